"""Parts that are placed over four gloo ranks: replica sets, regimes, and bit-exact restores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = range(4)
EVERYONE = [[0, 1, 2, 3]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ranks_parts.py")), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize(
    "case",
    [
        "ddp",
        "ddp_with_ema",
        "ddp_with_marked_ema",
        "zero",
        "fsdp",
        "hsdp",
        "tensor_parallel",
        "tensor_parallel_and_fsdp",
        "owned_sharded",
        "owned_frozen",
        "owned_local",
    ],
)
def test_state_comes_back_bit_for_bit(seen: list[dict[str, Any]], case: str) -> None:
    for rank in RANKS:
        result = seen[rank][case]
        told = {k: result[k] for k in ("changed", "in_place", "fresh", "digest", "goes_on")}
        assert all(told.values()), (rank, told)


def test_ddp_is_replicated_and_sends_nothing_big(seen: list[dict[str, Any]]) -> None:
    for rank in RANKS:
        result = seen[rank]["ddp"]
        assert (result["params"], result["optimizer"]) == (EVERYONE, EVERYONE)
        assert (result["small"], result["sent"]) == (0, 0)
        assert result["regime"] == "replicated"
        assert result["reason"] == (
            "peers hold all of model.module.0.weight and 3 more tensors (0.00 MB) and the "
            "optimizer state; small parts are sent"
        )


def test_a_plain_ema_is_sent_with_a_hint_and_a_marked_one_is_not(
    seen: list[dict[str, Any]],
) -> None:
    for rank in RANKS:
        plain = seen[rank]["ddp_with_ema"]
        assert plain["regime"] == "replicated"
        assert plain["sent"] == 896
        assert "no peer is known to hold ema.module.0.weight and 3 more tensors" in plain["reason"]
        assert "mark the part with replicated()" in plain["reason"]
        marked = seen[rank]["ddp_with_marked_ema"]
        assert marked["sent"] == 0
        assert marked["params"] == EVERYONE


def test_zero_shards_the_optimizer_only(seen: list[dict[str, Any]]) -> None:
    for rank in RANKS:
        result = seen[rank]["zero"]
        assert result["regime"] == "optimizer sharded"
        assert result["params"] == EVERYONE
        assert result["optimizer"] in ([[rank]], [])
    # Four tensors over four ranks: each holds two moments and a step for its own.
    assert sum(seen[rank]["zero"]["sent"] > 0 for rank in RANKS) == 4


@pytest.mark.parametrize("case", ["owned_sharded", "owned_frozen"])
def test_an_optimizer_that_keeps_weights_equal_says_who_holds_them(
    seen: list[dict[str, Any]], case: str
) -> None:
    for rank in RANKS:
        result = seen[rank][case]
        assert (result["params"], result["optimizer"]) == (EVERYONE, [[rank]])
        assert result["regime"] == "optimizer sharded"
        assert result["reason"] == (
            "peers hold every trained parameter, but the state of 'optimizer' is held here alone "
            "and is sent"
        )


def test_weights_that_drift_apart_are_held_by_nobody_else(seen: list[dict[str, Any]]) -> None:
    for rank in RANKS:
        result = seen[rank]["owned_local"]
        assert (result["params"], result["optimizer"]) == ([[rank]], [[rank]])
        assert result["replicated"] == []
        assert result["regime"] == "all sharded"
        assert result["reason"] == (
            "no peer holds model.0.weight and 3 more tensors (0.00 MB); these and their optimizer "
            "state are sent; their optimizer lets the weights of peers differ between steps"
        )


def test_fsdp_is_held_by_nobody_else(seen: list[dict[str, Any]]) -> None:
    for rank in RANKS:
        result = seen[rank]["fsdp"]
        assert result["regime"] == "all sharded"
        assert (result["params"], result["optimizer"]) == ([[rank]], [[rank]])
        assert result["replicated"] == []


def test_hsdp_is_held_along_the_replicating_axis(seen: list[dict[str, Any]]) -> None:
    for rank in RANKS:
        result = seen[rank]["hsdp"]
        peers = [[0, 2], [1, 3]][rank % 2]
        assert (result["params"], result["optimizer"]) == ([peers], [peers])
        assert result["regime"] == "replicated"


@pytest.mark.parametrize("case", ["tensor_parallel", "tensor_parallel_and_fsdp"])
def test_tensor_parallel_shares_its_biases_only(seen: list[dict[str, Any]], case: str) -> None:
    for rank in RANKS:
        result = seen[rank][case]
        pair = [[0, 1], [2, 3]][rank // 2]
        assert sorted(result["params"]) == sorted([[rank], pair])
        assert result["regime"] == "all sharded"


def test_gradients_that_fsdp_had_accumulated_are_dropped(seen: list[dict[str, Any]]) -> None:
    assert all(seen[rank]["accumulated"]["equal"] for rank in RANKS)


def test_peers_that_are_not_known_are_asked_for(seen: list[dict[str, Any]]) -> None:
    told = seen[0]["refusals"]
    assert told["sharded"] == (
        "part 'ema' is marked replicated(), but the models are sharded, cut into stages or in "
        "several DDP groups, so its peers are not known: say replicated(part, group=the "
        "data-parallel process group)"
    )
    assert told["given"] == "[(0, 1), (0, 1)]"
    assert told["stranger"] == (
        "shard 9 is no member of the process group with ranks (0, 1, 2, 3): wrap the model, or "
        "mark the part, with a group that this rank is in"
    )
