"""What each worker of a language-model run does.

:func:`main` is the function that the launcher calls in every worker; without a launcher it trains
in this process alone. The loop is an ordinary PyTorch loop around the runtime's attempts.

Shapes: B samples, T tokens, V entries of the vocabulary.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import planaria
from planaria.optim import training
from planaria.recipes.llm import export
from planaria.recipes.llm.config import LlmConfig
from planaria.recipes.llm.data import Corpus, Numbers, Order, prepare
from planaria.recipes.llm.evaluate import Evaluation, evaluate
from planaria.recipes.llm.models import causal_loss, make, wrap
from planaria.recipes.llm.scalars import Board, ProgressLine
from planaria.runtime.launch import worker


def main(config: LlmConfig) -> None:
    """Train ``config.model`` to ``config.steps`` and leave it in ``config.out / "model"``.

    Raises:
        DataError: the corpus cannot be read or is too small for a step.
        NonFiniteLoss: a loss was NaN or infinite and ``config.on_nonfinite`` is ``stop``.
    """
    torch.set_num_threads(config.threads)
    job = Job(config, prepare(config))
    joined = planaria.join(job.build, max_redo=config.max_redo, on_nonfinite=config.on_nonfinite)
    with joined as run:
        job.train(run)


class Job:
    """One worker's training: built by :meth:`build` when its shard is known."""

    def __init__(self, config: LlmConfig, corpus: Corpus) -> None:
        self.config = config
        self.corpus = corpus

    def build(self, shard: planaria.Shard) -> dict[str, Any]:
        """Model, optimizer and schedule for ``shard``, on the default group."""
        config = self.config
        self.shard = shard
        self.order = Order(
            samples=self.corpus.samples,
            seed=config.seed,
            world=shard.world,
            batch=config.batch,
            accumulate=config.accumulate,
        )
        whole = make(config, self.corpus.vocabulary)
        self.model = wrap(whole, config.regime, owned=config.owned)
        self.optimizer = optimizer(self.model, config)
        self.scheduler = LambdaLR(self.optimizer, lambda done: rate(config, done))
        self.board = Board(config.out / "tensorboard")
        # Weights are equal everywhere; dropout must differ from shard to shard.
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{config.seed}\0{shard.index}".encode()) >> 1)
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "board": self.board,
        }

    def train(self, run: planaria.Run) -> None:
        """Take every step, evaluate, and export the result."""
        config = self.config
        if worker.context() is not None:  # the launcher's screen shows each step's scalars
            self.attempt_all(run, None)
        else:
            with closing(ProgressLine(steps=config.steps, every=config.log_every)) as line:
                self.attempt_all(run, line)
        run.final(self.finish, **self.board.last)

    def attempt_all(self, run: planaria.Run, line: ProgressLine | None) -> None:
        """Take every step; shard 0 says how it goes on ``line``."""
        config = self.config
        self.since = time.monotonic()
        for attempt in run.attempts(until=config.steps, checkpoint_every=config.checkpoint_every):
            values: dict[str, float] = {}
            with attempt:
                values = self.step(run, attempt)
                attempt.log(**values)
                self.board.add(attempt.step, values)
            self.since = time.monotonic()
            if attempt.broken or self.shard.index != 0:
                continue
            self.board.write(upto=run.committed)
            if line is not None:
                line.say(attempt.step, {"skipped": 1.0} if attempt.skipped else values)

    def finish(self) -> None:
        """Write what is left of the scalars, and the model; a collective under FSDP2."""
        with training.averaged(self.optimizer):
            state = export.full_state(self.model)
        if self.shard.index == 0:
            self.board.write(upto=self.config.steps, now=True)
            self.board.close()
            export.write(
                self.config.out / "model",
                state=state,
                config=self.config,
                vocabulary=self.corpus.vocabulary,
            )

    def step(self, run: planaria.Run, attempt: planaria.Attempt) -> dict[str, float]:
        """One optimizer step, and an evaluation where one is due; its scalars by name."""
        config = self.config
        loss, ids = self.gradients(attempt.step)
        values: dict[str, float] = {}
        clipped = training.clip(self.model, self.optimizer, config.clip)
        attempt.consumed(ids.tolist())
        # A finite loss can have an infinite gradient; one agreement judges both.
        attempt.finite(loss if clipped is None else loss + 0.0 * clipped)
        values["lr"] = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        norm = training.norm_of_step(self.optimizer, clipped)
        if norm is not None:
            values["grad_norm"] = norm
        self.scheduler.step()
        self.optimizer.zero_grad()
        values["loss"] = self.mean(loss)
        tokens = self.order.per_step * config.sequence
        values["tokens_per_s"] = tokens / (time.monotonic() - self.since)
        due = config.eval_every and attempt.step % config.eval_every == 0
        if due or attempt.step == config.steps:
            with run.phase("evaluation"), training.averaged(self.optimizer):
                result = self.evaluate()
            values |= {"val_loss": result.loss, "perplexity": result.perplexity}
        return values

    def gradients(self, step: int) -> tuple[Tensor, Numbers]:
        """Accumulate the gradients of ``step``; this shard's mean loss and its samples' numbers."""
        config = self.config
        total = torch.zeros(())
        taken: list[Numbers] = []
        for micro in range(config.accumulate):
            ids = self.order.ids(step, shard=self.shard.index, micro=micro)
            taken.append(ids)
            ids_BT = torch.from_numpy(self.corpus.batch(ids))
            last = micro == config.accumulate - 1
            more = nullcontext() if last else training.accumulating(self.model, self.optimizer)
            with more:
                with autocast(config):
                    logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits
                loss = causal_loss(logits_BTV, ids_BT) / config.accumulate
                loss.backward()
            total += loss.detach()
        return total, np.concatenate(taken)

    def evaluate(self) -> Evaluation:
        """Loss on held-out text; a collective."""
        return evaluate(
            self.model,
            config=self.config,
            corpus=self.corpus,
            shard=self.shard.index,
            world=self.shard.world,
            autocast=autocast(self.config),
        )

    def mean(self, loss: Tensor) -> float:
        """The mean of ``loss`` over all workers; a collective."""
        loss = loss.clone()
        dist.all_reduce(loss)
        return float(loss) / self.shard.world


def rate(config: LlmConfig, done: int) -> float:
    """Share of ``config.lr`` for the step after ``done`` steps: a line up, then half a cosine down."""
    if done < config.warmup_steps:
        return (done + 1) / config.warmup_steps
    length = max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, (done - config.warmup_steps) / length)
    return config.lr_floor + (1.0 - config.lr_floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def autocast(config: LlmConfig) -> AbstractContextManager[object]:
    """bf16 autocast on the CPU, or nothing."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if config.dtype == "bf16" else nullcontext()


def optimizer(model: nn.Module, config: LlmConfig) -> Optimizer:
    """``config.optimizer``, which decays matrices and leaves vectors alone."""
    return training.make(
        config.optimizer,
        model,
        steps=config.steps,
        sparse=config.sparse,
        weight_decay=config.weight_decay,
        max_norm=config.clip,
        nonfinite="skip" if config.on_nonfinite == "skip" else "raise",
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
    )
