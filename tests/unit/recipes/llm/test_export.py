"""The exported folder: complete or absent, and loaded by transformers like any other."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from planaria.errors import CheckpointError
from planaria.recipes.llm import LlmConfig, export, models, prepare

MakeConfig = Callable[..., LlmConfig]


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_round_trip(name: str, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(model=name)
    packed = prepare(config)
    model = models.make(config, packed.vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    folder = tmp_path / "model"
    for _ in range(2):
        export.write(
            folder,
            state=export.full_state(model),
            config=config,
            vocabulary=packed.vocabulary,
        )
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("model")) == ["model"]
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "planaria.toml",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids_BT = torch.from_numpy(packed.held_out_batch(torch.arange(2).numpy()))
    model.eval()
    with torch.no_grad():
        assert torch.equal(
            loaded(input_ids=ids_BT).logits, model(input_ids=ids_BT, use_cache=False).logits
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def first(x):\n    return [x, 'caf\u00e9']\n"
    assert tokenizer(text).input_ids == packed.vocabulary.load().encode(text).ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert tokenizer.model_max_length == config.sequence
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 0
    generated = loaded.generate(ids_BT[:, :8], max_new_tokens=4, do_sample=False)
    assert generated.shape[1] <= 12


def test_full_state_is_a_copy(make_config: MakeConfig) -> None:
    config = make_config()
    model = models.make(config, prepare(config).vocabulary)
    state = export.full_state(model)
    name, before = next((n, t.clone()) for n, t in state.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(state[name], before)
    assert before.abs().sum() > 0


def test_full_disk_leaves_the_older_export(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    packed = prepare(config)
    model = models.make(config, packed.vocabulary)
    folder = tmp_path / "model"
    arguments = {"state": export.full_state(model), "config": config}
    export.write(folder, vocabulary=packed.vocabulary, **arguments)
    before = (folder / "model.safetensors").read_bytes()

    def full(self: nn.Module, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", full)
    with pytest.raises(CheckpointError) as caught:
        export.write(folder, vocabulary=packed.vocabulary, **arguments)
    assert str(caught.value) == (
        f"export: cannot write {folder}: No space left on device; free space and run again "
        "from the newest checkpoint"
    )
    assert (folder / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "model.partial").exists()
