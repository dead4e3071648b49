"""The table of contents of a capture: where each tensor's bytes lie in one host buffer.

A capture is ``small | sent | replicated by replica set``, each region aligned to 64 bytes::

    small        what is copied at once: buffers, cursors, scaler, tensors of foreign state_dicts
    sent         parameters and optimizer state that no peer holds
    replicated   one region per replica set: tensors that those shards hold bit for bit, too

``small | sent`` is a prefix of the buffer, and that prefix is what travels to the holder. What is
not a tensor is pickled into ``skeleton``, which travels with the layout.

This module imports no torch, so that tools can read a layout without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec

from planaria.errors import CommError, RunError, UserError
from planaria.runtime.messages import ReplicaSet

Role = Literal["param", "buffer", "optimizer", "other"]

REGION_ALIGNMENT = 64
"""Bytes; a cache line, and more than any dtype asks for."""
LEAF_ALIGNMENT = 16
"""Bytes; the largest item (complex128), so that each leaf can be viewed as its own dtype."""
MAX_LAYOUT_BYTES = 1 << 28
"""Bound of an encoded layout, in bytes: a peer's header cannot make us allocate more than this."""

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one item, by the name of a torch dtype without its ``torch.``."""


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor before it has a place."""

    part: str
    path: str
    dtype: str
    """Name of the torch dtype without ``torch.``."""
    shape: tuple[int, ...]
    """Of the local tensor."""
    role: Role
    asynchronous: bool
    """Whether it may be copied beside the next step's forward and backward."""
    shards: tuple[int, ...]
    """Replica set, sorted: the shards that hold these bytes, the own one included."""


class LeafEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and its place in the buffer."""

    part: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    asynchronous: bool
    shards: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""
    nbytes: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes that is moved as one."""

    shards: tuple[int, ...]
    offset: int
    nbytes: int
    """Padded to :data:`REGION_ALIGNMENT`."""


class Layout(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Table of one capture. ``leaves`` are in the order that the skeleton counts them in."""

    generation: int
    shard: int
    leaves: tuple[LeafEntry, ...]
    skeleton: bytes
    small: int
    """Bytes of the region of that name, padded."""
    sent: int
    """Bytes of the region of that name, padded."""
    replicated: tuple[Region, ...]
    total: int
    """Bytes of the whole buffer."""

    @property
    def prefix(self) -> int:
        """Bytes of ``small | sent``: what goes to the holder."""
        return self.small + self.sent

    def region(self, shards: Sequence[int]) -> Region:
        """The region of the replica set ``shards``; of the prefix where ``shards`` is empty.

        Raises :class:`~planaria.errors.RunError` where this capture has no such set.
        """
        wanted = tuple(shards)
        if not wanted:
            return Region((), 0, self.prefix)
        for region in self.replicated:
            if region.shards == wanted:
                return region
        known = ", ".join(str(region.shards) for region in self.replicated) or "none"
        raise RunError(
            f"the capture of generation {self.generation}, shard {self.shard} has no tensors with "
            f"the replica set {wanted} (it has: {known}): all workers must build the same objects"
        )

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """What a :class:`~planaria.runtime.messages.Report` says of the replicated regions."""
        return tuple(ReplicaSet(shards=r.shards, bytes=r.nbytes) for r in self.replicated)

    def same_region(self, other: Layout, shards: Sequence[int]) -> None:
        """Raise :class:`~planaria.errors.RunError` unless both regions hold the same tensors."""
        mine, theirs = self.region(shards), other.region(shards)
        a = [_relative(leaf, mine) for leaf in self.leaves if leaf.shards == mine.shards]
        b = [_relative(leaf, theirs) for leaf in other.leaves if leaf.shards == theirs.shards]
        if a != b or mine.nbytes != theirs.nbytes:
            pairs = zip(a, b, strict=False)
            first = next((f"{x} against {y}" for x, y in pairs if x != y), f"{len(a)}, {len(b)}")
            raise RunError(
                f"shards {self.shard} and {other.shard} disagree about the tensors that shards "
                f"{tuple(shards)} should share ({first}): all workers must build the same objects"
            )

    def encode(self) -> bytes:
        """MessagePack bytes. Raises :class:`~planaria.errors.RunError` above the bound."""
        data = msgspec.msgpack.encode(self)
        if len(data) > MAX_LAYOUT_BYTES:
            raise RunError(
                f"the table of shard {self.shard}'s capture takes {len(data)} bytes, more than "
                f"{MAX_LAYOUT_BYTES}: a part's state_dict holds much that is no tensor; make it one"
            )
        return data

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Layout:
        """The layout in ``data``, checked; raises :class:`~planaria.errors.CommError`."""
        if len(data) > MAX_LAYOUT_BYTES:
            raise CommError(
                f"a peer's table of a capture has {len(data)} bytes, more than {MAX_LAYOUT_BYTES}: "
                "it is not from a worker of this version; end the peer"
            )
        try:
            layout = msgspec.msgpack.decode(data, type=Layout)
        except msgspec.MsgspecError as error:
            raise CommError(
                f"a peer's table of a capture cannot be read ({error}): "
                "start all workers from one version of planaria"
            ) from error
        flaw = _flaw(layout)
        if flaw:
            raise CommError(
                f"a peer's table of a capture contradicts itself ({flaw}): "
                "start all workers from one version of planaria"
            )
        return layout


class Head(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A layout whose tables stay as they came: all that a holder needs, in microseconds."""

    generation: int
    shard: int
    leaves: msgspec.Raw
    skeleton: msgspec.Raw
    small: Annotated[int, msgspec.Meta(ge=0)]
    sent: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def prefix(self) -> int:
        """Bytes of ``small | sent``."""
        return self.small + self.sent

    @staticmethod
    def decode(data: bytes) -> Head:
        """Raises :class:`~planaria.errors.CommError` for what is no layout."""
        try:
            return msgspec.msgpack.decode(data, type=Head)
        except msgspec.MsgspecError as error:
            raise CommError(
                f"a peer's table of a capture cannot be read ({error}): "
                "start all workers from one version of planaria"
            ) from error


def lay_out(
    specs: Iterable[LeafSpec], *, generation: int, shard: int, skeleton: bytes = b""
) -> Layout:
    """Give each tensor its place. Pure: equal ``specs`` give equal offsets on every worker.

    Raises :class:`~planaria.errors.UserError` for a dtype whose bytes cannot be copied as they are.
    """
    listed = list(specs)
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for index, spec in enumerate(listed):
        if spec.dtype not in ITEM_BYTES:
            raise UserError(
                f"{spec.part}.{spec.path} has dtype {spec.dtype}, which cannot be protected: keep "
                f"it out of the parts, or as one of {', '.join(ITEM_BYTES)}"
            )
        groups.setdefault(_group(spec, shard), []).append(index)
    entries: list[LeafEntry | None] = [None] * len(listed)
    regions: list[Region] = []
    sizes = [0, 0]
    position = 0
    for rank, shards in sorted(groups):
        start = position
        for index in groups[rank, shards]:
            spec = listed[index]
            nbytes = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
            entries[index] = LeafEntry(*_fields(spec), offset=position, nbytes=nbytes)
            position = _align(position + nbytes, LEAF_ALIGNMENT)
        position = _align(position, REGION_ALIGNMENT)
        if rank == 2:
            regions.append(Region(shards, start, position - start))
        else:
            sizes[rank] = position - start
    return Layout(
        generation=generation,
        shard=shard,
        leaves=tuple(entry for entry in entries if entry is not None),
        skeleton=skeleton,
        small=sizes[0],
        sent=sizes[1],
        replicated=tuple(regions),
        total=position,
    )


def _group(spec: LeafSpec, shard: int) -> tuple[int, tuple[int, ...]]:
    """Sort key of the region: 0 small, 1 sent, 2 replicated (by replica set)."""
    if len(spec.shards) > 1:
        return 2, spec.shards
    return (1 if spec.asynchronous else 0), (shard,)


def _fields(
    spec: LeafSpec,
) -> tuple[str, str, str, tuple[int, ...], Role, bool, tuple[int, ...]]:
    return (
        spec.part,
        spec.path,
        spec.dtype,
        spec.shape,
        spec.role,
        spec.asynchronous,
        spec.shards,
    )


def _relative(leaf: LeafEntry, region: Region) -> tuple[str, str, str, tuple[int, ...], int]:
    return leaf.part, leaf.path, leaf.dtype, leaf.shape, leaf.offset - region.offset


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def _flaw(layout: Layout) -> str | None:
    """What makes a decoded layout unusable, or None: what comes from a peer is not believed."""
    if min(layout.generation, layout.shard, layout.small, layout.sent, layout.total) < 0:
        return "a negative number"
    starts = [layout.small, layout.sent, *(region.nbytes for region in layout.replicated)]
    if any(size % REGION_ALIGNMENT or size < 0 for size in starts):
        return "a region that is not aligned"
    if sum(starts) != layout.total:
        return f"regions of {sum(starts)} bytes in a buffer of {layout.total}"
    bounds = {0: (0, layout.small), 1: (layout.small, layout.prefix)}
    position = layout.prefix
    sets: dict[tuple[int, ...], tuple[int, int]] = {}
    for region in layout.replicated:
        if region.offset != position or len(region.shards) < 2 or region.shards in sets:
            return f"the region of {region.shards} at {region.offset}"
        position += region.nbytes
        sets[region.shards] = (region.offset, position)
    previous = 0
    for leaf in sorted(layout.leaves, key=lambda leaf: (leaf.offset, leaf.nbytes)):
        low, high = (
            sets.get(leaf.shards, (0, -1))
            if len(leaf.shards) > 1
            else bounds[1 if leaf.asynchronous else 0]
        )
        if leaf.dtype not in ITEM_BYTES or any(size < 0 for size in leaf.shape):
            return f"{leaf.part}.{leaf.path} of dtype {leaf.dtype} and shape {leaf.shape}"
        if leaf.nbytes != math.prod(leaf.shape) * ITEM_BYTES[leaf.dtype]:
            return f"{leaf.part}.{leaf.path} of shape {leaf.shape} in {leaf.nbytes} bytes"
        if leaf.offset % LEAF_ALIGNMENT or leaf.offset < max(low, previous):
            return f"{leaf.part}.{leaf.path} at {leaf.offset}"
        previous = leaf.offset + leaf.nbytes
        if previous > high:
            return f"{leaf.part}.{leaf.path} ends at {previous}, beyond its region's end {high}"
    return None
