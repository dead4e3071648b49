"""Other ways to send less, to compare with: top-k, DeMo-like, local steps, PowerSGD.

Each keeps all of its state in tensors made at construction, restores it in place and treats a
missing gradient as zero. All of them move the weights by AdamS, except the DeMo-like one, whose
rule is part of the method. Each may begin with dense steps, as SCAPE does, so that they are compared
at equal bytes.

Shapes: N workers, P weights in all, K chosen ones, C chunks of length L.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, ParamsT

from planaria.optim import checks, masks
from planaria.optim.adams import DEFAULT_BETAS, DEFAULT_DECAY, DEFAULT_EPS, update
from planaria.optim.base import load_groups, read_closure, trained
from planaria.optim.collectives import Workers, mean_rows


class FlatOptimizer(Optimizer):
    """Abstract: a replicated or drifting optimizer that works on one flat vector of all weights.

    A subclass makes its state in ``make_state`` and moves ``w`` [P] in ``move``, and in
    ``dense_move`` during the first ``dense_steps`` steps.
    """

    shard_local_state = True
    m: Tensor
    """First moment [P] where the method is AdamS."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float | Tensor = 1e-3,
        group: DeviceMesh | dist.ProcessGroup | None = None,
        density: float = 0.01,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = DEFAULT_EPS,
        weight_decay: float = DEFAULT_DECAY,
        dense_steps: int = 0,
    ) -> None:
        self.density = checks.density(density)
        self.dense_steps = int(checks.number("dense_steps", dense_steps, low=0))
        defaults = {"lr": lr, "betas": checks.betas(betas), "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        for own in self.param_groups:
            checks.number("lr", float(own["lr"]), low=0.0)
        self.workers = Workers(group)
        _, chosen = trained(self)
        if any(p.dtype != torch.float32 for _, _, p in chosen):
            raise checks.OptionError(
                f"{type(self).__name__} trains float32 weights only; convert the model with .float()"
            )
        self._params = [p for _, _, p in chosen]
        self._groups = [g for _, g, _ in chosen]
        self.sizes = [p.numel() for p in self._params]
        self.w = torch.zeros(sum(self.sizes), device=self._params[0].device)
        self.g = torch.zeros_like(self.w)
        self.count = torch.zeros((), dtype=torch.int64)
        self.tensors: dict[str, Tensor] = {"count": self.count}
        with torch.no_grad():
            self._pull()
            self.make_state()
        self.state["peer"] = self.tensors  # type: ignore[index]

    def make_state(self) -> None:
        """Adds this method's tensors to ``tensors``."""
        raise TypeError(f"{type(self).__name__} is abstract; build one of its subclasses")

    def move(self, step: int) -> None:
        """One step on ``w`` from this worker's gradients ``g``; collective."""
        raise TypeError(f"{type(self).__name__} is abstract; build one of its subclasses")

    def dense_move(self) -> None:
        """One step of dense AdamS; collective."""
        self.adams(self.all_mean(self.g), self.m)

    def segments(self) -> list[tuple[int, int, dict[str, Any]]]:
        """First element, last plus one and options of every parameter."""
        found: list[tuple[int, int, dict[str, Any]]] = []
        begin = 0
        for size, g in zip(self.sizes, self._groups, strict=True):
            group = self.param_groups[g]
            options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            if found and found[-1][2] == options:
                found[-1] = (found[-1][0], begin + size, options)
            else:
                found.append((begin, begin + size, options))
            begin += size
        return found

    def adams(self, g: Tensor, m: Tensor) -> None:
        """One AdamS step on ``w`` by the gradient ``g`` and the moment ``m``, all [P]."""
        for begin, end, options in self.segments():
            update(self.w[begin:end], g[begin:end], m[begin:end], **options)

    def _pull(self) -> None:
        torch.cat([p.detach().reshape(-1) for p in self._params], out=self.w)
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._params]
        torch.cat([grad.detach().reshape(-1) for grad in grads], out=self.g)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all workers; returns the closure's loss, if one is given.

        Errors: :class:`planaria.optim.checks.GradientError` on every worker for NaN or infinity.
        """
        loss = read_closure(closure)
        self._pull()
        finite = self.workers.table([float(torch.isfinite(self.g).all())])[:, 0].tolist()
        if not all(finite):
            raise checks.GradientError(
                f"a gradient is NaN or infinite on worker {finite.index(0.0)}; nothing was changed: "
                "lower the learning rate"
            )
        if int(self.count) < self.dense_steps:
            self.dense_move()
        else:
            self.move(int(self.count))
        self.count.add_(1)
        for param, part in zip(self._params, self.w.split(self.sizes), strict=True):
            param.detach().copy_(part.view(param.shape))
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores in place, bit by bit."""
        saved = state_dict["state"].get("peer")
        if saved is None or {k: v.shape for k, v in saved.items()} != {
            k: v.shape for k, v in self.tensors.items()
        }:
            raise checks.StateError(
                f"the saved state does not fit {type(self).__name__} on these parameters; load one "
                "that it made for the same model"
            )
        load_groups(self.param_groups, state_dict["param_groups"])
        for key, tensor in self.tensors.items():
            tensor.copy_(saved[key])

    def all_mean(self, own_P: Tensor) -> Tensor:
        """The mean over the workers of a vector, by a reduce-scatter and an all-gather."""
        size = self.workers.size
        width = math.ceil(own_P.numel() / size)
        rows = torch.zeros(size, width, device=own_P.device)
        rows.view(-1)[: own_P.numel()] = own_P
        received = torch.empty_like(rows)
        self.workers.exchange(received, rows).wait()
        self.workers.gather(rows, mean_rows(received)).wait()
        return rows.view(-1)[: own_P.numel()].clone()


class TopK(FlatOptimizer):
    """AdamS on the largest gradients of every worker, with error feedback.

    Each worker adds its gradient to what it did not send before and sends the ``density`` P largest
    with their places; the mean of what all sent is the gradient. Source: arXiv 1712.01887 without
    its momentum correction; error feedback as in arXiv 1901.09847.
    """

    def make_state(self) -> None:
        """The first moment and what was not sent."""
        self.tensors["moment"] = self.m = torch.zeros_like(self.w)
        self.tensors["left"] = self.left = torch.zeros_like(self.w)

    def move(self, step: int) -> None:
        """Sends the largest ones, then moves densely."""
        self.left.add_(self.g)
        width, count = self.left.numel(), math.ceil(self.density * self.left.numel())
        places_K = masks.largest(self.left.abs(), count)
        values_K = self.left[places_K]
        self.left[places_K] = 0.0
        name = masks.code_name(self.density)
        code = masks.encode(places_K, width=width, code=name)
        codes = torch.empty(self.workers.size, code.numel(), dtype=torch.uint8)
        values = torch.empty(self.workers.size, count)
        works = [self.workers.gather(codes, code), self.workers.gather(values, values_K)]
        for work in works:
            work.wait()
        places = masks.decode(codes, width=width, count=count, code=name)
        mean = torch.zeros_like(self.w)
        for worker in range(self.workers.size):
            mean.index_add_(0, places[worker], values[worker])
        self.adams(mean.div_(self.workers.size), self.m)


class DemoLike(FlatOptimizer):
    """Decoupled momentum: the largest frequencies of every worker's momentum, and a signed step.

    Momentum is cut into chunks, each is transformed by a cosine transform, its largest coefficients
    are sent and what they stand for is taken out of the momentum. Source: arXiv 2411.19870; chunks
    are of the flat vector here, so shapes of any number of dimensions work and a missing gradient
    does too.
    """

    CHUNK = 256
    DECAY = 0.999

    def make_state(self) -> None:
        """The momentum, padded to whole chunks."""
        chunks = math.ceil(self.w.numel() / self.CHUNK)
        self.tensors["moment"] = self.m = torch.zeros(chunks, self.CHUNK, device=self.w.device)
        n = torch.arange(self.CHUNK, dtype=torch.float64)
        cosines = torch.cos(math.pi / self.CHUNK * (n + 0.5) * n.unsqueeze(1))
        cosines *= math.sqrt(2 / self.CHUNK)
        cosines[0] /= math.sqrt(2)
        self.basis = cosines.to(self.w)
        self.each = max(1, round(self.density * self.CHUNK))

    def move(self, step: int) -> None:
        """Sends the largest coefficients; every weight takes a signed step."""
        flat = self.m.view(-1)
        flat.mul_(self.DECAY)
        flat[: self.g.numel()] += self.g
        coefficients_CL = self.m @ self.basis.T
        score = coefficients_CL.abs()
        places = torch.sort(score, dim=1, descending=True, stable=True).indices[:, : self.each]
        values = coefficients_CL.gather(1, places)
        own = torch.zeros_like(coefficients_CL).scatter_(1, places, values)
        self.m.sub_(own @ self.basis)
        all_places = torch.empty((self.workers.size, *places.shape), dtype=torch.uint8)
        all_values = torch.empty((self.workers.size, *values.shape))
        works = [
            self.workers.gather(all_places, places.to(torch.uint8)),
            self.workers.gather(all_values, values),
        ]
        for work in works:
            work.wait()
        total = torch.zeros_like(own)
        for worker in range(self.workers.size):
            total.scatter_add_(1, all_places[worker].to(torch.int64), all_values[worker])
        self._signed_step((total @ self.basis).view(-1)[: self.w.numel()])

    def dense_move(self) -> None:
        """All coefficients are sent: the step is the sign of the mean momentum."""
        flat = self.m.view(-1)
        flat.mul_(self.DECAY)
        flat[: self.g.numel()] += self.g
        self._signed_step(self.all_mean(flat[: self.g.numel()]))
        flat.zero_()

    def _signed_step(self, direction_P: Tensor) -> None:
        signs = direction_P.sign()
        for begin, end, options in self.segments():
            rate = float(options["lr"])
            self.w[begin:end].mul_(1 - rate * options["weight_decay"])
            self.w[begin:end].add_(signs[begin:end], alpha=-rate)


class LocalSteps(FlatOptimizer):
    """AdamS on every worker alone; all weights are averaged every 1/density steps.

    The averaging takes an outer Nesterov step. Source: DiLoCo (arXiv 2311.08105), with AdamS inside
    and its outer rate and momentum (.7, .9) as defaults. Replicas differ between averagings.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.9,
        **options: Any,
    ) -> None:
        self.outer_rate = checks.number("outer_rate", outer_rate, low=0.0)
        self.outer_momentum = checks.number("outer_momentum", outer_momentum, low=0.0, high=1.0)
        super().__init__(params, **options)

    def make_state(self) -> None:
        """The first moment, the weights of the last averaging and the outer velocity."""
        self.period = max(1, round(1 / self.density))
        self.tensors["moment"] = self.m = torch.zeros_like(self.w)
        self.tensors["anchor"] = self.anchor = self.w.clone()
        self.tensors["velocity"] = self.velocity = torch.zeros_like(self.w)

    def move(self, step: int) -> None:
        """A step alone; at the end of a period the averaging."""
        if step == self.dense_steps:
            self.anchor.copy_(self.w)
        self.adams(self.g, self.m)
        if (step - self.dense_steps + 1) % self.period:
            return
        delta = self.anchor - self.all_mean(self.w)
        self.velocity.mul_(self.outer_momentum).add_(delta)
        delta.add_(self.velocity, alpha=self.outer_momentum)
        self.anchor.sub_(delta, alpha=self.outer_rate)
        self.w.copy_(self.anchor)


def powersgd_rank(shapes: Sequence[Sequence[int]], density: float) -> int:
    """The rank at which PowerSGD sends ``density`` of the matrices' elements; at least 1."""
    matrices = [(s[0], math.prod(s[1:])) for s in shapes if len(s) > 1]
    elements = sum(n * m for n, m in matrices)
    sides = sum(n + m for n, m in matrices)
    return max(1, round(checks.density(density) * elements / sides)) if sides else 1


def powersgd(
    shapes: Sequence[Sequence[int]],
    *,
    density: float,
    group: dist.ProcessGroup | None = None,
    dense_steps: int = 10,
) -> PowerSGDState:
    """The state of torch's PowerSGD hook, with the rank for equal bytes.

    ``ddp.register_comm_hook(powersgd(...), powerSGD_hook)``. Source: arXiv 1905.13727.
    """
    return PowerSGDState(
        process_group=group,
        matrix_approximation_rank=powersgd_rank(shapes, density),
        start_powerSGD_iter=max(2, dense_steps),
        min_compression_rate=1,
    )
