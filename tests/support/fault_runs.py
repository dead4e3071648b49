"""Real runs for the fault tests: launched, watched by their journal, hit by signals, compared."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from planaria.runtime.launch.config import LaunchConfig, contact
from planaria.runtime.launch.launcher import launch
from tests.support.fault_programs import Job

TIMEOUT = 20.0
"""Seconds; the run's one time-out. A stopped worker is noticed after a twentieth of it."""


@dataclass(frozen=True)
class Outcome:
    """What a run has left."""

    out: Path
    code: int
    final: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in journal(self.out) if line["event"] == name]

    def log(self, worker: str) -> str:
        return (self.out / "logs" / f"{worker}.log").read_text(errors="replace")

    @property
    def holdings(self) -> list[dict[str, Any]]:
        files = sorted(self.final.glob("*.pt"), key=lambda path: int(path.stem))
        return [torch.load(path, weights_only=False) for path in files]


def run(job: Any, out: Path, *, workers: int, **settings: Any) -> Outcome:
    """Launch ``job``, a frozen dataclass with the field ``final``, and wait for its end.

    Each worker calls the function ``main`` of the module that ``job`` is of.
    """
    final = out / "final"
    final.mkdir(parents=True, exist_ok=True)
    programs = type(job).__module__
    config = LaunchConfig(
        function=(programs, "main"),
        argument=replace(job, final=str(final)),
        preload=(programs,),
        workers=workers,
        out=out,
        quiet=True,
        **{"timeout": TIMEOUT, "spares": 1, "resume": True, **settings},
    )
    code = launch(config)
    assert of_run(out) == [], "processes of the run were left behind"
    return Outcome(out, code, final)


def like(job: Any, **changes: Any) -> Any:
    """``job`` with other timing, which must not change how it ends."""
    return replace(job, **changes)


def owners_of(out: Path) -> dict[int, str]:
    """Owners of the shards, by the newest word of each."""
    return {e["shard"]: e["worker"] for e in journal(out) if e["event"] == "worker_restored"}


def journal(out: Path) -> list[dict[str, Any]]:
    """The journal's complete lines; empty before there is one."""
    try:
        text = (out / "journal.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, through dicts, lists and tensors; NaN equals itself."""
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def of_run(out: Path) -> list[int]:
    """Living processes that were told of ``out``, by their arguments or their log."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            told = str(out) in " ".join(process.cmdline())
            logs = os.path.realpath(f"/proc/{process.pid}/fd/1").startswith(str(out))
            if (told or logs) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return [pid for pid in found if pid != os.getpid()]


def pid_of(out: Path, worker: str) -> int:
    (line,) = [
        line
        for line in journal(out)
        if line["event"] == "worker_attached" and line["worker"] == worker and not line.get("again")
    ]
    return int(line["pid"])


def hit(out: Path, worker: str, number: signal.Signals = signal.SIGKILL) -> None:
    """A signal from outside; a worker that has just ended by itself is an error of the test."""
    os.kill(pid_of(out, worker), number)


@contextmanager
def beside(script: Callable[[Path], None], out: Path) -> Iterator[None]:
    """Run ``script(out)`` on a thread while the run goes on; its failure fails the test."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            script(out)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body, name="script")
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive(), "the script of the test has not ended"
    if failures:
        raise failures[0]


_JOIN = """
import json, sys
from pathlib import Path
from planaria.runtime.launch.config import JoinConfig
from planaria.runtime.launch.launcher import join
from tests.support import fault_programs
told = json.load(sys.stdin)
for name in ("nan_at", "raise_at"):
    told["job"][name] = tuple(told["job"][name])
sys.exit(join(JoinConfig(
    function=(fault_programs.__name__, "main"), argument=fault_programs.Job(**told["job"]),
    out=Path(told["out"]), **told["settings"])))
"""


def join_from_outside(
    out: Path, job: Job, *, spares: int = 1, node: str = "elsewhere"
) -> subprocess.Popen[str]:
    """Another launcher, as on another machine, that adds spares to the run in ``out``."""
    address, token = contact(str(out))
    told = {
        "job": dataclasses.asdict(replace(job, final=str(out / "final"))),
        "out": str(out.parent / f"joined-{out.name}"),
        "settings": {
            "address": address,
            "token": token,
            "spares": spares,
            "node": node,
            "timeout": TIMEOUT,
        },
    }
    child = subprocess.Popen(
        [sys.executable, "-c", _JOIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(told))
    child.stdin.close()
    child.stdin = None
    return child


def until(holds: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """The first true value of ``holds()``."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
    return value


def committed(out: Path) -> int:
    """Newest generation that is committed for all, by the journal; -1 before the first."""
    return max(
        (line["generation"] for line in journal(out) if line["event"] == "all_committed"),
        default=-1,
    )


def whole(out: Path) -> bool:
    """Whether each shard is owned and held twice since the last loss: another one may come."""
    epochs = [e["epoch"] for e in journal(out) if e["event"] == "epoch_begun"]
    safe = [e["epoch"] for e in journal(out) if e["event"] == "protected"]
    return bool(epochs) and safe[-1:] == epochs[-1:]


def check_equal(struck: Outcome, calm: Outcome) -> None:
    """The struck run ended as the calm one: digests, tensors, generators, losses, results."""
    assert (struck.code, calm.code) == (0, 0)
    assert struck.summary["state_digest"] == calm.summary["state_digest"]
    assert struck.summary["samples_digest"] == calm.summary["samples_digest"]
    assert struck.summary["final"] == calm.summary["final"]
    assert len(struck.holdings) == len(calm.holdings) > 0
    for shard, (mine, theirs) in enumerate(zip(struck.holdings, calm.holdings, strict=True)):
        for name in mine:
            assert equal(mine[name], theirs[name]), f"shard {shard} differs in {name}"


def check_faults(struck: Outcome, faults: Sequence[str], *, max_redo: int = 2) -> None:
    """Every fault fired, each led to a swap of its shard, and none cost more than was promised."""
    fired = sorted(line["fault"] for line in struck.events("injected"))
    assert fired == sorted(faults)
    lost = {shard for swap in struck.summary["swaps"] for shard in swap["lost"]}
    assert lost >= {int(fault.split("worker=")[1].split(",")[0]) for fault in faults}
    check_redone(struck, max_redo=max_redo)


def check_redone(struck: Outcome, *, max_redo: int = 2) -> None:
    assert struck.summary["swaps"]
    for swap in struck.summary["swaps"]:
        assert swap["redone"] <= max_redo, swap
