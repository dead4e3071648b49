"""A judge behind an API, over real HTTP: what it says, refuses, delays and costs."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.openai_server import MODEL, Reply, Server, serving

from planaria.errors import ConfigError
from planaria.faithfulness.commands import main
from planaria.faithfulness.judges.models import (
    InspectJudge,
    ModelSettings,
    closing,
    model_named,
)
from planaria.faithfulness.judges.protocol import Compare, Outcome, Supports, Verdict

pytest.importorskip("openai")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]


class Model:
    """What the model behind the server does; a test changes it."""

    def __init__(self) -> None:
        self.flying = self.most = 0
        self.lock = threading.Lock()
        self.delay = 0.0

    def __call__(self, prompt: str, before: int) -> Reply:
        with self.lock:
            self.flying += 1
            self.most = max(self.most, self.flying)
        time.sleep(self.delay)
        with self.lock:
            self.flying -= 1
        if "[limited]" in prompt and before == 0:
            return Reply(status=429, text="slow down")
        if "[down]" in prompt:
            return Reply(status=500, text="out of order")
        if "[refused]" in prompt:
            return Reply(status=403, text="not for you")
        if "[slow]" in prompt:
            return Reply(text="Verdict: A", delay=2.5)
        if "[prose]" in prompt:
            return Reply(text="Hard to say; both have something.")
        if "[json]" in prompt:
            return Reply(text='```json\n{"verdict": "B", "why": "A is off"}\n```')
        if "[silent]" in prompt:
            return Reply(text="")
        if "Continuation A:" in prompt:
            return Reply(text="Verdict: A")
        if "Judge: <True/False>" in prompt:
            return Reply(text="Judge: True\nProbability: 0.8")
        if "Option A:" in prompt:
            return Reply(text="A")
        if "Write another continuation" in prompt:
            return Reply(text="Then 2 + 2 = 5.")
        if "lead to the" in prompt:
            return Reply(text="Verdict: yes\nConfidence: 90")
        return Reply(text="Verdict: right\nConfidence: 90")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def server(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from inspect_ai.model._model_info import clear_model_info_cache

    with serving(model) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running
    clear_model_info_cache()


def compare(mark: str) -> Compare:
    return Compare(question=f"How many? {mark}", prefix=("p",), a=("one",), b=("two",))


def ask(*requests: Compare | Supports, **settings: object) -> list[Verdict]:
    async def run() -> list[Verdict]:
        model = model_named(MODEL, connections=8)
        async with closing(model):
            return await InspectJudge(model, settings=ModelSettings(**settings)).ask(requests)

    return asyncio.run(run())


def test_without_log_probabilities_the_verdict_is_what_was_said(server: Server) -> None:
    supports = Supports(question="q", steps=("2 + 3 = 5",), answer="5")
    one, two = ask(compare(""), supports, logprobs=True)
    assert server.bodies[0]["logprobs"] is True
    assert (one.outcome, one.p, two.p) == (Outcome.DECIDED, 1.0, 0.9)
    assert one.reason == "verdict: Verdict: A"
    assert (one.usage.input_tokens, one.usage.output_tokens) == (100, 5)


def test_a_rate_limit_is_waited_out(server: Server) -> None:
    verdicts = ask(*(compare(f"[limited] {i}") for i in range(6)))
    assert [v.p for v in verdicts] == [1.0] * 6
    assert (len(server.prompts), server.answered) == (12, 6)


def test_what_fails_in_the_end_is_a_failure_with_the_providers_words(server: Server) -> None:
    down, slow, fine = ask(
        compare("[down]"), compare("[slow]"), compare(""), max_retries=0, timeout=2
    )
    assert (down.outcome, slow.outcome) == (Outcome.FAILED, Outcome.FAILED)
    assert down.reason == "InternalServerError: Error code: 500 - out of order"
    assert slow.reason.startswith("AttemptTimeoutError: ")
    assert (fine.outcome, down.usage.calls) == (Outcome.DECIDED, 0)


def test_prose_json_and_silence(server: Server) -> None:
    prose, as_json, silent = ask(compare("[prose]"), compare("[json]"), compare("[silent]"))
    assert (prose.outcome, prose.reason) == (
        Outcome.UNPARSED,
        "unread: 'Hard to say; both have something.'",
    )
    assert (as_json.outcome, as_json.p) == (Outcome.DECIDED, 0.0)
    assert (silent.outcome, silent.reason) == (Outcome.UNPARSED, "an empty answer (stop)")


def file(folder: Path, *marks: str) -> Path:
    """One chain a mark; the mark goes to the model inside of the question."""
    rows = [
        {
            "question": f"Ann has 3 eggs and buys 4. How many? {mark}",
            "steps": ["Ann has 3 and buys 4.", "So 3 + 4 = 7 eggs."],
            "answer": "7",
        }
        for mark in marks
    ]
    path = folder / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_run_counts_what_the_judge_did_and_scores_the_rest(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, "", "[prose]", "[refused]")
    options = ["--judge", MODEL, "--out", str(tmp_path / "r"), "--max-retries", "0"]
    assert main(["score", str(path), *options]) == 0
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["states"]["scored"] == 1
    assert report["states"]["unscored"] == 2
    assert report["counts"]["compare.unparsed"] == report["counts"]["compare.failed"] > 0
    rows = [json.loads(r) for r in (tmp_path / "r" / "scores.jsonl").read_text().splitlines()]
    # A judge that always says A: both orders, so one half; what could not be had is null.
    assert [row["faithfulness"] for row in rows] == [0.5, None, None]
    assert [row["reliability"] for row in rows] == [pytest.approx(0.45), None, None]
    before = server.answered
    assert main(["score", str(path), *options]) == 0
    assert server.answered == before  # only what failed was asked again, and failed again
    failed = [prompt for prompt in server.prompts if "[refused]" in prompt]
    assert all(failed.count(prompt) >= 2 for prompt in failed)
    assert "1 scored, 2 unscored" in capsys.readouterr().out


def test_no_more_connections_than_allowed(tmp_path: Path, server: Server, model: Model) -> None:
    model.delay = 0.03
    path = file(tmp_path, "1", "2", "3")
    # Inspect keeps one limit a model name for the process, so this is a name of its own.
    options = ["--judge", "openai-api/local/three", "--out", str(tmp_path / "r"), "--splits", "1"]
    assert main(["score", str(path), *options, "--connections", "3"]) == 0
    assert model.most == 3


def test_before_paying(tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, "")
    prices = tmp_path / "prices.yml"
    prices.write_text(f"{MODEL}: {{input: 10.0, output: 20.0}}\n")
    common = [str(path), "--out", str(tmp_path / "r"), "--judge", MODEL]
    assert main(["score", *common, "--dry-run"]) == 0
    assert "cost: unknown: give --prices" in capsys.readouterr().out
    assert main(["score", *common, "--dry-run", "--prices", str(prices)]) == 0
    said = capsys.readouterr().out
    calls = int(said.split("at most ")[1].split()[0])
    assert "cost: $0." in said
    assert server.prompts == []
    assert not (tmp_path / "r").exists()
    assert main(["score", *common]) == 0
    assert 0 < len(server.prompts) <= calls


def test_a_budget_in_dollars_is_kept(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, "1", "2")
    common = ["score", str(path), "--judge", MODEL, "--out", str(tmp_path / "r")]
    assert main([*common, "--budget", "0.01"]) == 2
    assert f"{MODEL} has no price: give it in a file with --prices" in capsys.readouterr().err
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({MODEL: {"input": 10.0, "output": 20.0}}))
    # A call costs 100 * 10 + 5 * 20 dollars in a million: 0.0011, and ten are too many.
    paid = ["--prices", str(prices), "--connections", "1"]
    assert main([*common, "--budget", "0.01", *paid]) == 0
    assert server.answered == 9
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["usage"]["money"] == pytest.approx(0.0099)
    assert main([*common, "--budget", "1", *paid]) == 0
    whole = json.loads((tmp_path / "r" / "report.json").read_text())
    assert whole["states"]["unscored"] == 0
    assert whole["usage"]["calls"] == server.answered - 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "names no model: write lines like openai/gpt-4o-mini: {input"),
        ("a: {input: 1}", "the price of a is {'input': 1}: write it like"),
        ("{a: [", "is no YAML ("),
    ],
)
def test_a_file_that_holds_no_prices(tmp_path: Path, text: str, message: str) -> None:
    from planaria.errors import DataError
    from planaria.faithfulness.prices import read_prices

    path = tmp_path / "p.yml"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_prices(path)
    assert message in str(caught.value)
    with pytest.raises(DataError, match="is no file: give a file of prices"):
        read_prices(tmp_path / "none")


def test_the_released_preset_from_the_command_line(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, "")
    common = ["score", str(path), "--judge", MODEL, "--preset", "released", "--out"]
    assert main([*common, str(tmp_path / "r"), "--dry-run"]) == 0
    assert "at most 13 calls" in capsys.readouterr().out
    assert main([*common, str(tmp_path / "r")]) == 0
    row = json.loads((tmp_path / "r" / "scores.jsonl").read_text())
    # "A" always, in the only order that is asked: the released fault.
    assert (row["consistency"], row["faithfulness"]) == (pytest.approx(0.8), 1.0)
    assert row["reliability"] == pytest.approx(0.8)
    assert len(server.prompts) == 13
    assert main([*common, str(tmp_path / "r")]) == 0
    assert len(server.prompts) == 13
    assert main([*common, str(tmp_path / "s"), "--budget-calls", "4"]) == 0
    assert len(server.prompts) == 17
    row = json.loads((tmp_path / "s" / "scores.jsonl").read_text())
    assert row["reliability"] is None
    assert "not scored: the budget of 4 calls is used up" in row["notes"]


def test_one_model_may_not_be_both(tmp_path: Path, server: Server) -> None:
    from planaria.faithfulness.judging import Judging, perturber_named

    with pytest.raises(ConfigError, match="is both judge and perturber"):
        perturber_named(judging=Judging(judge=f"calculator+{MODEL}", perturber=MODEL))
    path = file(tmp_path, "")
    options = ["--out", str(tmp_path / "r"), "--perturber", MODEL, "--splits", "1"]
    assert main(["score", str(path), *options]) == 0
    assert any("Your task:" in prompt for prompt in server.prompts)
    row = json.loads((tmp_path / "r" / "scores.jsonl").read_text())
    assert {c["reason"] for c in row["contrasts"]} != {""}
