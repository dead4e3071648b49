"""``planaria demo``: train twice, lose a worker in one of the two, and compare to the last bit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.errors import RunError, UserError
from planaria.recipes.llm import LlmConfig, demo, prepare
from planaria.runtime.coordinator import lock
from planaria.runtime.coordinator.journal import JOURNAL_FILE
from planaria.runtime.coordinator.summary import SUMMARY_FILE
from planaria.runtime.launch.config import for_recipe
from planaria.runtime.launch.launcher import launch

MODULE = "planaria.recipes.llm.train"
PRELOAD = ("transformers", "torch.utils.tensorboard")
_WORKERS, _SPARES, _FAULT_STEP = 4, 1, 20
_FAULT = f"kill:worker=2,step={_FAULT_STEP},phase=backward"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the two runs ended with; seconds."""

    digests_equal: bool
    """Whether all parameters and optimizer states are equal, bit for bit."""
    samples_equal: bool
    """Whether the same samples were consumed in the same order."""
    recovery_s: dict[str, float]
    """By phase, and ``total``: from the signal to the next committed step."""
    steps_redone: int
    """The interrupted one included."""
    step_s: float
    """Median seconds of an undisturbed step."""
    state_digest: tuple[str, str]
    samples_digest: tuple[str, str]
    loss: tuple[float, float]
    """Training loss of the last step."""


def show(*, out: Path, json_file: Path | None = None, steps: int = 40) -> int:
    """Run both for ``steps`` steps, print the table; 0 where nothing was lost, 1 where something was.

    Raises :class:`UserError` where ``steps`` end before the fault fires.
    """
    if steps <= _FAULT_STEP:
        raise UserError(
            f"steps is {steps}: give more than {_FAULT_STEP}, the step in which the worker is killed"
        )
    check_json(json_file)
    calm, struck = out / "undisturbed", out / "killed"
    recipe = dataclasses.replace(demo(out=calm, steps=steps), cache=out / "cache")
    prepare(recipe)
    _say(f"1 of 2: {steps} steps on {_WORKERS} workers, undisturbed")
    _train(recipe, faults=())
    _say(f"2 of 2: the same, with a SIGKILL in mid-step ({_FAULT})")
    _train(dataclasses.replace(recipe, out=struck), faults=(_FAULT,))
    result = compare(_summary(calm), _summary(struck))
    _table(result)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"json {json_file} cannot be written: {error.strerror}") from None
    return 0 if result.digests_equal and result.samples_equal else 1


def check_json(path: Path | None) -> None:
    """Raise :class:`UserError` where ``path`` cannot be written: before the runs, not after them."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(f"json {path} cannot be written; give a file in a folder that exists")


def _train(recipe: LlmConfig, *, faults: tuple[str, ...]) -> None:
    lock.check(recipe.out)
    if (recipe.out / JOURNAL_FILE).exists():  # of an earlier demo
        shutil.rmtree(recipe.out)
    code = launch(
        for_recipe(
            recipe, module=MODULE, preload=PRELOAD, workers=_WORKERS, spares=_SPARES, inject=faults
        )
    )
    if code != 0:
        raise RunError(
            f"the run in {recipe.out} ended with exit code {code}; see {recipe.out}/logs"
        )


def _summary(out: Path) -> dict[str, Any]:
    return json.loads((out / SUMMARY_FILE).read_text(encoding="utf-8"))


def compare(calm: dict[str, Any], struck: dict[str, Any]) -> Comparison:
    """The undisturbed run's summary against the other one's.

    Raises :class:`RunError` where the fault never fired: nothing would be shown then.
    """
    swaps = struck["swaps"]
    if struck["injected"] != 1 or len(swaps) != 1:
        raise RunError(
            f"{struck['injected']} faults fired and {len(swaps)} swaps followed, expected one of "
            "each; see journal.jsonl"
        )
    return Comparison(
        digests_equal=_equal(calm, struck, "state_digest"),
        samples_equal=_equal(calm, struck, "samples_digest"),
        recovery_s={**swaps[0]["phases"], "total": swaps[0]["total"]},
        steps_redone=struck["steps_redone"],
        step_s=calm["step_s"],
        state_digest=(calm["state_digest"], struck["state_digest"]),
        samples_digest=(calm["samples_digest"], struck["samples_digest"]),
        loss=(calm["final"]["loss"], struck["final"]["loss"]),
    )


def _equal(calm: dict[str, Any], struck: dict[str, Any], name: str) -> bool:
    return calm[name] is not None and calm[name] == struck[name]


def _table(result: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="A worker was lost. What else was?")
    for name in ("", "undisturbed", "one SIGKILL", ""):
        table.add_column(name)
    for name, pair, equal in (
        ("state", result.state_digest, result.digests_equal),
        ("samples", result.samples_digest, result.samples_equal),
    ):
        verdict = "equal" if equal else "DIFFERENT"
        table.add_row(name, f"{pair[0][:12]}…", f"{pair[1][:12]}…", verdict)
    same = "equal" if result.loss[0] == result.loss[1] else "DIFFERENT"
    table.add_row("last loss", *(f"{loss:.6f}" for loss in result.loss), same)
    table.add_row("steps redone", "0", str(result.steps_redone), "", end_section=True)
    for phase, seconds in result.recovery_s.items():
        table.add_row(phase, "", f"{seconds:.3f} s", "to next commit" if phase == "total" else "")
    table.add_row("median step", f"{result.step_s:.3f} s", "", "")
    Console(highlight=False).print(table)


def _say(text: str) -> None:
    sys.stdout.write(f"planaria demo, {text}\n")
    sys.stdout.flush()
