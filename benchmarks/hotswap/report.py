"""``docs/results/hot_swap.md`` from the rows: every table with its target, met or missed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hotswap import matrix
from hotswap.figures import Interval, median, median_interval, seconds, table
from hotswap.paths import PHASES
from hotswap.rows import Row, Rows

REGIMES = ("replicated", "all sharded")
BEYOND_S = 0.5
"""Most seconds of a recovery beyond one step's own time."""
FASTER = 30.0
"""Than torchrun, at least."""
RATIO = {"replicated": 1.01, "all sharded": 1.05}
WAITING = 0.01
"""Most of a step that the training thread waits for protection."""

EXPLAINED = {
    "detect": "signal until the coordinator knows and has ordered everyone out",
    "broken attempt": "the slowest survivor leaves the rest of its attempt",
    "build": "the spare's model and optimizer, beyond that",
    "plan": "reports, plan, and their ways",
    "rebuild": "new gloo groups",
    "move": "state to the spare",
    "load": "into model and optimizer",
    "verify": "one collective, and the last word",
    "step": "the interrupted step, again",
    "commit": "until it is held twice for every shard",
}


def report(rows: Rows, *, command: str) -> str:
    """The whole page."""
    verdicts: list[Sequence[str]] = []
    parts = [
        _head(rows, command=command),
        "",
        *_recovery(rows, verdicts),
        *_systems(rows, verdicts),
        *_overhead(rows, verdicts),
        *_memory(rows),
        *_matrix(rows, verdicts),
        *_simulation(rows, verdicts),
    ]
    told = table(["what", "target", "measured", "met"], verdicts) if verdicts else ""
    parts[1] = f"## Targets\n\n{told}"
    return "\n".join(parts).rstrip() + "\n"


def _head(rows: Rows, *, command: str) -> str:
    done = rows.of("done")

    def all_of(name: str) -> str:
        return "; ".join(dict.fromkeys(str(row[name]) for row in done)) or "nothing measured yet"

    loads = [row["load"] for row in done]
    busy = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown"
    minutes = sum(row["seconds"] for row in done) / 60
    when = f"{min(row['at'] for row in done)} to {max(row['at'] for row in done)}" if done else "–"
    return (
        "# Hot swap, measured\n\n"
        f"- machine: {all_of('machine')}; everything runs on it, over its loopback\n"
        f"- commit: {all_of('commit')}\n"
        f"- command: `{command}`, {minutes:.0f} minutes in {len(done)} runs, {when}\n"
        f"- load of the machine when the runs began, those before them included: {busy}\n"
        "- rows: [raw/hot_swap.jsonl](raw/hot_swap.jsonl); finished ones are kept, and the command "
        "goes on where it was interrupted (`--fresh` begins anew)\n"
    )


def _measured(rows: Rows, part: str, tables: str) -> str:
    """What every table says: machine, commit and command of its own rows."""
    done = [row for row in rows.of("done") if row["unit"].startswith(part)]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in done))
    machines = "; ".join(dict.fromkeys(row["machine"] for row in done))
    return f"*{machines}; commit {commits}; `python benchmarks/hot_swap.py --only {tables}`*\n"


def _met(good: bool) -> str:
    return "yes" if good else "**no**"


def _recovery(rows: Rows, verdicts: list[Sequence[str]]) -> Iterator[str]:
    kills = {r: rows.of("kill", system="planaria", regime=r) for r in REGIMES}
    if not any(kills.values()):
        return
    yield "## Recovery by phase\n"
    yield (
        "SIGKILL to one of the workers in the middle of its backward pass; shards take turns, "
        "shard 0 included. Seconds along the critical path: every moment between the signal and "
        "the next committed step belongs to one phase, so that means add up (medians nearly do). "
        "*beyond* is the total less the median of the same run's undisturbed steps.\n"
    )
    head = ["phase"]
    for regime in REGIMES:
        head += [f"{regime}: median", "mean", "worst"]
    lines: list[list[str]] = []
    for phase in PHASES:
        line = [f"{phase}: {EXPLAINED[phase]}"]
        for regime in REGIMES:
            line += _spread([row["path"][phase] for row in kills[regime]])
        lines.append(line)
    for name, value in (
        ("**total**", _total),
        ("undisturbed step", _step),
        ("**beyond**", _beyond),
    ):
        line = [name]
        for regime in REGIMES:
            line += _spread([value(row) for row in kills[regime]])
        lines.append(line)
    yield table(head, lines)
    for regime in REGIMES:
        if not kills[regime]:
            continue
        redone = max(row["redone"] for row in kills[regime])
        yield (
            f"{regime}: {len(kills[regime])} kills, at most {redone} step"
            f"{'s' if redone > 1 else ''} done again.\n"
        )
        beyond = statistics.median(_beyond(row) for row in kills[regime])
        verdicts.append(
            [
                f"recovery beyond one step, {regime}",
                f"< {BEYOND_S} s",
                f"{beyond:.3f} s (median of {len(kills[regime])})",
                _met(beyond < BEYOND_S),
            ]
        )
    yield _measured(rows, "recovery", "recovery")


def _total(row: Row) -> float:
    return row["total"]


def _step(row: Row) -> float:
    return row["step_s"]


def _beyond(row: Row) -> float:
    return row["total"] - row["step_s"]


def _late(row: Row) -> float:
    return row["seconds"] - row["step_s"]


def _spread(values: Sequence[float]) -> list[str]:
    if not values:
        return ["–"] * 3
    found = (statistics.median(values), statistics.fmean(values), max(values))
    return [seconds(value) for value in found]


def _systems(rows: Rows, verdicts: list[Sequence[str]]) -> Iterator[str]:
    kills = {
        s: rows.of("kill", system=s, regime="replicated")
        for s in ("planaria", "torchrun", "torchft")
    }
    if not kills["planaria"] or not (kills["torchrun"] or kills["torchft"]):
        return
    own = statistics.median(row["seconds"] for row in kills["planaria"])
    late = statistics.median(_late(row) for row in kills["planaria"])
    yield "## The same job under other systems\n"
    yield (
        "One rule for all: seconds from the signal until the interrupted step is committed "
        "(torchrun: done by every rank, though not yet on disk; torchft: committed by every "
        "survivor). The same model, data, optimizer and place of the kill; runs alternate. The last "
        "column compares what is left when each system's own undisturbed step is taken off.\n"
    )
    lines: list[list[str]] = []
    for system, found in kills.items():
        if not found:
            continue
        times = [row["seconds"] for row in found]
        middle = statistics.median(times)
        lines.append(
            [
                {"planaria": "Planaria", "torchrun": "torchrun, checkpoints on disk"}.get(
                    system, "torchft 0.2.0"
                ),
                str(len(found)),
                seconds(middle),
                f"{min(times):.2f} to {max(times):.2f}",
                seconds(statistics.median(_step(row) for row in found)),
                f"{middle / own:.1f}",
                f"{statistics.median(_late(row) for row in found) / late:.1f}",
            ]
        )
        if system == "planaria":
            continue
        least = FASTER if system == "torchrun" else 1.0
        verdicts.append(
            [
                f"faster than {system}",
                f"≥ {least:g} times" if system == "torchrun" else "faster",
                f"{middle / own:.1f} times",
                _met(middle / own >= least),
            ]
        )
    head = ["system", "kills", "median s", "range s", "step s", "times Planaria's", "less one step"]
    yield table(head, lines)
    yield from _what_else(kills)
    yield _measured(rows, "recovery", "recovery")


def _what_else(kills: dict[str, list[Row]]) -> Iterator[str]:
    if kills["torchrun"]:
        phases = {
            name: statistics.median(row["path"][name] for row in kills["torchrun"])
            for name in kills["torchrun"][0]["path"]
        }
        redone = statistics.median(row["redone"] for row in kills["torchrun"])
        told = ", ".join(f"{name} {value:.2f} s" for name, value in phases.items())
        yield (
            f"torchrun's time by the median: {told} ({redone:g} steps; kills fall midway between "
            "two checkpoints). Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun of torch 2.13 "
            "does not come back at all on gloo (pytorch issue 135712).\n"
        )
    if kills["torchft"]:
        whole = median(
            row["whole_again"] for row in kills["torchft"] if row["whole_again"] is not None
        )
        yield (
            "torchft goes on with one replica less, whose batch is lost; all replicas commit "
            f"together again {seconds(whole)} s after the signal. Its time-outs are set to 5 s "
            "here (its example has 30 s for the manager); gradients are averaged by "
            "`manager.allreduce`, because the comm hook of 0.2.0's DistributedDataParallel ends "
            "every survivor when a gloo all-reduce fails.\n"
        )


def _overhead(rows: Rows, verdicts: list[Sequence[str]]) -> Iterator[str]:
    if not rows.of("pair"):
        return
    yield "## What protection costs while nothing fails\n"
    yield (
        "Capture, replication and commit on and off from step to step, in one process tree; each "
        "pair of neighbouring steps gives one ratio. Median with a 95 % bootstrap interval. Processor "
        "time is that of all threads of all workers.\n"
    )
    lines: list[list[str]] = []
    for regime in REGIMES:
        pairs = rows.of("pair", regime=regime)
        runs = rows.of("overhead", regime=regime)
        if not pairs or not runs:
            continue
        ratio = median_interval([pair["on"] / pair["off"] for pair in pairs])
        shares = [share for run in runs for share in run["waited_share"]]
        lines.append(_cost(regime, pairs, runs, ratio, shares))
        step = statistics.median(pair["off"] for pair in pairs)
        state = runs[0]["state"] / 1e6
        verdicts.append(
            [
                f"step time on : off, {regime} ({state:.0f} MB a worker, steps of {step:.2f} s)",
                f"≤ {RATIO[regime]}, steps ≥ 1 s",
                str(ratio),
                _met(ratio.median <= RATIO[regime] and step >= 1.0),
            ]
        )
        waiting = statistics.median(shares)
        verdicts.append(
            [
                f"training thread waits, {regime}",
                f"≤ {WAITING:.0%} of a step",
                f"{waiting:.2%} (worst {max(shares):.2%})",
                _met(waiting <= WAITING),
            ]
        )
    yield table(
        [
            "regime",
            "state MB a worker",
            "step off s",
            "on s",
            "pairs",
            "ratio",
            "processor time on : off",
            "waiting",
        ],
        lines,
    )
    yield _measured(rows, "overhead", "overhead")


def _cost(
    regime: str, pairs: list[Row], runs: list[Row], ratio: Interval, shares: list[float]
) -> list[str]:
    return [
        regime,
        f"{runs[0]['state'] / 1e6:.1f}",
        seconds(median(pair["off"] for pair in pairs)),
        seconds(median(pair["on"] for pair in pairs)),
        str(len(pairs)),
        str(ratio),
        str(median_interval([pair["cpu_on"] / pair["cpu_off"] for pair in pairs])),
        f"{statistics.median(shares):.3%}",
    ]


def _memory(rows: Rows) -> Iterator[str]:
    notes = rows.of("memory")
    if not notes:
        return
    yield "## Host memory and bytes sent\n"
    yield (
        "Of a worker, in the middle of training. *protection* is its two captures, and the two copies "
        "that it holds for another shard. PSS counts a page that several processes share "
        "by its share; Planaria's workers are forked from one server and share its imports.\n"
    )
    lines: list[list[str]] = []
    for system, regime in (("torchrun", "replicated"), *(("planaria", r) for r in REGIMES)):
        found = [row for row in notes if (row["system"], row["regime"]) == (system, regime)]
        if not found:
            continue
        own = {
            kind: median(row[kind] / 1e6 for row in found if kind in row)
            for kind in ("state", "buffers")
        }
        name = "torchrun, no protection" if system == "torchrun" else "Planaria"
        lines.append(
            [
                name,
                regime,
                *("–" if value is None else f"{value:.0f}" for value in own.values()),
                *(
                    f"{statistics.median(r[kind] for r in found) / 1e6:.0f}"
                    for kind in ("rss", "pss")
                ),
            ]
        )
    yield table(["system", "regime", "state MB", "protection MB", "RSS MB", "PSS MB"], lines)
    sent = [_sent(rows, regime) for regime in REGIMES if rows.of("overhead", regime=regime)]
    if sent:
        yield (
            "Bytes of one step, all workers together: what the journal says was sent to holders, "
            "and what the loopback interface has carried with protection and without.\n"
        )
        yield table(["regime", "to holders MB", "loopback, on MB", "off MB", "difference MB"], sent)
    yield _measured(rows, "", "recovery,overhead")


def _sent(rows: Rows, regime: str) -> list[str]:
    volume = [b for run in rows.of("overhead", regime=regime) for b in run["bytes"]]
    pairs = rows.of("pair", regime=regime)
    on = statistics.median(pair["sent_on"] for pair in pairs)
    off = statistics.median(pair["sent_off"] for pair in pairs)
    own = statistics.median(volume)
    return [regime, *(f"{value / 1e6:.3f}" for value in (own, on, off, on - off))]


def _matrix(rows: Rows, verdicts: list[Sequence[str]]) -> Iterator[str]:
    cells = rows.of("cell")
    if not cells:
        return
    calm = {row["regime"]: row for row in rows.of("undisturbed")}
    good = [cell for cell in cells if is_good(cell, calm)]
    yield "## Every worker, every phase\n"
    yield (
        "One SIGKILL or SIGSTOP to each worker, 0 included, several to a run. A cell is good when "
        "its fault fired, one swap followed, no more than "
        f"{matrix.MAX_REDO} steps (the interrupted one included) were done again, and the run ended "
        "with the state and the order of samples of the undisturbed run, bit for bit. Each field: "
        "good cells of all; median seconds from the signal to the next committed step; most steps "
        "done again. A SIGSTOP is noticed by silence, after a twentieth of the run's time-out of "
        f"{matrix.Size(workers=1).timeout:g} s.\n"
    )
    columns = [(regime, action) for regime in REGIMES for action in matrix.ACTIONS]
    lines = [
        [phase, *(_field(cells, calm, phase, regime, action) for regime, action in columns)]
        for phase in dict.fromkeys(cell["phase"] for cell in cells)
    ]
    yield table(["phase", *(f"{regime}, {action}" for regime, action in columns)], lines)
    for cell in cells:
        if cell not in good:
            yield f"- **not good**: {_tell(cell, calm)}"
    yield _measured(rows, "matrix", "matrix")
    verdicts.append(
        [
            "injections: fired, swapped, bit-equal, redone ≤ max_redo",
            "all",
            f"{len(good)} of {len(cells)}",
            _met(len(good) == len(cells)),
        ]
    )


def is_good(cell: Row, calm: dict[str, Row]) -> bool:
    """Whether a cell of the matrix shows what it must; ``calm``: undisturbed runs by regime."""
    same = calm.get(cell["regime"])
    return (
        same is not None
        and cell["fired"]
        and cell["swaps"] == 1
        and cell["redone"] <= matrix.MAX_REDO
        and all(cell[name] == same[name] for name in ("state", "samples"))
    )


def _field(cells: list[Row], calm: dict[str, Row], phase: str, regime: str, action: str) -> str:
    found = [
        cell
        for cell in cells
        if (cell["phase"], cell["regime"], cell["action"]) == (phase, regime, action)
    ]
    if not found:
        return "–"
    good = sum(is_good(cell, calm) for cell in found)
    middle = median(cell["seconds"] for cell in found if cell["seconds"] is not None)
    return f"{good}/{len(found)}; {seconds(middle)} s; {max(cell['redone'] for cell in found)}"


def _tell(cell: Row, calm: dict[str, Row]) -> str:
    same = calm.get(cell["regime"])
    equal = "not compared" if same is None else "equal"
    if same is not None and any(cell[name] != same[name] for name in ("state", "samples")):
        equal = "different"
    return (
        f"{cell['action']}:worker={cell['worker']},phase={cell['phase']}, {cell['regime']}: "
        f"fired {cell['fired']}, {cell['swaps']} swaps, {cell['redone']} steps done again, digests "
        f"{equal}"
    )


def _simulation(rows: Rows, verdicts: list[Sequence[str]]) -> Iterator[str]:
    found = rows.of("simulation")
    if not found:
        return
    row = found[-1]
    yield "## A million events through the membership\n"
    yield f"{row['text']}\n"
    yield _measured(rows, "simulation", "simulation")
    verdicts.append(
        [
            f"{row['events']:,} events through the membership",
            "no rule broken",
            f"none, {row['seconds']:.0f} s ({row['step_seconds']:.1f} s in the function)",
            _met(True),
        ]
    )
