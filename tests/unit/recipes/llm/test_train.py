"""Training: it learns, it is the same however it is dealt out, and it stops at a NaN."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import planaria
from planaria.errors import DataError, NonFiniteLoss
from planaria.optim.choice import SparseConfig
from planaria.recipes.llm import LlmConfig, models, prepare, train
from planaria.recipes.llm.scalars import last_steps

MakeConfig = Callable[..., LlmConfig]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # main() sets the threads of its worker; here that is the tests' own process.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def exported(config: LlmConfig) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(config.out / "model").state_dict()


def run(config: LlmConfig) -> dict[str, float]:
    """Train alone in this process; the last scalars."""
    job = train.Job(config, prepare(config))
    joined = planaria.join(job.build, max_redo=1, on_nonfinite=config.on_nonfinite)
    with joined as joined_run:
        job.train(joined_run)
    return job.board.last


def test_loss_falls_on_real_text(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(steps=60, warmup=5, eval_every=30, lr=1e-2)
    last = run(config)
    # 512 entries: ln 512 = 6.24 is what knowing nothing costs; seen here: about 5.2.
    assert last["loss"] < 5.5
    assert last["val_loss"] < 5.5
    assert last["perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    assert last["tokens_per_s"] > 0
    assert not dist.is_initialized()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/60  loss 6.")
    assert lines[-1].startswith("step 60/60  loss ")
    assert "held-out loss" in lines[-1]
    steps = last_steps(config.out / "tensorboard")
    assert steps["loss"] == steps["lr"] == steps["grad_norm"] == steps["val_loss"] == 60
    tokenizer = AutoTokenizer.from_pretrained(config.out / "model")
    assert len(tokenizer) == 512


FROZEN, LOCAL = SparseConfig(density=0.2), SparseConfig(density=0.2, unsent="local")


@pytest.mark.parametrize(
    ("optimizer", "sparse"),
    [("adams", None), ("sharded", None), ("scape", FROZEN), ("scape", LOCAL)],
    ids=["adams", "sharded", "frozen", "local"],
)
def test_every_optimizer_learns(
    make_config: MakeConfig, optimizer: str, sparse: SparseConfig | None
) -> None:
    options = {} if sparse is None else {"sparse": sparse}
    config = make_config(steps=30, eval_every=15, lr=1e-2, optimizer=optimizer, **options)
    last = run(config)
    # 512 entries: ln 512 = 6.24 is what knowing nothing costs; seen here: below 5.7.
    assert last["val_loss"] < 5.9
    assert last["grad_norm"] > 0
    steps = last_steps(config.out / "tensorboard")
    assert steps["grad_norm"] == steps["val_loss"] == 30
    assert exported(config)


def test_sharded_in_a_world_of_one_is_adamw(make_config: MakeConfig) -> None:
    whole, cut = make_config(), make_config(optimizer="sharded", out=make_config().out / "cut")
    assert run(whole)["loss"] == pytest.approx(run(cut)["loss"], abs=1e-5)


def test_main_trains_without_a_launcher(make_config: MakeConfig) -> None:
    config = make_config(steps=2)
    train.main(config)
    twin = dataclasses.replace(config, out=config.out.with_name("twin"))
    train.main(twin)
    for name, tensor in exported(config).items():
        assert torch.equal(tensor, exported(twin)[name]), name


def test_dropout_differs_between_shards_and_repeats_for_a_seed(make_config: MakeConfig) -> None:
    config = make_config(model="gpt2-tiny")
    job = train.Job(config, prepare(config))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        drawn = []
        for index in (0, 1, 0):
            job.build(planaria.Shard(index, 2))
            drawn.append(torch.rand(4).tolist())
    finally:
        dist.destroy_process_group()
    assert drawn[0] == drawn[2] != drawn[1]


def gradients(config: LlmConfig) -> dict[str, Tensor]:
    job = train.Job(config, prepare(config))
    job.build(planaria.Shard(0, 1))
    job.gradients(3)
    return {name: p.grad for name, p in job.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "how", [{"regime": "ddp"}, {"regime": "fsdp"}, {"optimizer": "sharded"}], ids=str
)
def test_accumulation_equals_the_bigger_batch(make_config: MakeConfig, how: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = gradients(make_config(batch=8, **how))
        parts = gradients(make_config(batch=2, accumulate=4, **how))
    finally:
        dist.destroy_process_group()
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        # float32 sums over 8 x 31 tokens in another grouping: 1e-5 of the largest is ample.
        torch.testing.assert_close(
            parts[name], gradient, rtol=0.0, atol=1e-5 * float(gradient.abs().max())
        )


def test_bf16_stays_near_fp32(make_config: MakeConfig) -> None:
    full = run(make_config(steps=4))
    half = run(make_config(steps=4, dtype="bf16", out=make_config().out.with_name("half")))
    # bf16 has 8 bits: a relative 2^-8 = .4 % per operation, averaging out in a mean loss of 6.
    assert half["loss"] == pytest.approx(full["loss"], abs=0.02)
    assert half["loss"] != full["loss"]


class Poisoned(nn.Module):
    """A model whose logits are NaN for the batches of one step."""

    def __init__(self, model: nn.Module, ids: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.inner = model
        self.ids = ids

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> Any:
        result = self.inner(input_ids=input_ids, use_cache=use_cache)
        if tuple(input_ids[0].tolist()) in self.ids:
            result.logits = result.logits * float("nan")
        return result


def poison(monkeypatch: pytest.MonkeyPatch, config: LlmConfig, step: int) -> list[int]:
    packed = prepare(config)
    order = train.Order(
        samples=packed.samples, seed=config.seed, world=1, batch=config.batch, accumulate=1
    )
    ids = order.ids(step, shard=0, micro=0)
    bad = {tuple(packed.batch(ids)[0].tolist())}
    monkeypatch.setattr(train, "make", lambda *given: Poisoned(models.make(*given), bad))
    # The folder would hold the wrapper's names.
    monkeypatch.setattr(train.Job, "finish", lambda self: None)
    return ids.tolist()


def test_nan_stops_the_run(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    ids = poison(monkeypatch, config, step=3)
    with pytest.raises(NonFiniteLoss) as caught:
        run(config)
    message = str(caught.value)
    assert message.startswith("the loss of step 3 is not finite on shard 0")
    assert ", ".join(map(str, ids)) in message
    assert not (config.out / "model").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "scape"])
def test_nan_is_skipped(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    optimizer: str,
) -> None:
    config = make_config(on_nonfinite="skip", log_every=1e-9, optimizer=optimizer)
    poison(monkeypatch, config, step=3)
    last = run(config)
    assert math.isfinite(last["loss"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "step 3/4  skipped: the loss is not finite"
    assert lines[3].startswith("step 4/4  loss ")


def test_too_small_for_its_workers(make_config: MakeConfig) -> None:
    config = make_config(batch=10**6)
    with pytest.raises(DataError) as caught:
        run(config)
    assert "but a step of 1 workers x 1 micro-batches x 1000000 takes 1,000,000;" in str(
        caught.value
    )


def test_rate() -> None:
    config = LlmConfig(steps=21, warmup=5, lr_floor=0.1)
    rates = [train.rate(config, done) for done in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == pytest.approx(1.0)
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))
    assert rates[-1] == pytest.approx(0.1)
    middle = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 5 / 15))
    assert rates[10] == pytest.approx(middle)
    assert train.rate(LlmConfig(steps=1, warmup=0), 0) == 1.0


def test_only_matrices_decay(make_config: MakeConfig) -> None:
    model = models.make(make_config(model="gpt2-tiny"), prepare(make_config()).vocabulary)
    optimizer = train.optimizer(model, make_config(weight_decay=0.25))
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.25 if parameter.ndim == 2 else 0.0), name
    assert len(decays) == len(list(model.parameters()))


def _worker(rank: int, ports: list[int], configs: list[LlmConfig]) -> None:
    for port, config in zip(ports, configs, strict=True):
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        train.main(config)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.mark.slow
def test_two_workers_equal_one_with_their_batch(make_config: MakeConfig) -> None:
    one = make_config(batch=8, steps=3)
    pair = [
        make_config(batch=4, steps=3, out=one.out.with_name(name), **how)
        for name, how in (
            ("ddp", {"regime": "ddp"}),
            ("fsdp", {"regime": "fsdp"}),
            ("sharded", {"optimizer": "sharded"}),
            ("adams", {"optimizer": "adams"}),
            ("adams-fsdp", {"optimizer": "adams", "regime": "fsdp"}),
        )
    ]
    ports = free_ports(len(pair))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["planaria.recipes.llm.train"])
    workers = [context.Process(target=_worker, args=(rank, ports, pair)) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        run(one)
        for worker in workers:
            worker.join(timeout=60)
            assert worker.exitcode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    names = [config.out.name for config in pair]
    ends = dict(zip(names, map(exported, pair), strict=True))
    expected = exported(one)
    for name in ("ddp", "fsdp", "sharded"):
        close(ends[name], expected)
    close(ends["adams-fsdp"], ends["adams"])


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for rounding, which these optimizers enlarge."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Three steps of at most lr = 3e-3. AdamW divides by the gradient's own size, so a gradient
        # that is rounding noise moves its weight by up to lr either way; all but a few in ten
        # thousand agree to a hundredth of a step.
        difference = (found[name] - tensor).abs()
        assert float(difference.max()) < 3 * 3e-3, name
        share = float(np.mean(difference.numpy() > 3e-5))
        assert share < 1e-3, (name, share)
