"""Durable checkpoints: the whole run on disk, by ``torch.distributed.checkpoint``, beside training.

One folder per generation below ``OUT/checkpoints``. Workers write into ``step-N.eE.partial``, E
being their epoch; the
coordinator, and nobody else, renames it to ``step-N`` once every shard has said that its part is
there, so that a folder without ``.partial`` is complete and a fenced worker can publish nothing.

What is saved: modules and optimizers under their qualified names, so that FSDP2 models load at
another world size; everything else (random generators, cursors, scheduler, scaler, tally, and tensors
that differ between workers though they bear one name, such as statistics of BatchNorm) per shard.
An optimizer that lets peers' states differ saves what the next steps depend on, once for all peers
(:class:`~planaria.runtime.memory.optstate.Portable`): a run that goes on from there is close to the
one that was stopped, not equal to it.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from planaria.comm import buckets
from planaria.comm.buckets import ddp_modules
from planaria.errors import CheckpointError, CommError
from planaria.runtime.coordinator.publish import complete_path, partial_path
from planaria.runtime.memory.optstate import OptimizerPart, Portable
from planaria.runtime.memory.parts import Parts
from planaria.runtime.memory.placements import local
from planaria.runtime.memory.restoring import leave_iteration

_PORTABLE = "portable"
"""Key of the optimizers, by part, that have a form of their own for the disk."""
_ALONE = "alone"
"""Key of the tensors that a shard alone holds: DCP keeps one copy of what bears one name."""
_BUCKETS = "buckets"
"""Key of the order of DDP's buckets, beside the parts of a shard."""


@contextmanager
def nobody(epoch: int) -> Generator[None]:
    """Without peers there is nobody to meet, in whatever epoch."""
    del epoch
    yield


class DurableCheckpoints:
    """Writes and reads this worker's share.

    Args:
        out: folder of the run, shared by all machines.
        parts: what to save.
        group: a process group of its own, over all shards: writing goes on beside training, and two
            threads must not interleave their collectives on one group. None in a world of one.
        member: ``member(epoch)``, in which a thread's collectives are those of that epoch and raise
            once it is over (:meth:`planaria.comm.domain.Domain.member`).
    """

    def __init__(
        self,
        out: Path,
        parts: Parts,
        *,
        group: Any | None,
        member: Callable[[int], AbstractContextManager[None]] = nobody,
    ) -> None:
        self._out = out
        self._parts = parts
        self._group = group
        self._member = member
        self._running: threading.Thread | None = None
        self._epoch = -1

    def save(
        self,
        generation: int,
        told: Callable[[int, str | None, float], None],
        *,
        epoch: int,
        check: Callable[[], None] = lambda: None,
    ) -> float:
        """Begin to write ``generation`` as a member of ``epoch``; returns the seconds that the
        training thread has waited.

        Waits first for one that is still being written in this epoch, and for none of an earlier one,
        which writes into a folder of its own and can meet nobody. ``told(generation, error,
        seconds)`` is called from another thread when this worker's part is complete on disk, or has
        failed. ``check`` is called while it waits, and what it raises ends the waiting.
        """
        started = time.monotonic()
        self.wait(epoch, check=check)
        for ddp in ddp_modules(self._parts.modules).values():
            # Now, as the next forward would: what is resumed from here goes on with that cut.
            buckets.settle(ddp)
        # Its folder is made on that thread: where one worker cannot, all have to hear of it.
        path = partial_path(self._out, generation, epoch=epoch)
        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged = stager.stage(self._state())
        assert isinstance(staged, dict), "staging without a thread of its own gives the copy itself"

        def write() -> None:
            try:
                # Not async_save: this thread's collectives have to be known as those of ``epoch``.
                with self._member(epoch):
                    dcp.save(
                        staged,
                        checkpoint_id=path,
                        process_group=self._group,
                        no_dist=self._group is None,
                    )
            except (Exception, CheckpointException) as error:
                told(generation, _first_line(error), time.monotonic() - started)
            else:
                told(generation, None, time.monotonic() - started)
            finally:
                stager.close()

        self._epoch = epoch
        self._running = threading.Thread(target=write, name="planaria-durable", daemon=True)
        self._running.start()
        return time.monotonic() - started

    def wait(self, epoch: int, *, check: Callable[[], None] = lambda: None) -> None:
        """Until nothing is being written in ``epoch``; ``check`` as for :meth:`save`."""
        while self._epoch == epoch and self._running is not None and self._running.is_alive():
            self._running.join(0.1)
            check()

    def load(self, generation: int) -> None:
        """Put the state of ``generation`` back, in place; a collective.

        At another number of shards than it was written with, models and optimizers are re-sharded,
        and shard s continues with cursors and generators of shard s modulo the old number.

        Raises:
            CheckpointError: it cannot be read, or holds other parts than this run.
        """
        path = complete_path(self._out, generation)
        leave_iteration(self._parts)
        state = self._state()
        try:
            metadata = dcp.FileSystemReader(path).read_metadata()
            own = [k for k in metadata.state_dict_metadata if k.startswith("shards.")]
            shards = sorted({int(key.split(".")[1]) for key in own})
            if not shards:
                raise CheckpointError(
                    f"{path} holds no shard's cursors: it is not a run's checkpoint"
                )
            mine = shards[self._parts.shard % len(shards)]
            others = state.pop("shards")
            state["shards"] = {str(mine): next(iter(others.values()))}
            dcp.load(
                state, checkpoint_id=path, process_group=self._group, no_dist=self._group is None
            )
        except (CheckpointError, CommError):
            raise  # a peer was lost meanwhile: the checkpoint is good
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {_first_line(error)}; it was written by a run with "
                "other parts, or is damaged: remove that folder to go on from an older one"
            ) from error
        self._put(state, mine)

    def _state(self) -> dict[str, Any]:
        """The state dict that is written and, in place, read."""
        parts = self._parts
        state: dict[str, Any] = {}
        for name, (module, steppers) in _pairs(parts).items():
            plain, portable = _kinds(steppers)
            model_state, optimizer_state = get_state_dict(module, plain)
            state[name] = {"model": model_state, "optimizer": optimizer_state}
            for key, optimizer in portable.items():
                _put_means(model_state, optimizer)
                state[name].setdefault(_PORTABLE, {})[key] = optimizer.portable_state_dict()
        own: dict[str, Any] = {name: other.state_dict() for name, other in parts.others.items()}
        own[_ALONE] = {key: tensor.detach().cpu() for key, tensor in _alone(parts).items()}
        own[_BUCKETS] = {
            name: buckets.order(ddp) for name, ddp in ddp_modules(parts.modules).items()
        }
        buffer = io.BytesIO()
        torch.save(own, buffer)
        state["shards"] = {str(parts.shard): buffer}
        return state

    def _put(self, state: Mapping[str, Any], shard: int) -> None:
        for name, (module, steppers) in _pairs(self._parts).items():
            plain, portable = _kinds(steppers)
            set_state_dict(
                module,
                plain,
                model_state_dict=state[name]["model"],
                optim_state_dict=state[name]["optimizer"],
            )
            for key, optimizer in portable.items():
                optimizer.load_portable_state_dict(state[name][_PORTABLE][key])
        buffer = state["shards"][str(shard)]
        buffer.seek(0)
        own = torch.load(buffer, weights_only=False)
        for name, other in self._parts.others.items():
            if name not in own:
                raise CheckpointError(
                    f"the checkpoint has no part {name!r} (it has {', '.join(sorted(own))}): "
                    "resume with the script that wrote it"
                )
            other.load_state_dict(own[name])
        self._put_alone(own.get(_ALONE, {}))
        for name, ddp in ddp_modules(self._parts.modules).items():
            if order := own.get(_BUCKETS, {}).get(name):
                buckets.align(ddp, order)

    def _put_alone(self, saved: Mapping[tuple[str, str], torch.Tensor]) -> None:
        for key, tensor in _alone(self._parts).items():
            if key not in saved:
                continue
            if saved[key].shape != tensor.shape:
                raise CheckpointError(
                    f"{'.'.join(key)} is {tuple(tensor.shape)} here and {tuple(saved[key].shape)} in "
                    "the checkpoint, and no peer holds it: resume with as many workers as wrote it"
                )
            with torch.no_grad():
                tensor.copy_(saved[key])


def _pairs(parts: Parts) -> dict[str, tuple[nn.Module, list[OptimizerPart]]]:
    """Each module with the optimizers that step its parameters, for the qualified names."""
    left = dict(parts.optimizers)
    pairs: dict[str, tuple[nn.Module, list[OptimizerPart]]] = {}
    for name, module in parts.modules.items():
        ids = {id(p) for p in module.parameters()}
        mine = [
            key
            for key, part in left.items()
            if all(id(p) in ids for group in part.optimizer.param_groups for p in group["params"])
        ]
        pairs[name] = module, [left.pop(key) for key in mine]
    if left:
        raise CheckpointError(
            f"optimizer {sorted(left)[0]!r} steps parameters that are in no module among the parts: "
            "return their module from build(), too"
        )
    return pairs


def _kinds(steppers: list[OptimizerPart]) -> tuple[list[Optimizer], dict[str, Portable]]:
    """Those that torch's own functions save by the parameters' names, and the others by part."""
    plain = [part.optimizer for part in steppers if part.portable is None]
    return plain, {part.name: part.portable for part in steppers if part.portable is not None}


def _put_means(model_state: dict[str, Any], optimizer: Portable) -> None:
    """Replace weights that differ from peer to peer by what is to be saved of them; not in place,
    since the model may just be copied."""
    means = {local(parameter).data_ptr(): mean for parameter, mean in optimizer.mean_weights()}
    for key, value in model_state.items():
        if isinstance(value, torch.Tensor) and local(value).data_ptr() in means:
            model_state[key] = means[local(value).data_ptr()]


def _alone(parts: Parts) -> dict[tuple[str, str], torch.Tensor]:
    """What a shard alone holds, without what portable optimizers and their weights save once."""
    portable = {name: part for name, part in parts.optimizers.items() if part.portable is not None}
    stepped = {
        id(parameter)
        for part in portable.values()
        for parameter in part.parameters()
        if parameter.requires_grad
    }
    return {
        key: tensor
        for key, tensor in parts.alone().items()
        if key[0] not in portable and id(tensor) not in stepped
    }


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if isinstance(error, CheckpointException) and lines:
        return lines[-1]  # of the traceback of whoever failed
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def default_group(world: int) -> Any | None:
    """The group for :class:`DurableCheckpoints`; made by all workers at the same place in a build."""
    return dist.new_group() if world > 1 else None
