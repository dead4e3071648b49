"""Synthetic lymph nodes with metastases: patches whose centre alone decides, and whole slides.

A patch is positive where a tumour pixel lies in its central 32 x 32 pixels, and only then; tumour
stands outside the centre in both classes with the same chance, so that nothing but the centre tells
them apart. Histiocytes, which are large and pale as tumour cells are, stand everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ConfigError
from planaria.pathology.slides import Pixels
from planaria.pathology.synthetic.paint import (
    Canvas,
    Stain,
    blobs,
    check_laboratories,
    draw_stain,
    inside,
    scatter,
    smooth,
)

CENTRE = 32
"""Pixels: the square in the middle that decides a patch's label. Source: PCam."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """How hard synthetic patches are. Defaults are calibrated: see docs/pathology.md."""

    px: int = 96
    """Pixels along one side of a patch."""
    mpp: float = 0.97
    """µm/px, as in PCam."""
    likeness: float = 0.2
    """0: tumour nuclei are twice as large as lymphocytes'; 1: they look like histiocytes."""
    mimics: float = 0.35
    """Fraction of a patch that histiocytes occupy."""
    focus: tuple[float, float] = (5.0, 14.0)
    """Range of the radius of the tumour in a positive patch's centre, in µm. The smallest hold no
    whole cell, so that no method reaches an AUC of 1."""
    around: float = 0.5
    """Chance that tumour stands outside the centre, in both classes."""
    apart: float = 14.0
    """µm that tumour around the centre keeps from it: a cell's width (6 µm) and the 8 px by which
    random center cropping moves a patch, so that a cropped negative patch still holds no tumour cell
    in its own centre. With less, a crop can contradict its label."""
    patches_per_slide: int = 64
    """Patches that share a slide's stain and tumour."""
    laboratories: str = "AB"
    """Slides come from these in turn."""

    def __post_init__(self) -> None:
        if self.px < CENTRE + 16 or not self.mpp > 0:
            raise ConfigError(
                f"patches of {self.px} px at {self.mpp} µm/px; at least {CENTRE + 16}"
            )
        for name in ("likeness", "mimics", "around"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; 0 to 1")
        if not 0 < self.focus[0] <= self.focus[1]:
            raise ConfigError(f"focus is {self.focus}; two rising radii above 0 µm")
        if self.patches_per_slide < 1:
            raise ConfigError(f"patches_per_slide is {self.patches_per_slide}; at least 1")
        if self.apart < 0:
            raise ConfigError(f"apart is {self.apart}; 0 or more µm")
        check_laboratories(self.laboratories)

    def laboratory(self, slide: int) -> str:
        """The laboratory of slide number ``slide``."""
        return self.laboratories[slide % len(self.laboratories)]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One synthetic patch with its truth."""

    rgb: Pixels
    """[px, px, 3]."""
    tumour: NDArray[np.bool_]
    """[px, px], where tumour stands."""
    label: int
    """1 where the centre holds tumour."""
    slide: str
    """Name of the slide that it belongs to: splits are by slide."""
    laboratory: str


def patch(index: int, *, seed: int = 0, config: NodeConfig | None = None) -> Patch:
    """Patch number ``index`` of the set ``seed``: the same arguments give the same pixels.

    Even and odd numbers alternate in label; slides come from the laboratories
    in turn.
    """
    config = config or NodeConfig()
    slide = index // config.patches_per_slide
    slide_rng = np.random.default_rng([seed, slide, 1])
    laboratory = config.laboratory(slide)
    stain = draw_stain(laboratory, rng=slide_rng)
    rng = np.random.default_rng([seed, index, 2])
    label = index % 2
    tumour = tumour_mask(label, config=config, rng=rng)
    canvas = paint_node(tumour, config=config, rng=rng)
    return Patch(
        rgb=canvas.colour(stain, rng=rng),
        tumour=tumour,
        label=label,
        slide=f"synthetic-node-{seed}-{slide:04d}",
        laboratory=laboratory,
    )


def tumour_mask(label: int, *, config: NodeConfig, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Where tumour stands in a patch of ``label``: in the centre for 1 only, around it for both."""
    px = config.px
    low, high = (px - CENTRE) // 2, (px + CENTRE) // 2
    mask = np.zeros((px, px), dtype=bool)
    if rng.random() < config.around:
        mask = blobs((px, px), scale=26 / config.mpp, fraction=rng.uniform(0.15, 0.5), rng=rng)
        edge = round(config.apart / config.mpp)
        mask[low - edge : high + edge, low - edge : high + edge] = False
    if label == 1:
        y, x = np.mgrid[:px, :px]
        radius = rng.uniform(*config.focus) / config.mpp
        cx, cy = rng.uniform(low + 4, high - 4, 2)
        mask |= (x - cx) ** 2 + (y - cy) ** 2 < radius**2
    return mask


def paint_node(
    tumour: NDArray[np.bool_], *, config: NodeConfig, rng: np.random.Generator
) -> Canvas:
    """A lymph node with tumour where ``tumour`` [H, W] says so: the stains' amounts."""
    canvas = Canvas(*tumour.shape, mpp=config.mpp)
    canvas.fibres(amount=0.22, rng=rng)
    shape = tumour.shape
    mimic = blobs(shape, scale=30 / config.mpp, fraction=config.mimics, rng=rng) & ~tumour
    lymph = ~(tumour | mimic)
    canvas.e[tumour] += 0.30 - 0.1 * config.likeness
    canvas.e[mimic] += 0.12 + 0.08 * config.likeness
    places = scatter(shape, spacing=7.2 / config.mpp, rng=rng)
    places = places[inside(places, lymph)]
    n = len(places)
    canvas.nuclei(
        places, radius=rng.normal(2.7, 0.3, n).clip(2), amount=rng.normal(1.5, 0.15, n), rng=rng
    )
    gap = 11.5 / config.mpp
    places = scatter(shape, spacing=gap, rng=rng)
    places = places[inside(places, mimic)]
    n = len(places)
    canvas.nuclei(
        places,
        radius=rng.normal(4.0, 0.6, n).clip(2.5),
        amount=rng.normal(0.85, 0.15, n).clip(0.3),
        rng=rng,
        long=1.7,
        vesicular=0.5,
    )
    places = scatter(shape, spacing=gap * (1 - 0.12 * (1 - config.likeness)), rng=rng)
    places = places[inside(places, tumour)]
    n = len(places)
    apart = 1 - config.likeness
    canvas.nuclei(
        places,
        radius=rng.normal(4.0 + 1.8 * apart, 0.7 + 0.5 * apart, n).clip(2.5),
        amount=rng.normal(0.85 + 0.45 * apart, 0.2, n).clip(0.3),
        rng=rng,
        long=1.7,
        vesicular=0.5,
    )
    return canvas


def node_slide(
    *,
    seed: int,
    size: tuple[int, int] = (1536, 1024),
    tumour_fraction: float = 0.15,
    laboratory: str = "A",
    config: NodeConfig | None = None,
) -> tuple[Pixels, NDArray[np.bool_], Stain]:
    """A node of ``size`` (width, height) px on glass: RGB, tumour mask, stain.

    ``tumour_fraction`` 0 gives a slide without metastasis.
    """
    config = config or NodeConfig()
    rng = np.random.default_rng([seed, 3])
    stain = draw_stain(laboratory, rng=rng)
    width, height = size
    y, x = np.mgrid[:height, :width]
    wobble = smooth((height, width), scale=min(size) / 5, rng=rng)
    shape = ((x / width - 0.5) / 0.42) ** 2 + ((y / height - 0.5) / 0.42) ** 2
    tissue = shape + 0.12 * wobble < 1
    tumour = blobs((height, width), scale=140 / config.mpp, fraction=tumour_fraction, rng=rng)
    tumour &= tissue
    canvas = paint_node(tumour, config=config, rng=rng)
    canvas.h *= tissue
    canvas.e *= tissue
    return canvas.colour(stain, rng=rng), tumour, stain
