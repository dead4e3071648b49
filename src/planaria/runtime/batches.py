"""A data loader as a stateful part: rolled back without fetching again, resumed to the sample.

An attempt that leaves no trace must give its batches back. :class:`Batches` keeps what was fetched
since the last committed generations, so that a survivor's loader, with its worker processes and what
they have prefetched, goes on untouched; only a new owner, or a resumed run, positions a loader anew.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from planaria.errors import DataError, UserError

T = TypeVar("T")


class Batches(Generic[T]):
    """An endless iterator over ``loader``, epoch after epoch, with a state.

    Args:
        loader: something that is iterated anew for each epoch and has ``state_dict`` and
            ``load_state_dict``, as ``torchdata.stateful_dataloader.StatefulDataLoader`` has. Its
            worker processes must not be forked from this process, which has threads and sockets:
            give it ``multiprocessing_context="forkserver"``. They end when this process does.
        set_epoch: called with the epoch's number before each (``sampler.set_epoch``).
        keep: how many batches are kept for giving back. At least what ``max_redo`` attempts take:
            a longer way back still works, by positioning the loader anew.

    Raises:
        UserError: a loader without state, or one whose workers are forked.
        DataError: an epoch without a single batch.

    >>> from torchdata.stateful_dataloader import StatefulDataLoader
    >>> data = Batches(StatefulDataLoader([1, 2, 3], batch_size=None))
    >>> [next(data) for _ in range(4)]
    [1, 2, 3, 1]
    """

    def __init__(self, loader: Iterable[T], *, set_epoch: Any = None, keep: int = 64) -> None:
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(loader, name, None)):
                raise UserError(
                    f"Batches got a {type(loader).__name__} without {name}(): use torchdata's "
                    "StatefulDataLoader, or make the batch a function of attempt.step and shard"
                )
        self._loader = cast(Any, loader)
        if getattr(loader, "num_workers", 0):
            _tie(self._loader)
        self._set_epoch = set_epoch
        self._iterator: Iterator[T] | None = None
        self._epoch = 0
        self._taken = 0
        """Batches handed out since the beginning, over all epochs."""
        self._fetched = 0
        """Batches fetched from the loader; more than taken after a way back."""
        self._kept: deque[tuple[int, T, int, Any]] = deque(maxlen=keep)
        """(number, batch, epoch after it, loader's state after it) of the newest batches."""
        self._state: Any = None
        """Loader's state after the batch that was taken last; None before the first of an epoch."""

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        if self._taken < self._fetched:
            number, batch, epoch, state = self._kept[self._taken - self._fetched]
            assert number == self._taken
            self._epoch, self._state = epoch, state
        else:
            batch = self._fetch()
        self._taken += 1
        return batch

    def _fetch(self) -> T:
        for fresh in (False, True):
            if self._iterator is None:
                if self._set_epoch is not None:
                    self._set_epoch(self._epoch)
                self._iterator = iter(self._loader)
            try:
                batch = next(self._iterator)
            except StopIteration:
                if fresh:
                    break
                self._iterator, self._state = None, None
                self._epoch += 1
                continue
            self._state = copy.deepcopy(self._loader.state_dict())
            self._kept.append((self._fetched, batch, self._epoch, self._state))
            self._fetched += 1
            return batch
        raise DataError(f"the loader gave no batch in epoch {self._epoch}: its data set is empty")

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "epoch": self._epoch, "loader": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        taken = state["taken"]
        oldest = self._kept[0][0] if self._kept else self._fetched
        # Without an iterator the loader stands wherever it was positioned last.
        goes_on = self._iterator is not None or taken == self._fetched == 0
        if goes_on and oldest <= taken <= self._fetched:
            # What lies between is still here, whatever the loader has prefetched since.
            self._taken, self._epoch, self._state = taken, state["epoch"], state["loader"]
            return
        self._taken = self._fetched = taken
        self._epoch, self._state = state["epoch"], state["loader"]
        self._kept.clear()
        self._iterator = None
        if self._state is not None:
            self._loader.load_state_dict(copy.deepcopy(self._state))


def _tie(loader: Any) -> None:
    """Have the loader's worker processes end with this one; raises where they are forked."""
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() == "fork":
        raise UserError(
            f"Batches got a {type(loader).__name__} whose {loader.num_workers} worker processes are "
            "forked from a process with threads, may hang, and keep its connections open after it "
            'has died: give the loader multiprocessing_context="forkserver"'
        )
    loader.worker_init_fn = _Tied(loader.worker_init_fn)


@dataclass(frozen=True)
class _Tied:
    """A ``worker_init_fn`` that ends its process as soon as the one that owns the loader is gone.

    The parent of a loader's worker is the fork server, which lives as long as any of its children:
    without this they would keep each other alive for ever. Picklable.
    """

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        owner = multiprocessing.parent_process()
        if owner is not None:
            threading.Thread(
                target=_end_with, args=(owner,), name="planaria-tied", daemon=True
            ).start()
        if self.then is not None:
            self.then(number)


def _end_with(owner: Any) -> None:
    owner.join()
    os._exit(1)
