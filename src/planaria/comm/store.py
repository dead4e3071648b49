"""Rendezvous over the control plane, bound to one membership epoch.

gloo and NCCL find their peers through a ``torch.distributed.Store``. PyTorch's own ``TCPStore`` lives
in some process of the job: where that process dies, a first ``set`` is swallowed without an error, and
a constructor that waits for a peer that died goes on waiting until its time-out. :class:`EpochStore`
keeps the keys in the coordinator and raises :class:`~planaria.errors.EpochSuperseded` out of every
call, also one that already waits, once its epoch is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from planaria.errors import CommError, UserError


class KeyValue(Protocol):
    """What a control plane has to offer; keys of different epochs never meet.

    Each call raises ``EpochSuperseded`` where ``epoch`` is not the newest, and ``CommError`` where the
    control plane is out of reach or ``timeout`` seconds have passed.
    """

    def put(self, epoch: int, key: str, value: bytes) -> None: ...

    def get_many(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Waits until every key is there."""
        ...

    def has(self, epoch: int, keys: Sequence[str]) -> bool: ...

    def add(self, epoch: int, key: str, amount: int) -> int:
        """Atomic counter, kept as decimal text as ``TCPStore`` does; returns the new value."""
        ...


class Section:
    """A part of a control plane: the same epochs, and keys that meet no others than its own."""

    def __init__(self, kv: KeyValue, name: str) -> None:
        self._kv = kv
        self._name = name

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def put(self, epoch: int, key: str, value: bytes) -> None:
        self._kv.put(epoch, self._key(key), value)

    def get_many(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        return self._kv.get_many(epoch, [self._key(key) for key in keys], timeout)

    def has(self, epoch: int, keys: Sequence[str]) -> bool:
        return self._kv.has(epoch, [self._key(key) for key in keys])

    def add(self, epoch: int, key: str, amount: int) -> int:
        return self._kv.add(epoch, self._key(key), amount)


class EpochStore(dist.Store):
    """A ``torch.distributed.Store`` whose keys live in the control plane under one epoch.

    Source: our choice (decision 7 of the design: the constructor of a gloo group releases the GIL, and
    a ``wait`` that raises frees it at once).
    """

    def __init__(self, kv: KeyValue, *, epoch: int, timeout: float) -> None:
        super().__init__()
        self._kv = kv
        self._epoch = epoch
        self._seconds = timeout

    @property
    def epoch(self) -> int:
        return self._epoch

    def set(self, key: str, value: str | bytes) -> None:
        self._kv.put(self._epoch, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._kv.get_many(self._epoch, [key], self._seconds)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # gloo passes the time-out of its collectives, which is longer than a rebuild may take.
        seconds = self._seconds if timeout is None else min(self._seconds, timeout.total_seconds())
        self._kv.get_many(self._epoch, list(keys), seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return self._kv.has(self._epoch, list(keys))

    def add(self, key: str, value: int) -> int:
        return self._kv.add(self._epoch, key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._kv.get_many(self._epoch, list(keys), self._seconds)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """No: ``append`` and queues are not offered, and gloo needs neither."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def delete_key(self, key: str) -> bool:
        """Keys end with their epoch; a deletion within one could strand a peer that still waits."""
        raise UserError(
            f"key {key!r} cannot be deleted: keys of the control plane end with their epoch; "
            "use a new key, or a store of your own"
        )


class MemoryKeyValue:
    """The same protocol inside one process: for a world of one, which needs no coordinator."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], bytes] = {}

    def put(self, epoch: int, key: str, value: bytes) -> None:
        self._values[epoch, key] = value

    def get_many(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        missing = [key for key in keys if (epoch, key) not in self._values]
        if missing:
            raise CommError(
                f"key {missing[0]!r} was never set, and a world of one has no peer to do so"
            )
        return [self._values[epoch, key] for key in keys]

    def has(self, epoch: int, keys: Sequence[str]) -> bool:
        return all((epoch, key) in self._values for key in keys)

    def add(self, epoch: int, key: str, amount: int) -> int:
        value = int(self._values.get((epoch, key), b"0")) + amount
        self._values[epoch, key] = str(value).encode()
        return value
