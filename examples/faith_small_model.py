"""Score the chains of a model that ``planaria train llm`` wrote: ``--model hf/OUT``.

    python examples/faith_small_model.py

trains a tiny Llama on sums for three steps, samples two chains for each of two questions from it
through Inspect, and scores and selects among them with the calculator. The model knows nothing;
what matters is that each outcome is counted and none is taken for a wrong answer.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from planaria.faithfulness.commands import main
from planaria.recipes.llm import LlmConfig
from planaria.recipes.llm.train import main as train

QUESTIONS = (
    {"question": "Ann has 3 eggs and buys 4. How many has she?", "answer": "7"},
    {"question": "Bo has 9 cards and loses 2. How many are left?", "answer": "7"},
)


def corpus(lines: int) -> str:
    """Sums with their answers, one a line."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 50), rng.randint(1, 50)) for _ in range(lines)]
    return "\n".join(
        f"{a} eggs and {b} eggs. {a} + {b} = {a + b}. Answer: {a + b}" for a, b in pairs
    )


def run(folder: Path) -> int:
    """The example; returns the exit code of the command line."""
    text, questions = folder / "sums.txt", folder / "questions.jsonl"
    text.write_text(corpus(1500), encoding="utf-8")
    questions.write_text("\n".join(json.dumps(row) for row in QUESTIONS), encoding="utf-8")
    # The same as: planaria train llm --model llama-tiny --data sums.txt --out trained …
    train(
        LlmConfig(
            model="llama-tiny",
            data=(str(text),),
            documents="line",
            out=folder / "trained",
            vocab_size=512,
            sequence=256,
            held_out=0.1,
            batch=4,
            steps=3,
        )
    )
    options = ["--out", str(folder / "run"), "--model", f"hf/{folder / 'trained'}"]
    return main(["select", str(questions), *options, "-n", "2", "--max-tokens", "24"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        raise SystemExit(run(Path(temporary)))
