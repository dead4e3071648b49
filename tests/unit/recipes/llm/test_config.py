"""Configurations: what is refused and in which words; what is written beside a result."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tyro

from planaria.errors import ConfigError
from planaria.optim import choice
from planaria.optim.choice import SparseConfig
from planaria.recipes.llm import LlmConfig, config, demo

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"model": "gpt5"},
        "model: 'gpt5' is unknown; choose one of gpt2-tiny, gpt2-small, gpt2-medium, llama-tiny, "
        "llama-demo, llama-1m, llama-30m, llama-500m, llama-1.8b",
    ),
    ({"regime": "zero"}, "regime: 'zero' is unknown; choose one of ddp, fsdp"),
    (
        {"documents": "page"},
        "documents: 'page' is unknown; choose one of auto, file, paragraph, line",
    ),
    (
        {"optimizer": "sgd"},
        "optimizer: 'sgd' is unknown; choose one of adamw, adams, sharded, scape",
    ),
    (
        {"optimizer": "scape", "regime": "fsdp"},
        "regime: fsdp cuts the weights, and optimizer = scape needs whole ones on each worker; "
        "use regime = ddp, which it then does without",
    ),
    (
        {"optimizer": "adams", "sparse": SparseConfig(density=0.1)},
        "density: 0.1 is set, and optimizer is 'adams', which sends everything; leave it out, or "
        "use optimizer = scape",
    ),
    ({"dtype": "fp16"}, "dtype: 'fp16' is unknown; choose one of fp32, bf16"),
    ({"attention": "flash"}, "attention: 'flash' is unknown; choose one of sdpa, eager"),
    ({"on_nonfinite": "pray"}, "on_nonfinite: 'pray' is unknown; choose one of stop, skip"),
    ({"data": ()}, "data: () names no corpus; give files, globs, datasets:NAME or stdlib"),
    ({"text_field": ""}, "text_field: '' names no field; give the one that holds the text"),
    ({"tokenizer": ""}, "tokenizer: '' names nothing; give train, or a tokenizer's folder"),
    ({"vocab_size": 256}, "vocab_size: 256 is too small; it must be at least 257"),
    ({"sequence": 1}, "sequence: 1 is too small; it must be at least 2"),
    ({"sequence": 10**6}, "sequence: 1000000 is too large; it must be at most 131072"),
    ({"batch": 0}, "batch: 0 is too small; it must be at least 1"),
    ({"accumulate": 0}, "accumulate: 0 is too small; it must be at least 1"),
    ({"steps": 0}, "steps: 0 is too small; it must be at least 1"),
    ({"steps": 2.5}, "steps: 2.5 is not a whole number; give one"),
    ({"seed": -1}, "seed: -1 is too small; it must be at least 0"),
    ({"max_bytes": 0}, "max_bytes: 0 is too small; it must be at least 1"),
    ({"max_redo": 0}, "max_redo: 0 is too small; it must be at least 1"),
    ({"lr": 0.0}, "lr: 0 is too small; it must be above 0"),
    ({"lr": float("nan")}, "lr: nan is not a finite number; give one"),
    ({"held_out": 0.0}, "held_out: 0 is too small; it must be above 0"),
    ({"held_out": 0.6}, "held_out: 0.6 is too large; it must be at most 0.5"),
    ({"betas": (0.9, 1.0)}, "betas: 1.0 never forgets; each must be below 1"),
    ({"betas": (-0.1, 0.9)}, "betas: -0.1 is too small; it must be at least 0"),
    ({"clip": 0.0}, "clip: 0 is too small; it must be above 0"),
    ({"dropout": 1.0}, "dropout: 1 is too large; it must be at most 0.99"),
    (
        {"warmup": 30, "steps": 20},
        "warmup: 30 steps do not fit into steps = 20; lower warmup or raise steps",
    ),
]


SPARSE_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"density": 0.0}, "density is 0; give a share of the weights in (0, 1]"),
    ({"unsent": "lost"}, "unsent is 'lost'; choose one of frozen, moved, local"),
    (
        {"dense_steps": 1.5},
        "dense_steps is 1.5; give a count of steps or a share of them in [0, 1)",
    ),
    (
        {"outer_momentum": 0.5},
        "outer_momentum: 0.5 is set, and unsent is 'frozen', which takes no outer step; leave it "
        "out, or use unsent = local",
    ),
    (
        {"unsent": "local", "outer_momentum": 1.0},
        "outer_momentum is 1; give a number in [0, 1)",
    ),
    (
        {"statistic": "size"},
        "statistic is 'size'; choose one of momentum, aged, gradient, cycle",
    ),
    ({"wire": "int2"}, "wire is 'int2'; choose one of float32, bfloat16, int8, int4"),
    ({"scale_cap": 0.5}, "scale_cap is 0.5; give a number at least 1"),
    (
        {"unsent": "local", "statistic": "cycle"},
        "statistic: cycle is set, and unsent is 'local', which sends every weight in turn; leave it "
        "out, or use unsent = frozen",
    ),
]


@pytest.mark.parametrize(("changes", "message"), SPARSE_REFUSED)
def test_sparse_options_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SparseConfig(**changes)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_sparse_options_that_are_not_given_are_those_of_scape() -> None:
    assert SparseConfig().choices() == {"density": 0.01, "unsent": "frozen"}
    cycle = SparseConfig(density=0.077, statistic="cycle", wire="int4", scale_cap=50)
    assert cycle.choices() == {
        "density": 0.077,
        "unsent": "frozen",
        "statistic": "cycle",
        "wire": "int4",
        "scale_cap": 50,
    }
    local = SparseConfig(unsent="local", outer_momentum=0.5, dense_steps=20)
    assert local.choices() == {"density": 0.01, "unsent": "local", "outer_momentum": 0.5}


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refuses_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LlmConfig(**changes)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_every_field_is_documented() -> None:
    for module, kind in ((config, LlmConfig), (choice, SparseConfig)):
        source = Path(module.__file__).read_text(encoding="utf-8")
        for field in dataclasses.fields(kind):
            after = source.split(f"\n    {field.name}: ", 1)[1].split("\n", 1)[1]
            assert after.startswith('    """'), field.name


def test_command_line() -> None:
    made = tyro.cli(
        LlmConfig,
        args=["--model", "gpt2-tiny", "--data", "a.txt", "b.txt", "--betas", "0.8", "0.99"],
    )
    assert made == LlmConfig(model="gpt2-tiny", data=("a.txt", "b.txt"), betas=(0.8, 0.99))


def test_toml_holds_the_resolved_configuration(tmp_path: Path) -> None:
    made = demo(out=tmp_path)
    read = tomllib.loads(config.as_toml(made))["llm"]
    assert read["out"] == str(tmp_path)
    assert read["model"] == "llama-demo"
    assert read["sparse"] == {
        "density": 0.01,
        "unsent": "frozen",
        "dense_steps": 0.1,
        "dense_embeddings": False,
    }
    left_out = {f.name for f in dataclasses.fields(made)} - set(read)
    assert left_out == {"cache", "dropout"}
    again = LlmConfig(
        **{
            **read,
            "out": Path(read["out"]),
            "data": ("stdlib",),
            "betas": tuple(read["betas"]),
            "sparse": SparseConfig(**read["sparse"]),
        }
    )
    assert again == made


def test_package_does_not_import_torch() -> None:
    code = "import sys, planaria.recipes.llm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
