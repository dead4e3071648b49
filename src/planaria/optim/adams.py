"""AdamS: AdamW whose second moment is made of the momentum, so that it needs no second state.

    nu_t = b2 * m_{t-1}^2 + (1 - b2) * g_t^2
    m_t  = b1 * m_{t-1}   + (1 - b1) * g_t
    w_t  = (1 - lr * wd) * w_{t-1} - lr * m_t / (sqrt(nu_t) + eps)

Source: arXiv 2505.16363; no bias correction, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from planaria.optim import checks

# Elements of one block of the flat update: its passes then run inside the cache instead of over main
# memory. 2^17 took 1.3 to 1.6 ms for a million weights, 2^15 1.7 to 2.0 and 2^13 3.3 to 3.5 (one core
# with 1 MiB of L2): smaller blocks lose by calls what they win by the cache.
BLOCK = 1 << 17

# Tensors up to this size are updated together, since there the calls take longer than the numbers.
SMALL = 1 << 12

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
        elif group["foreach"] is False:
            for w, g, m in zip(*reals, strict=True):
                update(w, g, m, **options)
        else:
            update_all(*reals, **options)


def _real(tensors: list[Tensor]) -> list[Tensor]:
    """What the update works on: the own part of a DTensor, complex numbers as pairs."""
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [torch.view_as_real(t) if torch.is_complex(t) else t for t in own]


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
    """One AdamS step in place on ``w`` and ``m``; the three have one shape. See :func:`update_all`."""
    update_all([w], [g], [m], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def update_all(
    ws: Sequence[Tensor],
    gs: Sequence[Tensor],
    ms: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float | None = None,
) -> None:
    """One AdamS step in place on every ``w`` and ``m``, with the gradients ``scale`` times ``g``.

    Large contiguous tensors are done block by block, small ones together. Every operation is
    elementwise, so blocks, whole tensors, lists and parts of them give the same bits: that is what
    makes the sharded optimizer equal to the unsharded one.
    """
    rate = float(lr)
    small: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
    for w, g, m in zip(ws, gs, ms, strict=True):
        if w.numel() <= SMALL:
            if w.numel():
                lists = small.setdefault((w.device, w.dtype, g.dtype, m.dtype), ([], [], []))
                for one, many in zip((w, g, m), lists, strict=True):
                    many.append(one)
            continue
        blocks = [(w, g, m)]
        if w.numel() > BLOCK and all(t.is_contiguous() for t in (w, g, m)):
            blocks = list(zip(*(t.view(-1).split(BLOCK) for t in (w, g, m)), strict=True))
        room = torch.empty_like(blocks[0][2])
        scaled = torch.empty_like(blocks[0][1]) if scale is not None else room
        for w_b, g_b, m_b in blocks:
            denominator = room
            if m_b.numel() != room.numel():
                denominator, scaled = room[: m_b.numel()], scaled[: m_b.numel()]
            if scale is not None:
                g_b = torch.mul(g_b, scale, out=scaled)
            torch.mul(m_b, m_b, out=denominator)
            denominator.mul_(betas[1]).addcmul_(g_b, g_b, value=1 - betas[1]).sqrt_().add_(eps)
            m_b.lerp_(g_b, 1 - betas[0])
            w_b.mul_(1 - rate * weight_decay)
            w_b.addcdiv_(m_b, denominator, value=-rate)
    for w_list, g_list, m_list in small.values():
        _update_foreach(
            w_list,
            g_list if scale is None else list(torch._foreach_mul(g_list, scale)),
            m_list,
            rate=rate,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )


def second_moment(m: Tensor, g: Tensor, *, beta2: float) -> Tensor:
    """``b2 * m^2 + (1 - b2) * g^2`` as a new tensor of the same shape."""
    return (m * m).mul_(beta2).addcmul_(g, g, value=1 - beta2)


def _update_foreach(
    w: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    *,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """As :func:`update_all`, tensor by tensor, for lists of one device and dtypes."""
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
