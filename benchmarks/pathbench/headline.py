"""Both recipes through the command line, with a worker killed on the way.

Each is run undisturbed and with the kill; what they leave must be equal to the bit. The metastasis
run has a bare baseline beside it.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hotswap.rows import Row

from pathbench.cells import predictions

LAUNCH = "--workers 2 --spares 1 --timeout 120"
"""Two minutes, for a worker that a busy machine does not let answer for a second is no lost one."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One recipe's runs."""

    recipe: str
    setting: str
    """Options of all its runs."""
    method: str
    """Options of the method's runs."""
    bare: str | None
    """Options of the bare baseline, if it is measured here."""
    fault: str
    seeds: tuple[int, ...] = (0,)
    """Of data and training. The first alone is struck as well."""

    def command(self, which: str, *, seed: int = 0) -> str:
        """The command line of a run, without folders: ``bare``, ``calm`` or ``struck``."""
        own = self.bare if which == "bare" else self.method
        fault = f" --inject {self.fault}" if which == "struck" else ""
        chance = f" --seed {seed}" if seed else ""
        return f"planaria train {self.recipe} {LAUNCH}{fault} {self.setting} {own}{chance}"

    def name(self, which: str, *, seed: int = 0) -> str:
        """The unit of a run's row."""
        return f"headline/{self.recipe}/{which}" + (f"/{seed}" if seed else "")

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """Kind and seed of each run, in the order in which they are made."""
        kinds = ("calm",) if self.bare is None else ("bare", "calm")
        first, *more = self.seeds
        struck = ((*kinds, "struck"), first)
        return tuple(
            (which, seed)
            for names, seed in (struck, *((kinds, s) for s in more))
            for which in names
        )


HEADLINES = (
    Headline(
        recipe="metastasis",
        # Without turns, so that crops are all that keeps a network from learning 512 patches by heart.
        setting="--synthetic 512 512 2048 --width 0.25 --depth 0.5 --batch 16 --epochs 54 --evals 4 "
        "--lr 4e-3 --no-turns --stem-stride 2 --no-attention --no-fusion",
        method="--rcc",
        bare="--no-rcc",
        fault="kill:worker=1,step=200,phase=backward",
        seeds=(20, 21, 22),
    ),
    Headline(
        recipe="gleason",
        setting="--synthetic 1020 --width 0.25 --depth 0.5 --tiles 16 --px 64 --mpp 2.0 --offsets 1 "
        "--batch 8 --epochs 8 --evals 4 --lr 4e-3",
        method="--pbir --dc batchnorm --loss qwmse",
        bare="--no-pbir --dc none --loss mse",
        fault="kill:worker=1,step=200,phase=backward",
    ),
)


def measure(
    headline: Headline, which: str, *, folder: Path, cache: Path, seed: int = 0
) -> list[Row]:
    """Runs the command; its row. RuntimeError where it failed or its fault did not fire."""
    shutil.rmtree(folder, ignore_errors=True)
    command = headline.command(which, seed=seed)
    words = [sys.executable, "-m", "planaria.cli", *shlex.split(command)[1:]]
    began = time.monotonic()
    subprocess.run([*words, "--out", str(folder), "--cache", str(cache), "--quiet"], check=True)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if summary["injected"] != (which == "struck"):
        raise RuntimeError(f"{command}: {summary['injected']} faults fired")
    return [
        {
            "row": "headline",
            "recipe": headline.recipe,
            "which": which,
            "seed": seed,
            "command": command,
            "wall_s": round(time.monotonic() - began, 1),
            "steps": summary["steps"],
            "swaps": len(summary["swaps"]),
            "redone": sum(swap["redone"] for swap in summary["swaps"]),
            "state_digest": summary["state_digest"],
            "samples_digest": summary["samples_digest"],
            **predictions(folder, recipe=headline.recipe),
        }
    ]
