"""A small corpus of real text, made of this Python's own modules, and configurations for it."""

from __future__ import annotations

import dataclasses
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.recipes.llm import LlmConfig

MODULES = (
    "argparse",
    "ast",
    "bdb",
    "calendar",
    "cmd",
    "copy",
    "csv",
    "datetime",
    "difflib",
    "enum",
)

MakeConfig = Callable[..., LlmConfig]


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten files of Python source and one of JSON lines."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        text = (library / f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.py").write_text(text[:40_000], encoding="utf-8")
    rows = [{"text": f"Line {i} of a table of lines.", "n": i} for i in range(50)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_config(text_folder: Path, cache: Path, tmp_path: Path) -> MakeConfig:
    """Builds a configuration of a tiny run on ``text_folder``; keywords replace fields."""
    base = LlmConfig(
        model="llama-tiny",
        out=tmp_path / "run",
        cache=cache,
        data=(str(text_folder),),
        documents="paragraph",
        held_out=0.05,
        vocab_size=512,
        sequence=32,
        batch=4,
        steps=4,
        warmup=2,
        lr=3e-3,
        eval_every=0,
        eval_batches=2,
    )

    def make(**changes: Any) -> LlmConfig:
        return dataclasses.replace(base, **changes)

    return make
