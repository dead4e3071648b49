"""Launching over real processes: what starts, what is said, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from planaria import cli
from planaria.errors import UserError
from planaria.runtime.launch.config import JoinConfig, LaunchConfig
from planaria.runtime.launch.launcher import _Launch, launch

PLAIN = """
import os, sys, time
print("argv", *sys.argv[1:], flush=True)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
"""

LOOP = """
import sys, time, torch, planaria
from torch.nn.parallel import DistributedDataParallel as DDP

def build(shard):
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 8))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

with planaria.join(build) as run:
    print("owns", run.shard.index, flush=True)
    for attempt in run.attempts(until=int(sys.argv[1])):
        with attempt:
            generator = torch.Generator().manual_seed(attempt.step * 100 + run.shard.index)
            run.model(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            time.sleep(0.02)
"""

CLASSIC = """
import os, signal, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")  # once to talk, as some launch scripts do, and once to train
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
time.sleep(0.2 * int(os.environ["RANK"]))
dist.init_process_group("gloo")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begin = 0
if os.path.exists(sys.argv[1]):
    saved = torch.load(sys.argv[1])
    model.module.load_state_dict(saved["model"])
    begin = saved["step"]
print("begins at", begin, flush=True)
for step in range(begin, 6):
    if first and step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.full((2, 4), 1.0 + dist.get_rank())).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, sys.argv[1])
    dist.barrier()
print("sum", model.module.weight.detach().double().sum().item(), flush=True)
dist.destroy_process_group()
"""


def write(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def events(out: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def until(holds: Callable[[], bool], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def of_run(out: Path) -> list[int]:
    """Processes that were told of ``out``: coordinator by its arguments, workers by their logs."""
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


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the real command in a session of its own; kills what a failed test leaves."""
    children: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "planaria.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


def test_plain_script_gets_arguments_and_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = cli.main(
        ["run", "--workers", "2", "--out", str(out), write(tmp_path, PLAIN), "--lr", "1", "--", "x"]
    )
    said = capsys.readouterr()
    assert code == 0
    assert said.err == ""
    for rank in range(2):
        assert f"[w{rank}] argv --lr 1 -- x\n" in said.out
        assert f"[w{rank}] rank {rank} of 2\n" in said.out
        assert "argv --lr 1 -- x" in (out / "logs" / f"w{rank}.log").read_text()
    config = tomllib.loads((out / "config.toml").read_text())
    assert config["launch"]["workers"] == 2
    assert config["launch"]["arguments"] == ["--lr", "1", "--", "x"]
    assert of_run(out) == []


def test_a_killed_worker_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    script = write(tmp_path, LOOP)
    digests: list[str] = []
    for name, faults in (("calm", ()), ("struck", ("kill:worker=0,step=6,phase=backward",))):
        config = LaunchConfig(
            workers=2,
            spares=1,
            script=script,
            arguments=("12",),
            out=tmp_path / name,
            inject=faults,
            quiet=True,
        )
        assert launch(config) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["injected"] == len(faults)
        assert len(summary["swaps"]) == len(faults)
        digests.append(summary["state_digest"])
    assert digests[0] == digests[1]
    # Whoever was ready first: two workers have owned shard 0, one after the other.
    logs = (tmp_path / "struck" / "logs").glob("w*.log")
    assert sum("owns 0" in log.read_text() for log in logs) == 2
    # A fresh spare was started for the one that stepped in.
    until(lambda: (tmp_path / "struck" / "logs" / "w3.log").exists(), seconds=1)


AFTER = (
    LOOP
    + """
index = run.shard.index
if sys.argv[2] == "fails" and index == 1:
    raise ValueError("no room")
time.sleep(1.0 if sys.argv[2] == "writes" else 60 * index)
open(f"{sys.argv[3]}/{index}", "w").write("whole")
"""
)


@pytest.mark.parametrize(
    ("does", "linger", "code", "words"),
    [
        ("writes", 20, 0, "the run is over, w0, w1 still at work; Ctrl-C ends them"),
        ("fails", 20, 1, "w1 failed after the run had finished: exit code 1; see "),
        ("hangs", 0.02, 1, "w1 had not ended when the run was over and was killed"),
    ],
)
def test_what_a_script_does_after_its_run_is_not_cut_off(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    does: str,
    linger: float,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr("planaria.runtime.launch.launcher._LEAVE", 0.3)
    monkeypatch.setattr("planaria.runtime.launch.launcher._LINGER", linger)
    config = LaunchConfig(
        workers=2,
        script=write(tmp_path, AFTER),
        arguments=("3", does, str(tmp_path)),
        out=tmp_path / "out",
    )
    assert launch(config) == code
    assert words in "".join(capsys.readouterr())
    assert (tmp_path / "0").read_text() == "whole"
    assert (tmp_path / "1").exists() == (does == "writes")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 3


def test_classic_script_restarts_from_its_own_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, CLASSIC)
    (tmp_path / "calm.pt").unlink(missing_ok=True)
    struck = LaunchConfig(
        workers=2, script=script, arguments=(str(tmp_path / "a.pt"),), out=tmp_path / "struck"
    )
    assert launch(struck) == 0
    said = capsys.readouterr().out
    assert said.count("this script does not join its run") == 1  # not again after the restart
    assert "spare w" not in said
    # By the name of the one that was killed, though w0 ends as soon as its peer has.
    assert re.findall(r"(w[01]) (?:was|is) lost", said) == ["w1"]
    assert "ranks from 0 on are now w2, w3" in said
    assert (
        "finished: all 2 workers ended by themselves with exit code 0; restarts of the whole: 1; see "
        "summary.json"
    ) in said
    assert json.loads((tmp_path / "struck" / "summary.json").read_text())["restarts"] == 1
    assert said.count("begins at 0\n") == 2
    assert said.count("begins at 3\n") == 2
    assert "all workers start again (1)" in said
    calm = LaunchConfig(
        workers=2,
        script=write(tmp_path, CLASSIC.replace("first and step", "False and step")),
        arguments=(str(tmp_path / "b.pt"),),
        out=tmp_path / "calm",
    )
    assert launch(calm) == 0
    sums = [line for line in said.splitlines() if "] sum " in line]
    undisturbed = [line for line in capsys.readouterr().out.splitlines() if "] sum " in line]
    assert len(sums) == len(undisturbed) == 2
    assert {line.split()[-1] for line in sums} == {line.split()[-1] for line in undisturbed}


def test_a_fault_for_a_script_that_does_not_join_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = "kill:worker=1,step=5,phase=backward"
    script = write(tmp_path, CLASSIC.replace("first and step", "False and step"))
    words = ["run", "--workers", "2", "--inject", fault, "--out", str(tmp_path / "out")]
    assert cli.main([*words, script, str(tmp_path / "a.pt")]) == 2
    said = "".join(capsys.readouterr())
    assert f"planaria: fault {fault} can never fire: this script does not join its run" in said
    assert "take --inject away, or make its loop one of planaria.join" in said


def test_restarts_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, CLASSIC.replace("first and step", "step"))
    config = LaunchConfig(
        workers=2,
        script=script,
        arguments=(str(tmp_path / "a.pt"),),
        out=tmp_path / "out",
        max_restarts=1,
    )
    assert launch(config) == 1
    err = capsys.readouterr().err
    assert "the script does not join; it was restarted 1 times already (--max-restarts)" in err
    assert err.count("\n") == 1


def test_an_exception_is_one_line_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path,
        "import os, time\n\ndef inner():\n    raise ValueError('bad\\nthing')\n\n"
        "if os.environ['RANK'] == '1':\n    inner()\ntime.sleep(60)\n",
    )
    out = tmp_path / "out"
    code = cli.main(["run", "--workers", "2", "--out", str(out), script])
    said = capsys.readouterr()
    assert code == 1
    assert said.err == f"planaria: ValueError: bad thing ({script}:4)\n"
    assert "Traceback" not in said.out
    log = (out / "logs" / "w1.log").read_text()
    assert "Traceback (most recent call last):" in log
    assert "in inner" in log
    assert of_run(out) == []


def test_an_error_of_ours_keeps_its_line_and_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path,
        "from planaria.errors import DataError\n"
        "raise DataError('corpus x.txt is empty; give one with text')\n",
    )
    code = cli.main(["run", "--out", str(tmp_path / "out"), script])
    assert capsys.readouterr().err == "planaria: corpus x.txt is empty; give one with text\n"
    assert code == 2


def test_a_syntax_error_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "x = 1\ny = = 2\n")
    assert cli.main(["run", "--out", str(tmp_path / "out"), script]) == 1
    err = capsys.readouterr().err
    assert err == f"planaria: SyntaxError: invalid syntax ({script}:2)\n"


def test_exit_code_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "import sys\nsys.exit(7)\n")
    assert cli.main(["run", "--out", str(tmp_path / "out"), script]) == 1
    assert capsys.readouterr().err == "planaria: the script ended with exit code 7\n"


def test_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = cli.main(["run", "--port", str(port), "--out", str(out), write(tmp_path, PLAIN)])
    assert capsys.readouterr().err == (
        f"planaria: port {port} on 127.0.0.1 cannot be used: Address already in use; "
        "choose another --port, or 0 for any free one\n"
    )
    assert code == 2
    assert of_run(out) == []


def test_an_argument_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        LaunchConfig(function=("builtins", "print"), argument=lambda: None, out=tmp_path / "out")
    assert str(caught.value).startswith("argument of builtins.print cannot be pickled: ")
    assert str(caught.value).endswith("; give plain values or a dataclass")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(
    tmp_path: Path,
    started: Callable[..., subprocess.Popen[str]],
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    out = tmp_path / "out"
    child = started(
        *("run", "--workers", "2", "--spares", "1", "--out", str(out)),
        *(write(tmp_path, LOOP), "100000"),
    )
    until(lambda: (out / "journal.jsonl").exists() and len(events(out, "all_committed")) > 3)
    assert len(of_run(out)) == 4 + 1  # coordinator, workers, spare; and the launcher itself
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == code, said
    assert f"{number.name}: a checkpoint is written first; once more stops at once" in said
    until(lambda: of_run(out) == [], seconds=5)
    (ended,) = events(out, "ended")
    assert number.name in ended["reason"]
    assert ended["exit_code"] == code
    assert json.loads((out / "summary.json").read_text())["exit_code"] == code
    assert "finished at" not in said
    assert "Traceback" not in (out / "logs" / "w0.log").read_text()
    # What was committed is on disk, complete.
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert (checkpoint / "complete.json").is_file()
    assert not checkpoint.name.endswith(".partial")
    if number == signal.SIGINT:
        goes_on(out, int(checkpoint.name.removeprefix("step-")), capfd)


def goes_on(out: Path, reached: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing of another command goes on from a run's checkpoint unasked; a resume is announced."""
    capfd.readouterr()
    words = ["run", "--workers", "2", "--out", str(out)]
    script = str(out.parent / "train.py")
    assert cli.main([*words, script, "5"]) == 2
    assert f"at step {reached}: its arguments are '5', were '100000'; " in capfd.readouterr().err
    fault = f"kill:worker=0,step={reached + 9},phase=data"
    assert cli.main([*words, "--resume", "--inject", fault, script, str(reached + 3)]) == 0
    said = capfd.readouterr()
    assert f"goes on from the checkpoint of generation {reached} in {out}" in said.out
    assert f"finished at step {reached + 3}" in said.out
    assert f"planaria: fault {fault} never fired: no worker that it names came to " in said.err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["durable"], summary["begun_at"]) == (reached, reached)
    assert summary["steps"] == reached + 3


CAUGHT = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    Path(sys.argv[1] + os.environ["RANK"]).write_text("saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("here", flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_script_that_does_not_join_may_save_on_sigterm(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    words = ("run", "--workers", "2", "--out", str(out), write(tmp_path, CAUGHT))
    child = started(*words, str(tmp_path / "saved"))
    logs = [out / "logs" / f"w{rank}.log" for rank in range(2)]
    until(lambda: all(log.exists() and "here" in log.read_text() for log in logs))
    child.send_signal(signal.SIGTERM)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 143, said
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == ["saved", "saved"]
    until(lambda: of_run(out) == [], seconds=5)


def test_a_second_signal_ends_everything_at_once(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    script = write(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    child = started("run", "--workers", "2", "--out", str(out), script)
    until(lambda: len(list((out / "logs").glob("w*.log"))) == 2 if out.exists() else False)
    begin = time.monotonic()
    child.send_signal(signal.SIGINT)
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert time.monotonic() - begin < 10
    until(lambda: of_run(out) == [], seconds=5)


def test_nothing_outlives_a_killed_launcher(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    child = started(
        *("run", "--workers", "2", "--spares", "1", "--out", str(out)),
        *(write(tmp_path, LOOP), "100000"),
    )
    until(lambda: (out / "journal.jsonl").exists() and len(events(out, "all_committed")) > 3)
    servers = psutil.Process(child.pid).children(recursive=True)
    assert len(servers) >= 5  # coordinator, fork server, resource tracker, workers
    (stopped,) = [e["pid"] for e in events(out, "worker_attached") if e["worker"] == "w1"]
    os.kill(stopped, signal.SIGSTOP)  # one that can do nothing for its own end
    child.kill()
    until(lambda: of_run(out) == [], seconds=10)
    until(lambda: not any(s.is_running() and s.status() != "zombie" for s in servers), seconds=10)


def test_a_spare_joins_a_living_run(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    out, script = tmp_path / "out", write(tmp_path, LOOP)
    child = started(
        *("run", "--workers", "2", "--no-refill", "--timeout", "10", "--out", str(out)),
        *("--inject", "kill:worker=1,step=8,phase=forward", script, "60"),
    )
    until(lambda: (out / "journal.jsonl").exists() and bool(events(out, "worker_ready")))
    contact = json.loads((out / "coordinator.json").read_text())
    token = tmp_path / "token"
    token.write_text("x" * 64)
    joined = str(tmp_path / "joined")
    words = ["join", contact["address"], "--token-file", str(token), "--out", joined]
    assert cli.main([*words, "--", script, "60"]) == 2
    assert capfd.readouterr().err == (
        "planaria: wrong token: give the token of this run (OUT/coordinator.token)\n"
    )
    token.write_text((out / "coordinator.token").read_text())
    other = write(tmp_path / "out", LOOP + "\n# another\n")
    assert cli.main([*words, "--", other, "60"]) == 2
    assert "has another script than its run: its text or argument differs; " in (
        capfd.readouterr().err
    )
    assert cli.main([*words, "--", script, "61"]) == 2
    assert "has arguments 61, its run has 60; start it with " in capfd.readouterr().err
    assert cli.main([*words, "--", script, "60"]) == 0
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0, said
    (log,) = [p for p in (tmp_path / "joined" / "logs").iterdir() if "owns 1" in p.read_text()]
    assert log.name.startswith("j")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["injected"] == 1
    assert [swap["lost"] for swap in summary["swaps"]] == [[1]]


def test_a_signal_to_spares_from_outside_promises_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = JoinConfig(
        script=write(tmp_path, PLAIN), address="127.0.0.1:1", token="x" * 64, out=tmp_path / "j"
    )

    async def stopped() -> int | None:
        launcher = _Launch(config)
        launcher.over, launcher.link = asyncio.Event(), cast(Any, object())
        await launcher._stop_softly(signal.SIGTERM)
        return launcher.code

    assert asyncio.run(stopped()) == 143
    said = "".join(capsys.readouterr())
    assert said == (
        "planaria: stopped by SIGTERM: the workers started here leave, the run goes on without\n"
    )


def test_a_killed_coordinator_is_started_again(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    child = started(
        *("run", "--workers", "2", "--out", str(out), write(tmp_path, LOOP), "120"),
    )
    until(lambda: (out / "journal.jsonl").exists() and len(events(out, "all_committed")) > 3)
    first = json.loads((out / "coordinator.json").read_text())["pid"]
    os.kill(first, signal.SIGKILL)
    said, _ = child.communicate(timeout=90)
    assert child.returncode == 0, said
    assert "the coordinator ended with killed by SIGKILL and was started again" in said
    assert [e.get("resumed", False) for e in events(out, "opened")] == [False, True]
    assert events(out, "all_committed")[-1]["generation"] == 120
    assert of_run(out) == []
