"""What each worker of a metastasis run does.

:func:`main` is the function that the launcher calls in every worker; without a launcher it trains
in this process alone. Shapes: B patches.
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
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import planaria
from planaria.optim import training
from planaria.optim.choice import OWNED
from planaria.pathology.augment import CropConfig, random_center_crop, random_turn
from planaria.pathology.bundle import save_bundle
from planaria.pathology.colour import to_unit
from planaria.pathology.datasets.features import Bags
from planaria.pathology.files import atomic, write_json
from planaria.pathology.heat import DISCLAIMER
from planaria.pathology.metrics import auc, operating_point
from planaria.pathology.order import SampleOrder
from planaria.pathology.plots import binary_plots
from planaria.pathology.training import (
    Ahead,
    Best,
    autocast,
    average_statistics,
    class_weights,
    rate,
    step_rate,
)
from planaria.recipes.metastasis.config import MetastasisConfig, as_toml
from planaria.recipes.metastasis.data import Prepared, prepare
from planaria.recipes.metastasis.evaluate import measure, probabilities, write_predictions
from planaria.recipes.metastasis.models import card, make, wrap

Batch = tuple[Tensor, Tensor, NDArray[np.int64]]


def main(config: MetastasisConfig) -> None:
    """Train, choose the operating point on the validation part, test once, and export.

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

    def __init__(self, config: MetastasisConfig, data: Prepared) -> None:
        self.config = config
        self.data = data
        self.card = card(data, config)

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
        self.scheduler = LambdaLR(self.optimizer, self.rate)
        # Weights are equal everywhere; dropout must differ from shard to shard.
        torch.manual_seed(self.order.chance(0, shard=shard.index))
        weights = class_weights(self.data.train.labels, classes=2) if config.class_weights else None
        self.weights = weights
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "best": self.best,
        }

    def make_optimizer(self) -> Optimizer:
        """The preset's, or the one that was asked for instead."""
        config = self.config
        if config.preset == "paper":
            return Adam(self.network.parameters(), lr=config.lr)
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
            max_norm=config.largest_norm,
            lr=config.lr,
        )

    def rate(self, done: int) -> float:
        """Share of the highest learning rate after ``done`` steps."""
        if self.config.preset == "paper":
            return step_rate(self.order.epoch(done), milestones=(15, 23))
        return rate(done, steps=self.steps, warmup=min(self.config.warmup, self.steps))

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
                        values = self.step(run, attempt, batches, last=until)
                        attempt.log(**values)
                if self.best.stop:
                    break
        result = {"auc": self.best.value, "best_step": float(self.best.step)}
        run.final(self.finish, **result)

    def batch(self, step: int) -> Batch:
        """Augmented patches [B, 3, px, px] or bags of features [B, K, D + 1], labels [B] and
        numbers [B]: a function of the step."""
        config = self.config
        part = self.data.train
        ids = self.order.ids(step, shard=self.shard.index)
        chance = self.order.chance(step, shard=self.shard.index)
        if isinstance(part.patches, Bags):
            bags = part.patches.batch(ids, size=config.bag, seed=chance)
            return torch.from_numpy(bags), torch.from_numpy(part.labels[ids]), ids
        pixels, labels = part.batch(ids)
        x = to_unit(torch.from_numpy(pixels))
        generator = torch.Generator().manual_seed(chance)
        if config.rcc:
            x = random_center_crop(x, generator=generator, config=CropConfig(fill=config.fill))
        if config.turns:
            x = random_turn(x, generator=generator)
        return x, torch.from_numpy(labels), ids

    def step(
        self, run: planaria.Run, attempt: planaria.Attempt, batches: Ahead[Batch], *, last: int
    ) -> dict[str, float]:
        """One optimizer step, and an evaluation at the stretch's end; its scalars by name."""
        config = self.config
        began = time.monotonic()
        x, labels, ids = batches(attempt.step)
        with autocast(config.dtype):
            logits = self.model(x)[:, 0]
        weight = None if self.weights is None else self.weights[labels]
        loss = binary_cross_entropy_with_logits(logits.float(), labels.float(), weight=weight)
        loss.backward()
        clipped = training.clip(self.model, self.optimizer, config.largest_norm)
        attempt.consumed(ids.tolist())
        attempt.finite(loss if clipped is None else loss + 0.0 * clipped)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        values = {"loss": float(loss.detach()), "step_s": time.monotonic() - began}
        if attempt.step == last:
            with run.phase("evaluation"), training.averaged(self.optimizer):
                average_statistics(self.model)
                found = self.probabilities("valid")
                values["val_auc"] = auc(self.data.valid.labels, found)
                self.best.add(values["val_auc"], step=attempt.step, model=self.network)
        return values

    def probabilities(self, name: str, *, average: int = 1) -> NDArray[np.float64]:
        """Probabilities for a part by its name; a collective."""
        return probabilities(
            self.network,
            getattr(self.data, name),
            shard=self.shard.index,
            world=self.shard.world,
            dtype=self.config.dtype,
            average=average,
        )

    def operating_point(self, probability: NDArray[np.float64]) -> tuple[float, str]:
        """The threshold for the validation part's probabilities, and what chose it."""
        if self.config.preset == "paper":
            return 0.5, "nothing: it is fixed"
        wanted = self.config.sensitivity
        cut = operating_point(self.data.valid.labels, probability, sensitivity=wanted)
        return float(np.clip(cut, 1e-6, 1 - 1e-6)), f"sensitivity {wanted:g} on the validation part"

    def finish(self) -> None:
        """The operating point, the one look at the test part, and the files; a collective."""
        config = self.config
        self.network.load_state_dict(self.best.state)
        valid = self.probabilities("valid", average=config.averaged_over)
        cut, chosen = self.operating_point(valid)
        results: dict[str, Any] = {
            "data": self.data.name,
            "split_by": self.data.by,
            "remarks": [*self.data.remarks, DISCLAIMER],
            "threshold": cut,
            "chosen_by": chosen,
            "best_step": self.best.step,
            "averaged_over": 1
            if isinstance(self.data.valid.patches, Bags)
            else config.averaged_over,
            "valid": measure(self.data.valid, valid, threshold=cut),
        }
        tested = self.data.test
        found = valid
        if tested is not None:
            found = self.probabilities("test", average=config.averaged_over)
            results["test"] = measure(tested, found, threshold=cut)
        if dist.is_initialized():
            dist.barrier()
        if self.shard.index != 0:
            return
        out = config.out
        if tested is not None:
            binary_plots(out, labels=tested.labels, probability=found, threshold=cut)
            write_predictions(out / "predictions.csv", tested, probability=found)
        done = dataclasses.replace(self.card, threshold=cut)
        save_bundle(out, card=done, model=self.network)
        write_json(out / "results.json", results)
        with atomic(out / "metastasis.toml") as temporary:
            temporary.write_text(as_toml(config), encoding="utf-8")
