"""Inspect finds the task, the scorer and the provider, and runs them."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]
inspect_ai = pytest.importorskip("inspect_ai")


def model(texts: list[str]) -> object:
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    state = {"n": 0}

    def outputs(messages: list, tools: list, choice: object, config: object) -> ModelOutput:
        text = texts[state["n"] % len(texts)]
        state["n"] += 1
        output = ModelOutput.from_content("mockllm/model", text)
        output.usage = ModelUsage(input_tokens=9, output_tokens=9, total_tokens=18)
        return output

    return get_model("mockllm/model", custom_outputs=outputs, memoize=False)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "Ann has 3 and buys 4. How many?", "answer": "7"}))
    return path


def test_the_entry_point_is_there() -> None:
    found = {e.name: e.value for e in entry_points(group="inspect_ai")}
    assert found["planaria"] == "planaria.faithfulness.inspect_ext"


def test_the_task_samples_scores_and_selects(tmp_path: Path, questions: Path) -> None:
    from planaria.faithfulness.inspect_ext import fact_e

    good = "3 + 4 = 7\nSo Ann has 7.\nAnswer: 7"
    bad = "3 + 4 = 8\nSo Ann has 8.\nAnswer: 8"
    log = inspect_ai.eval(
        fact_e(str(questions), n=3),
        model=model([good, bad, good]),
        log_dir=str(tmp_path / "logs"),
        display="none",
    )[0]
    assert log.status == "success", log.error
    sample = log.samples[0]
    row = sample.scores["fact_e"].metadata["fact_e"]
    assert row["chain"]["steps"] == ["3 + 4 = 7", "So Ann has 7."]
    means = [
        (result.name, metric.value)
        for result in log.results.scores
        for metric in result.metrics.values()
        if metric.name == "mean"
    ]
    values = dict(means)
    assert values["correct"] == pytest.approx(2 / 3)
    assert values["select_votes_r"] == 1.0
    # The wrong chain derives its wrong answer just as well: R alone ties, and ties are shared.
    assert values["select_argmax_r"] == pytest.approx(2 / 3)


def test_a_log_that_was_sampled_before_is_scored(tmp_path: Path) -> None:
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.log import read_eval_log
    from inspect_ai.solver import generate

    from planaria.faithfulness.inspect_ext import fact_e_scorer

    task = inspect_ai.Task(
        dataset=MemoryDataset([Sample(input="3 + 4?", target="7")]), solver=generate()
    )
    done = inspect_ai.eval(
        task,
        model=model(["3 + 4 = 8\nAnswer: 8"]),
        log_dir=str(tmp_path),
        display="none",
    )[0]
    scored = inspect_ai.score(read_eval_log(done.location), fact_e_scorer(), display="none")
    value = scored.samples[0].scores["fact_e"]
    assert value.answer == "8"
    assert value.value["correct"] == 0.0
    assert value.metadata["fact_e"]["breaks_at"] == 0


def test_what_is_unknown_of_one_sample_fails_no_other(tmp_path: Path) -> None:
    from planaria.faithfulness.inspect_ext import fact_e

    path = tmp_path / "q.jsonl"
    rows = [
        {"question": f"Ann has {n} and buys 4. How many?", "answer": f"{n + 4}"} for n in (3, 5)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    log = inspect_ai.eval(
        fact_e(str(path), n=1),
        model=model(["3 + 4 = 7\nAnswer: 7", "I cannot tell."]),
        log_dir=str(tmp_path / "logs"),
        display="none",
        max_connections=1,
    )[0]
    assert log.status == "success", log.error
    by_name = {result.name: result for result in log.results.scores}
    assert by_name["correct"].metrics["mean"].value == 1.0
    assert by_name["correct"].unscored_samples == 1


def test_reasoning_and_choices_of_a_log_are_scored(tmp_path: Path) -> None:
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.log import read_eval_log
    from inspect_ai.model import (
        ChatMessageAssistant,
        ContentReasoning,
        ContentText,
        ModelOutput,
        ModelUsage,
        get_model,
    )
    from inspect_ai.solver import multiple_choice

    from planaria.faithfulness.inspect_ext import fact_e_scorer
    from planaria.faithfulness.readers import read_chains

    thought = ContentReasoning(reasoning="3 + 4 = 7\nSo it is seven.")
    kept = ContentReasoning(reasoning="gAAAA=", summary="A summary.", redacted=True)
    content = [thought, kept, ContentText(text="ANSWER: B")]
    output = ModelOutput.from_message(ChatMessageAssistant(content=content))
    output.usage = ModelUsage(input_tokens=9, output_tokens=9, total_tokens=18)
    sample = Sample(input="3 + 4?", choices=["six", "seven"], target="B")
    done = inspect_ai.eval(
        inspect_ai.Task(dataset=MemoryDataset([sample]), solver=multiple_choice()),
        model=get_model("mockllm/model", custom_outputs=[output], memoize=False),
        log_dir=str(tmp_path),
        display="none",
    )[0]
    scored = inspect_ai.score(read_eval_log(done.location), fact_e_scorer(), display="none")
    value = scored.samples[0].scores["fact_e"]
    chain = value.metadata["fact_e"]["chain"]
    steps = ["3 + 4 = 7", "So it is seven.", "A summary."]
    assert (value.answer, value.value["correct"], chain["steps"]) == ("B", 1.0, steps)
    assert chain["question"] == "3 + 4?\n(A) six\n(B) seven"
    read = read_chains(done.location.removeprefix("file://")).chains[0]
    assert (list(read.steps), read.answer, read.labels.correct) == (steps, "B", True)


def test_the_provider_names_its_only_model() -> None:
    from inspect_ai.model import get_model

    with pytest.raises(
        ValueError, match="no model planaria/other: there is planaria/embedded only"
    ):
        get_model("planaria/other")
