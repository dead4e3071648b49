"""The slide commands, from files to pages, on good and on bad input."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from planaria.errors import ConfigError, DataError
from planaria.pathology.bundle import load_bundle
from planaria.pathology.commands import Info, Predict, Tile, main, plain
from planaria.pathology.folder import find_slides, read_mpp_table
from planaria.pathology.heat import load_heat
from planaria.pathology.predict import TOP_TILES, decide, slide_probability
from tests.support.slides import coordinates, tissue_pixels, write_pyramid


def test_info_says_what_is_known(cmu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(cmu), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["mpp"], facts["reader"]) == (0.499, "openslide/aperio")
    assert facts["resolution"] == "0.499 µm/px from openslide.mpp-x"
    assert facts["levels"] == [[2220, 2967, 1.0]]


def test_info_goes_on_after_a_broken_slide(cmu: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.svs").write_text("no slide")
    lines: list[str] = []
    assert Info(slides=(tmp_path / "bad.svs", cmu)).run(lines.append) == 1
    assert lines[0].startswith("bad.svs: no reader knows this file")
    assert "resolution   0.499 µm/px from openslide.mpp-x" in lines


def bad_folder(folder: Path) -> Path:
    """A folder of slides, most of which are wrong in a way of their own."""
    folder.mkdir()
    write_pyramid(folder / "good.tif", tissue_pixels(900, 600, box=(50, 50, 700, 550)))
    write_pyramid(folder / "white.tif", np.full((600, 600, 3), 240, np.uint8))
    write_pyramid(folder / "silent.tif", coordinates(300, 300), mpp=None)
    write_pyramid(folder / "nonsense.tif", coordinates(300, 300), mpp=352.8)
    write_pyramid(folder / "tiny.tif", tissue_pixels(100, 100, box=(0, 0, 100, 100)), tile=16)
    black = np.zeros((600, 600, 3), np.uint8)
    write_pyramid(folder / "unscanned.tif", black)
    tifffile.imwrite(folder / "deep.tif", np.zeros((300, 300, 3), np.uint16), photometric="rgb")
    Image.new("L", (300, 300)).save(folder / "grey.png")
    whole = (folder / "good.tif").read_bytes()
    (folder / "cut.tif").write_bytes(whole[: len(whole) // 4])
    (folder / "notes.txt").write_text("not a slide, not taken")
    return folder


def test_a_folder_with_broken_slides(tmp_path: Path) -> None:
    folder, out = bad_folder(tmp_path / "in"), tmp_path / "out"
    lines: list[str] = []
    assert Tile(slides=(folder,), out=out, px=128).run(lines.append) == 0
    assert lines[-1] == "9 slides: 2 done, 0 unchanged, 2 empty, 5 failed"
    with (out / "summary.csv").open(newline="") as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {
        "cut.tif": "failed",
        "deep.tif": "failed",
        "good.tif": "done",
        "grey.png": "failed",
        "nonsense.tif": "failed",
        "silent.tif": "failed",
        "tiny.tif": "done",
        "unscanned.tif": "empty",
        "white.tif": "empty",
    }
    assert "deep.tif: 16 bits per sample" in rows["deep.tif"]["detail"]
    assert "352.8 µm/px is outside 0.05 to 20" in rows["nonsense.tif"]["detail"]
    assert "state it with --slide-mpp" in rows["silent.tif"]["detail"]
    names = {p.name for p in (out / "good").iterdir()}
    assert names == {"good.h5", "good.csv", "clam", "preview.png", "tiles.json"}


def test_a_second_run_does_only_what_is_missing(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in ("a", "b"):
        write_pyramid(folder / f"{name}.tif", tissue_pixels(400, 300, box=(0, 0, 300, 300)))
    command = Tile(slides=(folder,), out=out, px=128)
    command.run(lambda line: None)
    before = (out / "a" / "a.h5").stat().st_mtime_ns
    (out / "b" / "tiles.json").unlink()
    os.utime(folder / "b.tif", ns=(1, 1))
    lines: list[str] = []
    command.run(lines.append)
    assert lines[-1] == "2 slides: 1 done, 1 unchanged, 0 empty, 0 failed"
    assert (out / "a" / "a.h5").stat().st_mtime_ns == before
    lines.clear()
    Tile(slides=(folder,), out=out, px=64, png=True).run(lines.append)
    assert lines[-1].startswith("2 slides: 2 done, 0 unchanged")
    Tile(slides=(folder,), out=out, px=96, png=True).run(lines.append)
    sizes = {np.asarray(Image.open(path)).shape for path in (out / "a" / "tiles").iterdir()}
    assert sizes == {(96, 96, 3)}


def test_the_table_of_resolutions(tmp_path: Path) -> None:
    slides = [tmp_path / "a.tif", tmp_path / "b.svs"]
    table = tmp_path / "mpp.csv"
    table.write_text("slide,mpp\na.tif,0.25\nb,0.5\nzebra,1\n")
    found, notes = read_mpp_table(table, slides=slides)
    assert found == {"a": 0.25, "b": 0.5}
    assert notes == ["mpp.csv: line 4: no slide is named 'zebra'"]
    for text, said in (
        ("slide,mpp\na,0.25\na.tif,0.3\n", "mpp.csv: line 3: 'a.tif' stands twice; keep one"),
        (
            "slide,mpp\na,fine\n",
            "mpp.csv: line 2: 'fine': nan x nan µm/px is not a number; give µm",
        ),
        ("slide,mpp\na,352\n", "mpp.csv: line 2: '352': 352 µm/px is outside 0.05 to 20"),
        ("name,mpp\na,0.25\n", "mpp.csv: columns are ['name', 'mpp']; needs slide and mpp"),
    ):
        table.write_text(text)
        with pytest.raises(DataError) as error:
            read_mpp_table(table, slides=slides)
        assert str(error.value).startswith(said)


def test_a_slide_that_says_nothing_is_helped_by_the_table(tmp_path: Path) -> None:
    pixels = tissue_pixels(400, 300, box=(0, 0, 300, 300))
    write_pyramid(tmp_path / "silent.tif", pixels, mpp=None)
    (tmp_path / "mpp.csv").write_text("slide,mpp\nsilent,0.5\n")
    lines: list[str] = []
    arguments = [
        "tile",
        str(tmp_path / "silent.tif"),
        "--out",
        str(tmp_path / "out"),
        "--px",
        "128",
        "--mpp-csv",
        str(tmp_path / "mpp.csv"),
    ]
    assert main(arguments) == 0
    assert (tmp_path / "out" / "silent" / "silent.h5").is_file()
    assert lines == []


def test_find_slides(tmp_path: Path) -> None:
    for name in ("b.svs", "a.tiff", ".hidden.svs", "c.txt"):
        (tmp_path / name).touch()
    assert [p.name for p in find_slides([tmp_path])] == ["a.tiff", "b.svs"]
    (tmp_path / "a.svs").touch()
    with pytest.raises(DataError, match=r"2 slides are named 'a' \(.*\); rename one"):
        find_slides([tmp_path])
    with pytest.raises(DataError, match="absent: no such slide or folder; check the path"):
        find_slides([tmp_path / "absent"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no slides in .*empty; expected files such as"):
        find_slides([empty])


def test_predict_writes_everything_and_stays_in_its_folder(
    cmu: Path, metastasis_model: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    white = write_pyramid(tmp_path / "white.tif", np.full((400, 400, 3), 240, np.uint8))
    command = Predict(
        slides=(cmu, white), model=metastasis_model, out=tmp_path / "out", page_px=512, batch=16
    )
    assert command.run(lines.append) == 0
    assert lines[-2:] == [
        "2 slides: 1 done, 0 unchanged, 1 empty, 0 failed",
        "Research software. Not for diagnosis.",
    ]
    folder = tmp_path / "out" / cmu.stem
    assert {p.name for p in folder.iterdir()} == {
        f"{cmu.stem}.geojson",
        "heat.csv",
        "heat.npz",
        "index.html",
        "overview.png",
        "prediction.json",
    }
    facts = json.loads((folder / "prediction.json").read_text())
    heat = load_heat(folder / "heat.npz")
    known = heat.values[~np.isnan(heat.values)]
    assert facts["tiles"] == len(known) > 60
    assert known.std() > 0
    assert facts["score"] == pytest.approx(np.sort(known)[-TOP_TILES:].mean(), abs=1e-6)
    assert facts["notes"][0] == "Research software. Not for diagnosis."
    page = (folder / "index.html").read_text()
    said = "Research software. Not for diagnosis."
    assert said in page
    assert json.loads((folder / f"{cmu.stem}.geojson").read_text())["description"] == said
    with Image.open(folder / "overview.png") as image:
        assert image.info["Description"] == said
    for table in (folder / "heat.csv", tmp_path / "out" / "summary.csv"):
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows
        assert all(row["note"] == said for row in rows)
    assert "://" not in page.split("<script>")[0].replace("data:", "")
    empty = json.loads((tmp_path / "out" / "white" / "prediction.json").read_text())
    assert empty["score"] is None
    assert empty["call"].startswith("no tissue (no score;")
    lines.clear()
    command.run(lines.append)
    assert lines[-2] == "2 slides: 0 done, 2 unchanged, 0 empty, 0 failed"


def test_predicted_tiles_are_what_the_model_says(
    cmu: Path, metastasis_model: Path, tmp_path: Path
) -> None:
    import torch

    from planaria.pathology.colour import to_unit
    from planaria.pathology.predict import predict_slide
    from planaria.pathology.regions import read_tile
    from planaria.pathology.slides import open_slide

    card, model = load_bundle(metastasis_model)
    slide = open_slide(cmu)
    found = predict_slide(slide, card=card, model=model)
    row, column = (int(v) for v in np.argwhere(~np.isnan(found.heat.values))[7])
    x, y = found.heat.grid.place(column, row)
    tile = read_tile(slide, x=x, y=y, mpp=card.mpp, px=card.px)
    with torch.no_grad():
        alone = model(to_unit(torch.from_numpy(tile)[None])).sigmoid()
    # Batched and single convolutions add in another order.
    assert float(found.heat.values[row, column]) == pytest.approx(float(alone), abs=1e-4)
    slide.close()


def test_a_gleason_model_grades_and_maps(cmu: Path, gleason_model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    command = Predict(slides=(cmu,), model=gleason_model, out=tmp_path, page_px=256)
    assert command.run(lines.append) == 0
    facts = json.loads((tmp_path / cmu.stem / "prediction.json").read_text())
    assert facts["rule"] == "expected grade of the best 4 tiles, mean of 4 boards"
    assert 0 <= facts["score"] <= 5
    assert facts["call"].startswith("ISUP ")
    heat = load_heat(tmp_path / cmu.stem / "heat.npz")
    assert heat.label == "expected ISUP grade"
    assert 20 < facts["tiles"] < 80


def test_a_model_without_pbir_sees_the_whole_slide_as_in_training(
    cmu: Path, gleason_model: Path
) -> None:
    import torch

    from planaria.pathology.boards import whole_board
    from planaria.pathology.bundle import grade_loss
    from planaria.pathology.colour import to_unit
    from planaria.pathology.predict import predict_slide
    from planaria.pathology.slides import open_slide

    card, model = load_bundle(gleason_model)
    card = dataclasses.replace(card, board=dataclasses.replace(card.board, pbir=False))
    slide = open_slide(cmu)
    found = predict_slide(slide, card=card, model=model)
    pixels = to_unit(torch.from_numpy(whole_board(slide, config=card.board))[None])
    with torch.no_grad():
        seen = grade_loss(card).score(model(pixels))
    assert found.score == pytest.approx(float(seen), abs=1e-5)
    assert found.rule == "expected grade of the whole slide on one board"
    # 2220 x 2967 px in the middle of a square board of 8 x 8 cells: the first column is white.
    grid = found.heat.grid
    assert (grid.columns, grid.rows, grid.y) == (8, 8, 0)
    assert grid.step * 8 == pytest.approx(2967)
    assert grid.x == pytest.approx((2220 - 2967) / 2, abs=2967 / 256)
    assert np.isnan(found.heat.values[:, 0]).all()
    assert found.tiles > 10
    slide.close()


def test_rules_from_tiles_to_slides(metastasis_model: Path, gleason_model: Path) -> None:
    tiles = np.array([0.1] * 50 + [1.0], dtype=np.float32)
    assert slide_probability(tiles) == pytest.approx((1 + 9 * 0.1) / 10)
    assert slide_probability(np.array([0.4, 0.6], dtype=np.float32)) == pytest.approx(0.5)
    card, _ = load_bundle(metastasis_model)
    assert [decide(s, card=card) for s in (None, 0.49, 0.5)] == ["no tissue", "no tumour", "tumour"]
    card, _ = load_bundle(gleason_model)
    assert [decide(s, card=card) for s in (0.2, 2.5, 4.9)] == ["ISUP 0", "ISUP 3", "ISUP 5"]


def test_a_model_that_gives_nan_is_not_taken_for_glass(
    metastasis_model: Path, gleason_model: Path, tmp_path: Path
) -> None:
    import torch

    slide = write_pyramid(tmp_path / "a.tif", tissue_pixels(400, 300, box=(0, 0, 300, 300)))
    for good in (metastasis_model, gleason_model):
        model = tmp_path / good.name
        shutil.copytree(good, model)
        state = torch.load(model / "model.pt", weights_only=True)
        for tensor in state.values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        torch.save(state, model / "model.pt")
        lines: list[str] = []
        command = Predict(slides=(slide,), model=model, out=tmp_path / "out", page_px=256)
        assert command.run(lines.append) == 1
        assert lines[0].startswith("[1/1] a.tif: failed: the model's scores are not finite: its")
    for size in (0, 100_000):
        with pytest.raises(ConfigError, match=rf"page_px is {size}; 64 to 8192 px, all inside the"):
            Predict(slides=(slide,), model=model, out=tmp_path, page_px=size).run(lines.append)


def test_wrong_models_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slide = write_pyramid(tmp_path / "a.tif", coordinates(300, 300))
    arguments = ["predict", str(slide), "--model", str(tmp_path), "--out", str(tmp_path / "o")]
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}: no model.json; give the output folder of a finished training\n"
    )
    (tmp_path / "model.json").write_text("{}")
    assert main(arguments) == 2
    assert "not a model card" in capsys.readouterr().err


def test_facts_are_told_in_words() -> None:
    assert plain(None) == plain([]) == "none"
    assert plain([[1500, 1400, 1.0], [750, 700, 2.0]]) == (
        "1500 x 1400 px at 1/1; 750 x 700 px at 1/2"
    )
    assert plain(["label", "macro"]) == "label, macro"
