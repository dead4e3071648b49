"""DICOM whole slides: one file per level, read by OpenSlide's own reader, or refused in a line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from planaria.errors import DataError
from planaria.pathology.commands import Tile
from planaria.pathology.folder import find_slides
from planaria.pathology.slides import open_slide
from tests.support.dicom import CT, write_dicom
from tests.support.slides import tissue_pixels

PIXELS = tissue_pixels(900, 600, box=(50, 50, 700, 550))


def test_a_series_is_one_slide_with_levels(tmp_path: Path) -> None:
    fine, coarse = write_dicom(tmp_path, PIXELS)
    for path in (fine, coarse):
        slide = open_slide(path)
        assert slide.info.reader == "openslide/dicom"
        assert [(v.width, v.downsample) for v in slide.info.levels] == [(900, 1.0), (225, 4.0)]
        assert slide.info.resolution.mpp == pytest.approx(0.5)
        assert slide.info.objective == 20.0
        slide.close()
    slide = open_slide(fine)
    found = slide.read(0, x=100, y=90, width=300, height=200).astype(int)
    # JPEG's loss; a wrong colour space or place would be tens of counts.
    assert np.abs(found - PIXELS[90:290, 100:400]).mean() < 3
    slide.close()


def test_a_folder_of_levels_is_as_many_slides_as_series(tmp_path: Path) -> None:
    write_dicom(tmp_path / "in", PIXELS)
    write_dicom(tmp_path / "in", PIXELS[:, ::-1], series="1.2.3.4", name="other")
    assert [p.name for p in find_slides([tmp_path / "in"])] == ["level-0.dcm", "other-0.dcm"]
    lines: list[str] = []
    assert Tile(slides=(tmp_path / "in",), out=tmp_path / "out", px=128).run(lines.append) == 0
    assert lines[-1] == "2 slides: 2 done, 0 unchanged, 0 empty, 0 failed"
    facts = json.loads((tmp_path / "out" / "level-0" / "tiles.json").read_text())
    assert facts["counts"]["tissue"] > 10


def test_other_dicom_is_refused_with_what_to_do(tmp_path: Path) -> None:
    advice = "; export a tiled VL Whole Slide Microscopy instance in colour, or a pyramidal TIFF"
    (scan,) = write_dicom(tmp_path / "ct", PIXELS, sop=CT, downsamples=(1,))
    with pytest.raises(DataError) as error:
        open_slide(scan)
    assert str(error.value) == (
        "level-0.dcm: DICOM, but not a whole slide that OpenSlide reads" + advice
    )
    (grey,) = write_dicom(tmp_path / "grey", PIXELS, downsamples=(1,))
    grey.write_bytes(grey.read_bytes().replace(b"YBR_FULL_422", b"MONOCHROME2 "))
    with pytest.raises(DataError) as error:
        open_slide(grey)
    assert "Unsupported photometric interpretation MONOCHROME2" in str(error.value)
    assert str(error.value).endswith(advice)
    assert str(tmp_path) not in str(error.value)


def test_a_truncated_one_fails_where_it_ends(tmp_path: Path) -> None:
    (path,) = write_dicom(tmp_path, PIXELS, downsamples=(1,))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    slide = open_slide(path)
    with pytest.raises(DataError, match=r"level-0\.dcm: cannot read 200x200 px at \(700, 400\)"):
        slide.read(0, x=700, y=400, width=200, height=200)
    slide.close()
    path.write_bytes(whole[:200])
    with pytest.raises(DataError, match=r"level-0\.dcm: DICOM, but not a whole slide"):
        open_slide(path)
