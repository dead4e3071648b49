"""What both pathology recipes share in training, without knowing the runtime that runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from planaria.errors import ConfigError, DataError

T = TypeVar("T")


def class_weights(labels: NDArray[np.int64], *, classes: int) -> Tensor:
    """Weights [classes] inversely proportional to how often a label occurs, 1 on average over
    samples. DataError where a class is missing."""
    counts = np.bincount(labels, minlength=classes)
    if (counts == 0).any():
        raise DataError(
            f"label {int(np.argmin(counts))} does not occur among {len(labels)} training samples; "
            "switch class weights off, or give samples of it"
        )
    return torch.tensor(len(labels) / (classes * counts), dtype=torch.float32)


def rate(done: int, *, steps: int, warmup: int, floor: float = 0.01) -> float:
    """Share of the highest learning rate after ``done`` steps: a line up, half a cosine down."""
    if done < warmup:
        return (done + 1) / warmup
    progress = min(1.0, (done - warmup) / max(1, steps - 1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def step_rate(epoch: int, *, milestones: Sequence[int], factor: float = 0.1) -> float:
    """``factor`` to the power of the ``milestones`` that ``epoch`` has reached (the paper's)."""
    return factor ** sum(epoch >= milestone for milestone in milestones)


def autocast(dtype: str) -> AbstractContextManager[object]:
    """bf16 autocast on the CPU, or nothing for ``fp32``."""
    if dtype not in ("fp32", "bf16"):
        raise ConfigError(f"dtype is {dtype!r}; it is 'fp32' or 'bf16'")
    return torch.autocast("cpu", dtype=torch.bfloat16) if dtype == "bf16" else nullcontext()


def set_momentum(model: nn.Module, momentum: float) -> None:
    """Sets the momentum of every BatchNorm: MONAI's 0.01 needs a thousand steps to settle."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum


class Best:
    """The best state so far by a validation measure, and how long ago that was.

    A stateful part of a run: the copy is held twice like the model itself, so early stopping and the
    model that is exported do not depend on who died on the way.
    """

    def __init__(self, *, patience: int) -> None:
        self.patience = patience
        """Evaluations without a better one after which to stop; 0 never stops."""
        self.value = -math.inf
        self.step = 0
        self.since = 0
        self.state: dict[str, Tensor] = {}

    def add(self, value: float, *, step: int, model: nn.Module) -> bool:
        """Takes an evaluation's measure (greater is better); whether it was the best so far.

        NaN (one class only) never is, except where there was no other.
        """
        if not self.state or value > self.value:
            self.value = -math.inf if math.isnan(value) else value
            self.step, self.since = step, 0
            self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            return True
        self.since += 1
        return False

    @property
    def stop(self) -> bool:
        """Whether patience is at an end."""
        return self.patience > 0 and self.since >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Everything but the patience, which is configuration."""
        return {
            "value": self.value,
            "step": self.step,
            "since": self.since,
            "state": dict(self.state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave."""
        self.value, self.step, self.since = state["value"], state["step"], state["since"]
        self.state = dict(state["state"])


class Ahead(Generic[T]):
    """Makes the next step's batch in a thread while this one is trained on.

    ``make(step)`` must be a pure function of the step; after a way back the batch is made again.
    """

    def __init__(self, make: Callable[[int], T], *, last: int) -> None:
        self._make = make
        self._last = last
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch")
        self._next: tuple[int, Future[T]] | None = None

    def __call__(self, step: int) -> T:
        """The batch of ``step``; starts the one after it."""
        if self._next is not None and self._next[0] == step:
            batch = self._next[1].result()
        else:
            batch = self._make(step)
        following = step + 1
        self._next = (
            (following, self._pool.submit(self._make, following))
            if following <= self._last
            else None
        )
        return batch

    def close(self) -> None:
        """Ends the thread; a batch under way is finished and dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def average_statistics(model: nn.Module) -> None:
    """The mean of BatchNorm's running statistics over all workers, in place; a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if not buffers:  # a head over features
        return
    flat = torch.cat([b.reshape(-1) for b in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for buffer in buffers:
        buffer.copy_(flat[start : start + buffer.numel()].reshape(buffer.shape))
        start += buffer.numel()


def share(count: int, *, shard: int, world: int) -> NDArray[np.int64]:
    """The indices of ``count`` samples that ``shard`` scores: every ``world``-th."""
    return np.arange(shard, count, world, dtype=np.int64)
