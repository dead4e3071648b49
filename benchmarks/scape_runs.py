"""Training runs of ``scape_table.py``: a few workers that stay and train one run after the other.

The workers are real processes in one gloo group; each run makes the recipe's network, data order
and optimizer anew. Starting them once saves half a minute a run.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from scape_methods import DRIFTING, parse, setup

EVALUATIONS = 20
"""Points of a curve."""
WINDOWS = 128
"""Held-out samples of each point, the same ones at every point and in every run."""
DENSE = 0.1
"""Share of dense steps at the start of the methods that send little."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; the same values are the same run."""

    method: str
    """As :mod:`scape_methods` reads it."""
    lr: float
    """Highest learning rate."""
    seed: int
    """Of weights and order of samples."""
    steps: int
    """Optimizer steps."""
    model: str
    """Name in the recipe."""
    workers: int
    """Gloo workers."""
    batch: int
    """Samples of one worker and step."""
    sequence: int
    """Tokens of a sample."""
    vocab_size: int
    """Entries of the tokenizer."""
    max_bytes: int
    """Bytes of text."""


def share_of_rate(done: int, run: Run) -> float:
    """A line up, then half a cosine down to a tenth."""
    warm = max(1, run.steps // 20)
    if done < warm:
        return (done + 1) / warm
    progress = min(1.0, (done - warm) / max(1, run.steps - 1 - warm))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(rank: int, run: Run, cache: str) -> dict[str, Any]:
    """One worker's part of one run; the row of its results."""
    from pathlib import Path

    import torch

    from planaria.optim.checks import GradientError
    from planaria.recipes.llm.config import LlmConfig
    from planaria.recipes.llm.data import Order, prepare
    from planaria.recipes.llm.models import causal_loss, make

    config = LlmConfig(
        model=run.model,
        cache=Path(cache),
        max_bytes=run.max_bytes,
        vocab_size=run.vocab_size,
        sequence=run.sequence,
        batch=run.batch,
        steps=run.steps,
        lr=run.lr,
        seed=run.seed,
        held_out=0.05,
    )
    corpus = prepare(config, world=run.workers)
    model = make(config, corpus.vocabulary)
    module, optimizer = setup(
        run.method, model, lr=run.lr, clip=config.clip, dense_steps=DENSE, total_steps=run.steps
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: share_of_rate(done, run))
    order = Order(
        samples=corpus.samples, seed=run.seed, world=run.workers, batch=run.batch, accumulate=1
    )
    clips = hasattr(optimizer, "max_norm")
    drifts = parse(run.method)[0] in DRIFTING
    every = max(1, run.steps // EVALUATIONS)
    curve: list[tuple[int, float]] = []
    begin = time.perf_counter()
    row: dict[str, Any] = {}
    for step in range(1, run.steps + 1):
        ids = torch.from_numpy(corpus.batch(order.ids(step, shard=rank, micro=0)))
        optimizer.zero_grad()
        causal_loss(module(input_ids=ids, use_cache=False).logits, ids).backward()
        if not clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        try:
            optimizer.step()
        except GradientError:
            row["diverged"] = step
            curve.append((step, math.nan))
            break
        schedule.step()
        if step % every == 0 or step == run.steps:
            with mean_weights(model) if drifts else contextlib.nullcontext():
                curve.append((step, held_out(model, config, corpus, rank, run.workers)))
    params = [p.numel() for p in model.parameters()]
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    return {
        **asdict(run),
        "curve": curve,
        **row,
        "params": sum(params),
        "vectors": vectors,
        "dense_steps": dense_steps(run),
        "seconds": time.perf_counter() - begin,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def dense_steps(run: Run) -> int:
    """First steps of a run that are dense."""
    family, _, options = parse(run.method)
    if family in ("adamw", "adams"):
        return run.steps
    share = options.get("dense_steps", DENSE)
    return round(share * run.steps) if 0 < share < 1 else int(share)


@contextlib.contextmanager
def mean_weights(model: Any) -> Generator[None]:
    """Inside it the parameters hold the mean over the workers, by one all-reduce."""
    import torch
    import torch.distributed as dist

    params = list(model.parameters())
    with torch.no_grad():
        own = [p.clone() for p in params]
        mean = torch.cat([p.view(-1) for p in own])
        dist.all_reduce(mean)
        mean.div_(dist.get_world_size())
        for param, part in zip(params, mean.split([p.numel() for p in params]), strict=True):
            param.copy_(part.view_as(param))
    try:
        yield
    finally:
        with torch.no_grad():
            for param, kept in zip(params, own, strict=True):
                param.copy_(kept)


def held_out(model: Any, config: Any, corpus: Any, rank: int, world: int) -> float:
    """Loss on the first held-out samples."""
    from planaria.recipes.llm.evaluate import evaluate

    batch = 16
    found = evaluate(
        model,
        config=replace(config, batch=batch, eval_batches=max(1, WINDOWS // (world * batch))),
        corpus=corpus,
        shard=rank,
        world=world,
        autocast=contextlib.nullcontext(),
    )
    return found.loss


def serve(rank: int, workers: int, store: str, cache: str, pipe: Any) -> None:
    """A worker: trains what comes through ``pipe`` and sends its row, until ``None`` comes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=600),
    )
    while (run := pipe.recv()) is not None:
        row = train(rank, run, cache)
        gc.collect()
        pipe.send(row)
    dist.destroy_process_group()


class Pool:
    """Workers that train runs; a context manager."""

    def __init__(self, workers: int, *, cache: str) -> None:
        self.workers, self.cache = workers, cache
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Pool:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "planaria.optim.scape"])
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.workers):
            mine, theirs = context.Pipe()
            arguments = (rank, self.workers, f"{self._folder.name}/store", self.cache, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        return self

    def execute(self, run: Run, *, limit: float) -> dict[str, Any]:
        """The row of a run; worker 0's, after all have ended it.

        Ends the program where a worker failed or the run takes longer than ``limit`` seconds.
        """
        for pipe in self._pipes:
            pipe.send(run)
        rows = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(limit):
                raise SystemExit(f"{run} takes longer than {limit:g} s; raise --limit")
            try:
                rows.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"{run}: worker {rank} failed; see the traceback above") from None
        return rows[0]

    def __exit__(self, kind: Any, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None and process.is_alive():
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(20 if kind is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
