"""The networks: transformers' GPT-2 and Llama by name, made from a seed, wrapped for a regime.

Shapes: B samples, T tokens, V entries of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from planaria.recipes.llm.config import LlmConfig
from planaria.recipes.llm.tokenizer import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Dimensions of a model, apart from vocabulary and sequence."""

    family: Literal["gpt2", "llama"]
    layers: int
    """Blocks."""
    width: int
    """Features of a token."""
    heads: int
    """Attention heads; Llama's key and value heads are as many."""
    inner: int
    """Features inside the feed-forward part."""
    tied: bool = True
    """Whether the output layer is the embedding."""


DIMS: dict[str, Dims] = {
    "gpt2-tiny": Dims(family="gpt2", layers=2, width=64, heads=2, inner=256),
    "gpt2-small": Dims(family="gpt2", layers=12, width=768, heads=12, inner=3072),
    "gpt2-medium": Dims(family="gpt2", layers=24, width=1024, heads=16, inner=4096),
    "llama-tiny": Dims(family="llama", layers=2, width=64, heads=2, inner=172),
    "llama-demo": Dims(family="llama", layers=4, width=96, heads=3, inner=256),
    "llama-1m": Dims(family="llama", layers=4, width=128, heads=4, inner=344),
    "llama-30m": Dims(family="llama", layers=8, width=512, heads=8, inner=1376),
    "llama-500m": Dims(family="llama", layers=24, width=1280, heads=20, inner=3456),
    "llama-1.8b": Dims(family="llama", layers=24, width=2304, heads=36, inner=6912, tied=False),
}
"""Sources: GPT-2 as released (small, medium); the rest is our choice, Llama's inner width being
about 8/3 of its width as in arXiv 2302.13971."""


def architecture(config: LlmConfig, vocabulary: Vocabulary) -> GPT2Config | LlamaConfig:
    """The transformers configuration of ``config.model`` for this vocabulary and sequence."""
    dims = DIMS[config.model]
    common: dict[str, Any] = {
        "vocab_size": vocabulary.size,
        "bos_token_id": vocabulary.end,
        "eos_token_id": vocabulary.end,
        "tie_word_embeddings": dims.tied,
    }
    if dims.family == "gpt2":
        rate = 0.1 if config.dropout is None else config.dropout
        return GPT2Config(
            n_positions=config.sequence,
            n_embd=dims.width,
            n_layer=dims.layers,
            n_head=dims.heads,
            n_inner=dims.inner,
            resid_pdrop=rate,
            embd_pdrop=rate,
            attn_pdrop=rate,
            **common,
        )
    return LlamaConfig(
        max_position_embeddings=config.sequence,
        hidden_size=dims.width,
        intermediate_size=dims.inner,
        num_hidden_layers=dims.layers,
        num_attention_heads=dims.heads,
        num_key_value_heads=dims.heads,
        attention_dropout=config.dropout or 0.0,
        **common,
    )


def make(config: LlmConfig, vocabulary: Vocabulary) -> nn.Module:
    """The model with fresh float32 weights: the same bits for the same seed in every process.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: nn.Module = AutoModelForCausalLM.from_config(
            architecture(config, vocabulary),
            attn_implementation=config.attention,
            dtype=torch.float32,
        )
    model.train()
    if config.compile:
        for block in blocks(model):
            block.compile()
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order: what FSDP2 shards and torch.compile compiles one by one."""
    names: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def wrap(model: nn.Module, regime: Literal["ddp", "fsdp"], *, owned: bool = False) -> nn.Module:
    """``model`` under DDP, or under FSDP2 block by block and then as a whole, on the default group.

    ``owned``: as it is, for an optimizer that reduces gradients by itself.
    """
    if owned:
        return model
    if regime == "ddp":
        return DistributedDataParallel(model)
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside :func:`wrap`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def causal_loss(logits_BTV: Tensor, ids_BT: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy of each next token in float32; as transformers' ``ForCausalLMLoss``.

    Every window has T - 1 labels, so the mean over micro-batches and workers is the mean over the
    whole batch.
    """
    predictions = logits_BTV[:, :-1].flatten(0, 1).float()
    return cross_entropy(predictions, ids_BT[:, 1:].flatten(), reduction=reduction)
