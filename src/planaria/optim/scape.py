"""SCAPE: AdamS, cut over the workers, that sends a small share of moments and weights."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT

from planaria.optim import checks, portable
from planaria.optim.adams import DEFAULT_BETAS, DEFAULT_DECAY, DEFAULT_EPS
from planaria.optim.base import (
    BUCKET_BYTES,
    Agreement,
    OwnedOptimizer,
    building,
    load_groups,
    loading,
    require_groups,
    take_seat,
    trained,
)
from planaria.optim.buckets import Buckets, master_dtype
from planaria.optim.collectives import Workers
from planaria.optim.drift import Drift
from planaria.optim.frozen import Frozen
from planaria.optim.layout import Layout, build
from planaria.optim.options import ScapeOptions
from planaria.optim.placement import like

ASSUMED_STEPS = 10_000
"""Length of a run that ``dense_steps`` is a share of where ``total_steps`` is not given: our choice."""

_ASSUMED = (
    "dense_steps is %g, a share of the run, and total_steps is not given: the first %d steps are "
    "dense; give total_steps=, or the count itself"
)

_FOR_ALL = tuple(field.name for field in fields(ScapeOptions))

log = logging.getLogger(__name__)


class Scape(OwnedOptimizer):
    """AdamS that sends ``density`` of the weights each step; at density 1 it is dense AdamS.

    All workers of ``group`` must build it with the same parameters in the same state; they check
    that. ``step()`` is a collective call.

    - Parameters of at most ``dense_ndim`` dimensions, and of groups with ``"dense": True``, are
      always sent whole (norms and biases by default; see :func:`planaria.optim.param_groups`).
    - ``dense_steps`` first steps are dense: a count, or a share of ``total_steps`` (of 10,000 where
      that is not given; a line in the log says so).
    - ``max_norm`` clips; in a sparse step by the root mean square of the workers' own norms, since
      the mean gradient is nowhere known.
    - A gradient that is ``None`` counts as zero, on one worker or on all.
    - float16 and bfloat16 weights have float32 masters.
    - ``unsent="local"``: replicas differ between averagings, ``replicas_equal`` is False, and the
      model to evaluate and to save is the mean (:meth:`mean_model`).
    - Further keywords are the fields of :class:`planaria.optim.ScapeOptions`.

    ``state_dict()`` holds this worker's own state to the bit, as live tensors under
    ``state["scape"]`` that only fit the same number of workers; it waits for nothing.
    :meth:`portable_state_dict` is the state that ``torch.distributed.checkpoint`` saves and loads
    at any number of workers.

    Between nodes, under FSDP2: ``fully_shard(model, mesh=mesh["shard"])`` and
    ``group=mesh["replicate"]``; gradients are then reduced densely inside a node.

    Errors: :class:`~planaria.optim.checks.OptionError`,
    :class:`~planaria.optim.checks.ReplicaError`,
    :class:`~planaria.optim.checks.GradientError`. Source: arXiv 2607.01678 where it says,
    else our choice; ``docs/design/optim.md`` tells which.

    >>> layer = torch.nn.Linear(64, 64)
    >>> optimizer = Scape(layer.parameters(), lr=1e-3, density=0.1)
    >>> layer(torch.ones(2, 64)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float | Tensor = 1e-3,
        group: Workers | DeviceMesh | dist.ProcessGroup | None = None,
        density: float = 0.01,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = DEFAULT_EPS,
        weight_decay: float = DEFAULT_DECAY,
        dense_steps: float = 0,
        total_steps: int | None = None,
        dense_ndim: int = 1,
        max_norm: float | None = None,
        nonfinite: str = "raise",
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        **choices: Any,
    ) -> None:
        self.workers = Workers.of(group)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        with building(self.workers):
            checks.number("bucket_bytes", bucket_bytes, low=1)
            self._set_limits(max_norm, nonfinite)
            total = ASSUMED_STEPS if total_steps is None else total_steps
            checks.number("total_steps", total, low=1)
            self.options = ScapeOptions(
                density=density,
                dense_steps=checks.steps("dense_steps", dense_steps, total=total),
                **choices,
            )
            super().__init__(params, {**defaults, "dense": False})
            layout = self._lay_out(bucket_bytes, dense_ndim)
        if 0 < dense_steps < 1 and total_steps is None and self.workers.rank == 0:
            log.warning(_ASSUMED, dense_steps, self.options.dense_steps)
        self._require_same(layout, {**asdict(self.options), "overlap": overlap})
        self.count = torch.zeros((), dtype=torch.int64)
        # Not kept by its own buckets: a dropped optimizer's memory is free at once then.
        me = weakref.proxy(self)
        self.buckets = Buckets(
            layout,
            self._params,
            self.workers,
            overlap=overlap,
            active=lambda: me.is_dense(int(me.count)),
        )
        self._lent = False
        family = Drift if self.options.unsent == "local" else Frozen
        with torch.no_grad():
            self.family: Drift | Frozen = family(self.buckets, self.options, self.param_groups)
        self._layout = torch.tensor(layout.digest(), dtype=torch.int64)
        self.state["scape"] = self._tensors()  # type: ignore[index]
        self.seal()

    def _lay_out(self, bucket_bytes: int, dense_ndim: int) -> Layout:
        """The layout of the trained parameters, after a check of groups and parameters."""
        self._check_groups()
        self._params, chosen = trained(self)
        held = take_seat(self.workers, chosen)
        self._check_params(held)
        return build(
            held,
            world=self.workers.size,
            bucket_bytes=bucket_bytes,
            dense=lambda _, g, p: self.param_groups[g]["dense"] or p.ndim <= dense_ndim,
        )

    def _check_groups(self) -> None:
        for g, own in enumerate(self.param_groups):
            for name in ("maximize", *_FOR_ALL):
                if own.get(name):
                    raise checks.OptionError(
                        f"parameter group {g} has {name}={own[name]!r}, and groups have their own "
                        "lr, betas, eps, weight_decay and dense only; give what is for all groups "
                        "to Scape itself, and build one optimizer for each otherwise"
                    )
            checks.number("lr", float(own["lr"]), low=0.0)
            checks.betas(own["betas"])
            checks.number("eps", own["eps"], low=0.0)
            checks.number("weight_decay", own["weight_decay"], low=0.0)

    def _check_params(self, held: list[tuple[int, int, Tensor]]) -> None:
        params = [p for _, _, p in held]
        dtypes = sorted({str(master_dtype(p.dtype)) for p in params})
        if len(dtypes) > 1:
            raise checks.OptionError(
                f"parameters are updated in {' and '.join(dtypes)}; give them one of the two, "
                "or build one optimizer for each"
            )
        for index, _, param in held:
            if not param.is_contiguous():
                raise checks.OptionError(
                    f"parameter {index} is not contiguous, and single weights are written "
                    "into it; make it contiguous before the optimizer is built"
                )
        half = any(master_dtype(p.dtype) != p.dtype for p in params)
        if half and self.options.decay == "all":
            raise checks.OptionError(
                "decay is 'all' and a parameter is of half precision, where a step's decay is "
                "rounded away; use decay='lazy'"
            )

    @property
    def replicas_equal(self) -> bool:
        """Whether all workers hold the same weights between steps."""
        return self.family.replicas_equal

    def is_dense(self, step: int) -> bool:
        """Whether a step, counted from 0, is dense."""
        return not self.options.sparse or step < self.options.dense_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all workers; returns the closure's loss, if one is given."""
        if self._lent:
            raise checks.OptionError(
                "step() is called inside mean_model(), whose end puts the weights back that this "
                "worker had before; leave it first"
            )
        loss = self.begin(closure)
        step = int(self.count)
        moved = self._dense_step(step) if self.is_dense(step) else self._sparse_step(step)
        self.buckets.finish()
        if moved:
            self.count.add_(1)
        return loss

    def _digest(self, step: int, *, sparse: bool) -> int:
        every = self.options.check_every
        return self.family.digest(sparse=sparse) if every and step % every == 0 and step else 0

    def _dense_step(self, step: int) -> bool:
        digest = self._digest(step, sparse=False)
        grads = self.buckets.reduced()
        agreed = self.agree(grads, digest=digest)
        if agreed.changed:
            grads = self.buckets.resend()
            agreed = self.agree(grads, digest=digest)
        self._compare(agreed, step)
        if not self.accept(agreed):
            return False
        factor = self.clip(agreed.norm)
        if factor is not None:
            for grad in grads:
                grad.mul_(factor)
        self.family.dense_step(step, grads, factor, before_sparse=not self.is_dense(step + 1))
        return True

    def _sparse_step(self, step: int) -> bool:
        layout = self.buckets.layout
        self.family.prepare()
        # Beside the agreement; clipped afterwards.
        works = [self.buckets.begin(b) for b in range(layout.sparse, len(layout.buckets))]
        agreed = self.agree(self.buckets.grads(), digest=self._digest(step, sparse=True))
        for work in works:
            work.wait()
        self._compare(agreed, step)
        agreed.square /= self.workers.size
        if not self.accept(agreed):
            return False
        self.family.sparse_step(step, self.clip(agreed.norm))
        return True

    def _compare(self, agreed: Agreement, step: int) -> None:
        if agreed.differ:
            listed = ", ".join(f"{digest:x}" for digest in agreed.digests)
            raise checks.ReplicaError(
                f"before step {step} masks or weights differ between workers ({listed}); "
                "something else than the optimizer changed them: restore a checkpoint"
            )

    @contextlib.contextmanager
    def mean_model(self) -> Generator[None]:
        """Inside it the parameters hold the mean over the workers; entering is collective."""
        means = self.mean_weights()
        self._lent = bool(means)
        with torch.no_grad():
            kept = [param.detach().clone() for param, _ in means]
            for param, mean in means:
                param.copy_(mean)
        try:
            yield
        finally:
            self._lent = False
            with torch.no_grad():
                for (param, _), own in zip(means, kept, strict=True):
                    param.copy_(own)

    @torch.no_grad()
    def mean_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Every trained parameter with the mean over the workers, where they differ; collective.

        Empty where all workers hold the same weights. Changes nothing.
        """
        if isinstance(self.family, Frozen):
            return []
        order = [self._params[index] for index in self.buckets.layout.place]
        means = self.family.mean_weights()
        return [(p, like(mean, p)) for p, mean in zip(order, means, strict=True)]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores in place, bit by bit, what ``state_dict`` gave on the same rank; collective.

        Errors: :class:`planaria.optim.checks.StateError` for other parameters, another family
        or another number of workers.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self.buckets.drop()
        saved = state_dict["state"].get("scape")
        here = self._tensors()
        with loading(self.workers):
            self._require_own(saved, here)
            require_groups(self.param_groups, state_dict["param_groups"])
        load_groups(self.param_groups, state_dict["param_groups"])
        for key, tensor in here.items():
            tensor.copy_(saved[key])
        self.restored()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _tensors(self) -> dict[str, Tensor]:
        return {"count": self.count, "layout": self._layout, **self.family.tensors()}

    def _require_own(self, saved: dict[str, Tensor] | None, here: dict[str, Tensor]) -> None:
        if saved is None or set(saved) != set(here):
            found = sorted(saved) if saved else "nothing"
            raise checks.StateError(
                f"the saved state holds {found} and Scape(unsent={self.options.unsent!r}) needs "
                f"{sorted(here)}; load a state that Scape made with the same options"
            )
        for key, tensor in here.items():
            if saved[key].shape != tensor.shape:
                raise checks.StateError(
                    f"the saved {key!r} has {tuple(saved[key].shape)} elements and this model over "
                    f"{self.workers.size} workers needs {tuple(tensor.shape)}; load a state of the "
                    "same model and number of workers, or use load_portable_state_dict"
                )
        if int(saved["layout"]) != int(self._layout):
            raise checks.StateError(
                "the saved state was laid out for other shapes, groups or bucket_bytes (layout "
                f"{int(saved['layout']):x}, here {int(self._layout):x}); load a state of the same "
                "model and options, or use load_portable_state_dict"
            )

    def abandon(self) -> None:
        """As :meth:`OwnedOptimizer.abandon`; the mask under way is gathered again."""
        super().abandon()
        self.family.abandon()

    @torch.no_grad()
    def restored(self) -> None:
        """As :meth:`OwnedOptimizer.restored`; drops what was derived from the old state."""
        super().restored()
        self.family.loaded()

    @torch.no_grad()
    def portable_state_dict(self) -> dict[str, Any]:
        """State of the parameters' shapes as DTensors, for any number of workers; collective.

        Workers' own first moments are saved as their mean, which is all that later steps depend on.
        """
        return portable.save(self)

    @torch.no_grad()
    def load_portable_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`portable_state_dict` gave, at any number of workers; collective."""
        self.buckets.drop()
        self.family.loaded()
        portable.load(self, state_dict)
