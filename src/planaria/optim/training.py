"""What a training loop does otherwise where the optimizer reduces gradients by itself.

A recipe leaves its model bare for the optimizers of :data:`planaria.optim.choice.OWNED`, wraps it
in DDP or FSDP2 for the others, and writes one loop for all of them with the functions here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from planaria.optim.adams import AdamS
from planaria.optim.base import OwnedOptimizer
from planaria.optim.choice import SparseConfig
from planaria.optim.groups import param_groups
from planaria.optim.scape import Scape
from planaria.optim.sharded import Sharded


def make(
    name: str,
    model: nn.Module,
    *,
    steps: int,
    sparse: SparseConfig,
    weight_decay: float,
    decay_vectors: bool = False,
    max_norm: float | None = None,
    nonfinite: str = "raise",
    **options: Any,
) -> Optimizer:
    """The optimizer ``name`` of :data:`~planaria.optim.choice.OPTIMIZERS` for ``model``.

    ``options`` are lr, betas and eps. ``steps`` is the length of the run, ``max_norm`` the clipping
    and ``nonfinite`` the answer to bad gradients of those that do that by themselves.
    """
    dense = name == "scape" and sparse.dense_embeddings
    groups = param_groups(
        model, weight_decay=weight_decay, decay_vectors=decay_vectors, dense_embeddings=dense
    )
    if name == "scape":
        return Scape(
            groups,
            dense_steps=sparse.dense_steps,
            total_steps=steps,
            max_norm=max_norm,
            nonfinite=nonfinite,
            **sparse.choices(),
            **options,
        )
    for group in groups:
        del group["dense"]
    if name == "sharded":
        own: dict[str, Any] = {"max_norm": max_norm, "nonfinite": nonfinite}
        return Sharded(AdamW, groups, fused=True, **own, **options)
    if name == "adams":
        return AdamS(groups, **options)
    return AdamW(groups, fused=True, **options)


def owns(optimizer: Optimizer) -> bool:
    """Whether the optimizer reduces and clips gradients itself, and so takes the bare model."""
    return isinstance(optimizer, OwnedOptimizer)


def accumulating(model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
    """Context of a backward that is not the last of its step: nothing has to be reduced yet.

    FSDP2 reduces each, to hold less.
    """
    if isinstance(optimizer, OwnedOptimizer):
        return optimizer.no_sync()
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def clip(model: nn.Module, optimizer: Optimizer, max_norm: float | None) -> Tensor | None:
    """Clips, where the optimizer does not; a number that is finite only if all gradients are.

    The norm of the mean gradient; where the optimizer clips by itself that of this worker's own
    gradient, which the workers have to agree upon. None where nothing is clipped.
    """
    if isinstance(optimizer, OwnedOptimizer):
        return torch.nn.utils.get_total_norm(_gradients(model.parameters()))
    if max_norm is None:
        return None
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def norm_of_step(optimizer: Optimizer, clipped: Tensor | None) -> float | None:
    """The gradient's norm before clipping, after the step; ``clipped`` is what :func:`clip` gave."""
    if isinstance(optimizer, OwnedOptimizer):
        return optimizer.norm
    return None if clipped is None else float(clipped)


def averaged(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Context in which the model holds what is to be evaluated and saved; entering is collective.

    Where replicas differ that is their mean, else it is the model as it is.
    """
    return optimizer.mean_model() if isinstance(optimizer, Scape) else nullcontext()


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]
