"""Captures: the state of a worker, copied to its own host memory beside the training.

At the end of an attempt :meth:`Capture.capture` runs on the training thread. It takes the state
apart, copies at once what the script may change at any moment (buffers, cursors, generators), and
hands the rest (parameters, optimizer state) to one copying thread. Nothing changes these before the
optimizer's next step, whose pre-step hook calls :meth:`Capture.wait_copied`.

On a CPU the copying thread runs one ``_foreach_copy_``, which holds the GIL for none of it. On CUDA
it enqueues copies into pinned memory on a side stream; that path was written against the
documentation and has not run on the machines this was developed on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import xxhash

from planaria.errors import RunError
from planaria.runtime.memory import restoring
from planaria.runtime.memory.finding import Leaf
from planaria.runtime.memory.layout import Layout, LeafSpec, lay_out
from planaria.runtime.memory.parts import Flat, Parts
from planaria.runtime.memory.slots import Buffers, Callback, Held, Occupancy, Slot, choose

__all__ = ["Buffers", "Capture", "Held", "Layout", "Occupancy", "Slot", "Taken", "choose"]

HASH_CHUNK = 1 << 22
"""Bytes hashed at a time: long enough that the GIL is free, short enough to leave the cache warm."""


@dataclass(frozen=True)
class Taken:
    """What :meth:`Capture.capture` did."""

    generation: int
    taken: bool
    """False: no slot was free within the wait, and nothing was captured."""
    reason: str
    nbytes: int = 0
    """Of the whole capture."""
    prefix: int = 0
    """Bytes of it that are sent to the holder."""
    seconds: float = 0.0
    """That the training thread spent."""
    waited: float = 0.0
    """Of these: waiting for a slot."""


@dataclass
class _Plan:
    """Where each leaf goes; kept while the set of leaves does not change."""

    fixed: tuple[Leaf, ...]
    loose: tuple[LeafSpec, ...]
    layout: Layout
    later: list[int]
    now: list[int]
    cuda: bool


@dataclass
class _Job:
    generation: int
    slot: Slot
    layout: Layout
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    ready: torch.cuda.Event | None
    copied: threading.Event = field(default_factory=threading.Event)
    done: torch.cuda.Event | None = None


class Capture:
    """Copies state into :class:`~planaria.runtime.memory.slots.Buffers`; owns the copying thread.

    Args:
        buffers: of this worker.
        on_complete: called on the copying thread with each generation whose capture is complete.
        on_event: called with ``"capture"`` in the middle of each copy; for injected faults.
    """

    def __init__(
        self,
        buffers: Buffers,
        *,
        on_complete: Callback | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        self.buffers = buffers
        self._on_complete = on_complete
        self._on_event = on_event
        self._plan: _Plan | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: _Job | None = None
        self._error: Exception | None = None
        self._stream: torch.cuda.Stream | None = None

    def capture(
        self, parts: Parts, *, generation: int, epoch: int = 0, wait: float | None = 0.0
    ) -> Taken:
        """Begin the capture of ``generation``; on the training thread.

        Waits up to ``wait`` seconds (None: without limit) for a slot; see :mod:`.slots` on why
        skipping must be agreed upon by all workers. Raises EpochSuperseded where ``epoch`` is over,
        before or meanwhile, and :class:`~planaria.errors.RunError` where the capture before this
        one failed.
        """
        started = time.perf_counter()
        self.wait_copied()
        slot = self.buffers.begin(generation, wait=wait, epoch=epoch)
        waited = time.perf_counter() - started
        if slot is None:
            return Taken(generation, False, self.buffers.reason, seconds=waited, waited=waited)
        try:
            plan, job = self._prepare(parts, generation, slot)
        except BaseException:
            self.buffers.abandon(slot)
            raise
        self._start()
        self._pending = job
        self._jobs.put(job)
        return Taken(
            generation,
            True,
            self.buffers.reason,
            nbytes=plan.layout.total,
            prefix=plan.layout.prefix,
            seconds=time.perf_counter() - started,
            waited=waited,
        )

    def wait_copied(self) -> float:
        """Return when the newest capture no longer reads the state; the seconds waited.

        To be called before anything changes parameters or optimizer state: by the optimizer's
        pre-step hook, and before a restore. On CUDA the current stream waits, not the host. Raises
        :class:`~planaria.errors.RunError` where the copying thread failed.
        """
        job, waited = self._pending, 0.0
        if job is not None:
            if not job.copied.is_set():
                started = time.perf_counter()
                job.copied.wait()
                waited = time.perf_counter() - started
            if job.done is not None:
                torch.cuda.current_stream().wait_event(job.done)
            self._pending = None
        if self._error is not None:
            error, self._error = self._error, None
            raise RunError(
                f"the state could not be captured ({type(error).__name__}: {error}): "
                "this worker is not protected any more, so the run must not go on"
            ) from error
        return waited

    def close(self) -> None:
        """End the copying thread, after what it has begun."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _prepare(self, parts: Parts, generation: int, slot: Slot) -> tuple[_Plan, _Job]:
        flat = parts.flatten()
        plan = self._planned(flat, parts.shard)
        layout = _with(plan.layout, generation=generation, skeleton=flat.skeleton)
        slot.reserve(layout.total)
        views = self._views(slot, plan)
        leaves = flat.leaves
        with torch.no_grad():
            if plan.now:
                # On CUDA in the order of the training's own stream, so before any later change.
                torch._foreach_copy_(
                    [views[i] for i in plan.now],
                    [leaves[i].tensor for i in plan.now],
                    non_blocking=plan.cuda,
                )
        ready = None
        if plan.cuda:
            ready = torch.cuda.Event()
            ready.record()
        job = _Job(
            generation=generation,
            slot=slot,
            layout=layout,
            targets=[views[i] for i in plan.later],
            sources=[leaves[i].tensor for i in plan.later],
            ready=ready,
        )
        return plan, job

    def _planned(self, flat: Flat, shard: int) -> _Plan:
        loose = tuple(map(_spec, flat.loose))
        plan = self._plan
        if plan is not None and plan.fixed is flat.fixed and plan.loose == loose:
            return plan
        specs = [*map(_spec, flat.fixed), *loose]
        self._plan = _Plan(
            fixed=flat.fixed,
            loose=loose,
            layout=lay_out(specs, generation=0, shard=shard),
            later=[i for i, spec in enumerate(specs) if spec.asynchronous],
            now=[i for i, spec in enumerate(specs) if not spec.asynchronous],
            cuda=any(leaf.tensor.is_cuda for leaf in flat.leaves),
        )
        return self._plan

    def _views(self, slot: Slot, plan: _Plan) -> list[torch.Tensor]:
        if slot.views is None or slot.views[0] is not plan:
            slot.views = plan, [restoring.view(slot.memory, leaf) for leaf in plan.layout.leaves]
        return slot.views[1]

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="planaria-copy", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
                job.copied.set()
                if job.done is not None:
                    job.done.synchronize()
                self._seal(job)
            # Whatever it is, the training thread must hear of it rather than wait for ever.
            except Exception as error:
                self._error = error
                self.buffers.abandon(job.slot)
            finally:
                job.copied.set()

    def _copy(self, job: _Job) -> None:
        # Two halves only where a fault is to fire in between: each call costs a hand-over.
        middle = len(job.targets) // 2 if self._on_event else 0
        cuts = [slice(0, middle), slice(middle, None)]
        with torch.no_grad():
            if job.ready is None:
                for cut in cuts:
                    if job.targets[cut]:
                        torch._foreach_copy_(job.targets[cut], job.sources[cut])
                    if self._on_event and cut.stop is not None:
                        self._on_event("capture")
                return
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_event(job.ready)
            with torch.cuda.stream(self._stream):
                for cut in cuts:
                    if job.targets[cut]:
                        torch._foreach_copy_(job.targets[cut], job.sources[cut], non_blocking=True)
                    if self._on_event and cut.stop is not None:
                        self._on_event("capture")
                job.done = torch.cuda.Event()
                job.done.record()

    def _seal(self, job: _Job) -> None:
        encoded = job.layout.encode()
        checksum = prefix_checksum(encoded, job.slot.bytes(0, job.layout.prefix))
        complete = self.buffers.complete(
            job.slot, layout=job.layout, encoded=encoded, checksum=checksum
        )
        if complete and self._on_complete is not None:
            self._on_complete(job.generation)


def prefix_checksum(encoded: bytes, prefix: memoryview) -> int:
    """xxh3-64 over an encoded layout and the bytes it names."""
    hasher = xxhash.xxh3_64(encoded)
    for start in range(0, len(prefix), HASH_CHUNK):
        hasher.update(prefix[start : start + HASH_CHUNK])
    return hasher.intdigest()


def _with(layout: Layout, *, generation: int, skeleton: bytes) -> Layout:
    return Layout(
        generation=generation,
        shard=layout.shard,
        leaves=layout.leaves,
        skeleton=skeleton,
        small=layout.small,
        sent=layout.sent,
        replicated=layout.replicated,
        total=layout.total,
    )


def _spec(leaf: Leaf) -> LeafSpec:
    tensor = leaf.tensor
    return LeafSpec(
        part=leaf.part,
        path=leaf.path,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        role=leaf.role,
        asynchronous=leaf.asynchronous,
        shards=leaf.shards,
    )
