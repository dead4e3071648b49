"""Errors of the optimizers and the checks of their options.

Options are checked here and nowhere else, so that each optimizer words the same mistake alike.
Nothing here imports torch: configurations that are read before any worker exists are checked, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planaria.errors import ConfigError, RunError

if TYPE_CHECKING:
    import torch


class OptionError(ConfigError, ValueError):
    """An option of an optimizer is out of range; also a ``ValueError``, as torch's own raise."""


class StateError(ConfigError, ValueError):
    """A state that is to be loaded belongs to other parameters or to another optimizer."""


class GradientError(RunError):
    """A gradient is NaN or infinite on at least one worker; no worker changed anything."""


class ReplicaError(RunError):
    """Workers that have to hold the same weights, layout or mask hold different ones."""


def number(name: str, value: float, *, low: float, high: float = math.inf) -> float:
    """The value of an option in [low, high), else :class:`OptionError`."""
    as_float = float(value)
    if not low <= as_float < high:
        limit = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g})"
        raise OptionError(f"{name} is {as_float:g}; give a number {limit}")
    return as_float


def choice(name: str, value: str, allowed: Sequence[str]) -> str:
    """One of the allowed words, else :class:`OptionError`."""
    if value not in allowed:
        raise OptionError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
    return value


def density(value: float) -> float:
    """A density in (0, 1], else :class:`OptionError`."""
    if not 0.0 < value <= 1.0:
        raise OptionError(f"density is {value:g}; give a share of the weights in (0, 1]")
    return float(value)


def betas(value: tuple[float, float]) -> tuple[float, float]:
    """Both decay rates in [0, 1), else :class:`OptionError`."""
    return (
        number("betas[0]", value[0], low=0.0, high=1.0),
        number("betas[1]", value[1], low=0.0, high=1.0),
    )


def steps(name: str, value: float, *, total: int) -> int:
    """A count of steps, or a share of ``total`` where the value is a fraction below 1."""
    whole = value >= 1 and value == int(value) if math.isfinite(value) else False
    if not (0 <= value < 1 or whole):
        raise OptionError(f"{name} is {value}; give a count of steps or a share of them in [0, 1)")
    return round(value * total) if value < 1 else int(value)


def shardable(index: int, param: torch.Tensor) -> None:
    """Refuses a parameter that cannot be cut into owners' parts."""
    if not param.is_floating_point():
        raise OptionError(
            f"parameter {index} is of {param.dtype}; only real floating-point weights are trained"
        )
    if param.ndim == 0:
        raise OptionError(
            f"parameter {index} has no dimension to cut; give it the shape (1,) instead of ()"
        )
    if param.is_sparse:
        raise OptionError(f"parameter {index} has a sparse layout; use a dense one")


def unscalable(index: int, grad: torch.Tensor) -> None:
    """Refuses a half-precision gradient that a GradScaler has scaled."""
    if grad.itemsize < 4:
        raise OptionError(
            f"the gradient of parameter {index} is of {grad.dtype} and scaled by a GradScaler, and "
            "unscaling would round it away; keep the weights in float32 and use autocast, or train "
            "in bfloat16 without a scaler"
        )


def no_sparse_gradient(index: int, grad: torch.Tensor) -> None:
    """Refuses a gradient in a sparse layout."""
    if grad.is_sparse:
        raise OptionError(
            f"the gradient of parameter {index} has a sparse layout; "
            "build the embedding with sparse=False"
        )
