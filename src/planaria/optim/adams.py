"""AdamS: AdamW whose second moment is made of the momentum, so that it needs no second state.

    nu_t = b2 * m_{t-1}^2 + (1 - b2) * g_t^2
    m_t  = b1 * m_{t-1}   + (1 - b1) * g_t
    w_t  = (1 - lr * wd) * w_{t-1} - lr * m_t / (sqrt(nu_t) + eps)

Source: arXiv 2505.16363; no bias correction, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from planaria.optim import checks

Triple = tuple[Tensor, Tensor, Tensor]
"""A weight, its gradient and its moment."""

# Elements of one block of the flat update: the squares of its moments then stay inside the cache.
# 2^15 to 2^17 took .58, .50 and .47 ms for a million weights (one core with 1 MiB of L2).
BLOCK = 1 << 17

# Tensors up to this size are updated together, since there the calls take longer than the numbers.
SMALL = 1 << 12

# A multiple of the elements of every CPU's vectors.
LANES = 64

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


@dataclass(frozen=True)
class Rule:
    """Numbers of an update."""

    rate: float
    """Learning rate."""
    betas: tuple[float, float]
    """Decays of the moment and of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    decay: float
    """Weight decay."""
    scale: float | None
    """Factor of the gradients; ``None`` for 1."""


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

    Float32 and float64 numbers on CPU go through torch's fused AdamW, whose second moment is given
    as the square of ``m``: two passes instead of eight. Every element meets the same operations
    wherever it lies, so blocks, whole tensors, lists and parts of them give the same bits: that is
    what makes the sharded optimizer equal to the unsharded one.
    """
    rule = Rule(float(lr), betas, eps, weight_decay, scale)
    kinds: dict[tuple[Any, ...], list[Triple]] = {}
    for w, g, m in zip(ws, gs, ms, strict=True):
        if w.numel():
            kinds.setdefault((w.device.type, w.dtype, g.dtype, m.dtype), []).append((w, g, m))
    for (device, *dtypes), triples in kinds.items():
        fused = device == "cpu" and set(dtypes) in ({torch.float32}, {torch.float64})
        (_update_fused if fused else _update_foreach)(triples, rule)


def _update_fused(triples: Sequence[Triple], rule: Rule) -> None:
    """As :func:`update_all`, for tensors on CPU that are all float32 or all float64."""
    largest = max(w.numel() for w, _, _ in triples)
    rows = 1 if rule.scale is None else 2
    # Full of whole vectors, so that no list that is longer is cut inside one.
    columns = max(SMALL, min(BLOCK, largest + -largest % LANES))
    rooms = triples[0][0].new_empty(rows, columns)
    rest: list[Triple] = []
    for w, g, m in triples:
        flat = _flat((w, g, m)) if w.numel() > SMALL else None
        if flat is None:
            rest.append((w, g, m))
            continue
        # The kernel rounds the last few elements, which fill no vector, now and then otherwise than
        # all others. So those are done below, together with small tensors.
        whole = w.numel() - w.numel() % LANES
        _kernel((flat[0][:whole], flat[1][:whole], flat[2][:whole]), rooms, rule)
        if whole < w.numel():
            rest.append((flat[0][whole:], flat[1][whole:], flat[2][whole:]))
    if not rest:
        return
    size = sum(w.numel() for w, _, _ in rest)
    pad = rooms.new_zeros(-size % LANES)
    w, g, m = (torch.cat([*(t.reshape(-1) for t in ts), pad]) for ts in zip(*rest, strict=True))
    _kernel((w, g, m), rooms, rule)
    sizes = [w.numel() for w, _, _ in rest]
    for held, made in ((0, w), (2, m)):
        ways = zip(rest, made[:size].split(sizes), strict=True)
        targets = [triple[held] for triple in rest]
        torch._foreach_copy_(targets, [part.view(triple[held].shape) for triple, part in ways])


def _kernel(flat: Triple, rooms: Tensor, rule: Rule) -> None:
    """As :func:`update_all`, block by block, for flat tensors that are full of whole vectors."""
    (beta1, beta2), scale = rule.betas, rule.scale
    # A step's number at which AdamW's corrections of bias are exactly 1.
    late = torch.tensor(1e30)
    size = rooms.shape[1]
    blocks = [flat] if flat[0].numel() <= size else zip(*(t.split(size) for t in flat), strict=True)
    for w, g, m in blocks:
        squares = rooms[0, : w.numel()]
        torch.mul(m, m, out=squares)
        torch._fused_adamw_(
            [w],
            [g if scale is None else torch.mul(g, scale, out=rooms[1, : w.numel()])],
            [m],
            [squares],
            [],
            [late],
            lr=rule.rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=rule.decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )
        # The kernel does not tell autograd, nor those who compare versions to find what changed.
        torch.autograd.graph.increment_version((w, m))


def _flat(tensors: Triple) -> Triple | None:
    """Flat views of the three in the order of their memory; ``None`` where that is not the same."""
    if all(t.ndim == 1 and t.is_contiguous() for t in tensors):
        return tensors
    order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
    w, g, m = (t.permute(order) for t in tensors)
    if w.is_contiguous() and g.is_contiguous() and m.is_contiguous():
        return w.view(-1), g.view(-1), m.view(-1)
    return None


def second_moment(m: Tensor, g: Tensor, *, beta2: float) -> Tensor:
    """``b2 * m^2 + (1 - b2) * g^2`` as a new tensor of the same shape."""
    return (m * m).mul_(beta2).addcmul_(g, g, value=1 - beta2)


def _update_foreach(triples: Sequence[Triple], rule: Rule) -> None:
    """As :func:`update_all`, operation by operation, for tensors of one device and dtypes."""
    w, g, m = (list(tensors) for tensors in zip(*triples, strict=True))
    if rule.scale is not None:
        g = torch._foreach_mul(g, rule.scale)
    denominators = torch._foreach_mul(m, m)
    torch._foreach_mul_(denominators, rule.betas[1])
    torch._foreach_addcmul_(denominators, g, g, 1 - rule.betas[1])
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, rule.eps)
    torch._foreach_lerp_(m, g, 1 - rule.betas[0])
    torch._foreach_mul_(w, 1 - rule.rate * rule.decay)
    torch._foreach_addcdiv_(w, m, denominators, -rule.rate)


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
