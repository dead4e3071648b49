"""What the ranks of :mod:`tests.support.ranks` do."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from planaria.comm import Domain, GlooTransport, buckets, init_default, pipelines, register
from planaria.errors import AttemptBroken, EpochSuperseded
from tests.support.polled_kv import PolledKeyValue


def serve(pipe: Connection, rank: int, world: int, port: int, solo: bool, kind: str) -> None:
    """Answer commands until the pipe closes."""
    torch.set_num_threads(1)
    try:
        program = Program(rank, world, port, solo, kind)
    except Exception:
        pipe.send(("error", traceback.format_exc()))
        return
    pipe.send(("ok", None))
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("ok", getattr(program, name)(*arguments)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


class Program:
    """One rank: a domain, a model of some ``kind``, an optimizer, and attempts at steps."""

    def __init__(self, rank: int, world: int, port: int, solo: bool, kind: str) -> None:
        self.rank, self.world, self.kind = rank, world, kind
        self.kv = PolledKeyValue(port)
        self.domain = Domain(GlooTransport(), self.kv, timeout=40, rebuild=20)
        self.failures: list[tuple[int, str]] = []
        self.domain.on_failure = lambda epoch, reason: self.failures.append((epoch, reason))
        threading.Thread(target=self._follow, args=(port,), daemon=True).start()
        register(self.domain)
        self.domain.begin(self.kv.newest(), rank=rank, world=world, solo=solo)
        init_default(self.domain, seconds=40)
        self.step = 0
        self.signal: int | None = None
        self._build()

    def _follow(self, port: int) -> None:
        """The control thread: leave what is over."""
        keys = PolledKeyValue(port)
        seen = keys.newest()
        while True:
            newest = keys.newest()
            if newest > seen:
                seen = newest
                self.domain.supersede(newest, "a peer was lost")
            time.sleep(0.01)

    def stray(self, epoch: int) -> str:
        """What a thread of the epoch before hears, once the groups are new."""
        heard: list[str] = []
        rebuilt = threading.Event()

        def speak() -> None:
            with self.domain.member(epoch - 1):
                rebuilt.wait(30)
                try:
                    dist.all_reduce(torch.ones(1))
                    heard.append("an answer")
                except EpochSuperseded as error:
                    heard.append(str(error))

        thread = threading.Thread(target=speak)
        thread.start()
        self.rebuild(epoch)
        rebuilt.set()
        thread.join()
        return heard[0]

    def group_after(self, seconds: float) -> float:
        """Comes to a new group ``seconds`` late; the sum of ones over it."""
        self.domain.rebuild_timeout = 1.5
        time.sleep(seconds)
        group = dist.new_group()
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        return ones.item()

    def _build(self) -> None:
        torch.manual_seed(0)
        layers = [
            nn.Linear(10, 64),
            nn.ReLU(),
            nn.Linear(64, 96),
            nn.Tanh(),
            nn.Linear(96, 32),
            nn.Linear(32, 4),
        ]
        self.schedule: Any = None
        net = nn.Sequential(*layers)
        mesh = None
        if self.kind == "ddp":
            self.model: nn.Module = DistributedDataParallel(net, bucket_cap_mb=0.02)
        elif self.kind == "fsdp":
            self.model = net
            self._shard(None)
        elif self.kind == "hsdp":
            mesh = dist.init_device_mesh(
                "cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard")
            )
            self.model = net
            self._shard(mesh)
        elif self.kind == "tp_fsdp":
            mesh = dist.init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
            plan = {
                "0": ColwiseParallel(),
                "2": RowwiseParallel(),
                "4": ColwiseParallel(),
                "5": RowwiseParallel(),
            }
            self.model = net
            parallelize_module(net, mesh["tp"], plan)
            self._shard(mesh["dp"])
        elif self.kind in ("gpipe", "1f1b"):
            cut = -(-len(layers) // self.world)
            mine = layers[self.rank * cut : (self.rank + 1) * cut]
            self.model = nn.Sequential(*mine)
            widths = [10, 64, 96, 4]
            # With declared shapes; without, a fresh schedule asks its neighbours for theirs.
            stage = PipelineStage(
                self.model,
                self.rank,
                self.world,
                torch.device("cpu"),
                input_args=torch.empty(4, widths[self.rank], requires_grad=self.rank > 0),
                output_args=torch.empty(4, widths[self.rank + 1], requires_grad=True),
            )
            schedule = ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B
            self.schedule = schedule(
                stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).pow(2).mean()
            )
        else:
            raise ValueError(self.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def _shard(self, mesh: Any) -> None:
        for layer in self.model:  # type: ignore[union-attr]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    # ------------------------------------------------------------------ commands

    def attempt(self, victim: int | None = None, signal: int | None = None, where: str = "") -> Any:
        """One step; ("done", digest) or ("broken", seconds it took to be left)."""
        if self.rank == victim:
            self.signal, self.where = signal, where
        begun = time.monotonic()
        try:
            self._step(self.step + 1)
            self.domain.check()
        except AttemptBroken:
            self.domain.rest()
            self.optimizer.zero_grad()
            return "broken", time.monotonic() - begun
        self.step += 1
        return "done", self.digest()

    def _fire(self, where: str) -> None:
        if self.signal is not None and self.where == where:
            signal, self.signal = self.signal, None
            os.kill(os.getpid(), signal)

    def _data_rank(self) -> int:
        """Tensor-parallel peers see the same data."""
        return self.rank // (self.world // 2) if self.kind == "tp_fsdp" else self.rank

    def _step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + self._data_rank())
        if self.schedule is not None:
            x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
            t = torch.randn(16, 4, generator=torch.Generator().manual_seed(step + 1))
            self._fire("forward")
            if self.rank == 0:
                self.schedule.step(x)
            elif self.rank == self.world - 1:
                self.schedule.step(target=t)
            else:
                self.schedule.step()
        else:
            for micro in range(3):
                self.domain.check()
                y = self.model(torch.randn(4, 10, generator=generator))
                if micro == 1:
                    self._fire("forward")
                    y.register_hook(lambda grad: self._fire("backward"))
                y.pow(2).sum().backward()
        self.domain.check()
        self._fire("clip")
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.domain.check()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        hasher = hashlib.sha256()
        for tensor in self._tensors():
            hasher.update(tensor.numpy().tobytes())
        return hasher.hexdigest()

    def _tensors(self) -> list[torch.Tensor]:
        found = [p.detach() for p in self.model.parameters()]
        for p in self.model.parameters():
            state = self.optimizer.state.get(p, {})
            found += [state[key] for key in ("exp_avg", "exp_avg_sq") if key in state]
        return [t.to_local() if hasattr(t, "to_local") else t for t in found]

    def state(self) -> Any:
        return self.step, [tensor.numpy().copy() for tensor in self._tensors()]

    def load(self, state: Any) -> None:
        """Take over a lost rank's state, as it was before the broken attempt."""
        self.step, arrays = state
        for p in self.model.parameters():
            if not self.optimizer.state.get(p):
                self.optimizer.state[p] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        for tensor, array in zip(self._tensors(), arrays, strict=True):
            tensor.copy_(torch.from_numpy(array))

    def order(self) -> tuple[int, ...]:
        return buckets.order(self.model) if self.kind == "ddp" else ()  # type: ignore[arg-type]

    def rebuild(self, epoch: int, order: tuple[int, ...] = ()) -> float:
        begun = time.monotonic()
        if order:
            buckets.align(self.model, order)  # type: ignore[arg-type]
        if self.schedule is not None:
            pipelines.begin_anew(self.schedule)
        self.domain.rebuild(epoch)
        return time.monotonic() - begun

    def try_rebuild(self, epoch: int) -> tuple[str, float]:
        """A rebuild that is to be superseded: the error's name and the seconds it took."""
        begun = time.monotonic()
        try:
            self.domain.rebuild(epoch)
        except EpochSuperseded as error:
            return type(error).__name__, time.monotonic() - begun
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begun
        return "rebuilt", time.monotonic() - begun

    def objects(self) -> Any:
        """Object collectives and a barrier on the default group, and a sum on a group of two."""
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, {"rank": self.rank})
        box = ["from zero" if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        dist.barrier()
        return [item["rank"] for item in gathered], box[0]

    def broken_objects(self) -> str:
        """What an object collective does in a broken worker."""
        try:
            dist.all_gather_object([None] * self.world, 1)
        except AttemptBroken as error:
            return str(error)
        return "completed"

    def mistake(self) -> str:
        """A caller's mistake must reach the caller and leave the group usable."""
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.complex64), op=dist.ReduceOp.MAX)
        except Exception as error:
            return f"{type(error).__name__}, {self.domain.mode.value}"
        return f"no error, {self.domain.mode.value}"

    def wait_forever(self, victim: int, signal: int) -> Any:
        """An all-reduce that rank ``victim`` never enters."""
        if self.rank == victim:
            os.kill(os.getpid(), signal)
        begun = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1 << 20))
            self.domain.check()
        except AttemptBroken:
            self.domain.rest()
            return "broken", time.monotonic() - begun
        return "done", time.monotonic() - begun
