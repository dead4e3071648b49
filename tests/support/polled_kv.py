"""A key-value store of the test process, for testing ``comm`` without a coordinator.

The parent hosts a ``TCPStore``; a key ``newest`` holds the newest epoch, and whoever waits in an older
one is let go.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from planaria.errors import CommError, EpochSuperseded


class PolledKeyValue:
    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))

    def newest(self) -> int:
        return int(self._store.get("newest"))

    def put(self, epoch: int, key: str, value: bytes) -> None:
        self._check(epoch)
        self._store.set(f"{epoch}/{key}", value)

    def get_many(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        full = [f"{epoch}/{key}" for key in keys]
        end = time.monotonic() + timeout
        while not self._store.check(full):
            self._check(epoch)
            if time.monotonic() > end:
                raise CommError(f"{keys} did not come within {timeout} s")
            time.sleep(0.002)
        return [self._store.get(key) for key in full]

    def has(self, epoch: int, keys: Sequence[str]) -> bool:
        return self._store.check([f"{epoch}/{key}" for key in keys])

    def add(self, epoch: int, key: str, amount: int) -> int:
        return self._store.add(f"{epoch}/{key}", amount)

    def _check(self, epoch: int) -> None:
        if epoch < self.newest():
            raise EpochSuperseded(f"epoch {epoch} is over")
