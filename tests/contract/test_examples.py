"""Every example runs under ``planaria run``, loses a worker on the way, and ends where it would have.

Undisturbed and struck runs are those of the real command, with real signals. All share one warm
fork server, so that a run costs its forks and not its imports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from planaria import cli
from planaria.runtime.launch.joinless import ADVICE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 20
FAULTS = {
    "plain": ("0", "collective"),
    "ddp": ("1", "backward"),
    "fsdp": ("2", "backward"),
    "scaler_ema": ("1", "optimizer"),
    "loader": ("1", "data"),
    "huggingface": ("0", "forward"),
    "pipeline": ("1", "forward"),
}
"""Whom the fault hits, and in which phase of step 10."""


def run(script: Path, out: Path, *options: str, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
    """``planaria run`` to its end; its summary."""
    words = ["run", "--spares", "1", "--preload", "transformers", "--threads", "1"]
    code = cli.main([*words, "--out", str(out), *options, str(script), *arguments])
    assert code == 0
    return json.loads((out / "summary.json").read_text())


def twice(
    script: Path,
    out: Path,
    fault: tuple[str, str],
    *,
    workers: int,
    arguments: tuple[str, ...] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summaries of an undisturbed run and of one that loses a worker; ``{}`` is each one's folder."""
    worker, phase = fault
    inject = ("--inject", f"kill:worker={worker},step=10,phase={phase}")
    size = ("--workers", str(workers))
    calm, struck = (
        run(
            script,
            out / name,
            *size,
            *options,
            arguments=tuple(a.format(out / name) for a in arguments),
        )
        for name, options in (("calm", ()), ("struck", inject))
    )
    return calm, struck


def assert_nothing_was_lost(calm: dict[str, Any], struck: dict[str, Any]) -> None:
    assert calm["injected"] == 0
    assert struck["injected"] == 1, "the fault did not fire: nothing is shown"
    assert len(struck["swaps"]) == 1
    assert struck["swaps"][0]["injected"]
    assert 1 <= struck["steps_redone"] <= 2
    assert calm["steps"] == struck["steps"] == STEPS
    assert calm["state_digest"] is not None
    assert struck["state_digest"] == calm["state_digest"]
    assert struck["samples_digest"] == calm["samples_digest"]
    assert struck["final"] == calm["final"]


def test_every_example_is_tested() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    # What is no training script has its test beside its capability's.
    elsewhere = {"faith_small_model"}
    assert found == {*FAULTS, "torchrun_script"} | elsewhere


@pytest.mark.parametrize("name", ["plain", "ddp", "fsdp", "scaler_ema"])
def test_an_example_ends_where_an_undisturbed_run_does(name: str, tmp_path: Path) -> None:
    calm, struck = twice(EXAMPLES / f"{name}.py", tmp_path, FAULTS[name], workers=3)
    assert_nothing_was_lost(calm, struck)


def test_the_scaler_of_the_example_has_left_steps_out(tmp_path: Path) -> None:
    """Else it would show nothing that plain DDP does not."""
    final = run(EXAMPLES / "scaler_ema.py", tmp_path, "--workers", "1")["final"]
    assert final["scale"] < 2.0**24


def test_a_loader_goes_on_to_the_sample(tmp_path: Path) -> None:
    calm, struck = twice(EXAMPLES / "loader.py", tmp_path, FAULTS["loader"], workers=2)
    assert_nothing_was_lost(calm, struck)


def test_a_hugging_face_model_is_exported(tmp_path: Path) -> None:
    fault = FAULTS["huggingface"]
    calm, struck = twice(
        EXAMPLES / "huggingface.py", tmp_path, fault, workers=3, arguments=("{}/model",)
    )
    assert_nothing_was_lost(calm, struck)
    weights = [load_file(tmp_path / n / "model" / "model.safetensors") for n in ("calm", "struck")]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
    assert json.loads((tmp_path / "calm/model/config.json").read_text())["model_type"] == "llama"


def test_stages_of_a_pipeline_begin_anew(tmp_path: Path) -> None:
    calm, struck = twice(EXAMPLES / "pipeline.py", tmp_path, FAULTS["pipeline"], workers=2)
    assert_nothing_was_lost(calm, struck)


def test_the_readme_shows_a_script_that_runs(tmp_path: Path) -> None:
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "train.py"
    script.write_text(block)
    calm, struck = twice(script, tmp_path, ("1", "backward"), workers=2)
    assert_nothing_was_lost(calm, struck)


BY_HAND = """
import planaria, torch
from torch.nn.parallel import DistributedDataParallel as DDP

def build(shard):
    torch.manual_seed(0)
    return {"model": DDP(torch.nn.Linear(64, 64))}

with planaria.join(build) as run:
    for attempt in run.attempts(until=20):
        with attempt:
            seed = attempt.step * run.shard.world + run.shard.index
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            loss = run.model(x).square().mean()
            loss.backward()
            attempt.finite(loss)
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
"""


def test_an_update_by_hand_leaves_no_trace_either(tmp_path: Path) -> None:
    """Nobody tells when the state begins to change, where no optimizer of torch's is among the parts."""
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    calm, struck = twice(script, tmp_path, ("1", "backward"), workers=2)
    assert_nothing_was_lost(calm, struck)


# ---------------------------------------------------------------- a script that has not joined


def said(out: Path) -> list[str]:
    """Every line of every worker's log."""
    logs = sorted((out / "logs").glob("w*.log"))
    return [line for log in logs for line in log.read_text().splitlines()]


def result(out: Path) -> str:
    (line,) = [line for line in said(out) if line.startswith("sum of all parameters")]
    return line


def killer(out: Path, ready: Callable[[], bool], killed: list[int]) -> Callable[[], None]:
    """Kills worker 1 of the run in ``out`` once it is ``ready``."""

    def kill() -> None:
        end = time.monotonic() + 60
        while not ready() and time.monotonic() < end:
            time.sleep(0.02)
        lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
        pids = {e["worker"]: e["pid"] for e in lines if e["event"] == "worker_attached"}
        os.kill(pids["w1"], signal.SIGKILL)
        killed.append(pids["w1"])

    return kill


def test_a_script_for_torchrun_starts_again_from_its_own_checkpoint(tmp_path: Path) -> None:
    script = EXAMPLES / "torchrun_script.py"
    assert "import planaria" not in script.read_text()
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    run(script, calm, "--workers", "2", arguments=(f"{tmp_path}/calm.pt",))
    assert said(calm).count(ADVICE) == 1

    checkpoint, killed = tmp_path / "struck.pt", list[int]()
    kill = threading.Thread(target=killer(struck, checkpoint.exists, killed))
    kill.start()
    try:
        run(script, struck, "--workers", "2", arguments=(str(checkpoint),))
    finally:
        kill.join()
    assert killed
    begins = [int(line.split()[-1]) for line in said(struck) if " begins at step " in line]
    assert begins[:2] == [0, 0]
    assert len(begins) == 4
    assert 1 <= begins[2] == begins[3] < 40
    assert result(struck) == result(calm)


def test_a_joined_script_runs_under_plain_torchrun(tmp_path: Path) -> None:
    """Unprotected, and it says so."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    child = subprocess.Popen(
        [sys.executable, *words, str(EXAMPLES / "ddp.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        said, _ = child.communicate(timeout=100)
    finally:
        for process in psutil.Process(child.pid).children() if child.poll() is None else ():
            process.kill()
        child.kill()
        child.wait()
    assert child.returncode == 0, said
    assert said.count("started without 'planaria run': a lost worker ends this job") == 1
