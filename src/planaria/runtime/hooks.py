"""Where a running attempt is looked at: boundaries, and the phases at which a test's fault fires.

A boundary is a place that an exception may leave without harm: the entry of a root module's forward
and the optimizer's step, before it changes anything. Between the two DDP and FSDP2 have work under
way that must complete (decision 5 of the design).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

At = Callable[[str], None]
"""Called with the name of the phase that the training thread is in."""


def watch_modules(modules: Iterable[nn.Module], check: Callable[[], None]) -> list[RemovableHandle]:
    """Call ``check`` before each forward of the root modules."""

    def before(module: nn.Module, args: Any) -> None:
        check()

    return [module.register_forward_pre_hook(before, prepend=True) for module in modules]


def watch_optimizers(
    optimizers: Iterable[Optimizer], before: Callable[[], None]
) -> list[RemovableHandle]:
    """Call ``before`` when a step is about to change the state."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before()

    return [optimizer.register_step_pre_hook(hook) for optimizer in optimizers]


def watch_phases(modules: Iterable[nn.Module], at: At) -> list[RemovableHandle]:
    """Call ``at("forward")`` and ``at("backward")`` in the middle of each; for injected faults.

    The middle is the median one of the innermost modules that hold parameters: a fault in it leaves
    layers computed and layers to come, in both directions.
    """
    handles: list[RemovableHandle] = []
    for module in modules:
        inner = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
        middle = inner[len(inner) // 2] if inner else module

        def after(module: nn.Module, args: Any, output: Any) -> None:
            at("forward")
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: at("backward"))
                    break

        handles.append(middle.register_forward_hook(after))
    return handles


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
