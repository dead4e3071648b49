"""The handle: a process group whose inside can be replaced.

:class:`RebuildableGroup` subclasses ``torch.distributed.ProcessGroup`` and forwards each operation to an
inner group (gloo or NCCL). DDP, FSDP2, DTensor, pipelines and user code keep the handle; a swap gives it
a new inside. :func:`register` makes it the backend ``"planaria"``.

Source: our choice (decisions 1 to 5 of the design). Shapes are those of ``torch.distributed``.
"""

from __future__ import annotations

# pyright: reportIncompatibleMethodOverride=false
# pyright: reportIncompatibleVariableOverride=false
# c10d calls these methods by position, and its stubs name the parameters otherwise from release to
# release.
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.futures import Future

from planaria.comm.domain import Domain, Mode
from planaria.comm.work import HandleWork, Pending, WaitedWork, first_line, last
from planaria.errors import CommError, EpochSuperseded, UserError

BACKEND = "planaria"

# What gloo and NCCL say when a peer or the network is gone. Anything else that is raised while an
# operation is launched is the caller's mistake (shapes, dtypes) and must reach the caller: a mistake
# taken for a broken communicator would return garbage.
_COMMUNICATOR_WORDS = (
    "connection",
    "closed by peer",
    "timed out",
    "timeout",
    "broken pipe",
    "socket",
    "connect",
    "nccl",
    "aborted",
    "reset by peer",
    "rendezvous",
)


def _is_communicator_error(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | CommError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _COMMUNICATOR_WORDS)


class RebuildableGroup(dist.ProcessGroup):
    """A group of the domain; ``inner`` is None between ``drop`` and ``fill``, and in a solo build."""

    def __init__(self, domain: Domain, *, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._domain = domain
        self._name = name
        self._my_rank = rank
        self._my_size = size
        self._description = "undefined"
        self.inner: Any = None
        self._has_lost = False

    # ------------------------------------------------------------------ inside

    def fill(self) -> None:
        """Make a new inside in the domain's epoch; blocks until all members do."""
        self.inner = self._domain.transport.make(
            self._domain.store(self._name),
            rank=self._my_rank,
            size=self._my_size,
            timeout=self._domain.timeout,
            connect=self._domain.rebuild_timeout / 3,
        )

    def meet(self) -> None:
        """Wait until every member is here, as long as a collective may take.

        For a group that is made beside training, in a script's ``build``: members come to it seconds
        apart, and the constructor's own time-out is short, for the sake of rebuilds.
        """
        domain = self._domain
        domain.kv.put(domain.epoch, f"here/{self._name}/{self._my_rank}", b"")
        keys = [f"here/{self._name}/{rank}" for rank in range(self._my_size)]
        domain.kv.get_many(domain.epoch, keys, domain.timeout)

    def drop(self) -> None:
        """Let the inside go. Training thread only, and after its sockets have been shut."""
        if self._has_lost:
            self._domain.lost.append(self.inner)
        self.inner, self._has_lost = None, False

    def _lose(self) -> None:
        self._has_lost = True

    # ------------------------------------------------------------------ what c10d asks of a group

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._domain.transport.device_types]

    def _get_backend_name(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802 (the name that C++ calls)
        return BACKEND

    def rank(self) -> int:
        return self._my_rank

    def size(self) -> int:
        return self._my_size

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers serve c10d's debug level, which compares them over a store."""

    def _get_sequence_number_for_group(self) -> int:
        return self._domain.entered

    def set_timeout(self, timeout: timedelta) -> None:
        """Time-outs derive from the run's own; a group's is not changed (see runtime.limits)."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def abort(self) -> None:
        self._domain.fail(self._domain.epoch, f"group {self._name} was aborted by the program")

    def shutdown(self) -> None:
        """``destroy_process_group`` calls this; the inside goes with the handle."""
        self._domain.handles.pop(self._name, None)
        self.drop()

    # ------------------------------------------------------------------ running

    def _run(
        self,
        launch: Callable[[Any], Any],
        outputs: list[torch.Tensor],
        alone: Callable[[], None],
        arrived: Callable[[], None] | None = None,
    ) -> HandleWork:
        """Launch on the inside, or do ``alone`` what the operation means for the caller's own data.

        ``arrived`` brings what has come into ``outputs``, where the inner operation does not.
        """
        domain = self._domain
        # First the inside, then the epoch: a rebuild changes them in the other order, so that a
        # thread of an older epoch can never have the new inside and pass.
        inner = self.inner
        domain.still_member()
        if domain.mode is not Mode.LIVE:
            return self._alone(outputs, alone)
        if inner is None:
            raise UserError(
                f"process group {self._name} was destroyed, and {self._description} still uses it: "
                "let go of the model or code that holds it, or do not destroy the group"
            )
        epoch = domain.epoch
        try:
            work = launch(inner)
        except (RuntimeError, CommError) as error:
            if domain.mode is Mode.LIVE and not _is_communicator_error(error):
                raise
            domain.fail(epoch, f"{type(error).__name__}: {first_line(error)}")
            return self._alone(outputs, alone)
        try:
            inner_future = work.get_future()
        except RuntimeError:  # "Work::getFuture not implemented."
            domain.enter()
            pending = Pending(domain, outputs=outputs, stuck=self._lose)
            made: HandleWork = WaitedWork(domain, pending, work)
        else:
            pending = Pending(domain, outputs=outputs, stuck=self._lose, arrived=arrived)
            domain.enter(pending)
            inner_future.add_done_callback(pending.finish)
            made = HandleWork(domain, pending.future)
        if domain.on_collective is not None:
            domain.on_collective()
        return made

    def _alone(self, outputs: list[torch.Tensor], alone: Callable[[], None]) -> HandleWork:
        domain = self._domain
        domain.still_member()
        if domain.mode is Mode.BROKEN and not domain.may_complete():
            domain.check()
        if domain.mode is Mode.SOLO and self._my_size > 1 and domain.receives_objects():
            raise UserError(
                "build() on a spare cannot receive Python objects from peers, which are not building: "
                "compute them from the seed, read them from a file, or receive them before join()"
            )
        with torch.no_grad():
            alone()
        future: Future[Any] = Future()
        future.set_result(outputs)
        return HandleWork(domain, future)

    # ------------------------------------------------------------------ operations

    def allreduce(self, tensors: Any, opts: Any = None, **kwargs: Any) -> HandleWork:
        tensors = _as_list(tensors)
        if not isinstance(opts, AllreduceOptions):
            opts = _options(AllreduceOptions, reduceOp=opts, **kwargs)
        return self._run(lambda g: g.allreduce(tensors, opts), tensors, _nothing)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> HandleWork:
        opts = opts or AllreduceCoalescedOptions()
        return self._run(lambda g: g.allreduce_coalesced(tensors, opts), tensors, _nothing)

    def broadcast(self, tensors: Any, opts: Any = None, **kwargs: Any) -> HandleWork:
        tensors = _as_list(tensors)
        if not isinstance(opts, BroadcastOptions):
            opts = _options(BroadcastOptions, rootRank=opts, **kwargs)
        return self._run(lambda g: g.broadcast(tensors, opts), tensors, _nothing)

    def reduce(self, tensors: Any, opts: Any = None) -> HandleWork:
        tensors = _as_list(tensors)
        opts = opts or ReduceOptions()
        return self._run(lambda g: g.reduce(tensors, opts), tensors, _nothing)

    def barrier(self, opts: Any = None) -> HandleWork:
        opts = opts or BarrierOptions()
        return self._run(lambda g: g.barrier(opts), [], _nothing)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> HandleWork:
        opts = opts or AllgatherOptions()

        def alone() -> None:
            for gathered, own in zip(outputs, inputs, strict=True):
                for slot in gathered:
                    slot.copy_(own)

        flat = [slot for gathered in outputs for slot in gathered]
        return self._run(lambda g: g.allgather(outputs, inputs, opts), flat, alone)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HandleWork:
        opts = opts or AllgatherOptions()

        def alone() -> None:
            for gathered in outputs:
                for slot, own in zip(gathered, inputs, strict=True):
                    slot.copy_(own)

        flat = [slot for gathered in outputs for slot in gathered]
        return self._run(lambda g: g.allgather_coalesced(outputs, inputs, opts), flat, alone)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> HandleWork:
        opts = opts or AllgatherOptions()

        def alone() -> None:
            output.view(self._my_size, -1).copy_(input.reshape(1, -1).expand(self._my_size, -1))

        return self._run(lambda g: g._allgather_base(output, input, opts), [output], alone)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> HandleWork:
        return self.all_gather_single(output, input, opts)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> HandleWork:
        """Python's gloo group lacks this operation, which DTensor needs: one gather per tensor."""
        return last(
            [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> HandleWork:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HandleWork:
        opts = opts or ReduceScatterOptions()

        def alone() -> None:
            for slot, parts in zip(outputs, inputs, strict=True):
                slot.copy_(parts[self._my_rank])

        return self._run(lambda g: g.reduce_scatter(outputs, inputs, opts), list(outputs), alone)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> HandleWork:
        opts = opts or ReduceScatterOptions()

        def alone() -> None:
            output.view(-1).copy_(input.reshape(self._my_size, -1)[self._my_rank])

        if self._domain.transport.reduces_whole:
            # What gloo does itself, but with a future, by which it can be left.
            whole = input.clone()
            reduce = _options(AllreduceOptions, reduceOp=opts.reduceOp)

            def arrived() -> None:
                output.view(-1).copy_(whole.reshape(self._my_size, -1)[self._my_rank])

            return self._run(lambda g: g.allreduce([whole], reduce), [output], alone, arrived)
        return self._run(lambda g: g._reduce_scatter_base(output, input, opts), [output], alone)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> HandleWork:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> HandleWork:
        return last(
            [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> HandleWork:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
    ) -> HandleWork:
        opts = opts or AllToAllOptions()
        out_splits, in_splits = list(output_split_sizes or []), list(input_split_sizes or [])

        def alone() -> None:
            if output.numel() == input.numel():
                output.view(-1).copy_(input.reshape(-1))
            else:
                output.zero_()

        return self._run(
            lambda g: g.alltoall_base(output, input, out_splits, in_splits, opts), [output], alone
        )

    def alltoall_base(
        self, output: Any, input: Any, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> HandleWork:
        return self.all_to_all_single(output, input, out_splits, in_splits, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> HandleWork:
        opts = opts or AllToAllOptions()

        def alone() -> None:
            for slot, own in zip(outputs, inputs, strict=True):
                if slot.shape == own.shape:
                    slot.copy_(own)

        return self._run(lambda g: g.alltoall(outputs, inputs, opts), list(outputs), alone)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> HandleWork:
        opts = opts or GatherOptions()

        def alone() -> None:
            for gathered, own in zip(outputs, inputs, strict=False):
                for slot in gathered:
                    slot.copy_(own)

        flat = [slot for gathered in outputs for slot in gathered]
        return self._run(lambda g: g.gather(outputs, inputs, opts), flat, alone)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HandleWork:
        opts = opts or ScatterOptions()

        def alone() -> None:
            for slot, parts in zip(outputs, inputs, strict=False):
                slot.copy_(parts[self._my_rank])

        return self._run(lambda g: g.scatter(outputs, inputs, opts), list(outputs), alone)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> HandleWork:
        return self._run(lambda g: g.send(tensors, dst, tag), list(tensors), _nothing)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> HandleWork:
        return self._run(lambda g: g.recv(tensors, src, tag), list(tensors), _nothing)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HandleWork:
        return self._run(lambda g: g.recv_anysource(tensors, tag), list(tensors), _nothing)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self.barrier().wait()


def _nothing() -> None:
    """Alone, the operation leaves the caller's own data as it is."""


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(kind: Any, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        if value is not None:
            setattr(options, name, value)
    return options


def register(domain: Domain) -> None:
    """Make ``init_process_group("planaria")`` and each later ``new_group`` give handles of ``domain``.

    c10d keeps backends in one table per process; a second call in the same process re-binds the name
    to the newer domain, so a process serves one run at a time.
    """

    def create(options: Any, _: Any) -> RebuildableGroup:
        name = str(options.group_id)
        handle = RebuildableGroup(
            domain, name=name, rank=options.group_rank, size=options.group_size
        )
        domain.handles[name] = handle
        if domain.mode is Mode.LIVE:
            try:
                handle.meet()
                handle.fill()
            except EpochSuperseded:
                raise
            except (RuntimeError, CommError) as error:
                domain.fail(domain.epoch, first_line(error))
                raise CommError(f"group {name} could not be made: {first_line(error)}") from error
        return handle

    devices = list(domain.transport.device_types)
    plugins = dist.Backend._plugins
    if BACKEND.upper() in plugins:
        plugins[BACKEND.upper()] = plugins[BACKEND.upper()]._replace(creator_fn=create)
    else:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=devices)


def init_default(domain: Domain, *, seconds: float) -> None:
    """Make the default group of this process a handle of ``domain`` (``domain.begin`` came before)."""
    dist.init_process_group(
        BACKEND,
        store=domain.epoch_store(),
        rank=domain.rank,
        world_size=domain.world,
        timeout=timedelta(seconds=seconds),
    )
