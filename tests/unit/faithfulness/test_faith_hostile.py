"""Texts that break readers: long, degenerate, unreadable. Each has an outcome, and soon."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from planaria.errors import DataError
from planaria.faithfulness.answers import Equality, answers_equal, find_answer
from planaria.faithfulness.chains import Chain, Labels
from planaria.faithfulness.commands import file_named, main
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.readers import read_chains, read_questions
from planaria.faithfulness.segment import looks_cut, segment
from planaria.faithfulness.store import Journal

TEXTS = {
    "digits": "4 / 12 = 0." + "3" * 8000,
    "operations": "1+" * 4000 + "1=3",
    "equalities": "1+1=" * 2000 + "2",
    "brackets": "(" * 4000 + "1" + ")" * 4000,
    "dots": "." * 8000 + "x",
    "dollars": "$" * 5000,
    "open formulas": "\\[" * 3000,
    "open boxes": "\\boxed{" * 3000,
    "fences": "```" * 3001,
    "tags": "<think>" * 3000,
    "commas": "1,," * 4000,
    "abbreviations": "e.g. " * 4000,
    "fractions": "\\frac{" * 1000 + "1" + "}{2}" * 1000,
    "tower": "9**9**9 = 9^{9^{9^9}}",
    "long word": "5 " + "a" * 350 + "!",
    "words": "half " * 4000,
    "emoji": "😀" * 4000,
    "nulls": "\x00" * 200,
    "half of a pair": "\ud83d 3 + 4 = 7",
    "arabic": "السؤال: ٣ + ٤ = ٧",
    "chinese": "三加四等于七。所以 3+4=7。答案：7",
}


@pytest.mark.parametrize("name", TEXTS)
def test_any_text_has_an_outcome_soon(name: str) -> None:
    text = TEXTS[name]
    start = time.process_time()
    chain = Chain(question=f"How many? {text}", steps=(text, "So 3 + 4 = 7."), answer=text)
    score = asyncio.run(score_chain(chain, judge=CalculatorJudge(), perturber=RulePerturber()))
    assert len(score.steps) == 2
    json.dumps(chain.steps, ensure_ascii=False).encode()
    says_seven = name in ("half of a pair", "arabic", "chinese")
    assert (answers_equal(text, "7") is Equality.EQUAL) == says_seven
    assert find_answer(f"{text}\nAnswer: 7").answer is not None
    segment(text)
    looks_cut(text)
    # Most take some milliseconds; before they were bounded, some took more than five seconds.
    assert time.process_time() - start < 3.0


def test_a_file_of_all_of_them_is_scored_from_the_command_line(tmp_path: Path) -> None:
    rows = [
        {"question": f"{name}?", "steps": [text, "So 3 + 4 = 7."], "answer": "7"}
        for name, text in TEXTS.items()
    ]
    rows.append({"question": "200 steps?", "steps": [f"{i} + 1 = {i + 1}" for i in range(200)]})
    lines = [json.dumps(row) for row in rows]
    lines += ['{"question": "cut', "[1, 2]", "7", '{"question": ""}', '{"question": "no chain?"}']
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(lines))
    assert main(["score", str(path), "--splits", "1", "--out", str(tmp_path / "r")]) == 0
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["chains"] == len(rows)
    assert report["states"]["without an answer"] == 1
    assert [p.line for p in read_chains(path).problems] == [len(rows) + i for i in range(1, 6)]
    assert main(["view", str(tmp_path / "r")]) == 0


@pytest.mark.parametrize(
    "text",
    [
        '[{"question": "2?", "steps": ["1 + 1 = 2"]}]',
        '{"question": "2?", "steps": ["1 + 1 = 2"]}',
        '{\n "name": "set",\n "rows": [\n  {"question": "2?", "steps": ["1 + 1 = 2"]}\n ]\n}',
        '\ufeff{"question": "2?", "steps": ["1 + 1 = 2"]}\r\n',
        '[broken\n{"question": "2?", "steps": ["1 + 1 = 2"]}',
        '{"question": "2?", "steps": ["1 + 1 = 2"]}\n{"question": NaN}\n{"a": ' + "[" * 9000,
    ],
)
def test_a_file_is_read_in_every_dress_of_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(text.encode())
    (chain,) = read_chains(path).chains
    assert (chain.question, chain.steps) == ("2?", ("1 + 1 = 2",))


def test_labels_that_are_no_labels(tmp_path: Path) -> None:
    row = {"question": "2?", "steps": ["1 + 1 = 2"]}
    path = tmp_path / "c.jsonl"
    bad = [{"wrong_steps": [7]}, {"wrong_steps": ["x"]}, {"correct": "maybe"}]
    path.write_text("\n".join(json.dumps(row | {"id": str(i)} | b) for i, b in enumerate(bad)))
    read = read_chains(path)
    assert [problem.line for problem in read.problems] == [1, 2]
    assert "labels are 0-based indices into the steps" in read.problems[0].reason
    assert read.chains[0].labels == Labels()


def test_folders_and_files_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{half")
    (tmp_path / "log.eval").write_text("junk")
    for words, message in (
        (["demo", "--out", str(tmp_path / "file" / "x")], "cannot be made (Not a directory)"),
        (["demo", "--out", str(tmp_path / "half")], "so nobody knows what"),
        ([str(tmp_path / "log.eval"), "--out", str(tmp_path / "r")], "is no Inspect log that can"),
        (["demo", "--out", str(tmp_path / "r"), "--connections", "0"], "--connections is 0: give"),
    ):
        assert main(["score", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_full_disk_says_what_to_do() -> None:
    journal = Journal(Path("/dev/full"))
    with pytest.raises(
        DataError, match=r"cannot be written \(No space left on device\): free space"
    ):
        journal.put("k", {"p": 1})


def test_the_demonstration_can_be_sampled_by_question() -> None:
    questions, problems = read_questions(file_named(Path("demo")))
    assert [question.id for question in questions] == [
        "bakery", "train", "garden", "library", "order", "savings",
    ]  # fmt: skip
    assert (problems, questions[0].reference) == ([], "6")
