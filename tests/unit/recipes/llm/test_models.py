"""The networks: sizes, equal bits from a seed, transformers' own loss."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from planaria.recipes.llm import LlmConfig, config, models, prepare, train
from planaria.recipes.llm.tokenizer import Vocabulary

MakeConfig = Callable[..., LlmConfig]

SIZES = {
    "gpt2-tiny": (512, 32, 134_912),
    "gpt2-small": (50_257, 1024, 124_439_808),
    "gpt2-medium": (50_257, 1024, 354_823_168),
    "llama-tiny": (2048, 128, 230_208),
    "llama-demo": (2048, 128, 639_840),
    "llama-1m": (4096, 256, None),
    "llama-30m": (8192, 512, None),
    "llama-500m": (32_000, 1024, None),
    "llama-1.8b": (32_000, 2048, None),
}
"""Vocabulary, sequence, parameters. GPT-2's are those of the released models."""


def llama_parameters(dims: models.Dims, size: int) -> int:
    """By hand: attention, gated feed-forward and two norms a block; a last norm; embeddings."""
    block = 4 * dims.width**2 + 3 * dims.width * dims.inner + 2 * dims.width
    return dims.layers * block + dims.width + (1 if dims.tied else 2) * size * dims.width


def vocabulary(size: int) -> Vocabulary:
    return Vocabulary(
        folder=Path("nowhere"), size=size, end=0, end_text="<|endoftext|>", digest="0"
    )


def test_names_and_tables_agree() -> None:
    assert set(models.DIMS) == set(config.MODELS) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_parameters(name: str) -> None:
    size, sequence, expected = SIZES[name]
    made = models.architecture(LlmConfig(model=name, sequence=sequence), vocabulary(size))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    count = sum(p.numel() for p in model.parameters())
    dims = models.DIMS[name]
    if dims.family == "llama":
        assert count == llama_parameters(dims, size)
    assert expected in (None, count)
    if name in ("llama-30m", "llama-500m", "llama-1.8b"):
        # A name's figure is what the model has, within a tenth.
        figure = {"llama-30m": 30e6, "llama-500m": 500e6, "llama-1.8b": 1.8e9}[name]
        assert abs(count / figure - 1) < 0.1
    assert len(models.blocks(model)) == models.DIMS[name].layers


def weights(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def trained(settings: LlmConfig, steps: int = 3) -> str:
    """Digest of the weights after ``steps`` plain steps; dropout draws from the global generator."""
    torch.manual_seed(1)
    model = models.make(settings, vocabulary(512))
    optimizer = train.optimizer(model, settings)
    for step in range(steps):
        ids_BT = (torch.arange(4 * 32) * (step + 3) % 511).view(4, 32)
        models.causal_loss(model(input_ids=ids_BT, use_cache=False).logits, ids_BT).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_equal_bits_in_two_processes() -> None:
    settings = LlmConfig(model="gpt2-tiny", sequence=32)
    code = (
        "import torch; torch.set_num_threads(1);"
        "from planaria.recipes.llm import LlmConfig;"
        "from tests.unit.recipes.llm.test_models import trained;"
        "print(trained(LlmConfig(model='gpt2-tiny', sequence=32)))"
    )
    root = Path(__file__).parents[4]
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert out.stdout.strip() == trained(settings)
    finally:
        torch.set_num_threads(before)


def test_seed_makes_the_weights_and_leaves_the_generator_alone() -> None:
    settings = LlmConfig(model="llama-tiny", sequence=32)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = models.make(settings, vocabulary(512))
    assert torch.equal(torch.rand(3), expected)
    assert weights(models.make(settings, vocabulary(512))) == weights(first)
    other = models.make(LlmConfig(model="llama-tiny", sequence=32, seed=1), vocabulary(512))
    assert weights(other) != weights(first)


def test_dropout_defaults() -> None:
    gpt2 = models.architecture(LlmConfig(model="gpt2-tiny"), vocabulary(512))
    llama = models.architecture(LlmConfig(model="llama-tiny"), vocabulary(512))
    assert (gpt2.resid_pdrop, gpt2.attn_pdrop, llama.attention_dropout) == (0.1, 0.1, 0.0)
    none = models.architecture(LlmConfig(model="gpt2-tiny", dropout=0.0), vocabulary(512))
    assert (none.resid_pdrop, none.embd_pdrop, none.attn_pdrop) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_loss_is_transformers_own(name: str, make_config: MakeConfig) -> None:
    settings = make_config(model=name, dropout=0.0)
    packed = prepare(settings)
    model = models.make(settings, packed.vocabulary)
    ids_BT = torch.from_numpy(packed.held_out_batch(torch.arange(3).numpy()))
    result = model(input_ids=ids_BT, labels=ids_BT)
    assert torch.equal(models.causal_loss(result.logits, ids_BT), result.loss)
    single = models.causal_loss(result.logits, ids_BT, reduction="none")
    assert single.shape == (3 * (settings.sequence - 1),)
    # The last token of a window is a label and never an input; the first is never a label.
    changed = ids_BT.clone()
    changed[:, 0] = 1
    assert torch.equal(models.causal_loss(result.logits, changed), result.loss)


def test_attention_forms_agree(make_config: MakeConfig) -> None:
    packed = prepare(make_config())
    ids_BT = torch.from_numpy(packed.held_out_batch(torch.arange(2).numpy()))
    sdpa, eager = (
        models.make(make_config(attention=form), packed.vocabulary)(input_ids=ids_BT).logits
        for form in ("sdpa", "eager")
    )
    # Two orders of float32 sums over 32 keys and 64 features: a few units in the seventh digit.
    torch.testing.assert_close(sdpa, eager, atol=2e-6, rtol=1e-4)
