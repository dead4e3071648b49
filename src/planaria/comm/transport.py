"""The seam between the handle and a communication library.

A :class:`Transport` makes inner groups and knows how to free whoever is stuck in one. One transport
lives as long as its worker and serves all groups and epochs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from planaria.comm.sockets import Address, opened_listener, shut


class Transport(Protocol):
    """Makes inner groups; frees the stuck."""

    device_types: tuple[str, ...]
    reduces_whole: bool
    """Whether a reduce-scatter is an all-reduce, of which each rank keeps its part."""

    @property
    def address(self) -> str:
        """What peers must know to tell this worker's connections; published in each epoch."""
        ...

    def meet(self, addresses: Iterable[str]) -> None:
        """Addresses of all members of the new epoch."""
        ...

    def make(
        self, store: dist.Store, *, rank: int, size: int, timeout: float, connect: float
    ) -> Any:
        """A new inner group; blocks until all ``size`` members are there or the store raises."""
        ...

    def free(self, groups: Iterable[Any]) -> int:
        """Make everyone who waits in one of ``groups``, or in ``make``, return with an error, now."""
        ...


class GlooTransport:
    """gloo over TCP, on CPU tensors.

    One device, and so one listener, serves every group of the worker: its port tells gloo's sockets
    from all others (see :mod:`.sockets`).
    """

    device_types: tuple[str, ...] = ("cpu",)
    reduces_whole = True

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._device, self._listener = opened_listener(
            lambda: dist.ProcessGroupGloo.create_device(hostname=host)
        )
        self._peers: frozenset[Address] = frozenset()

    @property
    def address(self) -> str:
        return f"{self._listener[0]}:{self._listener[1]}"

    def meet(self, addresses: Iterable[str]) -> None:
        found: set[Address] = set()
        for address in addresses:
            host, _, port = address.rpartition(":")
            found.add((host, int(port)))
        self._peers = frozenset(found - {self._listener})

    def make(
        self, store: dist.Store, *, rank: int, size: int, timeout: float, connect: float
    ) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [self._device]
        # The constructor dials a peer that has died since it published its address again and again
        # until this time is over, and shutting sockets does not stop it.
        options._timeout = timedelta(seconds=connect)
        options._threads = 2
        group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        group._set_default_timeout(timedelta(seconds=timeout))
        return group

    def free(self, groups: Iterable[Any]) -> int:
        return shut(self._listener, self._peers)


class NcclTransport:
    """NCCL on CUDA tensors, by ``abort`` of its communicators.

    Written against torch 2.13's ``ProcessGroupNCCL``. It has not run: the machines that this project
    is built on have no GPU. With torch 2.14 and newer, ``dist._reconfigure`` can take its place.
    """

    device_types: tuple[str, ...] = ("cuda",)
    reduces_whole = False

    @property
    def address(self) -> str:
        return "nccl:0"

    def meet(self, addresses: Iterable[str]) -> None:
        del addresses

    def make(
        self, store: dist.Store, *, rank: int, size: int, timeout: float, connect: float
    ) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def free(self, groups: Iterable[Any]) -> int:
        count = 0
        for group in groups:
            group.abort()
            count += 1
        return count
