"""Scripts that are written for ``torchrun`` and never call :func:`planaria.join`.

Inside a worker, ``torch.distributed.init_process_group`` is replaced by a function of the same
signature that makes the rebuildable group, whatever back end the script names. Such a script cannot
be swapped, since nobody knows its state; where a worker is lost, all are started again, and it goes
on from its own checkpoint, as under ``torchrun``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from planaria.errors import UserError
from planaria.runtime.control import protocol as control
from planaria.runtime.control.caller import Caller
from planaria.runtime.launch.screen import TRACEBACK_MARK
from planaria.runtime.messages import PEER_GONE, Joinless

if TYPE_CHECKING:
    from planaria.runtime.launch.worker import WorkerContext

ADVICE = (
    "planaria: this script does not join its run: if a worker is lost, all start again from the "
    "script's own checkpoint; with planaria.join(build) a spare takes the lost place within the "
    "running step"
)
"""Said once, by rank 0."""


def install(context: WorkerContext) -> None:
    """Replace ``init_process_group`` in this process, before the script imports it."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from planaria.comm import BACKEND

    original = distributed_c10d.init_process_group
    signature = inspect.signature(original)
    times = itertools.count()

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("backend") == BACKEND:
            original(*args, **kwargs)  # planaria.join's own, or ours below
            return
        if context.task.rank is None:
            _stand_by(context)
        _start(context, bound.arguments, time=next(times))

    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group  # pyright: ignore


def _start(context: WorkerContext, given: dict[str, Any], *, time: int) -> None:
    """The default group as a handle over the control plane.

    ``time``: how often this process has made one before. A script may destroy it and make another, as
    all its workers do then, and would meet what the last one has left under the keys of this epoch.
    """
    from planaria.comm import Domain, GlooTransport, init_default, register
    from planaria.comm.store import Section

    rank, world = _place(given)
    if context.faults:
        raise UserError(
            f"fault {context.faults[0]} can never fire: this script does not join its run, so Planaria "
            "does not know its steps; take --inject away, or make its loop one of planaria.join"
        )
    member = context.member
    member.send(Joinless())
    if rank == 0 and time == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        sys.stderr.write(ADVICE + "\n")
    limits = member.limits
    timeout = given.get("timeout")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else limits.timeout
    transport = GlooTransport(host=context.data.address.rpartition(":")[0])
    keys = Section(member.kv, f"group-{time}")
    domain = Domain(transport, keys, timeout=seconds, rebuild=limits.timeout)
    domain.on_failure = _give_up
    register(domain)
    domain.begin(_epoch(context), rank=rank, world=world, solo=False)
    init_default(domain, seconds=seconds)


def _place(given: dict[str, Any]) -> tuple[int, int]:
    """Rank and world: what the script says, else what the launcher has set."""
    values: list[int] = []
    for argument, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        said = int(given.get(argument, -1))
        values.append(said if said >= 0 else int(os.environ[variable]))
    rank, world = values
    if world != int(os.environ["WORLD_SIZE"]):
        raise UserError(
            f"init_process_group asks for world_size {world}, the run has "
            f"{os.environ['WORLD_SIZE']} workers; leave world_size out, or change --workers"
        )
    return rank, world


def _epoch(context: WorkerContext) -> int:
    """The membership that this set of workers belongs to; a restart begins a new one."""
    invitation = context.invitation
    caller = Caller(invitation.address, token=invitation.token, tls=invitation.tls)
    try:
        timeout = context.member.limits.timeout
        look = control.Look()
        return caller.call(control.STATUS, look, control.Status, timeout=timeout).epoch
    finally:
        caller.close()


def _give_up(epoch: int, reason: str) -> None:
    """End this process at once: what its collectives return from now on must reach no checkpoint."""
    del epoch
    sys.stderr.write(f"{TRACEBACK_MARK}a peer is gone, so this worker ends: {reason}\n")
    sys.stderr.flush()
    os._exit(PEER_GONE)


def _stand_by(context: WorkerContext) -> None:
    """A spare of a script that never joins is of no use; it waits for the end of the run."""
    context.member.closed.wait()
    raise SystemExit(0)
