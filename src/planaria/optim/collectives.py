"""The few collectives that the optimizers use, on an ordinary ``torch.distributed`` group.

Only documented calls of ``torch.distributed`` are made, so the group may be gloo's, or a handle
whose inside is replaced. A group of one worker, or none at all, costs no communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planaria.errors import ConfigError
from planaria.optim import checks


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Returns when its output may be read."""
        ...


class Done:
    """A collective that needed no communication."""

    def wait(self) -> object:
        """Returns at once."""
        return True


class Workers:
    """The workers that share one model: a group, this worker's rank in it and its size.

    ``group`` is a one-dimensional ``DeviceMesh``, a process group, or ``None`` for the default
    group (and for a lone process where ``torch.distributed`` is not initialised). Where FSDP2 cut
    the model inside a node, :meth:`seat` makes known the workers of that node, ``inner``.
    """

    def __init__(self, group: DeviceMesh | dist.ProcessGroup | None) -> None:
        self._mesh: DeviceMesh | None = None
        self._grid: DeviceMesh | None = None
        self.inner: Workers | None = None
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise checks.OptionError(
                    f"group is a mesh of {group.ndim} axes; give one axis of it, as mesh['dp']"
                )
            self._mesh, self.group = group, group.get_group()
        elif group is not None:
            self.group = group
        elif dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD
        if self.group is not None:
            self.rank = dist.get_rank(self.group)
            self.size = dist.get_world_size(self.group)
            if self.rank < 0:
                raise checks.OptionError(
                    "this process is not a member of group; build the optimizer only on members"
                )

    @staticmethod
    def of(group: Workers | DeviceMesh | dist.ProcessGroup | None) -> Workers:
        """The workers of a group; the same ones where they are given themselves."""
        return group if isinstance(group, Workers) else Workers(group)

    def mesh(self, device_type: str) -> DeviceMesh | None:
        """A mesh over the group, for DTensor; ``None`` where nothing is initialised."""
        if self._mesh is None and self.group is not None:
            self._mesh = DeviceMesh.from_group(self.group, device_type)
        return self._mesh

    def seat(self, mesh: DeviceMesh | None) -> None:
        """Makes known over which mesh FSDP2 cut the parameters inside the node, if it did."""
        self.inner = None if mesh is None else Workers(mesh)

    def grid(self, device_type: str) -> DeviceMesh | None:
        """The mesh (shard, replicate) where there is a node's axis, else :meth:`mesh`; collective."""
        if self._grid is None:
            between = self.mesh(device_type)
            inner = self.inner and self.inner.mesh(device_type)
            if between is None or inner is None:
                return between
            rows = self.table([float(rank) for rank in inner.mesh.flatten().tolist()])
            self._grid = DeviceMesh.from_group(
                [inner.get_group(), between.get_group()],
                device_type,
                mesh=rows.to(torch.int).T.contiguous(),
                mesh_dim_names=("shard", "replicate"),
            )
        return self._grid

    def exchange(self, received_NS: Tensor, sent_NS: Tensor) -> Pending:
        """Row r of ``sent`` goes to worker r; row r of ``received`` comes from it."""
        if not sent_NS.numel():
            return Done()
        if self.size == 1:
            if received_NS is not sent_NS:
                received_NS.copy_(sent_NS)
            return Done()
        return _pending(
            dist.all_to_all_single(received_NS, sent_NS, group=self.group, async_op=True)
        )

    def gather(self, rows_NS: Tensor, row_S: Tensor) -> Pending:
        """Row r of ``rows`` becomes the ``row`` of worker r."""
        if not row_S.numel():
            return Done()
        if self.size == 1:
            rows_NS.view(-1).copy_(row_S.view(-1))
            return Done()
        return _pending(
            dist.all_gather_single(
                rows_NS.view(-1), row_S.contiguous().view(-1), group=self.group, async_op=True
            )
        )

    def table(self, values: Sequence[float]) -> Tensor:
        """The ``values`` of all workers, float64 of shape [N, len(values)], on the CPU's side."""
        row = torch.tensor(values, dtype=torch.float64, device=self._device())
        rows = torch.empty(self.size, len(values), dtype=torch.float64, device=row.device)
        self.gather(rows, row).wait()
        return rows.cpu()

    def same(self, what: str, value: int, *, advice: str) -> None:
        """Raises :class:`planaria.optim.checks.ReplicaError` everywhere if ``value`` differs.

        ``value`` is below 2**52, so that a float64 carries it exactly.
        """
        values = self.table([float(value)])[:, 0].tolist()
        differ = len(set(values)) > 1
        listed = ", ".join(f"{int(v):x}" for v in values)
        if self.inner is not None:
            # The whole node hears of it, or the others would wait for this worker.
            found = self.inner.table([float(differ)])[:, 0].tolist()
            if any(found) and not differ:
                differ, listed = True, f"among those of shard {found.index(1.0)}"
        if differ:
            raise checks.ReplicaError(f"{what} differs between workers ({listed}); {advice}")

    @contextlib.contextmanager
    def together(self, what: str, *, advice: str, kind: type[ConfigError]) -> Generator[None]:
        """An error inside it ends in an error on every worker: this one, or one of ``kind``.

        ``what`` says what a worker could not do, ``advice`` what to do about it.
        """
        inner, error = self.inner, None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = self.table([float(error is not None)])[:, 0].tolist()
        named = f"worker {failed.index(1.0)}" if any(failed) else ""
        if inner is not None:
            node = inner.table([float(bool(named))])[:, 0].tolist()
            if any(node):
                named = named or f"a worker of shard {node.index(1.0)}"
        if error is not None:
            raise error
        if named:
            raise kind(f"{what} on {named}, which says why; {advice}")

    def _device(self) -> torch.device:
        if self.group is not None and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _pending(work: Pending | None) -> Pending:
    return Done() if work is None else work


def mean_rows(rows_NS: Tensor) -> Tensor:
    """The mean over dim 0, summed in the order of the ranks, in place in row 0; returns that row.

    The order is fixed so that every layout of the same numbers gives the same bits.
    """
    total_S = rows_NS[0]
    for row_S in rows_NS[1:]:
        total_S.add_(row_S)
    if rows_NS.shape[0] > 1:
        total_S.div_(rows_NS.shape[0])
    return total_S


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number below 2**52 that depends on every bit of the tensors and on their order."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        pad = -flat.numel() % 4
        words = torch.cat([flat, flat.new_zeros(pad)]) if pad else flat
        numbers = words.view(torch.int32).to(torch.int64)
        weights = torch.arange(1, numbers.numel() + 1) % 65521 + 1
        total = (total * 1000003 + int((numbers * weights).sum())) % (1 << 52)
    return total
