"""Score the chains of a model that you trained yourself: ``--model hf/FOLDER``.

    python examples/faith_small_model.py

makes a tiny Llama with its tokenizer, saves it as a training run would, samples two chains for each
of two questions through Inspect, and scores and selects among them with the calculator. The model
knows nothing; what matters is that each outcome is counted and none is taken for a wrong answer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from planaria.faithfulness.commands import main

QUESTIONS = (
    {"question": "Ann has 3 eggs and buys 4. How many has she?", "answer": "7"},
    {"question": "Bo has 9 cards and loses 2. How many are left?", "answer": "7"},
)


def save_model(folder: Path) -> None:
    """A tiny model and its tokenizer, as ``from_pretrained`` takes them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["question"] for row in QUESTIONS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run(folder: Path) -> int:
    """The example; returns the exit code of the command line."""
    save_model(folder / "model")
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(row) for row in QUESTIONS), encoding="utf-8")
    options = ["--out", str(folder / "run"), "--model", f"hf/{folder / 'model'}"]
    return main(["select", str(questions), *options, "-n", "2", "--max-tokens", "24"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        raise SystemExit(run(Path(temporary)))
