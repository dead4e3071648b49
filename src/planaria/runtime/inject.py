"""Faults for tests: a real signal to a worker at one phase of one step.

A fault is text, ``kill:worker=1,step=7,phase=backward``. ``kill`` sends SIGKILL and ``stop``
SIGSTOP, from the worker to itself, so that what follows is what a crash or a hang looks like from
outside. Each is announced to the coordinator first, which acknowledges only when the journal has
it: a test whose fault never fired can tell.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, cast

from planaria.errors import UserError
from planaria.runtime.messages import Injected

PHASES = (
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "capture",
    "replicate",
    "commit",
)
"""Where in a step a fault can fire, in the order in which a step passes them."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_SYNTAX = "kill|stop:worker=W|node=N,step=S,phase=P"
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One signal at one place; exactly one of ``worker`` and ``node`` is set."""

    action: Literal["kill", "stop"]
    """``kill`` is SIGKILL (a crash), ``stop`` is SIGSTOP (a hang)."""
    step: int
    """1-based step in whose attempt it fires."""
    phase: str
    """One of :data:`PHASES`."""
    worker: int | None = None
    """The shard whose first owner is hit; a spare that takes over is not hit again."""
    node: str | None = None
    """The failure domain whose first owners are all hit, as when a machine dies."""

    def __post_init__(self) -> None:
        if self.action not in _SIGNALS:
            raise UserError(f"fault {str(self)!r}: {self.action!r} is no action; use kill or stop")
        if self.phase not in PHASES:
            raise UserError(
                f"fault {str(self)!r}: phase {self.phase!r} is unknown; use {', '.join(PHASES)}"
            )
        if self.step < 1:
            raise UserError(f"fault {str(self)!r}: step {self.step} is below 1, the first step")
        if (self.worker is None) == (self.node is None):
            raise UserError(f"fault {str(self)!r}: name either worker=W or node=N")
        if self.worker is not None and self.worker < 0:
            raise UserError(f"fault {str(self)!r}: worker {self.worker} is below 0, the first one")
        if self.node is not None and not _NODE.fullmatch(self.node):
            raise UserError(
                f"fault {str(self)!r}: node {self.node!r} is no node name; "
                "use letters, digits, '.', '_' and '-'"
            )

    def __str__(self) -> str:
        target = f"node={self.node}" if self.worker is None else f"worker={self.worker}"
        return f"{self.action}:{target},step={self.step},phase={self.phase}"


def parse(text: str, *, workers: int | None = None) -> Fault:
    """A fault from its text, in the form of this module's first lines.

    ``workers``, where given, is the number of shards of the run. Raises :class:`UserError` with one
    line that names what is wrong and what is allowed.
    """
    action, colon, rest = text.partition(":")
    if not colon or action not in _SIGNALS:
        raise UserError(
            f"fault {text!r}: write {_SYNTAX}, for example kill:worker=1,step=7,phase=backward"
        )
    fields: dict[str, str] = {}
    for item in rest.split(","):
        key, equals, value = item.strip().partition("=")
        if not equals or key not in ("worker", "node", "step", "phase"):
            raise UserError(f"fault {text!r}: {item.strip()!r} is not understood; write {_SYNTAX}")
        if key in fields:
            raise UserError(f"fault {text!r}: {key} is given twice; write {_SYNTAX}")
        fields[key] = value
    if ("worker" in fields) == ("node" in fields):
        raise UserError(f"fault {text!r}: name either worker=W or node=N; write {_SYNTAX}")
    for key in ("step", "phase"):
        if key not in fields:
            raise UserError(f"fault {text!r}: {key} is missing; write {_SYNTAX}")
    fault = Fault(
        action=cast(Literal["kill", "stop"], action),
        step=_number(text, "step", fields["step"]),
        phase=fields["phase"],
        worker=_number(text, "worker", fields["worker"]) if "worker" in fields else None,
        node=fields.get("node"),
    )
    if workers is not None and fault.worker is not None and fault.worker >= workers:
        raise UserError(
            f"fault {text!r}: worker {fault.worker} does not exist; "
            f"this run has workers 0 to {workers - 1}"
        )
    return fault


def _number(text: str, key: str, value: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", value):
        raise UserError(f"fault {text!r}: {key} {value!r} is not a whole number")
    return int(value)


class Injector:
    """Fires the faults that are meant for this worker; one attribute test where there are none.

    ``shard`` is the shard that this process owned from the start of the run, or None for a spare:
    a worker that took over a shard is never hit. ``announce`` sends the :class:`Injected` record
    and returns once the coordinator has written it. Safe to call from several threads: capture and
    replication run beside the training thread.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        *,
        shard: int | None,
        node: str,
        announce: Callable[[Injected], None],
    ) -> None:
        self._waiting = [
            fault
            for fault in faults
            if shard is not None and (fault.worker == shard or fault.node == node)
        ]
        self._announce = announce
        self._lock = threading.Lock()

    @property
    def waiting(self) -> tuple[Fault, ...]:
        """The faults that can still fire here."""
        return tuple(self._waiting)

    def at(self, step: int, phase: str) -> None:
        """Say that this worker is in ``phase`` of ``step``; a fault that waits for it fires now.

        After SIGSTOP this returns when the process is continued; after SIGKILL never.
        """
        if not self._waiting:
            return
        assert phase in PHASES, phase
        with self._lock:
            due = [f for f in self._waiting if f.step == step and f.phase == phase]
            for fault in due:
                self._waiting.remove(fault)
        for fault in due:
            self._announce(Injected(fault=str(fault), step=step, phase=phase))
            os.kill(os.getpid(), _SIGNALS[fault.action])
