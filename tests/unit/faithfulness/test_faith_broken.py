"""What broke the commands once: each kind of fault has its line, and the rest goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.faithfulness.chains import Chain, Question, unique_ids
from planaria.faithfulness.commands import main
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.formats import from_completion
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.models import InspectJudge
from planaria.faithfulness.judges.protocol import Outcome, Supports, Verdict
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.readers import read_chains, read_questions
from planaria.faithfulness.run import score_chains
from planaria.faithfulness.scores import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]
OK: dict[str, Any] = {"question": "3 and 4?", "steps": ["3 + 4 = 7"], "answer": "7"}


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("code", ["utf-8", "utf-8-sig", "utf-16"])
def test_line_ends_and_encodings(tmp_path: Path, end: str, code: str) -> None:
    path = tmp_path / "c.jsonl"
    rows = [OK, OK | {"question": "Grün\u2028?"}]
    path.write_bytes(end.join(json.dumps(r, ensure_ascii=False) for r in rows).encode(code))
    assert [chain.question for chain in read_chains(path).chains] == ["3 and 4?", "Grün\u2028?"]


def test_bytes_that_are_no_utf_8_leave_their_line_out(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    bad = json.dumps(OK | {"question": "é?"}, ensure_ascii=False).encode("latin-1")
    path.write_bytes(json.dumps(OK).encode() + b"\n" + bad + b"\n" + json.dumps(OK).encode())
    read = read_chains(path)
    assert len(read.chains) == 2
    assert [str(p) for p in read.problems] == [
        "line 2: not in UTF-8 (byte 0xe9); save the file as UTF-8"
    ]


BAD_ROWS = [
    (OK | {"steps": [None]}, "steps holds None: give each step as text"),
    (OK | {"wrong_steps": [0.5]}, "wrong_steps is [0.5]: give whole numbers from 0 on"),
    (OK | {"wrong_steps": "0"}, "wrong_steps is '0': give whole numbers from 0 on"),
    (
        OK | {"choices": {"label": ["A"], "text": ["x", "y"]}},
        "1 labels for 2 options: give as many of each",
    ),
    (
        {"input": "q", "steps": "abc", "mistake_index": 0, "target": "1"},
        "as bbm: steps is 'abc': give a list of steps",
    ),
    ({"input": "q", "steps": ["a"], "mistake_index": 0}, "as bbm: no field 'target'"),
    (
        {"problem": None, "steps": ["a"], "label": -1, "final_answer_correct": True},
        "as processbench: problem is None: give a text",
    ),
    (
        {"problem": "q", "steps": ["a"], "label": "z", "final_answer_correct": True},
        "as processbench: label is 'z': give whole numbers from -1 on",
    ),
    ({"doc": "x", "resps": [["a"]]}, "as lm_eval: doc is 'x': give an object with the question"),
]


def test_fields_that_hold_something_else(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", OK, *(row for row, _ in BAD_ROWS))
    read = read_chains(path)
    assert [problem.reason for problem in read.problems] == [reason for _, reason in BAD_ROWS]
    assert len(read.chains) == 1


def test_halves_of_surrogates_in_names_are_written(tmp_path: Path) -> None:
    names = ("id", "question_id", "writer", "kind", "pair", "answer")
    path = jsonl(tmp_path / "c.jsonl", OK | dict.fromkeys(names, "\ud83d"))
    assert main(["score", str(path), "--out", str(tmp_path / "r")]) == 0
    assert json.loads((tmp_path / "r" / "scores.jsonl").read_text())["chain"]["id"] == "\ufffd"


def test_ids_stay_unique_whatever_they_look_like(tmp_path: Path) -> None:
    chains = [Chain(question="q", steps=(), id=name) for name in ("a", "a#2", "a", "a", "a#2")]
    assert [chain.id for chain in unique_ids(chains)] == ["a", "a#2", "a#3", "a#4", "a#2#2"]
    rows = ({"id": 1, "question": f"{i % 2}?", "answer": "1"} for i in range(4))
    questions, _ = read_questions(jsonl(tmp_path / "q.jsonl", *rows))
    assert [(q.id, q.text) for q in questions] == [("1", "0?"), ("1#2", "1?")]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7。\n答え：７", "７"),
        ("3 + 4 = 7. Ответ: 7", "7"),
        ("٣ + ٤ = ٧。الجواب: ٧", "٧"),
        ("३ + ४ = ७। उत्तर: ७।", "७"),
        ("3 + 4 = 7입니다. 답: 7", "7"),
        ("3 + 4 = 7.\n**Respuesta:** 7.", "7"),
        ("Die Antwort kennt niemand.", None),
    ],
)
def test_answers_in_other_languages(text: str, answer: str | None) -> None:
    chain = from_completion(Question(text="?", reference="7"), text)
    assert chain.answer == answer
    assert len(chain.steps) == 1
    assert chain.labels.correct is (None if answer is None else True)


def test_chains_and_steps_without_a_measure() -> None:
    long = Chain(question="3?", steps=tuple(f"{i} + 3 = {i + 3}" for i in range(2000)), answer="9")
    wide = Chain(question="12 " * 10**6, steps=("3 + 4 = 7. " * 10**6,), answer="7")
    start = time.process_time()
    for chain in (long, wide):
        score = asyncio.run(score_chain(chain, judge=CalculatorJudge(), perturber=RulePerturber()))
        assert len(score.steps) == len(chain.steps)
    assert score.contrasts[0].reason == "a continuation of 11000000 characters is too long"
    assert time.process_time() - start < 15.0  # 1 s; forty and a RecursionError before


MISTAKES = [
    (["score", "demo", "--out", "OUT", "--limit", "-1"], "--limit is -1: give a number from 0 on"),
    (["score", "demo", "--out", "OUT", "--budget", "nan"], "--budget is nan: give a number from 0"),
    (
        ["score", "demo", "--out", "OUT", "--temperature", "3"],
        "--temperature is 3.0: give a number",
    ),
    (["score", "demo", "--out", "OUT", "--judge", "calculator+"], "--judge 'calculator+' with"),
    (["select", "demo", "--out", "OUT", "-n", "0"], "-n is 0: give the number of chains per"),
    (["exemplars", "demo", "-k", "0"], "-k is 0: give the number of examples, from 1 on"),
    (["exemplars", "demo", "-k", "99"], "demo holds chains of 6 questions, and each gives one"),
    (["meta", "demo", "--noise", "2"], "--noise is 2.0: give a share from 0 to 1"),
    (
        ["meta", "demo", "--json", "/proc/a/b.json"],
        "/proc/a/b.json cannot be written (No such file",
    ),
    (["meta", "demo", "--json", "."], ". is a folder: give the name of a file in it"),
    (["meta", "PLAIN"], "PLAIN has no labels to compare with: give rows wrong_steps (a list of"),
    (["select", "ASKED", "--out", "OUT"], "ASKED holds 1 question and no chain: name a model"),
    (["score", "/proc/self/mem", "--out", "OUT"], "/proc/self/mem cannot be read (Input/output"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(w) for w, _ in MISTAKES])
def test_mistakes_are_found_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    plain = jsonl(tmp_path / "plain.jsonl", OK)
    asked = jsonl(tmp_path / "asked.jsonl", {"question": "3 and 4?", "answer": "7"})
    names = {"OUT": str(tmp_path / "r"), "PLAIN": str(plain), "ASKED": str(asked)}
    for name, path in names.items():
        line = line.replace(name, path)
    assert main([names.get(word, word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1
    assert not (tmp_path / "r").exists()


class Judge:
    """Says yes to everything, for a price; or nothing."""

    name = "yes/1"
    answers = frozenset({Supports})
    order_matters = False
    samples = False

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.asked = 0

    async def ask(self, requests: list[object]) -> list[Verdict]:
        self.asked += len(requests)
        return [self.verdict for _ in requests]


def test_a_journal_of_another_hand_is_asked_again(tmp_path: Path) -> None:
    judge = Judge(Verdict(outcome=Outcome.DECIDED, p=0.75))
    chains = [Chain(question=f"{i}?", steps=("a", "b"), answer="7") for i in range(8)]

    def run() -> tuple[int, int]:
        judge.asked = 0
        report = asyncio.run(
            score_chains(
                chains,
                judge=judge,
                perturber=RulePerturber(),
                settings=Settings(trials=1),
                out=tmp_path / "r",
            )
        )
        assert report.means["consistency"].estimate == 0.75
        return judge.asked, report.dropped

    journal = tmp_path / "r" / "answers.jsonl"
    assert run() == (8, 0)
    lines = journal.read_text().splitlines()
    assert len(lines) == 8
    rows = [json.loads(line) for line in lines]
    damaged: list[object] = ["[1]", '"abc"', '{"key": [1]}', '{"key"', "\0\0", "", "", ""]
    for index, change in ((5, {"outcome": "odd"}), (6, {"p": 7}), (7, {"usage": None})):
        damaged[index] = json.dumps(rows[index] | change)
    journal.write_text("\n".join(map(str, damaged)))
    assert run() == (8, 8)
    assert run() == (0, 5)  # those that can be read are superseded by the new ones


def test_pages_of_runs_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    assert main(["score", "demo", "--out", str(out)]) == 0
    for name, text, line in (
        (
            "report.json",
            "{}",
            "holds a run of another version of planaria (KeyError: 'states'): run",
        ),
        ("report.json", "{", "holds a run that cannot be read (Expecting property name"),
        ("config.json", "[]", "holds a run that cannot be read"),
    ):
        (out / name).write_text(text)
        capsys.readouterr()
        assert main(["view", str(out)]) == 2
        assert line in capsys.readouterr().err


def test_the_provider_speaks_for_itself_and_a_run_without_a_score_fails(
    tmp_path: Path, model_of: Callable, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(prompt: str) -> str:
        from inspect_ai.model._model import ModelGenerateError

        raise ModelGenerateError(
            "\nRequest:\n{}\n", status_code=400, provider_message="Error code: 400 - too long\nmore"
        ) from ValueError("Error code: 400")

    judge = InspectJudge(model_of(refuse))
    verdict = asyncio.run(judge.ask([Supports(question="q", steps=("s",), answer="7")]))[0]
    assert (verdict.outcome, verdict.reason) == (
        Outcome.FAILED,
        "ValueError: Error code: 400 - too long",
    )
    monkeypatch.setattr(
        "planaria.faithfulness.judging.judge_named",
        lambda name, judging=None: Judge(Verdict(outcome=Outcome.FAILED, reason="401: bad key")),
    )
    path = jsonl(tmp_path / "c.jsonl", OK)
    assert main(["score", str(path), "--out", str(tmp_path / "r")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "no chain could be scored: 1 request failed, most often for: 401: bad key; mend that and "
        "start the same command again"
    )
    said = Verdict(outcome=Outcome.UNPARSED, reason="unread: 'no'")
    monkeypatch.setattr(
        "planaria.faithfulness.judging.judge_named", lambda name, judging=None: Judge(said)
    )
    assert main(["score", str(path), "--out", str(tmp_path / "r")]) == 0
    assert "1 answer could not be read, most often for: unread: 'no'" in capsys.readouterr().out
