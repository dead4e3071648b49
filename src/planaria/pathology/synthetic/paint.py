"""Nuclei, fibres, stains and ink: the brushes of synthetic tissue.

A canvas holds the amounts of haematoxylin and eosin per pixel; colours come last, by Beer and
Lambert's law, so that two laboratories differ as two laboratories do: in their stains, not in their
tissue. Lengths are µm and are divided by the canvas's µm/px.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage as scipy_ndimage

from planaria.errors import ConfigError
from planaria.pathology.slides import Pixels

ndimage: Any = scipy_ndimage
"""Untyped: what scipy's source lets a checker infer is wrong in most calls."""

Field = NDArray[np.float32]
"""[H, W]"""

HAEMATOXYLIN = (0.65, 0.70, 0.29)
EOSIN = (0.07, 0.99, 0.11)
"""Optical densities of red, green and blue per amount of stain. Source: Ruifrok and Johnston 2001."""


@dataclass(frozen=True, kw_only=True)
class Stain:
    """How one slide was stained and scanned."""

    haematoxylin: tuple[float, float, float] = HAEMATOXYLIN
    eosin: tuple[float, float, float] = EOSIN
    strength: tuple[float, float] = (1.0, 1.0)
    """Amounts of haematoxylin and eosin relative to the canvas."""
    glass: tuple[int, int, int] = (244, 243, 245)
    """RGB where nothing is."""
    blur_px: float = 0.6
    """Standard deviation of the scanner's blur."""
    noise: float = 2.5
    """Standard deviation of the sensor's noise, of 255."""


LABORATORIES: dict[str, Stain] = {
    "A": Stain(),
    "B": Stain(
        haematoxylin=(0.72, 0.60, 0.34),
        eosin=(0.12, 0.92, 0.30),
        strength=(0.8, 1.25),
        glass=(238, 236, 228),
        blur_px=0.8,
        noise=3.5,
    ),
}
"""Two laboratories whose stains a person tells apart at a glance."""


def check_laboratories(names: str) -> None:
    """ConfigError where ``names`` holds a letter that is no laboratory, or none at all."""
    wrong = [name for name in names if name not in LABORATORIES]
    if wrong or not names:
        raise ConfigError(
            f"laboratories is {names!r}; it is made of the letters {', '.join(LABORATORIES)}"
        )


def draw_stain(laboratory: str, *, rng: np.random.Generator, spread: float = 0.08) -> Stain:
    """One slide's stain of ``laboratory``: its own, give or take ``spread``."""
    if laboratory not in LABORATORIES:
        raise ConfigError(f"laboratory is {laboratory!r}; it is one of {', '.join(LABORATORIES)}")
    base = LABORATORIES[laboratory]
    wobble = 1 + spread * rng.standard_normal(8)
    h = [max(v * w, 0.02) for v, w in zip(base.haematoxylin, wobble[:3], strict=True)]
    e = [max(v * w, 0.02) for v, w in zip(base.eosin, wobble[3:6], strict=True)]
    return Stain(
        haematoxylin=(h[0], h[1], h[2]),
        eosin=(e[0], e[1], e[2]),
        strength=(base.strength[0] * float(wobble[6]), base.strength[1] * float(wobble[7])),
        glass=base.glass,
        blur_px=base.blur_px,
        noise=base.noise,
    )


class Canvas:
    """Amounts of both stains, [H, W] each, at ``mpp`` µm/px."""

    def __init__(self, height: int, width: int, *, mpp: float) -> None:
        self.mpp = mpp
        self.h: Field = np.zeros((height, width), dtype=np.float32)
        self.e: Field = np.zeros((height, width), dtype=np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width), pixels."""
        return self.h.shape[0], self.h.shape[1]

    def fibres(self, *, amount: float, rng: np.random.Generator, angle: float = 0.0) -> None:
        """Lays wavy eosin fibres of about ``amount`` over the whole canvas."""
        height, width = self.shape
        coarse = ndimage.gaussian_filter(rng.standard_normal((height, width)), 6 / self.mpp)
        stretch = (1.0 / self.mpp, 9.0 / self.mpp)
        fine = ndimage.gaussian_filter(rng.standard_normal((height, width)), stretch)
        if abs(np.sin(angle)) > np.sqrt(0.5):
            fine = ndimage.gaussian_filter(rng.standard_normal((height, width)), stretch[::-1])
        fine /= fine.std() + 1e-9
        coarse /= coarse.std() + 1e-9
        self.e += (amount * np.clip(1 + 0.35 * fine + 0.2 * coarse, 0.15, None)).astype(np.float32)

    def nuclei(
        self,
        xy: NDArray[np.float64],
        *,
        radius: NDArray[np.float64],
        amount: NDArray[np.float64],
        rng: np.random.Generator,
        long: float = 1.3,
        vesicular: float = 0.0,
    ) -> None:
        """Stamps one ellipse of haematoxylin per row of ``xy`` [N, 2] (pixels).

        ``radius`` [N] in µm; ``amount`` [N] of stain; ``long`` the largest ratio of axes;
        ``vesicular`` (0 to 1) pales the inside against the rim, as in large tumour nuclei.
        """
        if len(xy) == 0:
            return
        r_px = radius / self.mpp
        reach = int(np.ceil(r_px.max() * long)) + 1
        offsets = np.arange(-reach, reach + 1)
        height, width = self.shape
        for start in range(0, len(xy), 4096):
            part = slice(start, start + 4096)
            count = len(xy[part])
            ratio = np.sqrt(rng.uniform(1, long, count))
            turn = rng.uniform(0, np.pi, count)
            cx, cy = xy[part, 0], xy[part, 1]
            ix, iy = np.floor(cx).astype(int), np.floor(cy).astype(int)
            dx = (ix - cx)[:, None, None] + offsets[None, None, :] + 0.5
            dy = (iy - cy)[:, None, None] + offsets[None, :, None] + 0.5
            cos, sin = np.cos(turn)[:, None, None], np.sin(turn)[:, None, None]
            a = (r_px[part] * ratio)[:, None, None]
            b = (r_px[part] / ratio)[:, None, None]
            distance = np.sqrt(((dx * cos + dy * sin) / a) ** 2 + ((dy * cos - dx * sin) / b) ** 2)
            edge = np.clip((1 - distance) * r_px[part][:, None, None] + 0.5, 0, 1)
            inside = 1 - vesicular * np.clip(1.25 - 1.6 * distance, 0, 1)
            value = (amount[part][:, None, None] * edge * inside).astype(np.float32)
            columns = ix[:, None, None] + offsets[None, None, :] + np.zeros_like(dy, dtype=int)
            rows = iy[:, None, None] + offsets[None, :, None] + np.zeros_like(dx, dtype=int)
            keep = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height) & (value > 0)
            np.maximum.at(self.h, (rows[keep], columns[keep]), value[keep])

    def colour(self, stain: Stain, *, rng: np.random.Generator) -> Pixels:
        """RGB [H, W, 3] by Beer and Lambert's law, with the scanner's blur and noise."""
        h = self.h * stain.strength[0]
        e = self.e * stain.strength[1]
        density = h[..., None] * np.array(stain.haematoxylin, dtype=np.float32) + e[
            ..., None
        ] * np.array(stain.eosin, dtype=np.float32)
        light = np.array(stain.glass, dtype=np.float32) * np.exp(-density)
        light = ndimage.gaussian_filter(light, (stain.blur_px, stain.blur_px, 0))
        light += stain.noise * rng.standard_normal(light.shape, dtype=np.float32)
        return np.clip(light, 0, 255).round().astype(np.uint8)


def scatter(
    shape: tuple[int, int], *, spacing: float, rng: np.random.Generator, jitter: float = 0.4
) -> NDArray[np.float64]:
    """Places [N, 2] (x, y) on a jittered grid of ``spacing`` px over ``shape`` (height, width)."""
    height, width = shape
    y, x = np.mgrid[
        -spacing / 2 : height + spacing : spacing, -spacing / 2 : width + spacing : spacing
    ]
    x = x + (np.arange(x.shape[0]) % 2)[:, None] * spacing / 2
    xy = np.stack([x.ravel(), y.ravel()], axis=1)
    return xy + spacing * jitter * rng.uniform(-1, 1, xy.shape)


def inside(xy: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which places [N, 2] lie on True pixels of ``mask`` [H, W]."""
    x, y = np.floor(xy[:, 0]).astype(int), np.floor(xy[:, 1]).astype(int)
    ok = (x >= 0) & (y >= 0) & (x < mask.shape[1]) & (y < mask.shape[0])
    out = np.zeros(len(xy), dtype=bool)
    out[ok] = mask[y[ok], x[ok]]
    return out


def smooth(shape: tuple[int, int], *, scale: float, rng: np.random.Generator) -> Field:
    """A random field [H, W] of mean 0 and deviation 1 whose hills are about ``scale`` px wide."""
    # Smoothing on a coarse grid and enlarging costs a fraction of a wide filter.
    step = max(int(scale / 4), 1)
    small = (shape[0] // step + 3, shape[1] // step + 3)
    field = ndimage.gaussian_filter(rng.standard_normal(small), scale / step / 2)
    field = ndimage.zoom(field, step, order=1)[: shape[0], : shape[1]]
    return ((field - field.mean()) / (field.std() + 1e-9)).astype(np.float32)


def blobs(
    shape: tuple[int, int], *, scale: float, fraction: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """A random mask [H, W] of smooth islands, ``scale`` px wide, that covers ``fraction``."""
    if fraction <= 0:
        return np.zeros(shape, dtype=bool)
    field = smooth(shape, scale=scale, rng=rng)
    return field > np.quantile(field, 1 - fraction)


INKS: dict[str, tuple[int, int, int]] = {
    "green": (20, 130, 60),
    "blue": (30, 40, 160),
    "black": (18, 18, 20),
    "red": (190, 25, 40),
}


def ink(
    rgb: Pixels, *, colour: str, width_px: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Draws a pen's stroke across ``rgb`` in place; returns where, [H, W]."""
    if colour not in INKS:
        raise ConfigError(f"ink is {colour!r}; it is one of {', '.join(INKS)}")
    height, width = rgb.shape[:2]
    t = np.linspace(0, 1, 4 * max(height, width))
    start, end = rng.uniform(0, 1, 2), rng.uniform(0, 1, 2)
    bend = rng.uniform(-0.3, 0.3, 2)
    x = ((1 - t) * start[0] + t * end[0] + bend[0] * np.sin(np.pi * t)) * width
    y = ((1 - t) * start[1] + t * end[1] + bend[1] * np.sin(np.pi * t)) * height
    line = np.ones((height, width), dtype=bool)
    ok = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    line[y[ok].astype(int), x[ok].astype(int)] = False
    mask = ndimage.distance_transform_edt(line) < width_px / 2
    rgb[mask] = (0.12 * rgb[mask] + 0.88 * np.array(INKS[colour])).astype(np.uint8)
    return mask
