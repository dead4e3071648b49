"""AdamS: AdamW whose second moment is made of the momentum, so that it needs no second state.

    nu_t = b2 * m_{t-1}^2 + (1 - b2) * g_t^2
    m_t  = b1 * m_{t-1}   + (1 - b1) * g_t
    w_t  = (1 - lr * wd) * w_{t-1} - lr * m_t / (sqrt(nu_t) + eps)

Source: arXiv 2505.16363; no bias correction, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from planaria.optim import checks

# Elements of one block of the flat update: the block's seven passes then run inside the cache
# instead of over main memory, which halves their time on the CPUs it was measured on.
BLOCK = 1 << 15

DEFAULT_BETAS = (0.9, 0.95)
DEFAULT_EPS = 1e-8
DEFAULT_DECAY = 0.1


class AdamS(Optimizer):
    """One state tensor per weight, ``exp_avg``; a drop-in for ``torch.optim.AdamW``.

    The state is made when a parameter is added, never later, so that a checkpoint taken before the
    first step has the same entries as one taken after it. A parameter without gradient is left
    alone, as torch's optimizers do. Gradients in a sparse layout are refused.

    Parameters may be of any real or complex floating-point dtype; the moment has the parameter's.
    Source of the rule and of the default betas: arXiv 2505.16363.

    >>> layer = torch.nn.Linear(4, 4)
    >>> optimizer = AdamS(layer.parameters(), lr=1e-3)
    >>> layer(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = DEFAULT_EPS,
        weight_decay: float = DEFAULT_DECAY,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise checks.OptionError(
                "capturable is True, and AdamS has no CUDA-graph path; leave it False"
            )
        if foreach and differentiable:
            raise checks.OptionError(
                "foreach and differentiable are both True; the foreach path writes in place, "
                "so set one of them to False"
            )
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise checks.OptionError(f"lr is a tensor of {lr.numel()} elements; give it one")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "foreach": foreach,
                "differentiable": differentiable,
                "capturable": False,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checks its options and makes its moments."""
        merged = {**self.defaults, **param_group}
        checks.number("lr", float(merged["lr"]), low=0.0)
        checks.betas(merged["betas"])
        checks.number("eps", merged["eps"], low=0.0)
        checks.number("weight_decay", merged["weight_decay"], low=0.0)
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            self.state[param]["exp_avg"] = torch.zeros_like(
                param, memory_format=torch.preserve_format, requires_grad=False
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key in ("maximize", "differentiable", "capturable"):
                group.setdefault(key, False)
            group.setdefault("foreach", None)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Moves every parameter that has a gradient; returns the closure's loss, if one is given.

        Errors: :class:`planaria.optim.checks.OptionError` for a gradient in a sparse layout.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with torch.set_grad_enabled(bool(group["differentiable"])):
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads: list[Tensor] = []
        for index, param in enumerate(params):
            assert param.grad is not None
            checks.no_sparse_gradient(index, param.grad)
            grads.append(param.grad)
        moments: list[Tensor] = [self.state[p]["exp_avg"] for p in params]
        options: dict[str, Any] = {
            "lr": group["lr"],
            "betas": group["betas"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
        }
        if group["maximize"]:
            grads = [-g for g in grads]
        reals = [_real(ts) for ts in (params, grads, moments)]
        if group["differentiable"]:
            for w, g, m in zip(*reals, strict=True):
                _update_differentiable(w, g, m, **options)
        elif group["foreach"]:
            _update_foreach(*reals, **options)
        else:
            for w, g, m in zip(*reals, strict=True):
                update(w, g, m, **options)


def _real(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t) if torch.is_complex(t) else t for t in tensors]


def update(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamS step in place on ``w`` and ``m``; the three have one shape.

    Works block by block where all three are contiguous. Every operation is elementwise, so blocks,
    whole tensors and parts of them give the same bits: that is what makes the sharded optimizer
    equal to the unsharded one.
    """
    rate = float(lr)
    blocks = [(w, g, m)]
    if w.numel() > BLOCK and all(t.is_contiguous() for t in (w, g, m)):
        blocks = list(zip(*(t.view(-1).split(BLOCK) for t in (w, g, m)), strict=True))
    for w_b, g_b, m_b in blocks:
        denominator = second_moment(m_b, g_b, beta2=betas[1]).sqrt_().add_(eps)
        m_b.lerp_(g_b, 1 - betas[0])
        w_b.mul_(1 - rate * weight_decay)
        w_b.addcdiv_(m_b, denominator, value=-rate)


def second_moment(m: Tensor, g: Tensor, *, beta2: float) -> Tensor:
    """``b2 * m^2 + (1 - b2) * g^2`` as a new tensor of the same shape."""
    return (m * m).mul_(beta2).addcmul_(g, g, value=1 - beta2)


def _update_foreach(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    rate = float(lr)
    grouped = Optimizer._group_tensors_by_device_and_dtype([params, grads, moments])  # type: ignore[list-item]
    for lists, _ in grouped.values():
        w, g, m = (cast("list[Tensor]", tensors) for tensors in lists)
        denominators = torch._foreach_mul(m, m)
        torch._foreach_mul_(denominators, betas[1])
        torch._foreach_addcmul_(denominators, g, g, 1 - betas[1])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, eps)
        torch._foreach_lerp_(m, g, 1 - betas[0])
        torch._foreach_mul_(w, 1 - rate * weight_decay)
        torch._foreach_addcdiv_(w, m, denominators, -rate)


def _update_differentiable(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    # The moment's old value is saved by autograd for its square, so it is cloned before the
    # in-place update; lr stays a tensor, so that its gradient exists too.
    old = m.clone()
    denominator = (old * old * betas[1] + g * g * (1 - betas[1])).sqrt() + eps
    m.lerp_(g, 1 - betas[0])
    w.mul_(1 - lr * weight_decay)
    w.add_(-lr * (m.clone() / denominator))
