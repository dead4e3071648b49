"""The parts of the optimizer benchmarks that compute: names, order of runs, tables."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import links
import pytest
import scape_methods
import scape_page
import scape_runs
import scape_table
from scape_runs import Run

SHARED: dict[str, Any] = {
    "model": "llama-1m",
    "workers": 4,
    "batch": 2,
    "sequence": 64,
    "vocab_size": 2048,
    "max_bytes": 6_000_000,
}


def row(method: str, loss: float, *, lr: float = 1e-3, seed: int = 0, **more: Any) -> Any:
    curve = [[500, loss + 1], [1000, loss]]
    what = {"method": method, "lr": lr, "seed": seed, "steps": 1000, "curve": curve}
    sizes = {"params": 1_000_000, "vectors": 1_000, "dense_steps": 100}
    return {**SHARED, **what, **sizes, **more}


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**SHARED, "steps": 1000, "methods": [], **values})


def test_names_of_methods() -> None:
    assert scape_methods.parse("local-0.01/wire=int8/average_moments=false/refresh=4") == (
        "local",
        0.01,
        {"wire": "int8", "average_moments": False, "refresh": 4},
    )
    assert scape_methods.parse("adams") == ("adams", 1.0, {})
    sizes = {"params": 10**6, "vectors": 0, "workers": 4}
    job = scape_methods.job("local-0.04/wire=int8/average_moments=false/dense_steps=0", **sizes)
    assert (job.wire, job.average_moments) == ("int8", False)


def test_a_curve_is_a_line_between_its_points() -> None:
    curve = [[100, 5.0], [200, 4.0], [300, 3.0]]
    assert scape_page.steps_to(curve, 3.5) == 250
    assert scape_page.steps_to(curve, 5.5) == 100
    assert scape_page.steps_to(curve, 2.9) is None
    assert scape_page.steps_to([[100, 5.0], [200, math.nan]], 4.5) is None


def test_dense_steps_of_a_run() -> None:
    def run(method: str) -> Run:
        return Run(method=method, lr=1e-3, seed=0, steps=400, **SHARED)

    assert scape_runs.dense_steps(run("adams")) == 400
    assert scape_runs.dense_steps(run("frozen-0.1")) == 40
    assert scape_runs.dense_steps(run("frozen-0.1/dense_steps=0.05")) == 20
    assert scape_runs.dense_steps(run("frozen-0.1/dense_steps=0")) == 0
    assert scape_runs.dense_steps(run("frozen-0.1/dense_steps=7")) == 7


def test_rates_come_before_seeds_and_seeds_at_the_best_rate() -> None:
    assert len(scape_table.RATES) == 3
    methods = ["adams", "local-0.1"]
    runs = scape_table.pending([], options(methods=methods))
    assert [(r.method, r.lr, r.seed) for r in runs] == [
        (method, lr, 0) for method in methods for lr in scape_table.RATES
    ]
    rows = [row("adams", 4.0 - i, lr=lr) for i, lr in enumerate(scape_table.RATES)]
    runs = scape_table.pending(rows, options(methods=methods))
    assert [(r.method, r.lr, r.seed) for r in runs] == [
        *(("local-0.1", lr, 0) for lr in scape_table.RATES),
        ("adams", scape_table.RATES[-1], 1),
        ("adams", scape_table.RATES[-1], 2),
    ]


def test_a_rate_that_diverged_is_never_the_best() -> None:
    low, high = scape_table.RATES[:2]
    rows = [row("adams", 3.0, lr=low), row("adams", math.nan, lr=high)]
    best = scape_page.chosen(rows, ["adams"])
    assert [r["lr"] for r in best["adams"]] == [low]
    # A lucky second seed at another rate changes nothing: only the first one is everywhere.
    rows += [row("adams", 2.0, lr=high, seed=1)]
    assert [r["lr"] for r in scape_page.chosen(rows, ["adams"])["adams"]] == [low]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"method": "adams"}\n{"method": "loc')
    assert scape_table.read(path) == [{"method": "adams"}]
    assert scape_table.read(tmp_path / "none") == []


def test_the_page_counts_dense_steps_as_dense_and_says_what_is_missing() -> None:
    method = "local-0.01"
    dense = row("adams", 4.0, dense_steps=1000)
    sparse = row(method, 4.04, curve=[[600, 4.2], [1000, 4.0]])
    common = {"mbit": 100, "network": "llama-1m", "batch": 2, "workers": 4}
    measured = [
        {**common, "kind": "adams", "seconds": 0.8, "bytes": 6e6},
        {**common, "kind": method, "seconds": 0.2, "bytes": 6e4},
    ]
    text = scape_page.page(
        [dense, sparse],
        [row("frozen-0.1/decay=lazy", 5.0, steps=300)],
        measured,
        methods=["adams", method],
        rates={"adams": (1e-3,), method: (1e-3, 2e-3)},
        seeds=1,
        mbit=100,
    )
    # 4.08 is reached at step 840: a hundred dense steps of .8 s and 740 of .2 s.
    assert f"| {method} | 840 | 100 | 0.200 | 60.0 | 1.00% | 3.8 |" in text
    assert "- local-0.01: rates 0.002, then 0 more seeds" in text
    assert "2 of 3 runs are done" in text
    assert (
        "- local-0.01 (0.6% of the bytes): +0.0%, asked for at most +5%: reached, by 1 of 1 seeds."
        in text
    )
    assert "| frozen-0.1, decay=lazy | 0.001 | 5.000 | – |" in text


def test_the_newest_of_equal_link_rows_counts_and_is_compared_with_the_plan() -> None:
    common = {"mbit": 100.0, "network": "mlp", "batch": 128, "workers": 4, "params": 1_000_000}
    common |= {"vectors": 2_000, "latency": 1e-3, "compute": 0.05}
    old = {**common, "kind": "adams", "seconds": 9.0, "bytes": 6e6}
    new = {**common, "kind": "adams", "seconds": 0.7, "bytes": 6e6}
    little = {**common, "kind": "local-0.01", "seconds": 0.07, "bytes": 7e4}
    other = {**common, "kind": "topk-0.01", "seconds": 0.07, "bytes": 7e4}
    rows = links.newest([old, new, little, other])
    assert rows == [new, little, other]
    assert links.predicted(other, rows) is None
    guess = links.predicted(new, rows)
    # 3 MB each way at 100 Mbit/s take .24 s without any loss.
    assert guess is not None
    assert 0.05 + 2 * 0.24 < guess < 0.05 + 2 * 0.24 * 1.4
    text = "\n".join(links.page(rows))
    assert "| 100 | local-0.01 | 50.0 | 70.0 |" in text
    assert text.count("| 10.00 | 85.7 |") == 2
    # Measured apart in the same run: .01 s for an exchange of 4 MB, as long for a gather.
    own = {"arithmetic": {"step": 0.002, "tensor": 0.0, "million": 0.02}, "tensors": 4}
    alone = [
        {**common, "kind": kind, "size": size, "seconds": size / 4e8, "bytes": size * 0.75}
        for kind in ("exchange", "gather")
        for size in (4_000, 4_000_000)
    ]
    rows = [{**new, **own, "seconds": 0.1}, {**little, **own}, *alone]
    # Computation, arithmetic, both ways and one small message.
    assert links.predicted(rows[0], rows) == pytest.approx(0.05 + 0.022 + 0.02 + 0.001, rel=0.02)
    text = "\n".join(links.page(rows))
    assert "2 of 2 steps lie within 15 % of what is predicted; the median is " in text


def test_unknown_methods_are_refused() -> None:
    import torch

    with pytest.raises(SystemExit) as caught:
        scape_methods.setup("none-0.1", torch.nn.Linear(2, 2), lr=1e-3)
    assert str(caught.value).startswith("method none-0.1 is unknown; see the families in ")
