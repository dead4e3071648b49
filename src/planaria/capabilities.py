"""What the capabilities bring to the command line: one entry for each command.

Apart from :mod:`planaria.cli` so that a new capability adds here and nowhere else. Nothing of a
capability is imported before its command is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tyro

Entry = tuple[tuple[str, ...], str, Callable[[], Any], Callable[[Any], int]]
"""Words, line in the help, the type that tyro reads, what is done with the parsed command."""

_LLM = ("model", "tensorboard")
_PATHOLOGY = (
    *("model.pt", "model.json", "results.json", "predictions.json", "predictions.csv"),
    *("confusion.png", "calibration.png", "gleason.toml", "metastasis.toml"),
)
RECIPES = {
    "llm": ("LlmConfig", "train a language model on text", _LLM),
    "metastasis": ("MetastasisConfig", "train a classifier of lymph-node patches", _PATHOLOGY),
    "gleason": ("GleasonConfig", "train a grader of prostate slides", _PATHOLOGY),
}
"""Recipe: the name of its configuration, its line in the help, what it leaves in its folder."""

FAITH = {
    "score": "score chains of thought for faithfulness and consistency",
    "select": "sample chains, score them, choose, report accuracy",
    "meta": "agreement of the scores with labels of steps",
    "exemplars": "few-shot examples, ready to paste",
    "view": "one page of a scored run",
}
SLIDE = {
    "info": "what is known of a slide, and what was assumed",
    "tile": "tissue of slides as tiles",
    "predict": "a trained model's heat-map over slides",
    "view": "slides with their heat-maps in a browser",
}


def entries(launching: type) -> Iterator[Entry]:
    """All of them, in the order of the help; ``launching`` holds the options of a run."""
    for name, (config, summary, _) in RECIPES.items():
        yield (("train", name), summary, _recipe(name, config, launching), _train(name))
    yield (
        ("plan-comm",),
        "what a step sends, dense and sparse, and how long that takes",
        lambda: importlib.import_module("planaria.optim.commands").PlanComm,
        lambda command: command.run(),
    )
    for name, summary in FAITH.items():
        yield (("faith", name), summary, _of("planaria.faithfulness.commands", name), _run_faith)
    for name, summary in SLIDE.items():
        yield (("slide", name), summary, _of("planaria.pathology.commands", name), _run_slide)


def _recipe(name: str, config: str, launching: type) -> Callable[[], Any]:
    """Options of a run and the fields of the recipe's configuration, as one type."""

    def load() -> Any:
        kind: Any = getattr(importlib.import_module(f"planaria.recipes.{name}"), config)
        return dataclasses.make_dataclass(
            f"Train{config}",
            [
                ("launching", tyro.conf.OmitArgPrefixes[launching]),
                ("recipe", tyro.conf.OmitArgPrefixes[kind]),
            ],
            namespace={"__doc__": f"{RECIPES[name][1].capitalize()}."},
            frozen=True,
            kw_only=True,
        )

    return load


def _train(name: str) -> Callable[[Any], int]:
    def run(command: Any) -> int:
        from planaria.demo import PRELOAD
        from planaria.runtime.launch import reuse
        from planaria.runtime.launch.config import for_recipe
        from planaria.runtime.launch.launcher import launch

        options = {
            f.name: getattr(command.launching, f.name)
            for f in dataclasses.fields(command.launching)
        }
        preload = PRELOAD if name == "llm" else ()
        config = for_recipe(
            command.recipe,
            module=f"planaria.recipes.{name}.train",
            preload=preload,
            results=RECIPES[name][2],
            **options,
        )
        reuse.check(config)
        # Before any process starts: data that cannot be read are one line.
        prepare = importlib.import_module(f"planaria.recipes.{name}").prepare
        if name == "llm":
            prepare(command.recipe, world=command.launching.workers)
        else:
            prepare(command.recipe)
        return launch(config)

    return run


def _of(module: str, name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(module).COMMANDS[name]


def _run_faith(command: Any) -> int:
    from planaria.faithfulness.commands import execute

    lines = execute(command, note=lambda line: _say(line, to=sys.stderr))
    _say("\n".join(lines))
    return 0


def _run_slide(command: Any) -> int:
    return int(command.run(_say))


def _say(line: str, *, to: Any = None) -> None:
    stream = to or sys.stdout
    stream.write(line + "\n")
    stream.flush()
