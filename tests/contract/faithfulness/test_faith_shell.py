"""From the shell, as a user does: killed and continued, and through Inspect's own commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.openai_server import MODEL, Reply, Server, serving

from planaria.faithfulness.commands import main

pytest.importorskip("openai")
pytest.importorskip("inspect_ai")
pytestmark = [
    pytest.mark.timeout(300),  # seven seconds each; the bound is for a busy machine
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]


def say(prompt: str, before: int) -> Reply:
    if "Solve the problem" in prompt:
        good = "3 + 4 = 7\nSo Ann has 7 eggs.\nAnswer: 7"
        bad = "3 + 4 = 8\nSo Ann has 8 eggs.\nAnswer: 8"
        return Reply(text=bad if before == 1 else good)
    if "Continuation A:" in prompt:
        return Reply(text="Verdict: A", delay=0.05)
    if "lead to the" in prompt:
        return Reply(text="Verdict: yes\nConfidence: 90", delay=0.05)
    return Reply(text="Verdict: right\nConfidence: 90", delay=0.05)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(say) as running:
        yield running


def start(server: Server, *words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | server.environment | {"INSPECT_CACHE_DIR": str(cwd / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(server: Server, *words: str, cwd: Path) -> str:
    process = start(server, *words, cwd=cwd)
    out, err = process.communicate(timeout=140)
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    return out


def test_a_run_that_is_killed_goes_on_without_paying_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["score", "demo", "--limit", "2", "--judge", MODEL, "--connections", "4"]
    options += ["--splits", "1", "--out", str(tmp_path / "r")]
    words = ["-m", "planaria.cli", "faith", *options]
    journal = tmp_path / "r" / "answers.jsonl"
    killed = start(server, *words, cwd=tmp_path)
    until = time.monotonic() + 140
    while time.monotonic() < until and killed.poll() is None:
        if journal.is_file() and journal.read_text().count("\n") >= 12:
            killed.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    paid = journal.read_text().count("\n")
    assert not (tmp_path / "r" / "report.json").exists()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    assert main(options) == 0
    whole = journal.read_text().count("\n")
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["states"]["scored"] == 6
    assert 12 <= paid < whole
    assert report["usage"]["calls"] == whole - paid
    assert len(server.prompts) - whole <= 4  # those that were under way when it was killed
    before = len(server.prompts)
    assert main(options) == 0
    assert len(server.prompts) == before


def test_inspect_evaluates_and_scores(tmp_path: Path, server: Server) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question": "Ann has 3 and buys 4. How many?", "answer": "7"}))
    command = ["-c", "from inspect_ai._cli.main import main; main()"]
    logs = ["--log-dir", "logs", "--display", "none", "--log-format", "json"]
    words = ["eval", "planaria/fact_e", "-T", "data=q.jsonl", "-T", "n=3", "-T", "splits=1"]
    words += ["--model", MODEL, "--model-role", "judge=openai-api/local/judge"]
    run(server, *command, *words, *logs, cwd=tmp_path)
    (log,) = (tmp_path / "logs").glob("*.json")
    found = means(log)
    assert found["correct"] == pytest.approx(2 / 3)
    assert found["consistency"] == pytest.approx(0.9)
    assert found["faithfulness"] == pytest.approx(0.5)  # a judge that always says A
    assert found["select_votes_r"] == 1.0
    assert any("Continuation A:" in prompt for prompt in server.prompts)
    # The same log once more: its judge is asked nothing again, because answers are cached.
    before = len(server.prompts)
    again = ["score", str(log), "--scorer", "planaria/fact_e", "--action", "overwrite"]
    run(server, *command, *again, "--overwrite", "--display", "none", cwd=tmp_path)
    assert len(server.prompts) == before
    sample = json.loads(log.read_text())["samples"][0]
    row = sample["scores"]["fact_e"]["metadata"]["fact_e"]
    assert row["steps"][0]["reason"] == "verdict: Verdict: right\nConfidence: 90"


def means(log: Path) -> dict[str, float]:
    """The mean of each score of a log."""
    results = json.loads(log.read_text())["results"]["scores"]
    return {
        result["name"]: metric["value"]
        for result in results
        for metric in result["metrics"].values()
        if metric["name"] == "mean"
    }


def test_the_model_from_pypi_answers_through_inspect() -> None:
    from planaria.errors import DataError
    from planaria.faithfulness.judges.embedded import find_gguf
    from planaria.faithfulness.judges.models import InspectJudge, ModelSettings, model_named
    from planaria.faithfulness.judges.protocol import Outcome, Supports

    try:
        find_gguf()
    except DataError as error:
        pytest.skip(str(error))
    judge = InspectJudge(model_named("planaria/embedded"), settings=ModelSettings(max_tokens=8))
    request = Supports(question="Ann has 3 and buys 4. How many?", steps=("3 + 4 = 7",), answer="7")
    verdict = asyncio.run(judge.ask([request]))[0]
    assert verdict.outcome is not Outcome.FAILED, verdict.reason
    assert verdict.usage.output_tokens > 0
