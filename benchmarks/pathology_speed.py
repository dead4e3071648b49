"""Equal work: reading against MONAI's reader, tissue check and PNG, and memory on two large slides.

    python benchmarks/pathology_speed.py SLIDE.svs [--large]

``--large`` also makes slides of 20,480 px and of four times the area (minutes, and 1 GiB of disk),
and compares the peak memory of a prediction on each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile

MEMORY = """
import resource, sys
from pathlib import Path
from planaria.pathology.commands import Tile
Tile(slides=(Path(sys.argv[1]),), out=Path(sys.argv[2]), mpp=0.5, px=256).run(lambda line: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def reading(path: Path, *, tiles: int) -> tuple[float, float]:
    """Tiles per CPU-second of ours and of MONAI's reader: each place by both, in turn.

    Both have a handle and so an OpenSlide cache of their own, warmed by one pass. CPU time, since
    other processes on the machine would otherwise decide.
    """
    from monai.data.wsi_reader import WSIReader

    from planaria.pathology.slides import open_slide

    slide = open_slide(path)
    columns = slide.info.width // 256
    rows = slide.info.height // 256
    places = [(256 * (i % columns), 256 * (i // columns % rows)) for i in range(tiles)]
    spent = [0.0, 0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = WSIReader("openslide")
        handle = reader.read(path)
        for measured in (False, True):
            for x, y in places if measured else places[: columns * rows]:
                began = time.process_time()
                slide.read(0, x=x, y=y, width=256, height=256)
                middle = time.process_time()
                reader.get_data(handle, location=(y, x), size=(256, 256), level=0)
                if measured:
                    spent[0] += middle - began
                    spent[1] += time.process_time() - middle
        handle.close()
    slide.close()
    return tiles / spent[0], tiles / spent[1]


def tiling(path: Path) -> tuple[int, float]:
    """Tiles that were checked and written as PNG, and how many per second."""
    from planaria.pathology.slides import open_slide
    from planaria.pathology.tiles import TileConfig, tile_slide

    with tempfile.TemporaryDirectory() as folder:
        slide = open_slide(path)
        began = time.process_time()
        table, _ = tile_slide(slide, config=TileConfig(min_tissue=0.0), png_dir=Path(folder))
        seconds = time.process_time() - began
        slide.close()
    return len(table.xy), len(table.xy) / seconds


def write_large(path: Path, *, side: int) -> None:
    """A pyramid of ``side`` px from one synthetic node over and over, written tile by tile."""
    from planaria.pathology.synthetic.node import node_slide

    rgb, _, _ = node_slide(seed=0, size=(2048, 2048))
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


def memory(side: int, folder: Path) -> float:
    """Peak MiB of tiling a synthetic slide of ``side`` px, in a process of its own."""
    path = folder / f"{side}.tif"
    write_large(path, side=side)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), str(folder / "out")],
        check=True,
        capture_output=True,
        text=True,
    )
    path.unlink()
    return float(done.stdout)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slide", type=Path)
    parser.add_argument("--tiles", type=int, default=500)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    ours, theirs = reading(options.slide, tiles=options.tiles)
    print(f"reading: {ours:.0f} tiles per CPU-second; MONAI's reader {theirs:.0f}")
    count, speed = tiling(options.slide)
    print(f"tissue check and PNG: {count} tiles, {speed:.0f} tiles per CPU-second")
    if options.large:
        with tempfile.TemporaryDirectory() as folder:
            for side in (20_480, 40_960):
                print(f"peak memory at {side} px: {memory(side, Path(folder)):.0f} MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
