"""Synthetic prostate biopsies: glands by Gleason pattern, and the ISUP grade that follows.

Pattern 3: small, round, separate glands with open lumina. Pattern 4: glands that fuse, and sieves.
Pattern 5: single cells and cords without lumina. Benign glands are large, with folded lumina and two
layers. Lengths in µm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage as scipy_ndimage

from planaria.errors import ConfigError
from planaria.pathology.slides import Pixels
from planaria.pathology.synthetic.paint import (
    Canvas,
    check_laboratories,
    draw_stain,
    ink,
    inside,
    scatter,
    smooth,
)

ndimage: Any = scipy_ndimage
"""Untyped: what scipy's source lets a checker infer is wrong in most calls."""

STROMA, BENIGN = 1, 2
"""Mask values beside 0 (glass) and the patterns 3, 4 and 5. Source: PANDA's Radboud masks."""


@dataclass(frozen=True, kw_only=True)
class BiopsyConfig:
    """How hard synthetic biopsies are. Defaults are calibrated: see docs/pathology.md."""

    width: int = 1280
    """Pixels of level 0."""
    height: int = 512
    """Pixels of level 0."""
    mpp: float = 1.0
    """µm/px of level 0."""
    vagueness: float = 0.35
    """0: every gland is typical of its pattern; 1: half of them look like a neighbouring pattern."""
    benign: tuple[float, float] = (0.2, 0.6)
    """Range of the part of a cancerous biopsy that is benign."""
    pen: float = 0.1
    """Chance of a pen mark."""
    laboratories: str = "AB"
    """Biopsies come from these in turn, six from each."""

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 128 or not self.mpp > 0:
            raise ConfigError(f"a biopsy of {self.width}x{self.height} px; at least 128x128")
        if not 0 <= self.vagueness <= 1:
            raise ConfigError(f"vagueness is {self.vagueness}; 0 to 1")
        if not 0 <= self.benign[0] <= self.benign[1] < 1:
            raise ConfigError(f"benign is {self.benign}; two rising fractions below 1")
        check_laboratories(self.laboratories)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a biopsy before it is painted."""

    name: str
    isup: int
    """Grade group, 0 to 5."""
    pair: tuple[int, int] | None
    """Primary and secondary Gleason pattern; None where there is no cancer."""
    laboratory: str

    @property
    def gleason(self) -> str:
        """``negative`` or ``3+4`` and alike."""
        return "negative" if self.pair is None else f"{self.pair[0]}+{self.pair[1]}"


@dataclass(frozen=True, kw_only=True)
class Biopsy:
    """One synthetic biopsy with its truth."""

    rgb: Pixels
    """[height, width, 3]."""
    mask: NDArray[np.uint8]
    """[height, width]: 0 glass, 1 stroma, 2 benign, 3, 4, 5 patterns."""
    isup: int
    """Grade group, 0 to 5."""
    gleason: str
    """``negative`` or ``3+4`` and alike."""
    laboratory: str
    name: str
    ink: str | None
    """Colour of the pen mark, where there is one."""


PAIRS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((3, 3),),
    2: ((3, 4),),
    3: ((4, 3),),
    4: ((4, 4), (3, 5), (5, 3)),
    5: ((4, 5), (5, 4), (5, 5)),
}
"""Gleason pairs of each ISUP grade group. Source: Epstein et al. 2016."""


def isup_of(primary: int, secondary: int) -> int:
    """The ISUP grade group of a pair of Gleason patterns (3 to 5); ConfigError for others."""
    for grade, pairs in PAIRS.items():
        if (primary, secondary) in pairs:
            return grade
    raise ConfigError(f"Gleason {primary}+{secondary}: patterns are 3, 4 and 5")


def biopsy(index: int, *, seed: int = 0, config: BiopsyConfig | None = None) -> Biopsy:
    """Biopsy number ``index`` of the set ``seed``: the same arguments give the same pixels.

    Grades go round 0 to 5; laboratories change every six.
    """
    config = config or BiopsyConfig()
    rng = np.random.default_rng([seed, index, 11])
    known = _facts(index, seed=seed, config=config, rng=rng)
    regions = lay_regions(known.pair, config=config, rng=rng)
    canvas, mask = paint_biopsy(regions, config=config, rng=rng)
    rgb = canvas.colour(draw_stain(known.laboratory, rng=rng), rng=rng)
    colour = None
    if rng.random() < config.pen:
        colour = ("green", "blue", "black")[int(rng.integers(3))]
        ink(rgb, colour=colour, width_px=40 / config.mpp, rng=rng)
    return Biopsy(
        rgb=rgb,
        mask=mask,
        isup=known.isup,
        gleason=known.gleason,
        laboratory=known.laboratory,
        name=known.name,
        ink=colour,
    )


def facts(index: int, *, seed: int = 0, config: BiopsyConfig | None = None) -> Facts:
    """What :func:`biopsy` would paint, at no cost."""
    rng = np.random.default_rng([seed, index, 11])
    return _facts(index, seed=seed, config=config or BiopsyConfig(), rng=rng)


def _facts(index: int, *, seed: int, config: BiopsyConfig, rng: np.random.Generator) -> Facts:
    grade = index % 6
    return Facts(
        name=f"synthetic-biopsy-{seed}-{index:05d}",
        isup=grade,
        pair=None if grade == 0 else PAIRS[grade][int(rng.integers(len(PAIRS[grade])))],
        laboratory=config.laboratories[(index // 6) % len(config.laboratories)],
    )


def lay_regions(
    pair: tuple[int, int] | None, *, config: BiopsyConfig, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Which pattern each pixel [H, W] belongs to, 0 for glass; the primary covers more cancer."""
    height, width = config.height, config.width
    middle = height / 2 + 0.06 * height * smooth((1, width), scale=width / 5, rng=rng)
    half = height * (0.31 + 0.03 * smooth((1, width), scale=width / 16, rng=rng))
    x, y = np.arange(width), np.arange(height)[:, None]
    ends = (x > 0.03 * width) & (x < 0.97 * width)
    tissue = (np.abs(y - middle) < half) & ends
    regions = np.where(tissue, BENIGN, 0).astype(np.uint8)
    if pair is None:
        return regions
    cancer = 1 - rng.uniform(*config.benign)
    share = 1.0 if pair[0] == pair[1] else rng.uniform(0.55, 0.85)
    field = smooth((height, width), scale=190 / config.mpp, rng=rng)
    cuts = np.quantile(field[tissue], [1 - cancer, 1 - cancer * (1 - share)])
    regions[tissue & (field > cuts[0])] = pair[0]
    regions[tissue & (field > cuts[1])] = pair[1]
    return regions


def paint_biopsy(
    regions: NDArray[np.uint8], *, config: BiopsyConfig, rng: np.random.Generator
) -> tuple[Canvas, NDArray[np.uint8]]:
    """The stains' amounts and the mask of a biopsy laid out as ``regions``."""
    canvas = Canvas(*regions.shape, mpp=config.mpp)
    canvas.fibres(amount=0.45, rng=rng, angle=float(rng.uniform(0, np.pi)))
    tissue = regions > 0
    mask = np.where(tissue, STROMA, 0).astype(np.uint8)
    spindles = scatter(regions.shape, spacing=22 / config.mpp, rng=rng)
    n = len(spindles)
    canvas.nuclei(spindles, radius=np.full(n, 2.2), amount=np.full(n, 1.1), rng=rng, long=5.0)
    for pattern in (BENIGN, 3, 4, 5):
        area = regions == pattern
        if area.any():
            _PAINTERS[pattern](canvas, mask, area, config, rng)
    canvas.h *= tissue
    canvas.e *= tissue
    mask[~tissue] = 0
    return canvas, mask


def _gland(
    canvas: Canvas,
    mask: NDArray[np.uint8],
    centre: NDArray[np.float64],
    *,
    radius: float,
    lumen: float,
    wobble: float,
    value: int,
    layers: int,
    size: float,
    rng: np.random.Generator,
) -> None:
    """One gland: cytoplasm, an open lumen, and ``layers`` rings of nuclei of ``size`` µm."""
    mpp = canvas.mpp
    r_px = radius / mpp
    reach = int(r_px * (1 + wobble) + 3)
    x0, y0 = int(centre[0]) - reach, int(centre[1]) - reach
    height, width = canvas.shape
    xa, xb, ya, yb = max(x0, 0), min(x0 + 2 * reach, width), max(y0, 0), min(y0 + 2 * reach, height)
    if xa >= xb or ya >= yb:
        return
    y, x = np.mgrid[ya:yb, xa:xb]
    dx, dy = x - centre[0], y - centre[1]
    angle = np.arctan2(dy, dx)
    waves = rng.uniform(-1, 1, 3) * wobble / 2
    phases = rng.uniform(0, 2 * np.pi, 3)
    outline = _outline(angle, waves, phases)
    folds = 1 + (0.9 * wobble) * np.cos(7 * angle + phases[0])
    distance = np.hypot(dx, dy) / (r_px * outline)
    body = distance < 1
    hollow = distance < lumen * folds
    window = (slice(ya, yb), slice(xa, xb))
    canvas.h[window][body] = 0.10
    canvas.e[window][body] = 0.38
    canvas.e[window][hollow & body] = 0.02
    canvas.h[window][hollow & body] = 0.0
    mask[window][body] = value
    for layer in range(layers):
        ring = radius * (0.87 - 0.24 * layer)
        count = max(int(2 * np.pi * ring / (2.6 * size)), 3)
        turn = np.linspace(0, 2 * np.pi, count, endpoint=False) + rng.uniform(0, 0.5, count)
        shape = _outline(turn, waves, phases)
        places = centre + (ring / mpp * shape)[:, None] * np.stack([np.cos(turn), np.sin(turn)], 1)
        canvas.nuclei(
            places,
            radius=rng.normal(size, 0.3, count).clip(1.5),
            amount=rng.normal(1.25, 0.15, count),
            rng=rng,
            vesicular=0.2,
        )


def _outline(
    angle: NDArray[np.float64], waves: NDArray[np.float64], phases: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The radius of a wavy outline relative to its mean, at each ``angle``."""
    out = np.ones_like(angle)
    for number, (wave, phase) in enumerate(zip(waves, phases, strict=True)):
        out += wave * np.cos((number + 2) * angle + phase)
    return out


def _benign(
    canvas: Canvas,
    mask: NDArray[np.uint8],
    area: NDArray[np.bool_],
    config: BiopsyConfig,
    rng: np.random.Generator,
) -> None:
    for centre in _centres(area, spacing=120, config=config, rng=rng):
        small = rng.random() < 0.3 * config.vagueness
        radius = rng.uniform(18, 26) if small else rng.uniform(32, 52)
        _gland(
            canvas,
            mask,
            centre,
            radius=radius,
            lumen=0.55,
            wobble=0.28,
            value=BENIGN,
            layers=2,
            size=2.6,
            rng=rng,
        )


def _three(
    canvas: Canvas,
    mask: NDArray[np.uint8],
    area: NDArray[np.bool_],
    config: BiopsyConfig,
    rng: np.random.Generator,
) -> None:
    for centre in _centres(area, spacing=58, config=config, rng=rng):
        radius = rng.uniform(15, 24)
        if rng.random() < 0.5 * config.vagueness:
            _sieve(canvas, mask, centre, radius=radius * 1.2, value=3, holes=2, rng=rng)
            continue
        _gland(
            canvas,
            mask,
            centre,
            radius=radius,
            lumen=0.45,
            wobble=0.08,
            value=3,
            layers=1,
            size=3.0,
            rng=rng,
        )


def _four(
    canvas: Canvas,
    mask: NDArray[np.uint8],
    area: NDArray[np.bool_],
    config: BiopsyConfig,
    rng: np.random.Generator,
) -> None:
    for centre in _centres(area, spacing=62, config=config, rng=rng):
        if rng.random() < 0.5 * config.vagueness:
            _gland(
                canvas,
                mask,
                centre,
                radius=rng.uniform(16, 26),
                lumen=0.4,
                wobble=0.12,
                value=4,
                layers=1,
                size=3.1,
                rng=rng,
            )
            continue
        _sieve(
            canvas,
            mask,
            centre,
            radius=rng.uniform(26, 40),
            value=4,
            holes=int(rng.integers(2, 6)),
            rng=rng,
        )


def _five(
    canvas: Canvas,
    mask: NDArray[np.uint8],
    area: NDArray[np.bool_],
    config: BiopsyConfig,
    rng: np.random.Generator,
) -> None:
    spacing = 15 / config.mpp
    places = scatter(area.shape, spacing=spacing, rng=rng)
    places = places[inside(places, area)]
    n = len(places)
    near = ndimage.binary_dilation(area, iterations=1) & area
    canvas.e[near] *= 0.9
    canvas.nuclei(
        places,
        radius=rng.normal(3.5, 0.6, n).clip(2),
        amount=rng.normal(1.3, 0.2, n),
        rng=rng,
        long=1.6,
        vesicular=0.3,
    )
    mask[area] = 5
    for centre in _centres(area, spacing=90, config=config, rng=rng):
        if rng.random() < 0.6 * config.vagueness:
            _sieve(canvas, mask, centre, radius=rng.uniform(20, 30), value=5, holes=1, rng=rng)


def _sieve(
    canvas: Canvas,
    mask: NDArray[np.uint8],
    centre: NDArray[np.float64],
    *,
    radius: float,
    value: int,
    holes: int,
    rng: np.random.Generator,
) -> None:
    """A solid nest full of nuclei with ``holes`` small round lumina: cribriform growth."""
    _gland(
        canvas,
        mask,
        centre,
        radius=radius,
        lumen=0.0,
        wobble=0.2,
        value=value,
        layers=0,
        size=3.1,
        rng=rng,
    )
    mpp = canvas.mpp
    reach = 2 * radius / mpp
    places = scatter((int(reach), int(reach)), spacing=8.5 / mpp, rng=rng) + centre - reach / 2
    places = places[np.hypot(*(places - centre).T) < 0.9 * radius / mpp]
    n = len(places)
    canvas.nuclei(
        places,
        radius=rng.normal(3.1, 0.4, n).clip(2),
        amount=rng.normal(1.2, 0.15, n),
        rng=rng,
        vesicular=0.2,
    )
    height, width = canvas.shape
    for _ in range(holes):
        turn, far = rng.uniform(0, 2 * np.pi), radius * np.sqrt(rng.uniform(0, 0.45))
        cx, cy = centre + far / mpp * np.array([np.cos(turn), np.sin(turn)])
        r = rng.uniform(3.5, 7.0) / mpp
        xa, xb = max(int(cx - r), 0), min(int(cx + r) + 2, width)
        ya, yb = max(int(cy - r), 0), min(int(cy + r) + 2, height)
        if xa >= xb or ya >= yb:
            continue
        y, x = np.mgrid[ya:yb, xa:xb]
        hole = np.hypot(x - cx, y - cy) < r
        canvas.h[ya:yb, xa:xb][hole] = 0.0
        canvas.e[ya:yb, xa:xb][hole] = 0.02


def _centres(
    area: NDArray[np.bool_], *, spacing: float, config: BiopsyConfig, rng: np.random.Generator
) -> NDArray[np.float64]:
    places = scatter(area.shape, spacing=spacing / config.mpp, rng=rng, jitter=0.22)
    return places[inside(places, area)]


_PAINTERS = {BENIGN: _benign, 3: _three, 4: _four, 5: _five}
