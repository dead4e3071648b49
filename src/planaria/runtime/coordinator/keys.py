"""Keys and values that the members of one epoch share, on the coordinator's side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from planaria.errors import CommError, EpochSuperseded, UserError
from planaria.runtime.control import protocol as control

MAX_BYTES = 256 << 20
"""Keys and values of one epoch; addresses and the like stay far below. Our choice."""


class EpochKeys:
    """Lives on one event loop. A new epoch forgets everything and ends every wait at once."""

    def __init__(self, *, epoch: int = 0, max_bytes: int = MAX_BYTES) -> None:
        self.epoch = epoch
        self._values: dict[str, bytes] = {}
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._bytes = 0
        self._max_bytes = max_bytes

    def begin(self, epoch: int) -> None:
        """Supersede the epoch: what waits for its keys ends with ``EpochSuperseded``."""
        before, self.epoch = self.epoch, epoch
        arrivals, self._arrivals = self._arrivals, {}
        self._values, self._bytes = {}, 0
        for arrival in arrivals.values():
            if not arrival.done():
                arrival.set_exception(_superseded(before, epoch))
                # Waiters that have timed out look no more; asyncio is not to complain of it.
                arrival.exception()

    def put(self, epoch: int, key: str, value: bytes) -> None:
        """Set ``key`` and wake who waits for it."""
        self._check(epoch)
        grown = self._bytes + len(value) - len(self._values.get(key, b""))
        if key not in self._values:
            grown += len(key)
        if grown > self._max_bytes:
            raise UserError(
                f"the keys of epoch {epoch} would take over {self._max_bytes} bytes with {key!r}; "
                "state goes through the data plane"
            )
        self._bytes = grown
        self._values[key] = value
        arrival = self._arrivals.pop(key, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    async def get(self, epoch: int, keys: Sequence[str], *, timeout: float) -> tuple[bytes, ...]:
        """The values of ``keys``, as soon as all are there; ``CommError`` after ``timeout`` s."""
        self._check(epoch)
        try:
            async with asyncio.timeout(timeout):
                for key in keys:
                    while key not in self._values:
                        arrival = self._arrivals.get(key)
                        if arrival is None:
                            arrival = asyncio.get_running_loop().create_future()
                            self._arrivals[key] = arrival
                        await asyncio.shield(arrival)
                        self._check(epoch)
        except TimeoutError:
            missing = [key for key in keys if key not in self._values]
            if not missing:  # the last one came in the same turn of the loop
                return tuple(self._values[key] for key in keys)
            raise CommError(
                f"{len(missing)} of {len(keys)} keys of epoch {epoch} did not come within "
                f"{timeout:g} s, {missing[0]!r} first; a member is late or lost"
            ) from None
        return tuple(self._values[key] for key in keys)

    def add(self, epoch: int, key: str, amount: int) -> int:
        """Add to a decimal counter; a missing key counts as 0."""
        self._check(epoch)
        before = self._values.get(key, b"0")
        try:
            after = int(before) + amount
        except ValueError:
            raise UserError(f"key {key!r} is not a counter: it holds {before[:40]!r}") from None
        self.put(epoch, key, str(after).encode())
        return after

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are there now."""
        self._check(epoch)
        return all(key in self._values for key in keys)

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise _superseded(epoch, self.epoch)


async def answer(keys: EpochKeys, body: Any) -> msgspec.Struct:
    """Answer Put, Get, GetMany, Add or Check out of ``keys``."""
    match body:
        case control.Put():
            keys.put(body.epoch, body.key, body.value)
            return control.Done()
        case control.Get():
            found = await keys.get(body.epoch, (body.key,), timeout=body.timeout)
            return control.Values(values=found)
        case control.GetMany():
            found = await keys.get(body.epoch, body.keys, timeout=body.timeout)
            return control.Values(values=found)
        case control.Add():
            return control.Counter(value=keys.add(body.epoch, body.key, body.amount))
        case control.Check():
            return control.Present(present=keys.check(body.epoch, body.keys))
        case _:
            raise AssertionError(f"{type(body).__name__} is no question about keys")


def _superseded(old: int, new: int) -> EpochSuperseded:
    return EpochSuperseded(f"epoch {old} is superseded: the run is in epoch {new}")
