"""The tokenizer: the same in every process, from a folder too, never fooled by its own marks."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.errors import DataError
from planaria.recipes.llm import LlmConfig, tokenizer

MakeConfig = Callable[..., LlmConfig]


def test_training_is_deterministic_across_processes(
    make_config: MakeConfig, text_folder: Path
) -> None:
    config = make_config()
    code = (
        "import sys, hashlib; from pathlib import Path;"
        "from planaria.recipes.llm import LlmConfig, tokenizer;"
        "c = LlmConfig(data=(sys.argv[1],), documents='paragraph', held_out=0.05, vocab_size=512);"
        "print(hashlib.sha256(tokenizer.train_bpe(c).to_str().encode()).hexdigest())"
    )
    digests = {hashlib.sha256(tokenizer.train_bpe(config).to_str().encode()).hexdigest()}
    for _ in range(2):
        out = subprocess.run(
            [sys.executable, "-c", code, str(text_folder)],
            check=True,
            capture_output=True,
            text=True,
        )
        digests.add(out.stdout.strip())
    assert len(digests) == 1


def test_trained_vocabulary(make_config: MakeConfig) -> None:
    vocabulary = tokenizer.vocabulary(make_config())
    assert (vocabulary.size, vocabulary.end, vocabulary.end_text) == (512, 0, "<|endoftext|>")
    loaded = vocabulary.load()
    for text in ("def f(x):\n\treturn x + 1\n", "caf\u00e9 \u2603 \U0001f40d", " a  b "):
        assert loaded.decode(loaded.encode(text).ids) == text


def test_text_that_spells_the_end_does_not_end(make_config: MakeConfig) -> None:
    vocabulary = tokenizer.vocabulary(make_config())
    ids = vocabulary.load().encode("a<|endoftext|>b").ids
    assert vocabulary.end not in ids
    assert vocabulary.load().decode(ids) == "a<|endoftext|>b"


def test_second_call_reads_the_cache(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(cache=tmp_path / "cache")
    first = tokenizer.vocabulary(config)

    def refuse(config: LlmConfig) -> None:
        raise AssertionError("trained twice")

    monkeypatch.setattr(tokenizer, "train_bpe", refuse)
    assert tokenizer.vocabulary(config) == first


def test_a_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    trained = tokenizer.vocabulary(make_config())
    folder = tmp_path / "saved"
    folder.mkdir()
    shutil.copy(trained.folder / "tokenizer.json", folder)
    assert tokenizer.vocabulary(make_config(tokenizer=str(folder))).digest == trained.digest
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": {"content": "a"}}), encoding="utf-8")
    other = tokenizer.vocabulary(make_config(tokenizer=str(folder)))
    assert (other.end_text, other.end) == ("a", trained.load().token_to_id("a"))
    assert other.digest != trained.digest


def test_bad_folders(make_config: MakeConfig, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(DataError) as caught:
            tokenizer.vocabulary(make_config(tokenizer=str(tmp_path)))
        return str(caught.value)

    assert refusal() == (
        f"tokenizer: {tmp_path} has no tokenizer.json; give `train` or the folder of a "
        "saved tokenizer"
    )
    file = tmp_path / "tokenizer.json"
    file.write_text("{", encoding="utf-8")
    message = refusal()
    assert message.startswith(f"tokenizer: {file} cannot be read: ")
    assert message.endswith("; save the tokenizer anew")
    shutil.copy(tokenizer.vocabulary(make_config()).folder / "tokenizer.json", tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "<nowhere>"}), encoding="utf-8")
    assert refusal() == (
        f"tokenizer: {tmp_path} names no end-of-text token that it has; "
        "set eos_token in its tokenizer_config.json"
    )
    settings.write_text("{", encoding="utf-8")
    assert refusal() == f"tokenizer: {settings} is not JSON; save the tokenizer anew"


def test_nothing_to_train_on(make_config: MakeConfig, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        tokenizer.vocabulary(make_config(data=(str(empty),)))
    assert str(caught.value) == (
        f"data: {empty} holds no text to train a tokenizer on; give more text"
    )
