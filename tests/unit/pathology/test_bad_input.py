"""What bad input gets: an error of one line or a defined result, and the rest goes on."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from planaria.errors import ConfigError, DataError, UserError
from planaria.pathology.boards import BoardConfig
from planaria.pathology.commands import Tile, main
from planaria.pathology.slides import open_slide
from planaria.pathology.tiles import TileConfig
from planaria.pathology.tissue import TissueConfig
from tests.support.dicom import write_dicom
from tests.support.slides import tissue_pixels, write_pyramid

PIXELS = tissue_pixels(600, 400, box=(50, 50, 500, 350))


def sources(folder: Path) -> dict[str, bytes]:
    """One whole file of each kind that a reader takes."""
    folder.mkdir()
    found = {"tiled": write_pyramid(folder / "tiled.tif", PIXELS).read_bytes()}
    tifffile.imwrite(folder / "strips.tif", PIXELS, photometric="rgb", rowsperstrip=16)
    found["strips"] = (folder / "strips.tif").read_bytes()
    found["dicom"] = write_dicom(folder / "d", PIXELS, downsamples=(1,))[0].read_bytes()
    for kind in ("PNG", "JPEG", "BMP", "WEBP"):
        Image.fromarray(PIXELS).save(folder / kind, format=kind)
        found[kind] = (folder / kind).read_bytes()
    return found


@pytest.fixture
def quiet() -> object:
    """tifffile says what it finds, in many lines; the command line silences it, too."""
    logger = logging.getLogger("tifffile")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_damaged_files_end_in_an_error_of_ours_or_are_read(tmp_path: Path, quiet: object) -> None:
    rng = np.random.default_rng(1)
    ended: Counter[str] = Counter()
    said: dict[str, str] = {}
    for kind, whole in sources(tmp_path / "whole").items():
        for number in range(24):
            damaged = bytearray(whole)
            # Headers more often than pixels: there the odd cases are.
            end = len(whole) if number % 3 == 0 else min(len(whole), 1000)
            damaged[int(rng.integers(end))] = int(rng.integers(256))
            for place in rng.integers(0, end, 7).tolist():
                damaged[place] = int(rng.integers(256))
            if number % 6 == 5:
                del damaged[int(rng.integers(1, len(damaged))) :]
            path = tmp_path / f"{kind}{number}.bin"
            path.write_bytes(bytes(damaged))
            try:
                slide = open_slide(path, mpp=0.5)
                with contextlib.closing(slide):
                    slide.read(0, x=0, y=0, width=600, height=400)
                ended["read"] += 1
            except DataError as error:
                said[path.name] = str(error)
                ended["refused"] += 1
    assert all(name in line and str(tmp_path) not in line for name, line in said.items())
    assert ended["read"] > 20
    assert ended["refused"] > 60


def test_a_tiff_whose_sides_or_segments_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, PIXELS, photometric="rgb", rowsperstrip=16, metadata=None)
    whole = path.read_bytes()
    with tifffile.TiffFile(path) as file:
        tags = {name: file.pages.first.tags[name] for name in ("ImageWidth", "StripOffsets")}
        places = {name: tag.offset for name, tag in tags.items()}
    damaged = bytearray(whole)
    damaged[places["ImageWidth"] + 8 : places["ImageWidth"] + 12] = bytes(4)
    path.write_bytes(bytes(damaged))
    with pytest.raises(DataError, match=r"a\.tif: an image of 0x400 px; the file is damaged"):
        open_slide(path)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("lab", {"photometric": "cielab"}, "a.tif: colours are CIELAB; convert it to RGB"),
        ("five", {"photometric": "rgb"}, "a.tif: 5 channels; export the stain as RGB"),
        ("grey", {"photometric": "minisblack"}, "a.tif: grey (1 channel); stains need colour"),
    ],
)
def test_colours_that_are_none(tmp_path: Path, name: str, options: dict, said: str) -> None:
    pixels = {
        "lab": PIXELS,
        "five": np.concatenate([PIXELS, PIXELS[..., :2]], axis=2),
        "grey": PIXELS[..., 0],
    }[name]
    tifffile.imwrite(tmp_path / "a.tif", pixels, metadata=None, **options)
    with pytest.raises(DataError) as error:
        open_slide(tmp_path / "a.tif")
    assert str(error.value).startswith(said)


def test_jpeg_2000_is_read_by_tifffile_where_openslide_cannot(tmp_path: Path) -> None:
    tifffile.imwrite(
        tmp_path / "a.tif", PIXELS, photometric="rgb", tile=(256, 256), compression="jpeg2000"
    )
    slide = open_slide(tmp_path / "a.tif", mpp=0.5)
    assert slide.info.reader == "tifffile"
    found = slide.read(0, x=40, y=40, width=100, height=100).astype(int)
    assert np.abs(found - PIXELS[40:140, 40:140]).mean() < 4
    slide.close()


def test_links_to_nowhere_folders_and_full_disks_end_one_slide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_pyramid(folder / "good.tif", PIXELS)
    (folder / "link.tif").symlink_to(tmp_path / "nowhere.tif")
    (folder / "folder.svs").mkdir()
    lines: list[str] = []
    assert Tile(slides=(folder,), out=tmp_path / "out", px=128).run(lines.append) == 0
    assert lines[-1] == "3 slides: 1 done, 0 unchanged, 0 empty, 2 failed"
    assert "folder.svs: not a file; give the slides inside it" in lines[0]
    assert "link.tif: [Errno 2] No such file or directory" in lines[2]

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    (tmp_path / "out" / "good" / "tiles.json").unlink()
    lines.clear()
    with pytest.raises(
        UserError, match=r"summary.csv cannot be written \(No space left on device\): f"
    ):
        Tile(slides=(folder,), out=tmp_path / "out", px=128).run(lines.append)
    assert "good.tif: failed: good.tif: [Errno 28] No space left on device" in lines[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--px", "100000"], "tiles of 100000 px at 0.5 µm/px: at most 8192 px, 0.05 to 200 µm/px"),
        (["--mpp", "inf"], "tiles of 256 px at inf µm/px: at most 8192 px, 0.05 to 200 µm/px"),
        (["--mpp", "1e-6"], "tiles of 256 px at 1e-06 µm/px: at most 8192 px, 0.05 to 200 µm/px"),
        (["--mpp", "nan"], "tiles of 256 px at nan µm/px: both must be positive"),
        (["--min-tissue", "nan"], "min_tissue is nan; a fraction is 0 to 1"),
        (
            ["--slide-mpp", "72"],
            "--slide-mpp is 72: 72 µm/px is outside 0.05 to 20; give µm per level-0 pixel",
        ),
        (["--mpp-csv", "TWICE"], "twice.csv: columns are ['slide', 'mpp', 'mpp']; each once"),
        (["--out", "FILE"], "--out FILE: no folder can be made (File exists)"),
        (
            ["--mpp-csv", "LATIN"],
            "latin.csv: not a CSV in UTF-8 ('utf-8' codec can't decode byte 0xf6 in position 11: "
            "invalid start byte); save the table as CSV, UTF-8, with commas",
        ),
    ],
)
def test_settings_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    slide = write_pyramid(tmp_path / "a.tif", PIXELS)
    (tmp_path / "file").touch()
    (tmp_path / "latin.csv").write_bytes("slide,mpp\ngöod,0.5\n".encode("latin-1"))
    (tmp_path / "twice.csv").write_text("slide,mpp,mpp\na,0.5,0.6\n")
    names = {"FILE": str(tmp_path / "file"), "LATIN": str(tmp_path / "latin.csv")}
    names["TWICE"] = str(tmp_path / "twice.csv")
    given = [names.get(word, word) for word in words]
    rest = [] if "--out" in words else ["--out", str(tmp_path / "out")]
    assert main(["tile", str(slide), *rest, *given]) == 2
    for short, whole in names.items():
        said = said.replace(short, whole)
    assert capsys.readouterr().err == said + "\n"
    assert not os.path.exists(tmp_path / "out")


def test_boards_and_overviews_have_a_size_that_fits_in_memory() -> None:
    with pytest.raises(
        ConfigError, match="a board of 10 x 10 tiles of 2000 px is 20000 px wide; at"
    ):
        BoardConfig(tiles=100, px=2000)
    with pytest.raises(ConfigError, match="tiles of 64 px at 1000 µm/px: at most 8192 px"):
        BoardConfig(tiles=4, px=64, mpp=1000)
    with pytest.raises(ConfigError, match="an overview at 8 µm/px of at most 100000 px; not above"):
        TissueConfig(max_px=100_000)
    assert TileConfig(px=8192, mpp=0.05).px == 8192
