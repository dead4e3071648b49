"""``docs/results/pathology.md`` from the rows: what is measured, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hotswap.rows import Row, Rows

from pathbench.cells import EXTRAS, MEASURE, METASTASIS, SWITCHES, Cell, full, short
from pathbench.figures import DRAWS, Pair, against_bare, gap, main_effect
from pathbench.headline import HEADLINES

CALIBRATED = {"metastasis": (0.80, 0.93), "gleason": (0.60, 0.80)}
"""Where the bare baselines are to land: neither failing nor solving the set. Source: the brief of
the pathology part."""
KAPPA, SLIDES = 0.85, 200
TITLES = {"metastasis": "Metastasis", "gleason": "Gleason"}

INTRO = """\
Synthetic tissue throughout: the numbers compare settings on made images and say nothing about
patients. Networks are scaled down (EfficientNet-b0 at width 0.25 and half the depth). Intervals are
95 %, from {draws:,} draws of test slides; a difference is drawn in pairs, on the same slides for both
runs, and each seed counts alike. An interval holds the chance of the slides, not that of the training,
which is larger here: small networks that train briefly differ most in when they first tell tumour
cells from histiocytes. So a part *adds* only where its interval is clear of 0 and all of at least three
seeds agree on the direction; fewer seeds are no verdict; the rest *adds nothing that is shown*."""

HOLDS = (
    (
        "RCC",
        "more images, the same centre",
        "tumour stands outside the centre in both classes with the same chance; only the centre "
        "decides",
    ),
    (
        "stem stride 1",
        "small images",
        "tumour cells are 4 to 6 µm in radius at 0.97 µm/px; the smallest foci hold no whole cell",
    ),
    (
        "attention, fusion",
        "meaning at several scales",
        "cells tell tumour (fine), their place tells the class (coarse); histiocytes, which are "
        "large and pale like tumour cells, stand everywhere",
    ),
    (
        "PBIR",
        "sparse tissue on a large slide",
        "a core on glass; resized to a board it fills a quarter of it, at 10 µm/px, where "
        "lumina are lost; tiles have 4",
    ),
    (
        "DC",
        "a network that knows other colours",
        "pre-trained on lymph nodes in laboratory A's stain; the biopsies come from both laboratories",
    ),
    (
        "QWMSE",
        "grades have an order",
        "patterns 3, 4 and 5 shade into each other; grade groups follow from their pair",
    ),
)

CALIBRATION = """\
How far tumour stands from the centre, how many patches train, how often they are seen and whether
they are turned was chosen on other seeds than those above, whose patches are other ones in all three
parts; everything that was tried is here (`likeness` 0.35 where nothing else is said). The choice is the
last row with half as many epochs again; its bare run was not tried before. The bare and the other runs
differ in nothing but what is on. So the gain above is that of crops **where nothing else keeps a
network from learning its patches by heart**. With turns, which are the recipe's default, crops added
in one process (three seeds of three) and not when launched (one of three): no gain is shown there. In
one process the test part had 1,024 patches, launched 2,048."""

REAL = """\
Nothing above needs data, and nothing of it replaces them. With the data sets of the papers:

```
many="--workers 4 --spares 1"
paper="--backbone b3 --epochs 30 --batch 64"
planaria train metastasis --data PCAM_DIR $many $paper --out runs/pcam
planaria train metastasis --data PCAM_DIR $many $paper --no-rcc --stem-stride 2 \\
    --no-attention --no-fusion --out runs/pcam-bare
planaria train metastasis --data KAGGLE_DIR --preset paper $many $paper --out runs/rpcam

slides="--data PANDA_DIR --pretrained lite0 --epochs 30 --cache runs/panda-cache"
for fold in 0 1 2 3 4; do
    planaria train gleason $slides $many --fold $fold --out runs/panda-$fold
    planaria train gleason $slides $many --fold $fold --no-pbir --dc none --loss mse \\
        --out runs/panda-bare-$fold
done
```

`PCAM_DIR` holds the six HDF5 files and `_meta.csv`, `KAGGLE_DIR` `train_labels.csv` and `train/`,
`PANDA_DIR` `train.csv` and `train_images/`. Each run leaves `results.json` with intervals by slide,
and its predictions."""


def report(rows: Rows, *, command: str, seeds: int) -> str:
    """The page."""
    parts = [
        "# Pathology, measured",
        _head(rows, command),
        INTRO.format(draws=DRAWS),
        "## Targets",
        _targets(rows),
        "## What the tissue holds",
        table(["part", "what it is made for", "what the tissue holds of it"], HOLDS, text=True),
        "## With a worker killed on the way",
        _headlines(rows),
    ]
    for recipe in MEASURE:
        parts += [f"## {TITLES[recipe]}: one factor at a time", _short(rows, recipe, seeds=seeds)]
    for recipe in MEASURE:
        parts += [f"## {TITLES[recipe]}: all combinations", _full(rows, recipe)]
    parts += ["## On real data", REAL]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, text: bool = False) -> str:
    """A Markdown table; columns but the first are to the right, unless they are ``text``."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |"]
    lines[1] += (" --- |" if text else " ---: |") * (len(head) - 1)
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def cells(rows: Rows, recipe: str) -> list[Row]:
    """The recipe's finished cells."""
    return rows.of("cell", recipe=recipe)


def _head(rows: Rows, command: str) -> str:
    done = rows.of("done")
    if not done:
        return "Nothing is measured yet."
    commits = dict.fromkeys(row["commit"] for row in done)
    hours = sum(row["seconds"] for row in done) / 3600
    loads = sorted(row["load"] for row in done)
    return "\n".join(
        [
            f"- machine: {done[-1]['machine']}",
            f"- commits: {', '.join(commits)}",
            f"- command: `{command}`; {hours:.1f} hours of runs one after the other, "
            f"{done[0]['at']} to {done[-1]['at']}, beside other work (load {loads[0]:.1f} to "
            f"{loads[-1]:.1f} where they began)",
            "- rows: [raw/pathology.jsonl](raw/pathology.jsonl); finished ones are kept, and the "
            "command goes on where it was interrupted",
        ]
    )


def _launched(rows: Rows) -> dict[tuple[str, str, int], Row]:
    """The launched runs by recipe, kind and seed."""
    return {(row["recipe"], row["which"], row["seed"]): row for row in rows.of("headline")}


def _both(rows: Rows, recipe: str) -> list[Pair]:
    """The launched runs with the method and without, of the same seeds; the first is the struck one
    where there is one."""
    runs = _launched(rows)
    seeds = sorted({seed for name, _, seed in runs if name == recipe})
    found = [
        (
            runs.get((recipe, "struck", s)) or runs.get((recipe, "calm", s)),
            runs.get((recipe, "bare", s)),
        )
        for s in seeds
    ]
    return [(method, bare) for method, bare in found if method and bare]


def _targets(rows: Rows) -> str:
    out: list[list[object]] = []
    for recipe, (low, high) in CALIBRATED.items():
        bare = [row["value"] for row in cells(rows, recipe) if not row["on"]]
        said = ", ".join(f"{value:.3f}" for value in bare)
        met = bool(bare) and all(low <= value <= high for value in bare)
        out.append(
            [
                f"bare {recipe} baseline",
                f"{MEASURE[recipe]} {low:.2f} to {high:.2f}",
                said or "missing",
                _met(met),
            ]
        )
    runs = _launched(rows)
    for recipe, (low, high) in CALIBRATED.items():
        launched = [row["value"] for row in rows.of("headline", recipe=recipe, which="bare")]
        said = ", ".join(f"{value:.3f}" for value in launched)
        out.append(
            [
                f"bare {recipe} baseline, launched with two workers",
                f"{MEASURE[recipe]} {low:.2f} to {high:.2f}",
                said or "missing",
                _met(bool(launched) and all(low <= value <= high for value in launched)),
            ]
        )
    for recipe in MEASURE:
        struck = next(iter(rows.of("headline", recipe=recipe, which="struck")), None)
        calm = runs.get((recipe, "calm", struck["seed"])) if struck else None
        if calm is None or struck is None:
            out.append([f"{recipe}, worker killed", "equal digests", "missing", _met(False)])
            continue
        same = all(calm[k] == struck[k] for k in ("state_digest", "samples_digest"))
        out.append(
            [
                f"{recipe}, worker killed",
                "equal digests",
                "equal" if same else "different",
                _met(same),
            ]
        )
    pairs = _both(rows, "metastasis")
    for name, chosen in (
        ("that metastasis run against its bare baseline", pairs[:1]),
        ("the same with other seeds, all together", pairs if len(pairs) > 1 else []),
    ):
        better = gap(chosen) if chosen else None
        said = str(better) if better else "missing"
        out.append([name, "AUC, clear of 0", said, _met(better is not None and better.low > 0)])
    grade = next(iter(rows.of("headline", recipe="gleason", which="struck")), None)
    said = f"{grade['value']:.3f} on {len(grade['groups'])} slides" if grade else "missing"
    met = bool(grade) and grade["value"] >= KAPPA and len(grade["groups"]) >= SLIDES
    out.append(
        ["that Gleason run", f"kappa ≥ {KAPPA} on at least {SLIDES} slides", said, _met(met)]
    )
    return table(["what", "target", "measured", "met"], out)


def _met(met: bool) -> str:
    return "yes" if met else "**no**"


def _headlines(rows: Rows) -> str:
    lines: list[list[object]] = []
    commands: list[str] = []
    for headline in HEADLINES:
        for which, seed in headline.runs:
            row = _launched(rows).get((headline.recipe, which, seed))
            command = row["command"] if row else headline.command(which, seed=seed)
            if seed == headline.seeds[0]:
                commands.append(f"{command} --out runs/{headline.recipe}-{which}")
            name = f"{headline.recipe}, {which}" + (f", seed {seed}" if seed else "")
            if row is None:
                lines.append([name, *["missing"] * 7])
                continue
            interval = row["interval"]
            lines.append(
                [
                    name,
                    f"{MEASURE[headline.recipe]} {row['value']:.4f} "
                    f"[{interval['low']:.3f}, {interval['high']:.3f}]",
                    row["steps"],
                    row["swaps"],
                    row["redone"],
                    f"`{row['state_digest'][:12]}`",
                    f"`{row['samples_digest'][:12]}`",
                    f"{row['wall_s']:.0f}",
                ]
            )
    head = ["run", "test part", "steps", "swaps", "steps again", "state", "samples", "seconds"]
    return "\n\n".join(
        [
            "Both recipes from the command line, two workers and a spare. *calm* and *struck* "
            "are the same run without and with a SIGKILL in the middle of a backward pass; equal "
            "digests mean the same parameters, BatchNorm statistics and optimizer states to the bit, "
            "and the same samples in the same order. A calm run with a swap lost a worker without "
            "being asked to: a busy machine did not let it answer within the limit of 1.5 s.",
            table(head, lines),
            "```\n" + "\n".join(commands) + "\n```",
            *_calibrated(rows),
            *_tried(rows),
        ]
    )


def _calibrated(rows: Rows) -> list[str]:
    """What the metastasis runs' tissue and sizes were chosen by."""
    found = rows.of("calibrated", recipe="metastasis")
    lines = [
        [
            row["setting"],
            "launched" if row["launched"] else "one process",
            row["seed"],
            _name(row["on"]),
            f"{row['value']:.3f}",
        ]
        for row in found
    ]
    if not lines:
        return []
    head = ["tissue and training part", "how", "seed", "on", "AUC"]
    return [CALIBRATION, table(head, lines, text=True)]


def _tried(rows: Rows) -> list[str]:
    """What was launched before with other settings, and is not what the targets are read from."""
    lines: list[list[object]] = []
    for attempt in dict.fromkeys(row["attempt"] for row in rows.of("tried")):
        found = {row["which"]: row for row in rows.of("tried", attempt=attempt)}
        calm, bare = found["calm"], found["bare"]
        change = gap([(calm, bare)])
        lines.append(
            [
                f"`{calm['command'].partition('--synthetic ')[2]}`",
                f"{bare['value']:.4f}",
                f"{calm['value']:.4f}",
                change,
                change.verdict,
            ]
        )
    if not lines:
        return []
    return [
        "Launched with other parts and sizes than the command has now:",
        table(["options after `--synthetic`", "bare AUC", "AUC", "difference", "verdict"], lines),
    ]


def _short(rows: Rows, recipe: str, *, seeds: int) -> str:
    found = cells(rows, recipe)
    wanted = [cell for seed in range(seeds) for cell in short(recipe, seed=seed)]
    order = dict.fromkeys(cell.on for cell in wanted)
    lines = [_line(found, on) for on in order if any(row["on"] == list(on) for row in found)]
    head = ["on", MEASURE[recipe], "seeds", "against nothing", "each seed", "verdict", "core s"]
    notes = [_setting(recipe), table(head, lines) if lines else "Nothing is measured yet."]
    shown = [row for row in found if tuple(row["on"]) in order]
    if shown:
        minutes = sum(row["cpu_s"] for row in shown) / 60
        notes.append(f"{len(shown)} runs, {minutes:.0f} minutes of one core.")
    for row in rows.of("calibration", recipe=recipe):
        notes.append(
            f"Another size was tried for the bare baseline and given up, being outside the band: "
            f"{row['setting']} give {row['value']:.3f}."
        )
    former = [f"{_name(r['on'])} {r['value']:.3f}" for r in rows.of("former", recipe=recipe)]
    if former:
        notes.append(
            "On the tissue before (tumour 6 µm from the centre instead of 14, 2,048 patches, turned, "
            f"8 epochs), one seed each: {', '.join(former)}."
        )
    if EXTRAS[recipe]:
        notes.append("Larger λ are tried by themselves only, and stand in no combination.")
    return "\n\n".join([*notes, *_missing(found, wanted)])


def _name(on: Sequence[str]) -> str:
    return " + ".join(on) or "nothing"


def _line(found: Sequence[Row], on: Sequence[str]) -> list[object]:
    mine = [row for row in found if row["on"] == list(on)]
    values = [row["value"] for row in mine]
    mean, cpu = sum(values) / len(values), sum(row["cpu_s"] for row in mine) / len(mine)
    name = _name(on)
    change = against_bare(found, on)
    if change is None:
        return [name, f"{mean:.3f}", len(values), "", "", "baseline", f"{cpu:.0f}"]
    each = ", ".join(f"{value:+.3f}" for value in change.seeds)
    return [name, f"{mean:.3f}", len(values), change, each, change.verdict, f"{cpu:.0f}"]


def _full(rows: Rows, recipe: str) -> str:
    found = [row for row in cells(rows, recipe) if set(row["on"]) <= set(SWITCHES[recipe])]
    wanted = [cell for seed in range(3) for cell in full(recipe, seed=seed)]
    effects: list[list[object]] = []
    for part in SWITCHES[recipe]:
        effect = main_effect(found, part)
        if effect is not None:
            change, pairs = effect
            each = ", ".join(f"{value:+.3f}" for value in change.seeds)
            effects.append([part, change, each, pairs, change.verdict])
    order = dict.fromkeys(cell.on for cell in wanted)
    lines = [_line(found, on) for on in order if any(row["on"] == list(on) for row in found)]
    if not lines:
        return "\n\n".join(["Nothing is measured yet.", *_missing(found, wanted)])
    head = ["on", MEASURE[recipe], "seeds", "against nothing", "each seed", "verdict", "core s"]
    return "\n\n".join(
        [
            "What a part adds on average over all settings of the others that are there:",
            table(["part", "adds", "each seed", "pairs", "verdict"], effects),
            "And each combination:",
            table(head, lines),
            *_missing(found, wanted),
        ]
    )


def _setting(recipe: str) -> str:
    if recipe == "metastasis":
        train, _, test = METASTASIS.synthetic
        return (
            f"{train:,} training and {test:,} test patches of other slides, {METASTASIS.epochs} "
            "epochs, the epoch chosen on the validation part, patches never turned in training, the mean "
            "over 8 turns in the end, in one process: the launched runs' sizes."
        )
    from pathbench.cells import GLEASON, SOURCE

    return (
        f"{GLEASON.synthetic} biopsies of both laboratories, a third each for training, validation "
        f"and test, {GLEASON.epochs} epochs; boards of {GLEASON.tiles} tiles of {GLEASON.px} px at "
        f"{GLEASON.mpp:g} µm/px. All cells start from one network that was trained on "
        f"{SOURCE.synthetic[0]:,} lymph-node patches of laboratory {SOURCE.laboratories}. Without "
        "PBIR the slide is resized, and there is no augmentation; without DC the network's own "
        "normalisation stands; without QWMSE the loss is the plain mean square error."
    )


def _missing(found: Sequence[Row], wanted: Sequence[Cell]) -> list[str]:
    there = {(tuple(row["on"]), row["seed"]) for row in found}
    absent = [cell for cell in wanted if (cell.on, cell.seed) not in there]
    if not absent:
        return []
    names = [f"{_name(cell.on)}, seed {cell.seed}" for cell in absent]
    more = "" if len(names) <= 6 else f"; and {len(names) - 6} more"
    return [
        f"**Missing: {len(absent)} of {len(wanted)} runs** ({'; '.join(names[:6])}{more}); "
        "`python benchmarks/pathology.py --only factors,full` goes on there."
    ]
