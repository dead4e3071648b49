"""What can be set for a metastasis run. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from planaria.errors import ConfigError
from planaria.optim import choice
from planaria.optim.choice import SparseConfig

SYNTHETIC = "synthetic"
"""``--data synthetic``: patches that the package makes; labelled so in everything that comes of it."""

PAPER_MEAN = (0.70017, 0.54368, 0.69611)
PAPER_STD = (0.22246, 0.26757, 0.19798)
"""Source: released code at 24cf3ce."""


@dataclass(frozen=True, kw_only=True)
class MetastasisConfig:
    """Patches classified as tumour or not; one instance describes a run completely.

    ``preset="strict"`` (default) splits by slide, tests on slides that nothing was chosen by, and
    reports pooled measures. ``preset="paper"`` is the released code's recipe: a stratified split by
    image without a test part, zeros as padding, random weights, and fixed colours; what it reports
    is optimistic, and says so.

    Raises:
        ConfigError: a value is out of range or contradicts another one.
    """

    data: str = SYNTHETIC
    """A PCam folder (HDF5), a Kaggle folder (train_labels.csv), a table of images (CSV), or
    `synthetic`."""

    preset: Literal["strict", "paper"] = "strict"
    """strict, or paper (see above)."""

    out: Path = Path("runs/metastasis")
    """Folder of the run: model, results, configuration, TensorBoard-free scalars as CSV."""

    cache: Path | None = None
    """Folder of synthetic patches; default OUT/cache."""

    synthetic: tuple[int, int, int] = (6144, 1024, 2048)
    """Synthetic patches for training, validation and test."""

    laboratories: str = "AB"
    """Laboratories that the synthetic slides come from in turn."""

    backbone: str = "b0"
    """b0 to b3 (the paper: b3)."""

    width: float | None = None
    """Width factor; default: the backbone's."""

    depth: float | None = None
    """Depth factor; default: the backbone's."""

    stem_stride: int = 1
    """1 (the paper's), or 2."""

    attention: bool = True
    """Squeeze-excitation on four stages."""

    fusion: bool = True
    """The four stages' features together, instead of the last alone."""

    rcc: bool = True
    """Random center cropping in training."""

    turns: bool = True
    """Turns and mirrorings in training."""

    features: Path | None = None
    """Folder of frozen features (H5 as CLAM and TRIDENT write them) in place of pixels: NAME.h5 for
    each row of the CSV, or train.h5, valid.h5 and test.h5 in the order of PCam's patches. What
    concerns pixels and the backbone then has no effect."""

    bag: int = 512
    """Most tiles of a slide's features that a training step draws."""

    hidden: int = 256
    """Width of the head over features."""

    pretrained: str = ""
    """Weight file for the backbone, a finished run's folder, or `lite0`; default: random weights."""

    dc: str = "standardise"
    """Distribution correction before a pre-trained backbone: batchnorm, affine, conv1x1,
    standardise or none."""

    class_weights: bool = False
    """Weights both classes equally whatever their number."""

    batch: int = 32
    """Patches per worker and step (the paper: 256 in all)."""

    epochs: int = 8
    """Passes over the training part (the paper: 30)."""

    optimizer: str = "adamw"
    """adamw, adams, sharded or scape, as for language models (strict only; the paper's is Adam)."""

    sparse: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    """Options of optimizer = scape."""

    lr: float = 3e-3
    """Highest learning rate. Source: released code."""

    warmup: int = 30
    """Steps of linear warm-up (strict only)."""

    weight_decay: float = 1e-2
    """Decoupled decay (strict only; the paper's Adam has none)."""

    momentum: float = 0.1
    """BatchNorm's: MONAI's 0.01 needs more steps than small sets have."""

    clip: float | None = 1.0
    """Largest norm of the gradient; None does not clip (strict only; the paper's is not clipped)."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast of the forward pass."""

    evals: int = 8
    """Evaluations on the validation part, spread evenly over the run."""

    patience: int = 0
    """Evaluations without a better AUC after which training ends; 0 never ends early."""

    views: int = 8
    """Turns and mirrorings that a patch's probability is averaged over in the end, 1 to 8 (strict
    only; the paper looks at the patch as it is)."""

    sensitivity: float = 0.95
    """What the operating point, chosen on the validation part, reaches there (strict only; the
    paper's is 0.5)."""

    distance: int = 4
    """Bits of 64 up to which two images count as near-duplicates; -1 does not look for any."""

    seed: int = 0
    """Seed of weights, order of samples and augmentation."""

    max_redo: int = 2
    """Steps that a swap may have to do again, the interrupted one included."""

    checkpoint_every: int = 0
    """Steps between durable checkpoints; 0: only when the run is asked to stop."""

    threads: int = 1
    """CPU threads per worker."""

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "evals", "max_redo", "threads", "bag", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is too small; at least 1")
        for name in ("warmup", "patience", "weight_decay", "seed", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is negative; 0 or more")
        if not self.lr > 0:
            raise ConfigError(f"lr: {self.lr} must be positive")
        if not 0 < self.momentum <= 1:
            raise ConfigError(f"momentum: {self.momentum} must be above 0 and up to 1")
        if not 0 < self.sensitivity <= 1:
            raise ConfigError(f"sensitivity: {self.sensitivity} must be above 0 and up to 1")
        if not 1 <= self.views <= 8:
            raise ConfigError(f"views: {self.views} is outside 1 to 8")
        if min(self.synthetic) < 64:
            raise ConfigError(f"synthetic: {self.synthetic}: each part needs at least 64 patches")
        if not -1 <= self.distance <= 32:
            raise ConfigError(f"distance: {self.distance} is outside -1 to 32 bits")
        if self.preset == "paper" and self.pretrained:
            raise ConfigError("pretrained: the paper's preset starts from random weights; drop it")
        choice.check(self.optimizer, self.sparse)
        if self.preset == "paper" and self.optimizer != "adamw":
            raise ConfigError(
                f"optimizer: {self.optimizer!r} is set, and the paper's preset trains with Adam; "
                "leave it out, or use preset = strict"
            )
        if self.features is not None:
            self._check_features()
        if not self.data:
            raise ConfigError("data: '' names nothing; give a folder, a CSV or 'synthetic'")

    def _check_features(self) -> None:
        if self.preset == "paper":
            raise ConfigError("features: the paper's preset trains on pixels; drop one of both")
        if self.pretrained:
            raise ConfigError("pretrained: features need no backbone; drop one of both")
        if self.data == SYNTHETIC:
            raise ConfigError(
                "features: synthetic patches have none; give --data a CSV or PCam's folder"
            )

    @property
    def fill(self) -> str:
        """What random center cropping pads with."""
        return "zeros" if self.preset == "paper" else "reflect"

    @property
    def largest_norm(self) -> float | None:
        """Where the gradient's norm is clipped; None nowhere."""
        return None if self.preset == "paper" else self.clip

    @property
    def averaged_over(self) -> int:
        """Turns and mirrorings of a patch that are looked at in the end."""
        return 1 if self.preset == "paper" else self.views

    @property
    def cache_folder(self) -> Path:
        """Where synthetic patches lie."""
        return self.out / "cache" if self.cache is None else self.cache


def as_toml(config: MetastasisConfig) -> str:
    """The resolved configuration as a TOML document; written beside every result."""
    return tomli_w.dumps({"metastasis": plain(config)})


def plain(config: Any) -> dict[str, Any]:
    """A configuration as plain values: paths as text, tuples as lists, None left out, nested ones too."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            continue
        value = str(value) if isinstance(value, Path) else value
        value = plain(value) if dataclasses.is_dataclass(value) else value
        values[field.name] = list(value) if isinstance(value, tuple) else value
    return values
