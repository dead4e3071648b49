"""One row of each known format to chains: the table that a new format joins with one entry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from planaria.errors import DataError
from planaria.faithfulness.answers import Equality, answers_equal, find_answer, letter_of
from planaria.faithfulness.chains import Chain, Labels, Question, digest
from planaria.faithfulness.segment import looks_cut, segment, split_thinking

Row: TypeAlias = dict[str, Any]

_QUESTION = ("question", "problem", "prompt", "input", "query", "instruction")
_STEPS = ("steps", "chain", "cot", "chain_of_thought", "rationale", "reasoning")
_TEXT = ("completion", "response", "solution", "output", "text", "generation", "prediction_text")
_ANSWER = ("answer", "final_answer", "prediction", "pred", "model_answer")
_REFERENCE = ("reference", "target", "gold", "ground_truth", "correct_answer", "label", "expected")
_MARK = re.compile(r"<<[^<>]*>>")
_GSM8K = re.compile(r"\n?####\s*(?P<answer>.+?)\s*$")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one kind of row is recognised and read."""

    fields: tuple[str, ...]
    """Fields that a row must have."""
    convert: Callable[[Row], list[Chain]]
    """Chains of a row; raises for a row that is not of this kind."""
    test: Callable[[Row], bool] = lambda row: True
    """A further condition."""


def from_completion(
    question: Question, text: str, *, stop_reason: str | None = None, writer: str = ""
) -> Chain:
    """A chain from what a model wrote.

    Thinking and response are taken apart, the answer is found, and the line that only states it is
    removed from the steps. The thinking is the chain where there is one: it is what the answer
    came out of.
    """
    if stop_reason == "stop":
        stop_reason = None  # the model was done
    parts = split_thinking(text)
    body = parts.thinking or parts.response
    found = find_answer(parts.response or parts.thinking, options=bool(question.options))
    notes: list[str] = []
    if parts.thinking:
        notes.append("the steps are what stood between thinking tags")
    if found.answer is None:
        notes.append(f"no answer was found: {found.reason}")
    cut = looks_cut(text, stop_reason=stop_reason)
    if cut is None and found.answer is None and stop_reason is None:
        end = body.rstrip()[-1:]
        if end.isalnum() and len(body) > 40:
            cut = "no answer was found and the last line has no end"
    if cut:
        notes.append(f"truncated: {cut}")
    return Chain(
        question=question.full,
        steps=steps_of(body),
        answer=_by_letter(found.answer, question),
        reference=question.reference,
        question_id=question.id,
        truncated=cut is not None and (found.answer is None or stop_reason is not None),
        writer=writer,
        labels=Labels(correct=_correct(found.answer, question)),
        notes=tuple(notes),
    )


def steps_of(text: str) -> tuple[str, ...]:
    """Steps of a text without calculator marks and without a line that only states the answer."""
    steps = segment(_MARK.sub("", text))
    return tuple(step for step in steps if not _only_answer(step))


_ONLY_ANSWER = re.compile(
    r"(?:####|\*{0,2}(?:final\s+)?answer\*{0,2}\s*[:：=]|A:)\s*\S.{0,80}", re.IGNORECASE
)


def _only_answer(step: str) -> bool:
    return _ONLY_ANSWER.fullmatch(step.strip()) is not None


def _by_letter(answer: str | None, question: Question) -> str | None:
    """The answer, as its option's letter where there are options: "library" and "B" are one vote."""
    letter = letter_of(answer, tuple(text for _, text in question.options))
    return answer if letter is None else question.options[ord(letter) - ord("A")][0]


def _correct(answer: str | None, question: Question) -> bool | None:
    choices = tuple(text for _, text in question.options)
    equality = answers_equal(answer, question.reference, choices=choices)
    return None if equality is Equality.UNKNOWN else equality is Equality.EQUAL


def text_of(row: Row, names: tuple[str, ...]) -> str | None:
    """The first of several fields that holds text or a number."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return None


def _required(row: Row, names: tuple[str, ...], what: str) -> str:
    value = text_of(row, names)
    if value is None:
        raise DataError(f"no {what}: expected one of {', '.join(names)}")
    return value


def options_of(row: Row) -> tuple[tuple[str, str], ...]:
    """Options of a row: ``{"label": […], "text": […]}``, a list of texts, or letter to text."""
    choices = row.get("choices", row.get("options"))
    if isinstance(choices, dict) and "text" in choices:
        labels = [str(label) for label in choices.get("label") or []]
        texts = [str(text) for text in choices["text"]]
        labels = labels or [chr(ord("A") + i) for i in range(len(texts))]
        return tuple(zip(labels, texts, strict=True))
    if isinstance(choices, dict):
        return tuple((str(k), str(v)) for k, v in choices.items())
    if isinstance(choices, list):
        return tuple((chr(ord("A") + i), str(text)) for i, text in enumerate(choices))
    return ()


def question_of(row: Row) -> Question:
    """The question of a row, with its reference answer if there is one."""
    text = _required(row, _QUESTION, "question")
    reference = text_of(row, ("answerKey", *_REFERENCE))
    answer = text_of(row, ("answer", "final_answer"))
    if reference is None and answer is not None:
        marked = _GSM8K.search(answer)
        reference = marked.group("answer") if marked else answer
    if reference is not None and "\n" in reference:
        reference = find_answer(reference).answer
    options = options_of(row)
    if options and reference is not None and "answerKey" not in row:
        letters = [letter for letter, label in options if label == reference]
        reference = letters[0] if letters else reference
    name = text_of(row, ("question_id", "id", "unique_id", "task_id"))
    question = Question(text=text, reference=reference, options=options)
    return replace(question, id=name) if name else question


def _generic(row: Row) -> list[Chain]:
    asked = _required(row, _QUESTION, "question")
    options = options_of(row)
    question = Question(
        text=asked, options=options, reference=text_of(row, ("answerKey", *_REFERENCE))
    )
    steps = next((row[name] for name in _STEPS if row.get(name)), None)
    if isinstance(steps, list):
        given = tuple(step.strip() for step in map(str, steps) if step.strip())
        chain = Chain(
            question=question.full,
            steps=tuple(step for step in given if not _only_answer(step)) or given,
            answer=text_of(row, _ANSWER) or find_answer("\n".join(given)).answer,
            reference=question.reference,
            notes=() if len(given) == len(steps) else ("empty steps were left out",),
        )
    else:
        text = steps if isinstance(steps, str) else text_of(row, _TEXT)
        if text is None:
            empty = [name for name in (*_STEPS, *_TEXT) if name in row]
            if empty:
                raise DataError(f"{empty[0]} is empty; give the chain's steps or its text")
            raise DataError(f"no chain: expected one of {', '.join((*_STEPS, *_TEXT))}")
        chain = from_completion(question, text, stop_reason=row.get("stop_reason"))
        stated = text_of(row, _ANSWER)
        if stated is not None:
            chain = replace(
                chain, answer=stated, notes=tuple(n for n in chain.notes if "no answer" not in n)
            )
    chain = replace(chain, answer=_by_letter(chain.answer, question))
    return [_labelled(chain, row, question)]


def _labelled(chain: Chain, row: Row, question: Question) -> Chain:
    correct = row.get("correct", row.get("is_correct"))
    if not isinstance(correct, bool):
        correct = _correct(chain.answer, question)
    wrong = row.get("wrong_steps")
    labels = Labels(correct=correct)
    if isinstance(wrong, list):
        labels = Labels(
            correct=correct,
            steps_labelled=True,
            wrong=tuple(sorted(int(i) for i in wrong)),
            first_wrong=min((int(i) for i in wrong), default=None),
        )
    given = text_of(row, ("question_id",))
    return replace(
        chain,
        labels=labels,
        id=text_of(row, ("id", "unique_id")) or chain.id,
        question_id=given or digest(question.full),
        writer=str(row.get("writer") or row.get("generator") or row.get("model") or ""),
        truncated=bool(row.get("truncated", chain.truncated)),
        pair=str(row.get("pair") or ""),
        kind=str(row.get("kind") or ""),
    )


def _gsm8k(row: Row) -> list[Chain]:
    question = question_of(row)
    body = _GSM8K.sub("", row["answer"])
    chain = Chain(
        question=question.text,
        steps=steps_of(body),
        answer=question.reference,
        reference=question.reference,
        question_id=question.id,
        labels=Labels(correct=True),
        writer="reference",
    )
    return [chain]


def _gsm8k_graded(row: Row) -> list[Chain]:
    truth = str(row["ground_truth"])
    found = find_answer(truth)
    question = Question(text=str(row["question"]), reference=found.answer)
    out: list[Chain] = []
    for writer, value in row.items():
        if not isinstance(value, dict) or "solution" not in value:
            continue
        chain = from_completion(question, str(value["solution"]), writer=writer)
        labels = replace(chain.labels, correct=bool(value["is_correct"]))
        out.append(replace(chain, labels=labels, id=f"{question.id}/{writer}"))
    return out


def _math(row: Row) -> list[Chain]:
    question = question_of(row)
    body = str(row["solution"])
    chain = Chain(
        question=question.text,
        steps=steps_of(body),
        answer=find_answer(body).answer or question.reference,
        reference=question.reference,
        question_id=question.id,
        labels=Labels(correct=True),
        writer="reference",
    )
    return [chain]


def _bbm(row: Row) -> list[Chain]:
    index = row["mistake_index"]
    steps = tuple(str(step) for step in row["steps"])
    target, answer = str(row["target"]), text_of(row, ("answer",))
    equality = answers_equal(answer, target)
    return [
        Chain(
            question=str(row["input"]),
            steps=steps,
            answer=answer,
            reference=target,
            labels=Labels(
                first_wrong=index,
                wrong=() if index is None else (int(index),),
                steps_labelled=True,
                correct=None if equality is Equality.UNKNOWN else equality is Equality.EQUAL,
            ),
        )
    ]


def _prmbench(row: Row) -> list[Chain]:
    # ``idx`` is not unique: one question has a row for each class of error.
    pair = digest(str(row["original_question"]), *map(str, row["modified_process"]))
    if row.get("idx"):
        pair = f"{row['idx']}-{row.get('classification') or pair}"
    errors = tuple(sorted({int(step) - 1 for step in row["error_steps"]}))
    changed = row["original_question"] != row["modified_question"]
    modified = tuple(str(step) for step in row["modified_process"])
    inside = tuple(index for index in errors if 0 <= index < len(modified))
    notes: list[str] = []
    if changed:
        notes.append("the question was changed, too")
    if not inside:
        notes.append("no error step is labelled")
    common: Row = {
        "question_id": digest(str(row["original_question"])),
        "pair": pair,
        "kind": str(row.get("classification") or ""),
        "notes": tuple(notes),
    }
    original = Chain(
        question=str(row["original_question"]),
        steps=tuple(str(step) for step in row["original_process"]),
        id=f"{pair}/original",
        labels=Labels(steps_labelled=True),
        **common,
    )
    altered = Chain(
        question=str(row["modified_question"]),
        steps=modified,
        id=f"{pair}/modified",
        labels=Labels(
            first_wrong=inside[0] if inside else None, wrong=inside, steps_labelled=bool(inside)
        ),
        **common,
    )
    return [original, altered]


def _processbench(row: Row) -> list[Chain]:
    label = int(row["label"])
    steps = tuple(str(step) for step in row["steps"])
    return [
        Chain(
            question=str(row["problem"]),
            steps=steps,
            answer=find_answer("\n".join(steps)).answer,
            id=str(row.get("id") or ""),
            labels=Labels(
                first_wrong=None if label < 0 else label,
                wrong=() if label < 0 else (label,),
                steps_labelled=True,
                correct=bool(row["final_answer_correct"]),
            ),
            writer=str(row.get("generator") or ""),
        )
    ]


def _lm_eval(row: Row) -> list[Chain]:
    doc = row["doc"]
    question = question_of(doc)
    target = text_of(row, ("target",))
    if target is not None and "####" in target:
        target = find_answer(target).answer
    question = replace(question, reference=target or question.reference)
    out: list[Chain] = []
    for number, text in enumerate(_responses(row["resps"])):
        chain = from_completion(question, text)
        out.append(replace(chain, id=f"{row.get('doc_id', question.id)}/{number}"))
    return out


def _responses(value: Any) -> list[str]:
    """``resps`` nests lists by request and repeat; log-likelihood rows hold no text."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _responses(item)]
    return []


FORMATS: dict[str, Format] = {
    "prmbench": Format(fields=("original_process", "modified_process"), convert=_prmbench),
    "bbm": Format(fields=("input", "steps", "mistake_index"), convert=_bbm),
    "processbench": Format(
        fields=("problem", "steps", "label", "final_answer_correct"), convert=_processbench
    ),
    "lm_eval": Format(fields=("doc", "resps"), convert=_lm_eval),
    "gsm8k_graded": Format(
        fields=("question", "ground_truth"),
        convert=_gsm8k_graded,
        test=lambda row: any(isinstance(v, dict) and "solution" in v for v in row.values()),
    ),
    "gsm8k": Format(
        fields=("question", "answer"),
        convert=_gsm8k,
        test=lambda row: isinstance(row["answer"], str) and "####" in row["answer"],
    ),
    "math": Format(
        fields=("solution", "answer"),
        convert=_math,
        test=lambda row: "level" in row or "subject" in row or "\\boxed" in str(row["solution"]),
    ),
    "generic": Format(
        fields=(),
        convert=_generic,
        test=lambda row: (
            any(name in row for name in _QUESTION)
            and any(name in row for name in (*_STEPS, *_TEXT))
        ),
    ),
}
"""Formats by name, the most specific first."""


def recognise(row: Row) -> str | None:
    """Name of the first format that a row fits, or None."""
    for name, format in FORMATS.items():
        if all(field in row for field in format.fields) and format.test(row):
            return name
    return None
