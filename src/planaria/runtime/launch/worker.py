"""What runs in each forked worker, before, around and after the user's script.

:func:`main` is the target of the process that the launcher has forked from a warm server. It makes
the process one that dies with its launcher and logs to a file of its own, joins the run's control
plane, and runs the script as ``__main__``. :func:`context` is the seam by which
:func:`planaria.join` finds the run inside the script.

Importing this module imports neither torch nor gRPC.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import sysconfig
import traceback
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planaria.errors import JoinError, PlanariaError
from planaria.runtime.control.protocol import Invitation
from planaria.runtime.inject import Fault
from planaria.runtime.launch import joinless
from planaria.runtime.launch.screen import TRACEBACK_MARK

if TYPE_CHECKING:
    from planaria.runtime.control.member import Member
    from planaria.runtime.memory.replicas import DataServer

REFUSED = 3
"""Exit code of a worker whose coordinator refused it; the reason is the last line of its log."""

SPARE_FAILED = 4
"""Exit code of a spare whose script ended before it joined; the run goes on without it."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the launcher hands to a worker: who it is and what it runs. Picklable."""

    invitation: Invitation
    script: str | None = None
    """Path of the script that is run as ``__main__``; None where ``function`` is set."""
    function: tuple[str, str] | None = None
    """``(module, name)`` of a function that is called with ``argument``."""
    argument: Any = None
    """Picklable; for ``function`` only."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments: ``sys.argv[1:]``."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Set before the script runs: what ``torchrun`` sets."""
    threads: int = 1
    """Of each worker's operators (``torch.set_num_threads``)."""
    faults: tuple[Fault, ...] = ()
    """Of the whole run; the runtime picks those that are meant for this worker."""
    max_redo: int | None = None
    """The launcher's ``--max-redo``; None: what the script says."""
    rank: int | None = None
    """Provisional rank of an initial worker, so that a script that never joins has one."""
    world: int = 1
    """Shards of the run."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What :func:`planaria.join` finds inside ``planaria run``."""

    task: Task
    member: Member
    """Connected: ``Hello`` was answered by ``Welcome``."""
    data: DataServer
    """Listening; its address was in the ``Hello``."""

    @property
    def invitation(self) -> Invitation:
        return self.task.invitation

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self.task.faults

    @property
    def max_redo(self) -> int | None:
        """As :func:`planaria.join` takes it: two buffers allow no more than 2."""
        return None if self.task.max_redo is None else min(self.task.max_redo, 2)

    def place(self, shard: int, world: int) -> None:
        """Tell the script's environment which shard this worker owns, as ``torchrun`` would.

        ``LOCAL_RANK`` stays: it numbers this machine's workers and spares, and so its devices.
        """
        os.environ["RANK"] = str(shard)
        os.environ["WORLD_SIZE"] = str(world)


class _Seat:
    """Holds the context of this process: one attribute, set once, before the script runs."""

    context: WorkerContext | None = None


def context() -> WorkerContext | None:
    """The run that this process is a worker of, or None outside of ``planaria run``."""
    return _Seat.context


def main(task: Task) -> None:
    """Be a worker: the target of the forked process. Ends it with ``SystemExit``."""
    _belong()
    _redirect(task.invitation.log)
    _prepare(task)
    sys.exit(_serve(task))


def _belong() -> None:
    """Die with the launcher, and lead a session, so that Ctrl-C at the terminal passes us by.

    A parent-death signal ties us to the fork server. The server ends when nobody holds its alive
    pipe any more; multiprocessing hands the pipe's end to every child too, so it is closed here, or
    a SIGKILL of the launcher would leave everything running.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def _redirect(log: str) -> None:
    """Send descriptors 1 and 2, and so also what C code prints, to ``log``, line by line."""
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore
    faulthandler.enable()
    # For a person who wonders what a worker waits for: kill -USR1 PID.
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _prepare(task: Task) -> None:
    """Environment, arguments and warm memory."""
    for name in ("RANK", "LOCAL_RANK"):  # a launcher may itself run under another one
        os.environ.pop(name, None)
    os.environ.update(task.environment)
    sys.argv = [task.script or (task.function or ("-",))[0], *task.arguments]
    # For the server that a data loader of the script starts: its workers are forks then, and do not
    # import torch each.
    forkserver.set_forkserver_preload(["torch.utils.data", "torchdata.stateful_dataloader"])
    _touch(task.threads)


def _touch(threads: int) -> None:
    """One small step through autograd and an optimizer: first uses are paid here, not in a swap."""
    import torch

    torch.set_num_threads(threads)
    state = torch.get_rng_state()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    torch.set_rng_state(state)


def _serve(task: Task) -> int:
    """Join the control plane, run the script, say how it ended; returns the exit code."""
    from planaria.runtime.control.member import Member
    from planaria.runtime.memory.replicas import DataServer

    invitation = task.invitation
    host = invitation.address.rpartition(":")[0]
    data = DataServer(token=invitation.token, run=invitation.run, host=_own_address(host))
    try:
        member = Member(invitation, data_address=data.address)
    except JoinError as error:
        sys.stderr.write(f"{TRACEBACK_MARK}{error}\n")
        return REFUSED
    _Seat.context = joined = WorkerContext(task=task, member=member, data=data)
    joinless.install(joined)
    reason, code = _attempt(task)
    if reason and task.rank is None and "RANK" not in os.environ:
        # Never promoted, so the run is whole without it: a closed stream says enough.
        sys.stderr.write(f"{TRACEBACK_MARK}{reason}\n")
        return SPARE_FAILED
    if reason:
        member.failed(reason, exit_code=code)
    member.close()
    data.close()
    return code


def _own_address(coordinator: str) -> str:
    """The address of this machine by which the coordinator, and so its peers, can reach it."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((coordinator, 9))
        return str(probe.getsockname()[0])


def _attempt(task: Task) -> tuple[str, int]:
    """Run the script; ("", 0) where it ended well, else one line and the exit code."""
    try:
        _run(task)
    except SystemExit as error:
        return _of_exit(error)
    except PlanariaError as error:
        _log_traceback()
        return str(error), error.exit_code
    except BaseException as error:
        _log_traceback()
        return describe(error, script=task.script), 1
    return "", 0


def _of_exit(error: SystemExit) -> tuple[str, int]:
    if error.code is None or error.code == 0:
        return "", 0
    if isinstance(error.code, int):
        return f"the script ended with exit code {error.code}", 1
    sys.stderr.write(f"{error.code}\n")
    return str(error.code).splitlines()[0], 1


def _run(task: Task) -> None:
    if task.script is not None:
        # As python does for a script: its folder is searched first.
        sys.path.insert(0, str(Path(task.script).resolve().parent))
        runpy.run_path(task.script, run_name="__main__")
        return
    assert task.function is not None
    module, name = task.function
    getattr(importlib.import_module(module), name)(task.argument)


def _log_traceback() -> None:
    sys.stderr.write(TRACEBACK_MARK)
    traceback.print_exc()


def describe(error: BaseException, *, script: str | None = None) -> str:
    """One line: the exception's type, its text, and its place in the user's own file.

    The place is the innermost frame that is neither an installed library nor Python itself nor
    Planaria; where there is none, the innermost frame.
    """
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    foreign = {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib")}
    foreign.add(str(Path(__file__).resolve().parents[1]))
    own = [f for f in frames if _is_own(f.filename, foreign, script)]
    place = (own or list(frames))[-1:]
    where = f" ({place[0].filename}:{place[0].lineno})" if place else ""
    kind = type(error).__name__
    return f"{kind}: {text}{where}" if text else f"{kind}{where}"


def _is_own(filename: str, foreign: set[str], script: str | None) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if script is not None and path == Path(script).resolve():
        return True
    return not any(path.is_relative_to(folder) for folder in foreign)
