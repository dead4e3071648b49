"""The page in a real browser: pixels, the slider, the value under the cursor."""

from __future__ import annotations

import io
import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from planaria.errors import DataError, RunError
from planaria.pathology import vendor
from planaria.pathology.commands import Predict
from planaria.pathology.heat import load_heat
from planaria.pathology.serve import Viewer
from planaria.pathology.slides import open_slide
from planaria.pathology.viewer import Pyramid, plan_pyramid, pyramid_tile, render_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def results(cmu: Path, metastasis_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    Predict(slides=(cmu,), model=metastasis_model, out=out, page_px=1024).run(lambda line: None)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is missing; install it with apt-get install chromium")
        pytest.skip("chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def shot(page: Any) -> np.ndarray:
    page.wait_for_timeout(500)
    return np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).astype(int)


@pytest.mark.parametrize("how", ["file", "served"])
def test_the_page_in_a_browser(browser: Any, results: Path, cmu: Path, how: str) -> None:
    viewer = Viewer(results)
    viewer.start()
    page = browser.new_page(viewport={"width": 900, "height": 700})
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: problems.append(str(e)))
    try:
        if how == "file":
            page.goto((results / cmu.stem / "index.html").as_uri())
        else:
            page.goto(viewer.url)
            page.click(f"text={cmu.stem}")
        page.wait_for_selector("body[data-ready=yes]", timeout=60_000)
        check_pixels(page, results / cmu.stem)
        assert "Not for diagnosis" in page.inner_text("#note")
        assert problems == []
    finally:
        page.close()
        viewer.close()


def check_pixels(page: Any, folder: Path) -> None:
    heat = load_heat(folder / "heat.npz")
    box = page.locator("#viewer").bounding_box()
    scale = min(box["width"] / 2220, box["height"] / 2967)
    left = box["x"] + (box["width"] - 2220 * scale) / 2
    top = box["y"] + (box["height"] - 2967 * scale) / 2

    def place(row: int, column: int) -> tuple[int, int]:
        x, y = heat.grid.place(column, row)
        return (
            int(left + (x + heat.grid.side / 2) * scale),
            int(top + (y + heat.grid.side / 2) * scale),
        )

    known = np.argwhere(~np.isnan(heat.values[:-1, :-1])).tolist()
    glass = np.argwhere(np.isnan(heat.values[:-1, :-1])).tolist()
    page.locator("#opacity").fill("100")
    opaque = shot(page)
    colours = heat.rgba()
    for row, column in known[:: len(known) // 12]:
        x, y = place(row, column)
        assert np.abs(opaque[y, x] - colours[row, column, :3]).max() <= 3
    page.locator("#opacity").fill("0")
    clear = shot(page)
    for row, column in glass[:: len(glass) // 12]:
        x, y = place(row, column)
        # Untinted: the slide's own pixels, whatever the heat-map's opacity.
        assert (opaque[y, x] == clear[y, x]).all()
    assert np.abs(opaque - clear).max() > 60
    row, column = known[len(known) // 2]
    page.mouse.move(*place(row, column))
    value = float(heat.values[row, column])
    assert page.inner_text("#value") == f"probability of tumour: {value:.3f}"
    page.mouse.move(*place(*glass[0]))
    assert page.inner_text("#value") == "no tissue here"
    page.click("text=+")
    assert np.abs(shot(page) - clear).max() > 60
    page.click("text=Whole slide")
    assert np.abs(shot(page) - clear)[int(top) + 20 :].mean() < 2


def test_tiles_of_a_pyramid_fit_together(cmu: Path) -> None:
    slide = open_slide(cmu)
    pyramid = plan_pyramid(slide)
    assert (pyramid.max_level, pyramid.min_level) == (12, 8)
    assert pyramid.size(8) == (139, 186)
    places = list(pyramid.places())
    assert len([p for p in places if p[0] == 12]) == 9 * 12
    tile = pyramid_tile(slide, pyramid=pyramid, level=12, column=8, row=11)
    assert tile.shape == (2967 - 11 * 256, 2220 - 8 * 256, 3)
    np.testing.assert_array_equal(tile, slide.read(0, x=2048, y=2816, width=172, height=151))
    with pytest.raises(DataError, match="level 13 is outside 8 to 12 of the page"):
        pyramid_tile(slide, pyramid=pyramid, level=13, column=0, row=0)
    with pytest.raises(DataError, match=r"tile \(9, 0\) is outside level 12 of 2220x2967 px"):
        pyramid_tile(slide, pyramid=pyramid, level=12, column=9, row=0)
    slide.close()
    assert Pyramid(width=1, height=1, down=1.0).max_level == 0


def test_a_name_cannot_end_the_script(cmu: Path, results: Path, tmp_path: Path) -> None:
    evil = tmp_path / "a<script>alert(1).svs"
    evil.write_bytes(cmu.read_bytes())
    slide = open_slide(evil)
    heat = load_heat(results / cmu.stem / "heat.npz")
    html = render_page(slide, heat=heat, call="", inline_px=256)
    assert "<script>alert(1)" not in html
    assert "a\\u003cscript>alert(1).svs" in html
    slide.close()


def test_the_server_answers_only_what_it_has(results: Path, cmu: Path) -> None:
    viewer = Viewer(results)
    viewer.start()
    try:
        with urllib.request.urlopen(f"{viewer.url}{cmu.stem}/tiles/12/0_0.jpg") as reply:
            assert reply.headers["Content-Type"] == "image/jpeg"
            assert Image.open(io.BytesIO(reply.read())).size == (256, 256)
        for path in (
            "../../etc/passwd",
            "x/",
            f"{cmu.stem}/tiles/99/0_0.jpg",
            f"{cmu.stem}/heat.npz",
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(viewer.url + path)
            assert error.value.code == 404
            error.value.close()
        rebound = urllib.request.Request(viewer.url, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(rebound)
        assert error.value.code == 403
        error.value.close()
    finally:
        viewer.close()


def test_no_results(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no predictions; make some with 'planaria slide predict'"):
        Viewer(tmp_path)


def test_ports_that_cannot_be_had(results: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 99_999):
            with pytest.raises(DataError, match=rf"port {port} cannot be used \(.*\); choose"):
                Viewer(results, port=port)


def test_another_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "openseadragon-6.1.1.tgz"
    archive.write_bytes(b"not what was reviewed")
    with pytest.raises(RunError, match=r"openseadragon-6.1.1.tgz: sha512 is .*; do not use it"):
        vendor.unpack(archive, target=tmp_path / "out")
    assert not (tmp_path / "out").exists()
