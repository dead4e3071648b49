"""Readers: what they tell, what they refuse, and what is white."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from planaria.errors import ConfigError, DataError
from planaria.pathology import slides
from planaria.pathology.slides import SlidePool, cut, flatten, open_slide, whiten
from planaria.pathology.tiff import TiffSlide
from tests.support.slides import coordinates, write_pyramid


def test_the_real_slide(cmu: Path) -> None:
    slide = open_slide(cmu)
    info = slide.info
    assert (info.reader, info.width, info.height) == ("openslide/aperio", 2220, 2967)
    assert info.resolution.mpp == pytest.approx(0.499)
    assert info.choice.reason == "0.499 µm/px from openslide.mpp-x"
    assert info.associated == ("label", "macro", "thumbnail")
    assert slide.associated("thumbnail").shape == (768, 574, 3)
    assert slide.read(0, x=1000, y=1500, width=50, height=40).shape == (40, 50, 3)
    with pytest.raises(DataError, match="no associated image 'x'; it has: label, macro, thumbnail"):
        slide.associated("x")
    slide.close()


def test_outside_is_white_and_not_black(cmu: Path) -> None:
    slide = open_slide(cmu)
    assert (slide.read(0, x=2220, y=0, width=8, height=8) == 255).all()
    assert (slide.read(0, x=-50, y=-50, width=40, height=40) == 255).all()
    slide.close()


def test_alpha_lies_on_white_and_gaps_are_white() -> None:
    rgba = np.zeros((1, 4, 4), dtype=np.uint8)
    rgba[0, 0] = (100, 50, 200, 255)
    rgba[0, 1] = (100, 50, 200, 0)
    rgba[0, 2] = (100, 50, 200, 128)
    rgba[0, 3] = (3, 0, 7, 255)
    assert whiten(rgba).tolist() == [[[100, 50, 200], [255] * 3, [177, 152, 227], [255] * 3]]


def test_whitening_leaves_its_argument_alone() -> None:
    black = np.zeros((2, 2, 3), dtype=np.uint8)
    assert (whiten(black) == 255).all()
    assert (black == 0).all()


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_subifd_levels_are_read_by_tifffile(tmp_path: Path, compression: str | None) -> None:
    pixels = coordinates(700, 500)
    path = tmp_path / "levels.ome.tif"
    with tifffile.TiffWriter(path) as writer:
        writer.write(
            pixels,
            photometric="rgb",
            tile=(128, 128),
            subifds=1,
            compression=compression,
            resolution=(20000, 20000),
            resolutionunit="CENTIMETER",
            metadata=None,
        )
        writer.write(
            pixels[::2, ::2],
            photometric="rgb",
            tile=(128, 128),
            subfiletype=1,
            compression=compression,
            metadata=None,
        )
    slide = open_slide(path)
    assert isinstance(slide, TiffSlide)
    assert [level.downsample for level in slide.info.levels] == [1.0, 2.0]
    assert slide.info.resolution.mpp == pytest.approx(0.5)
    np.testing.assert_array_equal(
        slide.read(0, x=100, y=90, width=300, height=200), pixels[90:290, 100:400]
    )
    np.testing.assert_array_equal(
        slide.read(1, x=100, y=90, width=100, height=80), pixels[::2, ::2][45:125, 50:150]
    )
    beyond = slide.read(0, x=650, y=450, width=100, height=100)
    np.testing.assert_array_equal(beyond[:50, :50], pixels[450:, 650:])
    assert (beyond[50:] == 255).all()
    slide.close()


def test_a_stripped_tiff_is_read(tmp_path: Path) -> None:
    pixels = coordinates(300, 200)
    path = tmp_path / "strips.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", rowsperstrip=16, metadata=None)
    slide = open_slide(path)
    assert slide.info.reader == "tifffile"
    np.testing.assert_array_equal(
        slide.read(0, x=10, y=25, width=99, height=70), pixels[25:95, 10:109]
    )
    slide.close()


def test_a_png_with_another_extension_is_read_by_its_content(tmp_path: Path) -> None:
    Image.fromarray(coordinates(64, 48)).save(tmp_path / "a.svs", format="PNG")
    slide = open_slide(tmp_path / "a.svs", mpp=0.5)
    assert slide.info.reader == "image/png"
    assert slide.info.notes == ("named .svs but holds PNG: read as PNG",)
    assert slide.info.resolution.source == "user"


def test_no_resolution_is_an_error_only_when_it_is_asked_for(tmp_path: Path) -> None:
    Image.fromarray(coordinates(64, 48)).save(tmp_path / "a.png")
    info = open_slide(tmp_path / "a.png").info
    with pytest.raises(DataError) as error:
        _ = info.resolution
    assert str(error.value) == (
        "a.png: no usable resolution (the file states no resolution); state it with "
        "--slide-mpp (slide info: --mpp) or in the --mpp-csv table"
    )


def test_seventy_two_dots_per_inch_are_refused(tmp_path: Path) -> None:
    Image.fromarray(coordinates(64, 48)).save(tmp_path / "a.jpg", dpi=(72, 72))
    choice = open_slide(tmp_path / "a.jpg").info.choice
    assert choice.rejected == ("tag 72 px/inch: 352.8 µm/px is outside 0.05 to 20",)


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("grey.png", "L", "grey.png: grey (mode L); stains need colour: export RGB"),
        ("deep.png", "I;16", "deep.png: pixel mode I;16; convert it to 8-bit RGB"),
        ("print.jpg", "CMYK", "print.jpg: CMYK (a print export); convert it to sRGB"),
    ],
)
def test_images_without_stain_are_refused(tmp_path: Path, name: str, mode: str, said: str) -> None:
    Image.new(mode, (64, 64)).save(tmp_path / name)
    with pytest.raises(DataError) as error:
        open_slide(tmp_path / name)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("pixels", "options", "said"),
    [
        (np.zeros((300, 300), np.uint8), {}, "a.tif: grey (1 channel); stains need colour"),
        (np.zeros((300, 300, 3), np.uint16), {"photometric": "rgb"}, "a.tif: 16 bits per sample"),
        (
            np.zeros((300, 300, 4), np.uint8),
            {"photometric": "separated"},
            "a.tif: CMYK (a print export)",
        ),
    ],
)
def test_tiffs_without_stain_are_refused(
    tmp_path: Path, pixels: np.ndarray, options: dict[str, object], said: str
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(128, 128), metadata=None, **options)
    with pytest.raises(DataError) as error:
        open_slide(tmp_path / "a.tif")
    assert str(error.value).startswith(said)


def test_truncated_tiff(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "a.tif", coordinates(600, 600), downsamples=())
    whole = path.read_bytes()
    cut_short = tmp_path / "b.tif"
    cut_short.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(DataError, match=r"b.tif: .*truncated or damaged"):
        read_far(cut_short)


def read_far(path: Path) -> None:
    open_slide(path).read(0, x=500, y=500, width=64, height=64)


def test_files_that_are_no_slides(tmp_path: Path) -> None:
    (tmp_path / "empty.svs").touch()
    (tmp_path / "text.svs").write_text("not a slide " * 50)
    (tmp_path / "a.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\0" * 64)
    for name, said in (
        ("absent.svs", "no such slide; check the path"),
        ("empty.svs", "empty.svs: the file is empty; copy it again"),
        ("text.svs", "text.svs: no reader knows this file; slides are SVS"),
        ("a.dcm", "a.dcm: DICOM, but not a whole slide that OpenSlide reads"),
        (".", "not a file; give the slides inside it"),
    ):
        with pytest.raises(DataError) as error:
            open_slide(tmp_path / name)
        assert said in str(error.value)


def test_cut_is_white_outside() -> None:
    pixels = coordinates(20, 10)
    out = cut(pixels, x=-2, y=8, width=5, height=4)
    np.testing.assert_array_equal(out[:2, 2:], pixels[8:, :3])
    assert (out[2:] == 255).all()
    assert (out[:, :2] == 255).all()


def test_a_pool_is_bounded_and_closes_the_oldest(tmp_path: Path) -> None:
    paths = [write_pyramid(tmp_path / f"{i}.tif", coordinates(300, 300)) for i in range(4)]
    with SlidePool(capacity=2) as pool:
        first = pool.get(paths[0])
        assert pool.get(paths[0]) is first
        for path in paths[1:]:
            pool.get(path)
        assert len(pool) == 2
        with pytest.raises(Exception, match="closed"):
            first.read(0, x=0, y=0, width=8, height=8)
        assert pool.get(paths[0]) is not first
    with pytest.raises(ConfigError, match="capacity is 0; a pool holds at least 1 slide"):
        SlidePool(capacity=0)


def test_a_pool_is_pickled_without_handles_and_forgets_those_of_its_parent(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "a.tif", coordinates(300, 300), mpp=None)
    pool = SlidePool(capacity=2, mpp={"a": 0.25})
    slide = pool.get(path)
    copy = pickle.loads(pickle.dumps(pool))
    assert len(copy) == 0
    assert copy.get(path).info.resolution.mpp == 0.25
    pool._owner = os.getpid() + 1
    assert pool.get(path) is not slide
    slide.close()
    pool.close()
    copy.close()


def test_raw_pixels_are_those_of_openslides_image(
    cmu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = open_slide(cmu)
    assert slides._RAW is not None, "openslide-python has hidden the fast way; reading still works"
    # The last one leaves the slide.
    places = [(0, 0), (1000, 1500), (2100, 2900)]
    raw = [slide.read(0, x=x, y=y, width=200, height=150) for x, y in places]
    monkeypatch.setattr(slides, "_RAW", None)
    for (x, y), pixels in zip(places, raw, strict=True):
        image = slide.read(0, x=x, y=y, width=200, height=150)
        np.testing.assert_array_equal(pixels, image)
    slide.close()


def test_colours_times_alpha_lie_on_white() -> None:
    def packed(a: int, r: int, g: int, b: int) -> int:
        return a << 24 | r << 16 | g << 8 | b

    argb = np.array(
        [[packed(255, 100, 50, 200), 0, packed(128, 50, 25, 100), packed(255, 3, 0, 7)]],
        dtype=np.uint32,
    )
    assert flatten(argb).tolist() == [[[100, 50, 200], [255] * 3, [177, 152, 227], [255] * 3]]
    assert flatten(argb[:, [0, 3]]).tolist() == [[[100, 50, 200], [255] * 3]]
