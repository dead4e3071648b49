"""What can be set for a Gleason run. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from planaria.errors import ConfigError
from planaria.optim import choice
from planaria.optim.choice import SparseConfig
from planaria.pathology.boards import BoardConfig

SYNTHETIC = "synthetic"
"""``--data synthetic``: biopsies that the package makes; labelled so in everything that comes of it."""

LOSSES = ("qwmse", "qwmse-ordinal", "expected-cost", "mse", "cross-entropy")
_POSITIVE = (
    "batch",
    "epochs",
    "evals",
    "max_redo",
    "threads",
    "shifts",
    "bag",
    "hidden",
    "offsets",
)
CORRECTIONS = ("batchnorm", "affine", "conv1x1", "standardise", "none")


@dataclass(frozen=True, kw_only=True)
class GleasonConfig:
    """Prostate slides graded ISUP 0 to 5; one instance describes a run completely.

    Raises:
        ConfigError: a value is out of range or contradicts another one.
    """

    data: str = SYNTHETIC
    """A PANDA folder (train.csv, train_images), or `synthetic`."""

    out: Path = Path("runs/gleason")
    """Folder of the run: model, results, configuration."""

    cache: Path | None = None
    """Folder of synthetic slides and of tiles that were cut; default OUT/cache."""

    synthetic: int = 600
    """Synthetic slides, all parts together."""

    slides_seed: int | None = None
    """Seed of the synthetic slides; default: `seed`. Set it to train several seeds on the same."""

    laboratories: str = "AB"
    """Laboratories that the synthetic slides come from in turn."""

    folds: int = 5
    """Parts of the split; one tests, the next validates, the others train."""

    fold: int = 0
    """Which fold tests."""

    tiles: int = 36
    """Tiles on a board, N; a square number."""

    px: int = 128
    """Pixels along one side of a tile."""

    mpp: float = 1.0
    """µm/px of the tiles."""

    candidates: float = 1.5
    """M / N: training draws N tiles from the M best."""

    offsets: int = 2
    """Grids that training slides are cut on: the first stands still, the others are moved by a
    random fraction of a tile, and a step draws one of them. Tests use the first."""

    pbir: bool = True
    """False: the slide resized to the board's size."""

    dc: str = "batchnorm"
    """Distribution correction: batchnorm, affine, conv1x1, standardise or none."""

    loss: str = "qwmse"
    """qwmse, qwmse-ordinal, expected-cost, mse or cross-entropy."""

    strength: float = 1.0
    """λ of the quadratic weights."""

    backbone: str = "b0"
    """b0 to b3."""

    width: float | None = None
    """Width factor; default: the backbone's."""

    depth: float | None = None
    """Depth factor; default: the backbone's."""

    features: Path | None = None
    """Folder of frozen features, ID.h5 for each slide as CLAM and TRIDENT write them, in place of
    pixels. What concerns boards, colours and the backbone then has no effect."""

    bag: int = 512
    """Most tiles of a slide's features that a training step draws."""

    hidden: int = 256
    """Width of the head over features."""

    pretrained: str = ""
    """Weight file for the backbone, a finished run's folder, or `lite0`; default: random weights."""

    class_weights: bool = False
    """Weights all grades equally whatever their number."""

    batch: int = 8
    """Slides per worker and step."""

    epochs: int = 12
    """Passes over the training slides."""

    optimizer: str = "adamw"
    """adamw, adams, sharded or scape, as for language models."""

    sparse: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    """Options of optimizer = scape."""

    lr: float = 3e-3
    """Highest learning rate."""

    warmup: int = 20
    """Steps of linear warm-up."""

    weight_decay: float = 1e-2
    """Decoupled decay."""

    momentum: float = 0.1
    """BatchNorm's: MONAI's 0.01 needs more steps than small sets have."""

    clip: float | None = 1.0
    """Largest norm of the gradient; None does not clip."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast of the forward pass."""

    evals: int = 6
    """Evaluations on the validation part, spread evenly over the run."""

    patience: int = 0
    """Evaluations without a better kappa after which training ends; 0 never ends early."""

    shifts: int = 4
    """Boards that a test slide's grade is averaged over."""

    distance: int = 4
    """Bits of 64 up to which two slides count as near-duplicates; -1 does not look for any."""

    seed: int = 0
    """Seed of weights, split, order and augmentation."""

    max_redo: int = 2
    """Steps that a swap may have to do again, the interrupted one included."""

    checkpoint_every: int = 0
    """Steps between durable checkpoints; 0: only when the run is asked to stop."""

    threads: int = 1
    """CPU threads per worker."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is too small; at least 1")
        for name in ("warmup", "patience", "weight_decay", "seed", "checkpoint_every", "strength"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is negative; 0 or more")
        if self.loss not in LOSSES:
            raise ConfigError(f"loss: {self.loss!r} is unknown; choose one of {', '.join(LOSSES)}")
        if self.dc not in CORRECTIONS:
            raise ConfigError(f"dc: {self.dc!r} is unknown; choose one of {', '.join(CORRECTIONS)}")
        if not self.lr > 0:
            raise ConfigError(f"lr: {self.lr} must be positive")
        if not 0 < self.momentum <= 1:
            raise ConfigError(f"momentum: {self.momentum} must be above 0 and up to 1")
        if self.folds < 3 or not 0 <= self.fold < self.folds:
            raise ConfigError(
                f"fold: {self.fold} of {self.folds}; at least 3 folds, counted from 0"
            )
        if self.synthetic < 12:
            raise ConfigError(f"synthetic: {self.synthetic} slides; at least 12")
        if not -1 <= self.distance <= 32:
            raise ConfigError(f"distance: {self.distance} is outside -1 to 32 bits")
        choice.check(self.optimizer, self.sparse)
        if self.features is not None and self.pretrained:
            raise ConfigError("pretrained: features need no backbone; drop one of both")
        if self.features is not None and self.data == SYNTHETIC:
            raise ConfigError("features: synthetic slides have none; give --data PANDA's folder")
        if not self.data:
            raise ConfigError("data: '' names nothing; give a folder or 'synthetic'")
        _ = self.board

    @property
    def board(self) -> BoardConfig:
        """How boards are made."""
        return BoardConfig(
            tiles=self.tiles,
            px=self.px,
            mpp=self.mpp,
            candidates=self.candidates,
            pbir=self.pbir,
            offset=self.offsets > 1,
        )

    @property
    def cache_folder(self) -> Path:
        """Where synthetic slides and tiles lie."""
        return self.out / "cache" if self.cache is None else self.cache


def as_toml(config: GleasonConfig) -> str:
    """The resolved configuration as a TOML document; written beside every result."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = {k: v for k, v in vars(value).items() if v is not None}
        if value is not None:
            values[field.name] = str(value) if isinstance(value, Path) else value
    return tomli_w.dumps({"gleason": values})
