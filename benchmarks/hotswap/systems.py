"""Run the job under each of the three systems, and end whatever is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import psutil

from hotswap.task import Task, read_notes
from planaria.errors import RunError
from planaria.runtime.launch.config import LaunchConfig
from planaria.runtime.launch.launcher import launch

PRELOAD = ("transformers", "transformers.models.llama.modeling_llama", "hotswap.planaria_job")
HERE = Path(__file__).resolve().parents[1]
TORCHFT_AFTER = 3
"""Committed steps with all replicas after the last strike, before torchft's job is ended."""


def planaria(
    task: Task,
    *,
    spares: int,
    timeout: float = 30.0,
    refill: bool = True,
    inject: Sequence[str] = (),
    limit: float,
) -> Path:
    """Run the job under Planaria's launcher; the folder of the run.

    Raises :class:`RunError` where it did not end well within ``limit`` seconds.
    """
    task.write()
    out = Path(task.folder) / "run"
    config = LaunchConfig(
        function=("hotswap.planaria_job", "main"),
        argument=task,
        workers=task.workers,
        spares=spares,
        refill=refill,
        out=out,
        timeout=timeout,
        inject=tuple(inject),
        threads=1,
        preload=PRELOAD,
        environment={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        quiet=True,
    )
    with _alarm(limit) as rung:
        code = launch(config)
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) and not rung.is_set():
        raise SystemExit(code)  # that was the user
    if code != 0:
        raise RunError(f"the run in {out} ended with exit code {code}; see its journal and logs")
    return out


@contextlib.contextmanager
def _alarm(limit: float) -> Generator[threading.Event]:
    """End a launch that takes longer, as a user would: SIGTERM, twice. Gives whether it did."""
    over, rung = threading.Event(), threading.Event()

    def watch() -> None:
        if over.wait(limit):
            return
        rung.set()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)

    thread = threading.Thread(target=watch, name="alarm", daemon=True)
    thread.start()
    try:
        yield rung
    finally:
        over.set()
        thread.join()


def torchrun(task: Task, *, limit: float) -> None:
    """Run the job under ``torchrun`` to its end; :class:`RunError` where it does not get there."""
    path = task.write()
    command = [
        *_torchrun(f"--nproc-per-node={task.workers}", restarts=len(task.strikes) + 1),
        "-m",
        "hotswap.torchrun_job",
        str(path),
    ]
    # Without it a restart reads the addresses that the dead workers left in the shared store
    # (pytorch issue 135712) and fails over and over.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = Path(task.folder) / "torchrun.log"
    with _process(command, log=log, environment=environment) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        ended = "did not end" if code is None else f"ended with exit code {code}"
        raise RunError(f"torchrun {ended} within {limit:g} s; see {task.folder}/torchrun.log")


def torchft(task: Task, *, limit: float) -> None:
    """Run the job under torchft until it has got over the last strike.

    A lighthouse, and for each replica group a ``torchrun`` of its own that starts a dead worker
    again, as torchft's README has it. All but one must be there: with the README's single one, a
    worker that was started again trains alone from step 0 while the others start again, too, gets
    ahead of them, and they take over its state. Raises :class:`RunError` where it does not get
    there.
    """
    path = task.write()
    port = _free_port()
    lighthouse = [
        str(Path(sys.executable).with_name("torchft_lighthouse")),
        f"--min_replicas={task.workers - 1}",
        "--quorum_tick_ms=100",
        "--join_timeout_ms=10000",
        f"--bind=[::]:{port}",
    ]
    folder = Path(task.folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(lighthouse, log=folder / "lighthouse.log"))
        for group in range(task.workers):
            command = [
                *_torchrun("--nproc-per-node=1", restarts=len(task.strikes) + 1),
                "-m",
                "hotswap.torchft_job",
                str(path),
            ]
            environment = {
                "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
                "REPLICA_GROUP_ID": str(group),
            }
            log = folder / f"replica-{group}.log"
            stack.enter_context(_process(command, log=log, environment=environment))
        if not _until(lambda: torchft_is_through(task), limit):
            raise RunError(f"torchft's job did not end within {limit:g} s; see {folder}")


def torchft_is_through(task: Task) -> bool:
    """Whether all strikes have fallen and all replicas have committed steps together since."""
    signals = list(read_notes(task, "signal"))
    if len(signals) < len(task.strikes):
        return False
    last = max((note["mono"] for note in signals), default=0.0)
    whole = [
        note
        for note in read_notes(task, "step")
        if note["mono"] > last and note["participants"] == task.workers
    ]
    return len(whole) >= TORCHFT_AFTER * task.workers


def _torchrun(*options: str, restarts: int) -> list[str]:
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    return [*module, *options, f"--max-restarts={restarts}"]


@contextlib.contextmanager
def _process(
    command: Sequence[str], *, log: Path, environment: dict[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """A process of ours; neither it nor its children are left afterwards."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **(environment or {})}
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=values,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        children = _children(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def _children(pid: int) -> list[psutil.Process]:
    """Workers of ``torchrun`` lead sessions of their own, so they are found by their parent."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _until(done: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
