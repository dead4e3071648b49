"""Parameter groups that tell norms, biases and embeddings from the rest."""

from __future__ import annotations

from typing import Any

from torch import nn


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    decay_vectors: bool = False,
    dense_embeddings: bool = False,
) -> list[dict[str, Any]]:
    """Groups for any optimizer of this package, at most three, none of them empty.

    Weights of ``nn.Embedding`` (and layers tied to them) are marked ``"dense": True`` if
    ``dense_embeddings``: :class:`planaria.optim.Scape` then always sends them whole. They are 4 to
    40 % of a language model, so a density of 1 % then means 5 to 41 % of the bytes. Parameters of
    at most one dimension do not decay unless ``decay_vectors``. Parameters with
    ``requires_grad=False`` are left out.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for param in model.parameters():
        if param.requires_grad:
            decay = weight_decay if decay_vectors or param.ndim > 1 else 0.0
            groups.setdefault((decay, dense_embeddings and id(param) in embeddings), []).append(
                param
            )
    return [
        {"params": params, "weight_decay": decay, "dense": dense}
        for (decay, dense), params in groups.items()
    ]
