"""The page of ``scape_table.py`` from whatever rows there are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scape_methods import SCAPE, job, parse

Row = dict[str, Any]
TARGET = 1.02
"""The loss to reach, as a multiple of dense AdamS' last one."""
WITHIN = {0.1: 0.02, 0.01: 0.05}
"""Largest allowed relative distance to dense AdamS by share of bytes."""


def final(row: Row) -> float:
    """Loss at the end; infinite where it is not a number."""
    loss = row["curve"][-1][1]
    return loss if math.isfinite(loss) else math.inf


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Step at which a curve first reaches a loss, on a line between its points."""
    before: Sequence[float] | None = None
    for step, value in curve:
        if value <= loss:
            if before is None or before[1] <= value:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (step, value)
    return None


def chosen(rows: Sequence[Row], methods: Sequence[str]) -> dict[str, list[Row]]:
    """The runs of every method at its best rate, which the first seed alone decides."""
    found: dict[str, list[Row]] = {}
    for method in methods:
        rates: dict[float, list[Row]] = {}
        for row in rows:
            if row["method"] == method:
                rates.setdefault(row["lr"], []).append(row)
        firsts = {lr: final(r) for lr, runs in rates.items() for r in runs if r["seed"] == 0}
        if firsts:
            found[method] = rates[min(firsts, key=lambda lr: firsts[lr])]
    return found


def share_of_bytes(row: Row) -> float | None:
    """Bytes of a sparse step of one of this package's methods over those of a dense step."""
    from planaria.optim.plan_comm import volume

    family, density, _ = parse(row["method"])
    sizes = {key: row[key] for key in ("params", "vectors", "workers")}
    dense = volume(job("adams", **sizes), "dense", 1.0).total
    if family in ("adams", "adamw"):
        return 1.0
    if family not in ("frozen", "local"):
        return None
    return volume(job(row["method"], **sizes), family, density).total / dense


def losses(best: Mapping[str, list[Row]], rates: Mapping[str, Sequence[float]], tried: Any) -> Any:
    """The table of losses, as lines."""
    base = statistics.mean(map(final, best["adams"])) if "adams" in best else math.nan
    lines = [
        "| method | best rate (of those tried) | seeds | held-out loss | against dense AdamS | "
        "bytes of a step, planned |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for method, runs in best.items():
        found = [final(r) for r in runs]
        spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
        others = ", ".join(f"{lr:g}" for lr in sorted(tried[method]))
        share = share_of_bytes(runs[0])
        edge = len(tried[method]) == len(rates[method]) and runs[0]["lr"] == max(tried[method])
        lines.append(
            f"| {method} | {runs[0]['lr']:g}{' (the highest)' if edge else ''} ({others}) | "
            f"{len(runs)} | {statistics.mean(found):.3f}{spread} | "
            f"{statistics.mean(found) / base - 1:+.1%} | {f'{share:.2%}' if share else '–'} |"
        )
    return lines


def times(best: Mapping[str, list[Row]], links: Sequence[Row], mbit: float) -> list[str]:
    """The table of times to the dense loss, as lines: dense steps and sparse ones by themselves."""
    if "adams" not in best:
        return ["Dense AdamS has not run yet."]
    base = statistics.mean(map(final, best["adams"]))
    model = best["adams"][0]["model"]
    measured = {r["kind"]: r for r in links if r.get("mbit") == mbit and r.get("network") == model}
    dense = measured.get("adams")
    lines = [
        f"| method | steps to {base * TARGET:.3f} | dense ones among them | s a sparse step | "
        "kB sent in it | share of dense AdamS' | minutes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, runs in best.items():
        link = measured.get(method)
        reached = [steps_to(r["curve"], base * TARGET) for r in runs]
        steps = statistics.mean(s for s in reached if s) if all(reached) else None
        first = min(runs[0]["dense_steps"], steps or math.inf)
        cells = [
            method,
            f"{steps:.0f}" if steps else "not reached",
            f"{first:.0f}" if steps else "–",
        ]
        if link and dense:
            cells += [f"{link['seconds']:.3f}", f"{link['bytes'] / 1e3:.1f}"]
            cells.append(f"{link['bytes'] / dense['bytes']:.2%}")
        else:
            cells += ["–"] * 3
        if steps and link and dense:
            seconds = first * dense["seconds"] + (steps - first) * link["seconds"]
            cells.append(f"{seconds / 60:.1f}")
        else:
            cells.append("–")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ablation(rows: Sequence[Row]) -> list[str]:
    """One line for each switch, by family, against the family without it."""
    if not rows:
        return ["Nothing has run yet."]
    by_rate: dict[tuple[str, float], Row] = {(r["method"], r["lr"]): r for r in rows}
    dense = {lr: final(r) for (m, lr), r in by_rate.items() if m == "adams"}
    lines = [
        "| method and switches | rate | held-out loss | against dense AdamS |",
        "| --- | ---: | ---: | ---: |",
    ]
    ordered = sorted(by_rate.items(), key=lambda item: (item[0][0].split("/")[0], final(item[1])))
    for (method, lr), row in ordered:
        against = f"{final(row) / min(dense.values()) - 1:+.1%}" if dense else "–"
        lines.append(f"| {method.replace('/', ', ')} | {lr:g} | {final(row):.3f} | {against} |")
    return lines


def missing(
    rows: Sequence[Row],
    best: Mapping[str, list[Row]],
    rates: Mapping[str, Sequence[float]],
    seeds: int,
) -> list[str]:
    """What the table still lacks, a line for each method."""
    lines = []
    for method, grid in rates.items():
        done = {r["lr"] for r in rows if r["method"] == method and r["seed"] == 0}
        left = [f"{lr:g}" for lr in grid if lr not in done]
        repeats = seeds - len(best.get(method, []))
        if left:
            lines.append(f"- {method}: rates {', '.join(left)}, then {seeds - 1} more seeds")
        elif repeats > 0:
            lines.append(f"- {method}: {repeats} more seed{'s' if repeats > 1 else ''}")
    return lines or ["Nothing: every run of the plan is done."]


def verdict(best: Mapping[str, list[Row]]) -> list[str]:
    """Whether the losses are as near to dense AdamS as was asked for, family by family."""
    if "adams" not in best:
        return []
    base = statistics.mean(map(final, best["adams"]))
    lines = []
    for share, within in WITHIN.items():
        for method, runs in best.items():
            part = share_of_bytes(runs[0])
            if parse(method)[0] not in SCAPE or not part or not share / 5 < part <= share * 1.3:
                continue
            off = statistics.mean(map(final, runs)) / base - 1
            said = "reached" if off <= within else "missed"
            lines.append(
                f"- {method} ({part:.1%} of the bytes): {off:+.1%}, asked for at most "
                f"{within:+.0%}: {said}."
            )
    return lines


def page(
    rows: Sequence[Row],
    ablated: Sequence[Row],
    links: Sequence[Row],
    *,
    methods: Sequence[str],
    rates: Mapping[str, Sequence[float]],
    seeds: int,
    mbit: float,
) -> str:
    """The results as a Markdown page."""
    head = "# Dense and sparse optimizers on the language-model recipe"
    if not rows and not ablated:
        return f"{head}\n\nNothing has run yet.\n"
    one = (list(rows) or list(ablated))[0]
    best = chosen(rows, methods)
    tried = {m: {r["lr"] for r in rows if r["method"] == m and r["seed"] == 0} for m in best}
    planned = sum(len(grid) + seeds - 1 for grid in rates.values())
    done = sum(len(tried[m]) + len(best[m]) - 1 for m in best)
    about = (
        f"{one['model']} ({one['params']:,} weights), {one['workers']} gloo workers x "
        f"{one['batch']} samples x {one['sequence']} tokens, {{steps}} steps, the standard "
        f"library's sources ({one['max_bytes'] / 1e6:g} MB, {one['vocab_size']:,} tokens). "
    )
    every = [
        f"| {m} | {lr:g} | {', '.join(f'{final(r):.3f}' for r in runs)} |"
        for m in methods
        for lr in sorted({r["lr"] for r in rows if r["method"] == m})
        for runs in [sorted((r for r in rows if (r["method"], r["lr"]) == (m, lr)), key=_seed)]
    ]
    sections = [
        head,
        about.format(steps=f"{rows[0]['steps']:,}" if rows else "no")
        + "Methods that send little begin with a tenth of dense steps unless their name says "
        "otherwise. Every method runs with each rate of one grid and seed 0, then with two more "
        "seeds at its best rate; ± is the standard deviation over seeds. Where workers drift apart "
        "the mean of their models is evaluated. `benchmarks/scape_table.py` makes this page; "
        f"{done} of {planned} runs are done.",
        "## Loss after equal steps",
        "\n".join(losses(best, rates, tried)),
        "\n".join(verdict(best)),
        f"## Time to dense AdamS' loss x {TARGET:g} over {mbit:g} Mbit/s",
        "Steps are read from the curves; the length and the bytes of a step of this very network "
        "were measured over the limited link by `benchmarks/links.py` (links.md), and a dense step "
        "counts as dense AdamS' own.",
        "\n".join(times(best, links, mbit)),
        "## What is missing",
        "\n".join(missing(rows, best, rates, seeds)),
        "## Every run",
        "\n".join(["| method | rate | loss by seed |", "| --- | ---: | --- |", *every]),
        "## Ablation",
        (about.format(steps=f"{ablated[0]['steps']:,}") if ablated else "")
        + "One seed; each line changes only what its name says.",
        "\n".join(ablation(ablated)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _seed(row: Row) -> int:
    return row["seed"]
