"""Which optimizers may be sharded, found by trying instead of by a list of names.

An optimizer fits a flat buffer if it is elementwise (the update of a tensor is the updates of its
pieces) and if its state can be made before the first step. Both are tried on a few numbers when the
sharded optimizer is built, so that one that does not fit is refused instead of trained wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from planaria.optim import checks

Factory = Callable[..., Optimizer]

_ELEMENTS, _CUT, _STEPS = 24, 8, 3


def make_state(optimizer: Optimizer) -> None:
    """Gives an optimizer that makes its state at the first step the state it would start from.

    A step with zero gradients and a learning rate of zero makes the tensors; they are then set to
    zero, their start in every optimizer that :func:`require_elementwise` lets pass.
    """
    lacking = [
        p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)
    ]
    if not lacking:
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    kept = [p.detach().clone() for p in lacking]
    for p in lacking:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, before in zip(lacking, kept, strict=True):
        p.grad = None
        p.detach().copy_(before)
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate


def require_elementwise(factory: Factory, options: dict[str, Any]) -> None:
    """Raises :class:`planaria.optim.checks.OptionError` for an optimizer that cannot be sharded."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ELEMENTS, generator=generator)
    grads = [torch.randn(_ELEMENTS, generator=generator) for _ in range(_STEPS)]
    name = getattr(factory, "__name__", str(factory))
    try:
        whole, _ = _run(factory, options, [start], [[g] for g in grads], early=False)
        early, state = _run(factory, options, [start], [[g] for g in grads], early=True)
        pieces, _ = _run(
            factory,
            options,
            [start[:_CUT], start[_CUT:]],
            [[g[:_CUT], g[_CUT:]] for g in grads],
            early=False,
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise checks.OptionError(
            f"{name} cannot be sharded: with {options} it does not run on a flat tensor ({error}); "
            "use an elementwise optimizer such as AdamW"
        ) from error
    if not torch.equal(torch.cat(whole), torch.cat(pieces)):
        raise checks.OptionError(
            f"{name} with {options} cannot be sharded: its update of a tensor differs from the "
            "updates of its pieces; use an elementwise optimizer such as AdamW"
        )
    if not torch.equal(torch.cat(whole), torch.cat(early)):
        raise checks.OptionError(
            f"{name} with {options} cannot be sharded: its first step is special, so its state "
            "cannot be made beforehand; use one whose state starts from zero"
        )
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim and value.shape != start.shape:
            raise checks.OptionError(
                f"{name} with {options} cannot be sharded: its state {key!r} has the shape "
                f"{tuple(value.shape)} for a weight of {tuple(start.shape)}"
            )


def _run(
    factory: Factory,
    options: dict[str, Any],
    starts: list[Tensor],
    grads: list[list[Tensor]],
    *,
    early: bool,
) -> tuple[list[Tensor], dict[str, Any]]:
    params = [start.clone().requires_grad_() for start in starts]
    optimizer = factory([{"params": params, **options}])
    if early:
        make_state(optimizer)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [p.detach() for p in params], dict(optimizer.state[params[0]])
