"""What each worker of a Gleason run does.

:func:`main` is the function that the launcher calls in every worker; without a launcher it trains
in this process alone. Shapes: B slides.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import planaria
from planaria.optim import training
from planaria.optim.choice import OWNED
from planaria.pathology.bundle import grade_loss, save_bundle
from planaria.pathology.files import atomic, write_json
from planaria.pathology.heat import DISCLAIMER
from planaria.pathology.losses import GradeLoss
from planaria.pathology.metrics import apply_thresholds, fit_thresholds, kappa
from planaria.pathology.order import SampleOrder
from planaria.pathology.plots import plot_confusion
from planaria.pathology.training import (
    Ahead,
    Best,
    autocast,
    average_statistics,
    class_weights,
    rate,
)
from planaria.recipes.gleason.config import GleasonConfig, as_toml
from planaria.recipes.gleason.data import Prepared, prepare
from planaria.recipes.gleason.evaluate import ROUNDING, expected_grades, measure
from planaria.recipes.gleason.models import CLASSES, card, inputs, make, wrap

Batch = tuple[Tensor, Tensor, NDArray[np.int64]]


def main(config: GleasonConfig) -> None:
    """Train, fit the cuts on the validation part, test once, and export.

    Raises:
        DataError: the data cannot be read or is too small for a step.
        NonFiniteLoss: a loss was NaN or infinite.
    """
    torch.set_num_threads(config.threads)
    job = Job(config, prepare(config))
    with planaria.join(job.build, max_redo=config.max_redo) as run:
        job.train(run)


class Job:
    """One worker's training: built by :meth:`build` when its shard is known."""

    def __init__(self, config: GleasonConfig, data: Prepared) -> None:
        self.config = config
        self.data = data
        self.card = card(data, config)
        self.loss = GradeLoss(config.loss, classes=CLASSES, strength=config.strength)

    def build(self, shard: planaria.Shard) -> dict[str, Any]:
        """Model, optimizer, schedule and the best state so far, on the default group."""
        config = self.config
        self.shard = shard
        self.order = SampleOrder(
            samples=len(self.data.train.labels),
            seed=config.seed,
            world=shard.world,
            batch=config.batch,
        )
        self.steps = config.epochs * self.order.steps_per_epoch
        self.network = make(self.card, config)
        self.model = self.network if config.optimizer in OWNED else wrap(self.network)
        self.best = Best(patience=config.patience)
        self.optimizer = self.make_optimizer()
        self.scheduler = LambdaLR(
            self.optimizer,
            lambda done: rate(done, steps=self.steps, warmup=min(config.warmup, self.steps)),
        )
        # Weights are equal everywhere; dropout must differ from shard to shard.
        torch.manual_seed(self.order.chance(0, shard=shard.index))
        self.weights = (
            class_weights(self.data.train.labels, classes=CLASSES) if config.class_weights else None
        )
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "best": self.best,
        }

    def make_optimizer(self) -> Optimizer:
        """The one that was asked for."""
        config = self.config
        if config.optimizer == "adamw":
            params = self.network.parameters()
            return AdamW(params, lr=config.lr, weight_decay=config.weight_decay)
        return training.make(
            config.optimizer,
            self.network,
            steps=self.steps,
            sparse=config.sparse,
            weight_decay=config.weight_decay,
            decay_vectors=True,
            max_norm=config.clip,
            lr=config.lr,
        )

    def train(self, run: planaria.Run) -> None:
        """Take every step, evaluate between stretches of them, and export the result."""
        config = self.config
        edges = np.linspace(0, self.steps, min(config.evals, self.steps) + 1).round().astype(int)
        with closing(Ahead(self.batch, last=self.steps)) as batches:
            for until in edges[1:].tolist():
                # A stretch ends only when its last step is committed for all: whether to stop
                # early is then decided on a state that no loss can take back.
                for attempt in run.attempts(until=until, checkpoint_every=config.checkpoint_every):
                    with attempt:
                        attempt.log(**self.step(run, attempt, batches, last=until))
                if self.best.stop:
                    break
        run.final(self.finish, kappa=self.best.value, best_step=float(self.best.step))

    def batch(self, step: int) -> Batch:
        """Boards [B, 3, px, px] or bags of features [B, K, D + 1], grades [B] and numbers [B]: a
        function of the step alone."""
        ids = self.order.ids(step, shard=self.shard.index)
        seed = self.order.chance(step, shard=self.shard.index)
        x = inputs(self.data.train, ids, self.config, seed=seed)
        return x, torch.from_numpy(self.data.train.labels[ids]), ids

    def step(
        self, run: planaria.Run, attempt: planaria.Attempt, batches: Ahead[Batch], *, last: int
    ) -> dict[str, float]:
        """One optimizer step, and an evaluation at the stretch's end; its scalars by name."""
        config = self.config
        began = time.monotonic()
        x, grades, ids = batches(attempt.step)
        with autocast(config.dtype):
            output = self.model(x)
        loss = self.loss(output.float(), grades, weights_C=self.weights)
        loss.backward()
        clipped = training.clip(self.model, self.optimizer, config.clip)
        attempt.consumed(ids.tolist())
        attempt.finite(loss if clipped is None else loss + 0.0 * clipped)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        values = {"loss": float(loss.detach()), "step_s": time.monotonic() - began}
        if attempt.step == last:
            with run.phase("evaluation"), training.averaged(self.optimizer):
                average_statistics(self.model)
                score = self.grades("valid")
                grade = apply_thresholds(score, ROUNDING)
                values["val_kappa"] = kappa(self.data.valid.labels, grade, classes=CLASSES)
                self.best.add(values["val_kappa"], step=attempt.step, model=self.network)
        return values

    def grades(self, name: str, *, shifts: int = 1) -> NDArray[np.float64]:
        """Expected grades of a part by its name; a collective."""
        return expected_grades(
            self.network,
            getattr(self.data, name),
            loss=grade_loss(self.card),
            config=self.config,
            shard=self.shard.index,
            world=self.shard.world,
            shifts=shifts,
        )

    def finish(self) -> None:
        """Cuts, the one look at the test part, and the files; a collective."""
        config, data = self.config, self.data
        self.network.load_state_dict(self.best.state)
        valid = self.grades("valid", shifts=config.shifts)
        cuts = fit_thresholds(data.valid.labels, valid, classes=CLASSES)
        test = self.grades("test", shifts=config.shifts)
        if dist.is_initialized():
            dist.barrier()
        if self.shard.index != 0:
            return
        results: dict[str, Any] = {
            "data": data.name,
            "split_by": "slide and near-duplicates",
            "remarks": [*data.remarks, DISCLAIMER],
            "cuts": cuts,
            "best_step": self.best.step,
            "averaged_over": config.shifts if data.test.bags is None else 1,
            "valid": measure(data.valid, valid, cuts=cuts),
            "test": measure(data.test, test, cuts=cuts),
            "test_rounded": measure(data.test, test),
        }
        out = config.out
        rows = zip(data.test.names, data.test.labels.tolist(), test.tolist(), strict=True)
        write_json(
            out / "predictions.json",
            [
                {"slide": name, "grade": grade, "score": score, "note": DISCLAIMER}
                for name, grade, score in rows
            ],
        )
        counts = np.array(results["test"]["overall"]["confusion"])
        plot_confusion(
            out / "confusion.png", counts=counts, names=tuple(f"ISUP {g}" for g in range(CLASSES))
        )
        save_bundle(out, card=dataclasses.replace(self.card, cuts=cuts), model=self.network)
        write_json(out / "results.json", results)
        with atomic(out / "gleason.toml") as temporary:
            temporary.write_text(as_toml(config), encoding="utf-8")
