"""The network and the data of the benchmarked job. Shapes: B sequences, T tokens."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hotswap.task import Striker, Task

BYTES = 256
CORPUS = 4 << 20
"""Bytes of text that are read."""


def make(task: Task, striker: Striker) -> nn.Module:
    """The plain network, from the task's seed, with the place in backward where strikes fall."""
    torch.manual_seed(task.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=task.width,
            intermediate_size=task.width * 8 // 3,
            num_hidden_layers=task.layers,
            num_attention_heads=max(1, task.width // 64),
            max_position_embeddings=task.context,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )

    def after(layer: nn.Module, args: Any, output: Any) -> None:
        hidden_BTC = output[0] if isinstance(output, tuple) else output
        if hidden_BTC.requires_grad:
            hidden_BTC.register_hook(lambda grad: striker.backward())

    model.model.layers[task.layers // 2].register_forward_hook(after)
    return model


def wrap(model: nn.Module, task: Task) -> nn.Module:
    """``model`` under DDP, or sharded block by block by FSDP2, on the default group."""
    if task.regime == "replicated":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def corpus() -> torch.Tensor:
    """Python's own sources, one after another: uint8 [CORPUS]."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS:
            break
    return torch.frombuffer(text[:CORPUS], dtype=torch.uint8)


def batch(text: torch.Tensor, task: Task, *, step: int, shard: int) -> tuple[torch.Tensor, Any]:
    """Tokens [B, T] of ``shard`` in ``step``, and where they begin: a pure function of the seed."""
    order = torch.Generator().manual_seed(task.seed * 1_000_003 + step * 1_009 + shard)
    begins_B = torch.randint(len(text) - task.context, (task.batch,), generator=order)
    rows = [text[begin : begin + task.context] for begin in begins_B.tolist()]
    return torch.stack(rows).long(), begins_B.tolist()


def loss(model: nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens_BT, labels=tokens_BT).loss
