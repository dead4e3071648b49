"""``planaria status``: who holds which shard, how new its copy is, and whether it is protected."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Table

from planaria.errors import CommError, DataError, UserError
from planaria.runtime.control import protocol as control
from planaria.runtime.control.caller import Caller
from planaria.runtime.coordinator.journal import JOURNAL_FILE, read
from planaria.runtime.coordinator.summary import summarise

TIMEOUT = 5.0
"""Seconds to wait for the coordinator; our choice."""


def status(
    target: str | os.PathLike[str], *, token: str | None = None, tls: control.Tls | None = None
) -> control.Status:
    """What is known of a run, by its folder or by its coordinator's ``HOST:PORT``.

    A folder gives the token, too; an address needs ``token``. A run that is over is told from its
    journal. Raises ``UserError`` with one line where there is no such run or no token, ``JoinError``
    for a wrong token, ``CommError`` where nobody answers at an address.
    """
    out = Path(target)
    if out.is_dir():
        return _of_folder(out, tls)
    name = os.fspath(target)
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"{name} is neither the folder of a run nor HOST:PORT of a coordinator; "
            "give one of the two"
        )
    token = token or control.token_from()
    if not token:
        raise UserError(
            f"{name} asks for the token of its run; give --token-file OUT/{control.TOKEN_FILE}"
        )
    return _ask(name, token, tls)


def _ask(address: str, token: str, tls: control.Tls | None) -> control.Status:
    caller = Caller(address, token=token, tls=tls)
    try:
        return caller.call(control.STATUS, control.Look(), control.Status, timeout=TIMEOUT)
    finally:
        caller.close()


def _of_folder(out: Path, tls: control.Tls | None) -> control.Status:
    try:
        contact, token = control.read_contact(out)
    except UserError:
        return _of_journal(out)
    contact.check_tls(tls is not None)
    try:
        return _ask(contact.address, token, tls)
    except CommError:
        return _of_journal(out)


def _of_journal(out: Path) -> control.Status:
    if not (out / JOURNAL_FILE).is_file():
        raise UserError(f"{out} is not the folder of a run: it has no {JOURNAL_FILE}")
    try:
        summary = summarise(read(out / JOURNAL_FILE))
    except DataError as error:
        raise UserError(str(error)) from None
    over = summary.exit_code is not None
    return control.Status(
        run=summary.run,
        phase="ended" if over else "gone",
        epoch=max((swap.epoch for swap in summary.swaps), default=0),
        world=summary.world,
        generation=summary.steps,
        swaps=len(summary.swaps),
        reason=summary.reason
        if over
        else "no coordinator answers; it may be started with --resume",
        exit_code=summary.exit_code,
    )


def render(state: control.Status) -> Group:
    """A table for a terminal: a line on the run, a row for each shard, the spares."""
    shards = f"all {state.world} shards" if state.world > 1 else "the one shard"
    reached = "no step is" if state.generation is None else f"step {state.generation} is"
    head = (
        f"run {state.run}: {state.phase}; {reached} committed for {shards}; "
        f"swaps: {state.swaps}, epoch {state.epoch}"
    )
    if state.exit_code is not None:
        head += f", exit code {state.exit_code}"
    table = Table("shard", "owner", "node", "holder", "committed", "protected", "at step", box=None)
    for row in state.shards:
        table.add_row(
            str(row.shard),
            row.owner or "nobody",
            row.node,
            row.holder or "none",
            "none" if row.generation is None else str(row.generation),
            "yes" if row.protected else "no",
            str(row.step),
        )
    spares = f"spares: {', '.join(state.spares) or 'none'}"
    parts: list[str | Table] = [head, f"last: {state.reason}"]
    if state.shards:
        parts += [table, spares]
    return Group(*parts)


def show(
    target: str,
    *,
    token_file: Path | None = None,
    as_json: bool = False,
    tls: control.Tls | None = None,
) -> int:
    """Print the status of ``target``; the exit code of the command."""
    token = None
    if token_file is not None:
        token = control.read_token(token_file)
    state = status(target, token=token, tls=tls)
    if as_json:
        # All fields, those that have their default value as well.
        document = msgspec.structs.asdict(state)
        document["shards"] = [msgspec.structs.asdict(row) for row in state.shards]
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    else:
        Console(highlight=False, soft_wrap=True).print(render(state), markup=False)
    return 0
