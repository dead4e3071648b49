"""The parts of ``benchmarks/pathology.py`` that compute: by value, on rows made here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hotswap.rows import Rows
from pathbench import cells, report
from pathbench.figures import Gap, Measured, against_bare, gap, main_effect
from pathbench.headline import HEADLINES
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from planaria.cli import _parse

FIRST, SECOND, *_ = HEADLINES[0].seeds


def patches(on: tuple[str, ...] = (), *, seed: int = 0, signal: float = 1.0) -> dict[str, Any]:
    """20 slides of 20 patches whose scores tell the classes as far apart as ``signal``."""
    rng = np.random.default_rng(seed)
    truth = np.arange(400) % 2
    # Rounded to tenths, so that there are ties.
    said = (signal * truth + rng.standard_normal(400)).round(1)
    return {
        "recipe": "metastasis",
        "on": list(on),
        "seed": seed,
        "cpu_s": 1.0,
        "value": float(roc_auc_score(truth, said)),
        "groups": [[f"{seed}-{slide}", 20] for slide in range(20)],
        "truth": "".join(map(str, truth)),
        "said": said.tolist(),
    }


def slides(on: tuple[str, ...] = (), *, seed: int = 0, errors: int = 2) -> dict[str, Any]:
    """60 slides, of which every ``errors``-th is a grade too high."""
    truth = np.arange(60) % 6
    said = np.minimum(truth + (np.arange(60) % errors == 0), 5)
    return {
        "recipe": "gleason",
        "on": list(on),
        "seed": seed,
        "cpu_s": 1.0,
        "value": float(cohen_kappa_score(truth, said, weights="quadratic")),
        "groups": [[f"slide-{number}", 1] for number in range(60)],
        "truth": "".join(map(str, truth)),
        "said": "".join(map(str, said)),
    }


@pytest.mark.parametrize("row", [patches(seed=3), slides(errors=4)])
def test_a_measure_under_weights_is_scikit_learns_of_the_drawn_slides(row: dict[str, Any]) -> None:
    measured = Measured(row)
    assert measured.plain() == pytest.approx(row["value"], abs=1e-12)
    drawn = np.random.default_rng(1).integers(0, 3, len(row["groups"]))
    counts = np.repeat(drawn, [count for _, count in row["groups"]])
    truth = np.repeat([int(digit) for digit in row["truth"]], counts)
    said = np.repeat([float(value) for value in row["said"]], counts)
    if row["recipe"] == "gleason":
        expected = cohen_kappa_score(truth, said.astype(int), weights="quadratic")
    else:
        expected = roc_auc_score(truth, said)
    assert measured.at(drawn[None].astype(float))[0] == pytest.approx(expected, abs=1e-12)


def test_a_difference_is_drawn_in_pairs() -> None:
    rows = [patches(seed=s) for s in range(3)]
    rows += [patches(("stem",), seed=s, signal=1.4) for s in range(3)]
    found = against_bare(rows, ["stem"])
    assert found is not None
    assert found.value == pytest.approx(np.mean([b["value"] - a["value"] for a, b in _three(rows)]))
    assert found.low < found.value < found.high
    assert found.low > 0
    assert found.verdict == "adds"
    assert against_bare(rows, ["RCC"]) is None
    assert against_bare(rows, []) is None
    # The same scores cannot differ, whatever is drawn.
    same = gap([(rows[0], rows[0])])
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    other = patches(seed=1) | {"seed": 0}
    with pytest.raises(ValueError, match="two runs that are compared were tested on different"):
        gap([(rows[0], other)])


def _three(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(rows[:3], rows[3:], strict=True))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Gap(0.03, 0.01, 0.05, (0.02, 0.04, 0.03)), "adds"),
        (Gap(0.03, 0.01, 0.05, (0.07, 0.03, -0.01)), "adds nothing that is shown"),
        (Gap(0.03, -0.01, 0.05, (0.02, 0.04, 0.03)), "adds nothing that is shown"),
        (Gap(-0.03, -0.05, -0.01, (-0.02, -0.04, -0.03)), "takes away"),
        (Gap(0.03, 0.01, 0.05, (0.03, 0.03)), "no verdict (2 of 3 seeds)"),
    ],
)
def test_a_verdict_needs_the_interval_and_every_seed(found: Gap, verdict: str) -> None:
    assert found.verdict == verdict


def test_a_main_effect_is_over_all_settings_of_the_others() -> None:
    rows = [
        slides((), errors=2),
        slides(("DC",), errors=3),
        slides(("PBIR",), errors=4),
        slides(("PBIR", "DC"), errors=6),
        slides(("QWMSE",), errors=2),
    ]
    found = main_effect(rows, "PBIR")
    assert found is not None
    change, pairs = found
    value = [row["value"] for row in rows]
    assert pairs == 2
    assert change.value == pytest.approx(((value[2] - value[0]) + (value[3] - value[1])) / 2)
    assert main_effect(rows[:2], "PBIR") is None


def test_the_short_table_is_part_of_the_full_one() -> None:
    for recipe, count in (("metastasis", 16), ("gleason", 8)):
        every = list(cells.full(recipe, seed=1))
        assert len(every) == len({cell.name for cell in every}) == count
        short = [c for c in cells.short(recipe, seed=1) if not set(c.on) & {*cells.EXTRAS[recipe]}]
        assert short[0].on == ()
        assert short[-1].on == tuple(cells.SWITCHES[recipe])
        assert set(short) <= set(every)


def test_a_cell_switches_its_parts_on_and_no_others(tmp_path: Path) -> None:
    bare = cells.config_of(cells.Cell(recipe="metastasis", on=(), seed=2), base=tmp_path)
    assert (bare.rcc, bare.stem_stride, bare.attention, bare.fusion) == (False, 2, False, False)
    assert bare.seed == 2
    cell = cells.Cell(recipe="gleason", on=("QWMSE λ=25",), seed=1)
    config = cells.config_of(cell, base=tmp_path, scale=0.1)
    assert (config.loss, config.strength, config.pbir, config.dc) == ("qwmse", 25.0, False, "none")
    assert (config.synthetic, config.epochs) == (66, 1)
    assert config.pretrained == str(tmp_path / "source")
    assert cells.source_config(base=tmp_path).laboratories == "A"


def test_the_headlines_are_commands_that_exist() -> None:
    for line in HEADLINES:
        for which, seed in line.runs:
            words = shlex.split(line.command(which, seed=seed))
            assert words[:3] == ["planaria", "train", line.recipe]
            assert ("--inject" in words) == (which == "struck")
            assert ("--seed" in words) == (seed > 0)
            assert callable(_parse(words[1:]))
        assert len({line.name(which, seed=seed) for which, seed in line.runs}) == len(line.runs)
        assert [which for which, _ in line.runs].count("struck") == 1


def headline(recipe: str, which: str, **values: Any) -> dict[str, Any]:
    made = patches(seed=FIRST, signal=1.5) if recipe == "metastasis" else slides(errors=2)
    return made | {
        "row": "headline",
        "which": which,
        "interval": {"low": 0.8, "high": 0.9},
        "command": f"planaria train {recipe} --synthetic 64 64 64",
        "wall_s": 3.0,
        "steps": 10,
        "swaps": 1,
        "redone": 1,
        "state_digest": "a" * 32,
        "samples_digest": "b" * 32,
        **values,
    }


def test_the_page_says_what_is_missed_and_what_is_missing(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "raw" / "pathology.jsonl")
    assert "Nothing is measured yet." in report.report(rows, command="c", seeds=3)
    rows.add("cell/metastasis/nothing/0", [{"row": "cell", **patches()}], seconds=1.0, load=0.0)
    rows.add("a", [{"row": "cell", **patches(("stem",), signal=2.0)}], seconds=1.0, load=0.0)
    rows.add("b", [headline("metastasis", "calm")], seconds=1.0, load=0.0)
    struck = headline("metastasis", "struck", state_digest="c" * 32)
    rows.add("c", [struck], seconds=1.0, load=0.0)
    tried = [
        headline("metastasis", which) | {"row": "tried", "attempt": "x"}
        for which in ("bare", "calm")
    ]
    rows.add("d", tried, seconds=1.0, load=0.0)
    again = Rows(rows.path)
    page = report.report(again, command="make bench BENCH=pathology", seeds=1)
    assert "| metastasis, worker killed | equal digests | different | **no** |" in page
    assert "| gleason, worker killed | equal digests | missing | **no** |" in page
    # Its AUC of 0.76 is below the band.
    assert "| bare metastasis baseline | AUC 0.80 to 0.93 | 0.7" in page
    assert "| +0.000 [+0.000, +0.000] | no verdict (1 of 3 seeds) |" in page
    assert "**Missing: 4 of 6 runs** (RCC, seed 0; attention, seed 0; fusion, seed 0;" in page
    assert "**Missing: 46 of 48 runs**" in page
    more = [
        headline("metastasis", "bare") | patches(seed=SECOND) | {"value": 0.9},
        headline("metastasis", "calm") | patches(seed=SECOND, signal=3.0),
    ]
    rows.add("e", [headline("metastasis", "bare", value=0.858), *more], seconds=1.0, load=0.0)
    chosen = {"row": "calibrated", "recipe": "metastasis", "setting": "as it is", "seed": 11}
    rows.add("f", [chosen | {"launched": True, "on": ["RCC"], "value": 0.875}], seconds=1, load=0)
    page = report.report(Rows(rows.path), command="c", seeds=1)
    # One struck run is as good as its baseline, the other seed's calm one is better.
    alone, together = (line for line in page.splitlines() if "AUC, clear of 0" in line)
    assert alone.endswith("| +0.000 [+0.000, +0.000] | **no** |")
    assert together.endswith("| yes |")
    launched = "| bare metastasis baseline, launched with two workers | AUC 0.80 to 0.93 | "
    assert f"{launched}0.858, 0.900 | yes |" in page
    assert f"| metastasis, calm, seed {SECOND} | AUC " in page
    assert "| as it is | launched | 11 | RCC | 0.875 |" in page
    assert json.loads(rows.path.read_text().splitlines()[0])["unit"] == "cell/metastasis/nothing/0"
