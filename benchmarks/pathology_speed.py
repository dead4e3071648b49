"""Equal work: reading against MONAI's reader, tissue check and PNG against histolab, and memory.

    python benchmarks/pathology_speed.py [--slide SLIDE.svs] [--histolab PYTHON] [--large]

``--histolab`` names a Python that can import histolab, which pins versions that this package does
not run with. ``--large`` also makes slides of 20,480 px and of four times the area (minutes, and 1
GiB of disk), and compares the peak memory of ``slide tile`` and ``slide predict`` on each. Writes
docs/results/pathology_speed.md; a part that is not asked for keeps what its last run has measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "pathology_speed.md"
ROWS = ROOT / "docs" / "results" / "raw" / "pathology_speed.json"
SIDES = (20_480, 40_960)

MEMORY = """
import json, sys, time
from pathlib import Path
from planaria.pathology.commands import Predict, Tile
slide, out, model = map(Path, sys.argv[2:5])
began = time.monotonic()
if sys.argv[1] == "tile":
    code = Tile(slides=(slide,), out=out, mpp=0.5, px=256).run(lambda line: None)
else:
    code = Predict(slides=(slide,), out=out, model=model).run(lambda line: None)
# Not ru_maxrss: that counts what the parent held when it forked.
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
marker = next(out.glob("*/*s.json" if sys.argv[1] == "tile" else "*/prediction.json"))
facts = json.loads(marker.read_text())
tiles = facts["counts"]["tissue"] if sys.argv[1] == "tile" else facts["tiles"]
print(json.dumps({"code": code, "peak": peak, "tiles": tiles, "s": time.monotonic() - began}))
"""

HISTOLAB = """
import json, sys, tempfile, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from histolab.slide import Slide
from histolab.types import CoordinatePair
places = json.loads(sys.argv[2])
with tempfile.TemporaryDirectory() as out:
    slide = Slide(sys.argv[1], processed_path=out)
    began, enough = time.process_time(), 0
    for number, (x, y, px) in enumerate(places):
        tile = slide.extract_tile(CoordinatePair(x, y, x + px, y + px), level=0, tile_size=(px, px))
        enough += bool(tile.has_enough_tissue(tissue_percent=10))
        tile.save(Path(out) / f"{number}.png")
    spent = time.process_time() - began
print(json.dumps({"enough": enough, "per_s": len(places) / spent}))
"""


def reading(path: Path, *, tiles: int) -> dict[str, Any]:
    """Tiles per CPU-second of ours and of MONAI's reader, each place by both, who goes first in turn.

    Both have a handle and so an OpenSlide cache of their own, warmed by one pass. CPU time, since
    other processes on the machine would otherwise decide.
    """
    from monai.data.wsi_reader import WSIReader

    from planaria.pathology.slides import open_slide

    slide = open_slide(path)
    columns, rows = slide.info.width // 256, slide.info.height // 256
    places = [(256 * (i % columns), 256 * (i // columns % rows)) for i in range(tiles)]
    spent = np.zeros((tiles, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = WSIReader("openslide")
        handle = reader.read(path)
        ways = (
            lambda x, y: slide.read(0, x=x, y=y, width=256, height=256),
            lambda x, y: reader.get_data(handle, location=(y, x), size=(256, 256), level=0),
        )
        for x, y in places[: columns * rows]:
            for way in ways:
                way(x, y)
        for number, (x, y) in enumerate(places):
            for way in (0, 1) if number % 2 else (1, 0):
                began = time.process_time()
                ways[way](x, y)
                spent[number, way] = time.process_time() - began
        handle.close()
    slide.close()
    rng = np.random.default_rng(0)
    draws = spent[rng.integers(tiles, size=(2000, tiles))].sum(axis=1)
    low, high = np.quantile(draws[:, 1] / draws[:, 0], (0.025, 0.975))
    ours, theirs = (tiles / spent[:, way].sum() for way in (0, 1))
    return {
        "tiles": tiles,
        "ours": ours,
        "monai": theirs,
        "ratio": ours / theirs,
        "interval": [float(low), float(high)],
    }


def tiling(path: Path, *, tiles: int, histolab: str | None) -> dict[str, Any]:
    """Tiles that were read, checked for tissue and written as PNG per CPU-second, by us and histolab.

    The same places for both; every tile is written, whatever the check says.
    """
    from planaria.pathology.slides import open_slide

    slide = open_slide(path)
    rng = np.random.default_rng(0)
    x = rng.integers(0, slide.info.width - 256, tiles).tolist()
    y = rng.integers(0, slide.info.height - 256, tiles).tolist()
    places = [(left, top, 256) for left, top in zip(x, y, strict=True)]
    found: dict[str, Any] = {
        "tiles": tiles,
        "ours": _ours(slide, places, level=1),
        "ours, PNG as PIL's default": _ours(slide, places, level=6),
    }
    slide.close()
    if histolab is not None:
        done = subprocess.run(
            [histolab, "-c", HISTOLAB, str(path), json.dumps(places)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found["histolab"] = json.loads(done.stdout.splitlines()[-1])
    return found


def _ours(slide: Any, places: list[tuple[int, int, int]], *, level: int) -> dict[str, float]:
    from PIL import Image

    from planaria.pathology.regions import read_tile
    from planaria.pathology.tissue import TissueConfig, measure_tile, tissue_map

    config = TissueConfig()
    mpp = slide.info.resolution.mpp
    with tempfile.TemporaryDirectory() as folder:
        began, enough = time.process_time(), 0
        threshold = tissue_map(slide, config=config).threshold
        for number, (x, y, px) in enumerate(places):
            rgb = read_tile(slide, x=x, y=y, mpp=mpp, px=px)
            enough += measure_tile(rgb, threshold=threshold, config=config).tissue >= 0.1
            Image.fromarray(rgb).save(Path(folder) / f"{number}.png", compress_level=level)
        seconds = time.process_time() - began
    return {"enough": int(enough), "per_s": len(places) / seconds}


def write_large(path: Path, *, side: int, node: int = 2048) -> None:
    """A pyramid of ``side`` px from one synthetic node of ``node`` px over and over, tile by tile."""
    from planaria.pathology.synthetic.node import node_slide

    rgb, _, _ = node_slide(seed=0, size=(node, node))
    common = {"tile": (256, 256), "compression": "jpeg", "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for down in (1, 4):
            piece = np.ascontiguousarray(rgb[::down, ::down])
            edge = side // down

            def tiles(piece: np.ndarray = piece, edge: int = edge) -> Iterator[np.ndarray]:
                for y in range(0, edge, 256):
                    for x in range(0, edge, 256):
                        top, left = y % len(piece), x % len(piece)
                        yield piece[top : top + 256, left : left + 256]

            options = dict(common)
            if down == 1:
                options |= {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
            else:
                options |= {"subfiletype": 1}
            writer.write(tiles(), shape=(edge, edge, 3), dtype=np.uint8, **options)


def write_model(folder: Path) -> None:
    """An untrained metastasis model: memory and time do not depend on the weights."""
    from planaria.pathology.bundle import ModelCard, build, save_bundle
    from planaria.pathology.colour import ColourStatistics
    from planaria.pathology.networks import NetworkConfig

    card = ModelCard(
        kind="metastasis",
        network=NetworkConfig(width=0.25, depth=0.5),
        target=ColourStatistics(mean=(0.70, 0.54, 0.70), std=(0.22, 0.27, 0.20)),
        trained_on="nothing",
    )
    save_bundle(folder, card=card, model=build(card))


def memory() -> list[dict[str, Any]]:
    """Peak MiB of both commands on slides of both sizes, each in a process of its own."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        for side in SIDES:
            path = folder / f"{side}.tif"
            write_large(path, side=side)
            for command in ("tile", "predict"):
                out = folder / f"{command}-{side}"
                words = [command, str(path), str(out), str(folder / "model")]
                done = subprocess.run(
                    [sys.executable, "-c", MEMORY, *words],
                    check=True,
                    capture_output=True,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                row = {"command": command, "side": side, **json.loads(done.stdout.splitlines()[-1])}
                print(f"{command} at {side} px: {row['peak']:.0f} MiB", flush=True)
                found.append(row)
            path.unlink()
    return found


def page(rows: dict[str, Any]) -> str:
    """The results as a page."""
    read, tile = rows["reading"], rows["tiling"]
    lines = [
        "# Pathology: speed and memory",
        "",
        "Written by `python benchmarks/pathology_speed.py`; single numbers in "
        "`raw/pathology_speed.json`.",
        "",
        "| the same work | ours | other | ratio |",
        "| --- | --- | --- | --- |",
        f"| {read['tiles']} reads of 256 px, tiles per CPU-second | {read['ours']:.0f} | "
        f"{read['monai']:.0f} (MONAI's WSIReader over OpenSlide) | {read['ratio']:.3f} "
        f"[{read['interval'][0]:.3f}, {read['interval'][1]:.3f}] |",
    ]
    ours, theirs = tile["ours"], tile.get("histolab")
    plain = tile["ours, PNG as PIL's default"]
    other, ratio = "not measured", ""
    if theirs is not None:
        other = f"{theirs['per_s']:.1f} (histolab 0.7.0)"
        ratio = f"{ours['per_s'] / theirs['per_s']:.1f}"
    lines.append(
        f"| {tile['tiles']} tiles of 256 px read, checked for tissue and written as PNG, tiles per "
        f"CPU-second | {ours['per_s']:.1f} ({plain['per_s']:.1f} with PIL's default compression) | "
        f"{other} | {ratio} |"
    )
    lines += [
        "",
        "Both on the CMU slide (2220 × 2967 px), the same places. The interval is a bootstrap over "
        "places. Every tile is written, whatever the check says: each has its own idea of tissue.",
    ]
    if "memory" in rows:
        lines += [
            "",
            "| command | slide | tiles | peak MiB | s |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| `slide {row['command']}` | {row['side']:,}² px | {row['tiles']:,} | "
            f"{row['peak']:.0f} | {row['s']:.0f} |"
            for row in rows["memory"]
        ]
        lines += [
            "",
            "Peak resident memory of a process of its own, imports included (torch and MONAI for "
            "`predict`); synthetic JPEG pyramids, an untrained network of width 0.25.",
        ]
    lines += ["", f"Measured on {rows['date']}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures, prints and writes the page."""
    from planaria.pathology.samples import cmu_slide

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--tiles", type=int, default=500)
    parser.add_argument("--histolab")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    slide = options.slide or cmu_slide(ROOT / ".cache" / "slides")
    rows: dict[str, Any] = json.loads(ROWS.read_text()) if ROWS.is_file() else {}
    rows["reading"] = reading(slide, tiles=options.tiles)
    tiled = tiling(slide, tiles=options.tiles, histolab=options.histolab)
    rows["tiling"] = {**rows.get("tiling", {}), **tiled}
    if options.large:
        rows["memory"] = memory()
    rows["date"] = datetime.date.today().isoformat()
    text = page(rows)
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
