"""What a coordinator that is started again needs: ``OUT/coordinator.state``.

Written before anyone is told of a new epoch, phase or plan; other changes within one ping. Commits
of the last moment may be missing: members say theirs again when they attach.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from planaria.errors import RunError, UserError
from planaria.runtime.membership.state import State, dump, load

STATE_FILE = "coordinator.state"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's own configuration beside the membership, without the token."""

    config: dict[str, str | int | float | bool | None]
    """Fields of ``CoordinatorConfig``; paths as text."""
    run: str
    address: str


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content."""

    header: Header
    state: bytes
    """Of :func:`planaria.runtime.membership.state.dump`."""


class Store:
    """Writes the file in folder ``out``; a reader sees an old or a new one, never half of one."""

    def __init__(self, out: Path, header: Header) -> None:
        self._path = out / STATE_FILE
        self._header = header
        self._dirty = True

    def update(self, before: State, state: State) -> None:
        """Write now what others will act on; leave the rest to :meth:`flush`."""
        if state is before:
            return
        self._dirty = True
        if (
            state.epoch != before.epoch
            or state.phase != before.phase
            or state.plan is not before.plan
        ):
            self.flush(state)

    def flush(self, state: State) -> None:
        """Write what has changed since the last time."""
        if not self._dirty:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        data = msgspec.msgpack.encode(Stored(header=self._header, state=dump(state)))
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
            os.replace(partial, self._path)
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}; free space and start the run "
                "again from its durable checkpoint"
            ) from None
        self._dirty = False


def read(out: Path) -> tuple[Header, State]:
    """What a coordinator had stored in ``out``; ``UserError`` where there is nothing to resume."""
    path = out / STATE_FILE
    try:
        stored = msgspec.msgpack.decode(path.read_bytes(), type=Stored)
    except OSError as error:
        raise UserError(
            f"{out} has no coordinator to take over ({error.strerror}: {path}); "
            "give the --out folder of a run that was started"
        ) from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is damaged ({error}); start the run anew") from None
    return stored.header, load(stored.state)
