"""What modules are told to do, as a stateful part: training or evaluation, frozen or trained, and
whether the next iteration synchronises.

None of it is in a ``state_dict``, and all of it outlives a broken attempt: one that is left between
two micro-batches leaves DistributedDataParallel without the exchange of buffers that it begins an
iteration with, so that its next collective meets another one of its peers; one that is left in an
evaluation leaves a model without dropout. And a spare that has just built its model has heard
nothing of what the loop has unfrozen since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

_DDP = ("require_forward_param_sync", "require_backward_grad_sync")
_FSDP = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


class Modes:
    """Modes of all ``modules``; only what differs from a fresh module's is named, so it is small."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def state_dict(self) -> dict[str, Any]:
        return {name: _read(module) for name, module in self._modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all modes; a part that the state does not name stays as it is (other stages)."""
        for name, module in self._modules.items():
            if name in state:
                _write(module, state[name])


def _read(root: nn.Module) -> dict[str, Any]:
    evaluating: list[str] = []
    switches: dict[str, tuple[bool, ...]] = {}
    for path, module in root.named_modules():
        if not module.training:
            evaluating.append(path)
        for key, owner, names in _switched(path, module):
            values = tuple(bool(getattr(owner, name)) for name in names)
            if not all(values):
                switches[key] = values
    frozen = [path for path, parameter in root.named_parameters() if not parameter.requires_grad]
    return {"evaluating": evaluating, "frozen": frozen, "switches": switches}


def _write(root: nn.Module, state: dict[str, Any]) -> None:
    evaluating, frozen = set(state["evaluating"]), set(state["frozen"])
    for path, module in root.named_modules():
        module.training = path not in evaluating
        for key, owner, names in _switched(path, module):
            for name, value in zip(
                names, state["switches"].get(key, (True,) * len(names)), strict=True
            ):
                setattr(owner, name, value)
    for path, parameter in root.named_parameters():
        parameter.requires_grad_(path not in frozen)


def _switched(path: str, module: nn.Module) -> list[tuple[str, Any, tuple[str, ...]]]:
    """Objects with switches in ``module`` itself: key, object, names of its switches."""
    if isinstance(module, DistributedDataParallel):
        return [(path, module, _DDP)]
    if isinstance(module, FSDPModule):
        groups = module._get_fsdp_state()._fsdp_param_groups
        return [(f"{path}#{index}", group, _FSDP) for index, group in enumerate(groups)]
    return []
