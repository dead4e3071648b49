"""Memory does not follow the slide: pixels come, are used and are forgotten.

At 20,480 px and four times the area, whole processes: benchmarks/pathology_speed.py --large.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from pathology_speed import write_large

from planaria.pathology.commands import Predict, Tile


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("large")
    paths = (folder / "small.tif", folder / "large.tif")
    for path, side in zip(paths, (2048, 4096), strict=True):
        write_large(path, side=side, node=1024)
    return paths


def peak(command: Tile | Predict) -> float:
    """Most MiB that Python and numpy held at once; torch's own tensors are not counted."""
    tracemalloc.start()
    try:
        assert command.run(lambda line: None) == 0
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_tiling(slides: tuple[Path, Path], tmp_path: Path) -> None:
    # The first run pays for imports.
    used = [
        peak(Tile(slides=(slide,), out=tmp_path / str(number), px=512))
        for number, slide in enumerate((slides[0], *slides))
    ][1:]
    # 38 MB of pixels more; what may grow is the overview, bounded by max_px, and the table.
    assert used[1] < used[0] + 6
    assert used[1] < 30


def test_predicting(slides: tuple[Path, Path], metastasis_model: Path, tmp_path: Path) -> None:
    used = [
        peak(
            Predict(
                slides=(slide,), model=metastasis_model, out=tmp_path / str(number), page_px=512
            )
        )
        for number, slide in enumerate((slides[0], *slides))
    ][1:]
    assert used[1] < used[0] + 6
    assert used[1] < 30
