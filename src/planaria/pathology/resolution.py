"""Which resolution a slide has, in micrometres per pixel of level 0, and who says so.

A file may state its resolution in several places, in none, or wrongly: a TIFF that was exported at
"72 dots per inch" claims 352.8 µm per pixel. :func:`choose_resolution` walks the chain (user, then
OpenSlide's property, the vendor's, the TIFF tag), refuses values that no microscope gives, and keeps
the refusals so that ``planaria slide info`` can show them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planaria.errors import ConfigError

MIN_MPP = 0.05
"""µm/px. A 100x oil objective on a 5 µm sensor gives 0.05; nothing scans finer."""
MAX_MPP = 20.0
"""µm/px. Coarser than any slide thumbnail that still shows glands; 72 dpi would be 352.8."""
MAX_ANISOTROPY = 1.1
"""Ratio of the two axes above which tiles would be visibly stretched; scanners stay below 1.01."""

MAX_TILE_MPP = 200.0
"""µm/px of a tile: a whole biopsy in a few pixels."""
MAX_TILE_PX = 8192
"""Pixels along a tile's side: 200 MB, of which some copies are made."""

_MIRAX = "mirax.LAYER_0_LEVEL_0_SECTION.MICROMETER_PER_PIXEL"
_CM_PER_UNIT = {"centimeter": 1.0, "centimetre": 1.0, "cm": 1.0, "inch": 2.54}


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The size of a level-0 pixel and where it was found."""

    x: float
    """µm per level-0 pixel, horizontally."""
    y: float
    """µm per level-0 pixel, vertically."""
    source: str
    """The property or tag that said so, or ``user``."""

    @property
    def mpp(self) -> float:
        """µm per level-0 pixel, the geometric mean of both axes."""
        return math.sqrt(self.x * self.y)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What :func:`choose_resolution` decided, with its reason."""

    resolution: Resolution | None
    """None where nothing usable was found."""
    reason: str
    """One sentence: what was taken, or why nothing was."""
    rejected: tuple[str, ...]
    """One sentence for each value that was found and refused."""


def refuse(x: float, y: float) -> str | None:
    """The reason why ``x`` by ``y`` µm/px cannot be a slide's resolution, or None where it can."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return f"{x:g} x {y:g} µm/px is not a number"
    for value in (x, y):
        if not MIN_MPP <= value <= MAX_MPP:
            return f"{value:.4g} µm/px is outside {MIN_MPP:g} to {MAX_MPP:g}"
    if max(x, y) / min(x, y) > MAX_ANISOTROPY:
        return f"{x:.4g} x {y:.4g} µm/px: the axes differ by more than 10 %"
    return None


def check_tile(px: int, mpp: float) -> None:
    """ConfigError where ``px`` pixels at ``mpp`` µm/px cannot be a tile."""
    if px < 1 or not mpp > 0:
        raise ConfigError(f"tiles of {px} px at {mpp} µm/px: both must be positive")
    if px > MAX_TILE_PX or not MIN_MPP <= mpp <= MAX_TILE_MPP:
        raise ConfigError(
            f"tiles of {px} px at {mpp:g} µm/px: at most {MAX_TILE_PX} px, {MIN_MPP:g} to "
            f"{MAX_TILE_MPP:g} µm/px"
        )


def choose_resolution(
    candidates: Iterable[tuple[str, float, float]], *, override: float | None = None
) -> Choice:
    """The first usable resolution of ``candidates`` (source, x, y), unless the user overrides it.

    Source: our choice; the order of the chain is the one that OpenSlide's own documentation and the
    vendors' tags suggest (a scanner's own number before a TIFF tag that any converter may rewrite).
    """
    rejected: list[str] = []
    found = list(candidates)
    if override is not None:
        wrong = refuse(override, override)
        if wrong is None:
            chosen = Resolution(x=override, y=override, source="user")
            said = f"; the file says {found[0][1]:.4g} ({found[0][0]})" if found else ""
            return Choice(
                resolution=chosen, reason=f"{override:.4g} µm/px by the user{said}", rejected=()
            )
        rejected.append(f"user: {wrong}")
        return Choice(resolution=None, reason=rejected[0], rejected=tuple(rejected))
    for source, x, y in found:
        wrong = refuse(x, y)
        if wrong is not None:
            rejected.append(f"{source}: {wrong}")
            continue
        chosen = Resolution(x=x, y=y, source=source)
        return Choice(
            resolution=chosen,
            reason=f"{chosen.mpp:.4g} µm/px from {source}",
            rejected=tuple(rejected),
        )
    reason = "; ".join(rejected) if rejected else "the file states no resolution"
    return Choice(resolution=None, reason=reason, rejected=tuple(rejected))


def openslide_candidates(properties: Mapping[str, str]) -> list[tuple[str, float, float]]:
    """The resolutions that OpenSlide's properties hold: its own, the vendor's, the TIFF tag's."""
    pairs = (
        ("openslide.mpp-x", "openslide.mpp-y"),
        ("aperio.MPP", "aperio.MPP"),
        (f"{_MIRAX}_X", f"{_MIRAX}_Y"),
        ("hamamatsu.XResolution", "hamamatsu.YResolution"),
    )
    found: list[tuple[str, float, float]] = []
    for key_x, key_y in pairs:
        x, y = number(properties.get(key_x)), number(properties.get(key_y))
        if x is not None and y is not None:
            found.append((key_x, x, y))
    x, y = (
        number(properties.get("tiff.XResolution")),
        number(properties.get("tiff.YResolution")),
    )
    if x is not None and y is not None:
        found += tag_candidates(x, y, unit=properties.get("tiff.ResolutionUnit", "inch"))
    return found


def tag_candidates(x: float, y: float, *, unit: str) -> list[tuple[str, float, float]]:
    """The resolution behind TIFF's or PNG's pixels per ``unit`` (``inch`` or ``centimeter``)."""
    centimetres = _CM_PER_UNIT.get(unit.lower())
    if centimetres is None or x <= 0 or y <= 0:
        return []
    return [(f"tag {x:g} px/{unit.lower()}", 1e4 * centimetres / x, 1e4 * centimetres / y)]


def number(text: str | None) -> float | None:
    """What a property says, a decimal comma taken for a point; None where it is no number."""
    if text is None:
        return None
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return None
