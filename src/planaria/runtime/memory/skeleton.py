"""Pickling of what is not a tensor, with the tensors taken out.

``pack`` pickles any object; each tensor in it, however deep, is replaced by its index and handed
back in a list. ``unpack`` puts tensors in again. A pickle can run code: it is only ever read from
buffers of this process or of peers that have proved to know the run's token.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from planaria.errors import RunError, UserError
from planaria.runtime.memory.placements import DTensorSpec, local

LeafGetter = Callable[[int, str, DTensorSpec | None], torch.Tensor]
"""(index, device type, specification of a DTensor or None) -> tensor."""


def leaf(index: int, device: str, spec: DTensorSpec | None) -> torch.Tensor:
    """Stands in a pickle for a tensor; :func:`unpack` puts its ``get`` in this function's place."""
    raise RunError(
        f"tensor {index} ({device}, {spec}) was unpickled outside of planaria: "
        "read captures with Parts.restore"
    )


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, first: int) -> None:
        super().__init__(stream, protocol=5)
        self.first = first
        self.tensors: list[torch.Tensor] = []
        # By identity: pickle's own memo does not see through what the override returns.
        self.indices: dict[int, int] = {}

    # Not called for int, str, tuple, list or dict, so that a state of plain values costs nothing.
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        stored = local(obj)
        index = self.indices.get(id(obj))
        if index is None:
            index = self.indices[id(obj)] = self.first + len(self.tensors)
            self.tensors.append(stored)
        spec = DTensorSpec.of(obj) if isinstance(obj, DTensor) else None
        return leaf, (index, stored.device.type, spec)


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, get: LeafGetter) -> None:
        super().__init__(stream)
        self.get = get

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == (leaf.__module__, leaf.__name__):
            return self.get
        return super().find_class(module_name, global_name)


def pack(value: Any, *, first: int, what: str) -> tuple[bytes, list[torch.Tensor]]:
    """``(pickle, tensors)``: tensors are counted from ``first`` on, DTensors give their local one.

    Raises :class:`~planaria.errors.UserError` where something in ``value`` cannot be pickled.
    """
    stream = io.BytesIO()
    packer = _Packer(stream, first)
    try:
        packer.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"the state of {what} cannot be pickled ({error}): "
            "let its state_dict() return plain values and tensors only"
        ) from error
    return stream.getvalue(), packer.tensors


def unpack(data: bytes, *, get: LeafGetter, what: str) -> Any:
    """The object of :func:`pack`, with the tensors that ``get`` returns."""
    try:
        return _Unpacker(io.BytesIO(data), get).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise RunError(
            f"the state of {what} cannot be read back ({error}): "
            "start all workers from the same code"
        ) from error
