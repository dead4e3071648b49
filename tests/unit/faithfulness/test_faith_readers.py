"""Every format in a miniature of its own, and files that are broken."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from planaria.errors import DataError
from planaria.faithfulness.readers import read_chains, read_questions

pytestmark = [
    # Inspect's own, about its retry library and its streams.
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]
ROWS = {
    "generic": {
        "question": "2+2?",
        "steps": ["2 + 2 = 4", "", "Answer: 4"],
        "answer": "4",
        "reference": "4",
        "wrong_steps": [],
    },
    "gsm8k": {"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7\nSo 7 eggs.\n#### 7"},
    "gsm8k_graded": {
        "question": "How many?",
        "ground_truth": "3 + 4 = 7\nA: 7",
        "small": {"is_correct": False, "solution": "3 * 4 = <<3*4=12>>12\nA: 12"},
        "large": {"is_correct": True, "solution": "3 + 4 = 7\nA: 7"},
    },
    "math": {
        "problem": "What is half?",
        "solution": "It is one part of two. Hence $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "level": 1,
    },
    "bbm": {
        "input": "1 + 1 =",
        "steps": ["1 + 1 = 3", "So the answer is 3"],
        "target": "2",
        "answer": "3",
        "mistake_index": 0,
    },
    "prmbench": {
        "original_question": "q?",
        "modified_question": "q?",
        "original_process": ["a", "b"],
        "modified_process": ["a", "c"],
        "error_steps": [2],
        "idx": "x",
        "classification": "confidence",
    },
    "processbench": {
        "id": "gsm8k-0",
        "generator": "m",
        "problem": "q?",
        "steps": ["a", "b \\boxed{3}"],
        "final_answer_correct": False,
        "label": 1,
    },
    "lm_eval": {
        "doc_id": 3,
        "doc": {"question": "q?", "answer": "x\n#### 7"},
        "target": "x\n#### 7",
        "resps": [["one\ntwo\n#### 7"], ["The answer is 8."]],
        "filtered_resps": ["7"],
    },
}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_recognised(tmp_path: Path, name: str) -> None:
    read = read_chains(write(tmp_path / "x.jsonl", ROWS[name]))
    assert read.format == name
    assert read.problems == ()
    assert all(chain.steps for chain in read.chains)
    assert "<<" not in "".join(chain.text for chain in read.chains)


def test_labels_and_answers(tmp_path: Path) -> None:
    graded = read_chains(write(tmp_path / "g.jsonl", ROWS["gsm8k_graded"])).chains
    assert [(c.answer, c.labels.correct, c.writer) for c in graded] == [
        ("12", False, "small"),
        ("7", True, "large"),
    ]
    bbm = read_chains(write(tmp_path / "b.jsonl", ROWS["bbm"])).chains[0]
    assert (bbm.labels.first_wrong, bbm.labels.flawed, bbm.labels.correct) == (0, True, False)
    original, modified = read_chains(write(tmp_path / "p.jsonl", ROWS["prmbench"])).chains
    assert (original.labels.flawed, modified.labels.wrong, modified.pair) == (
        False,
        (1,),
        "x-confidence",
    )
    process = read_chains(write(tmp_path / "r.jsonl", ROWS["processbench"])).chains[0]
    assert (process.labels.first_wrong, process.answer) == (1, "3")
    generic = read_chains(write(tmp_path / "n.jsonl", ROWS["generic"])).chains[0]
    assert generic.steps == ("2 + 2 = 4",)
    assert generic.labels.flawed is False
    assert "empty steps were left out" in generic.notes
    first, second = read_chains(write(tmp_path / "l.jsonl", ROWS["lm_eval"])).chains
    assert (first.answer, first.labels.correct, second.labels.correct) == ("7", True, False)


def test_a_broken_line_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROWS["bbm"], "{broken", "[1]", {"a": 1}, ROWS["bbm"])
    read = read_chains(path)
    assert [problem.line for problem in read.problems] == [2, 3, 4]
    assert "no JSON" in read.problems[0].reason
    assert "is no object" in read.problems[1].reason
    assert read.problems[2].reason == "no known fields among a"
    assert [chain.id.split("#")[1:] for chain in read.chains] == [[], ["2"]]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no file: give a .jsonl, .json or .eval file"):
        read_chains(tmp_path / "missing.jsonl")
    path = write(tmp_path / "x.jsonl", {"question": "q?", "choices": ["a"], "answerKey": "A"})
    with pytest.raises(DataError, match="sample chains from questions with"):
        read_chains(path)
    with pytest.raises(DataError, match="unknown format 'csv': choose auto, inspect or one of bbm"):
        read_chains(path, format="csv")


def test_questions_with_options(tmp_path: Path) -> None:
    row = {
        "question": "Where?",
        "choices": {"label": ["A", "B"], "text": ["bank", "mall"]},
        "answerKey": "B",
    }
    questions, problems = read_questions(write(tmp_path / "q.jsonl", row, {"no": 1}))
    assert questions[0].reference == "B"
    assert questions[0].full == "Where?\n(A) bank\n(B) mall"
    assert len(problems) == 1


def test_inspect_logs(tmp_path: Path) -> None:
    inspect_ai = pytest.importorskip("inspect_ai")
    # Streams that Inspect left open in other tests: their warnings' tracebacks are parsed, and
    # CPython 3.11 does not stand that inside the parsing that Inspect's imports do.
    gc.collect()
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.solver import generate

    def outputs(messages: list, tools: list, choice: object, config: object) -> ModelOutput:
        out = ModelOutput.from_content("mockllm/model", "3 + 4 = 7\nso it is 7\nAnswer: 7")
        out.usage = ModelUsage(input_tokens=9, output_tokens=9, total_tokens=18)
        return out

    task = inspect_ai.Task(
        dataset=MemoryDataset([Sample(id="s", input="3+4?", target="7")]), solver=generate()
    )
    model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
    log = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")[0]
    read = read_chains(log.location.removeprefix("file://"))
    assert read.format == "inspect"
    assert read.chains[0].steps == ("3 + 4 = 7", "so it is 7")
    assert read.chains[0].labels.correct is True
    gc.collect()  # Inspect leaves a stream open, and the warning belongs here
