"""``planaria slide info | tile | predict | view``: each command a frozen dataclass with ``run``.

``run(say)`` returns the exit code and says its lines through ``say``. ``main`` is the command line of
this module alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from planaria.errors import ConfigError, PlanariaError
from planaria.pathology.folder import find_slides, process, read_mpp_table
from planaria.pathology.heat import DISCLAIMER, HeatMap, over_thumbnail, save_heat, save_overview
from planaria.pathology.regions import thumbnail
from planaria.pathology.resolution import refuse
from planaria.pathology.slides import Slide, SlideInfo, open_slide
from planaria.pathology.tiles import TileConfig, tile_slide, write_csv, write_h5, write_preview
from planaria.pathology.tissue import TissueConfig

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Info:
    """Says what a slide's file states and what is assumed."""

    slides: tyro.conf.Positional[tuple[Path, ...]]
    """Slides, or folders of them."""
    mpp: float | None = None
    """µm per level-0 pixel, over whatever the files say."""
    json: bool = False
    """One JSON object per slide instead of lines."""

    def run(self, say: Say) -> int:
        """0 unless no slide at all could be opened, as for the other commands."""
        failed = 0
        paths = find_slides(self.slides)
        for path in paths:
            try:
                slide = open_slide(path, mpp=self.mpp)
            except PlanariaError as error:
                failed += 1
                say(
                    json.dumps({"path": str(path), "error": str(error)})
                    if self.json
                    else str(error)
                )
                continue
            facts = describe(slide.info)
            slide.close()
            if self.json:
                say(json.dumps(facts))
            else:
                for key, value in facts.items():
                    say(f"{key:<12} {plain(value)}")
                say("")
        if failed and len(paths) > 1:
            sys.stderr.write(f"{failed} of {len(paths)} slides failed\n")
        return int(failed == len(paths))


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Cuts slides into tiles: coordinates (H5, CSV), a preview, and PNG files where asked for."""

    slides: tyro.conf.Positional[tuple[Path, ...]]
    """Slides, or folders of them."""
    out: Path
    """Folder for the results, one folder per slide."""
    mpp: float = 0.5
    """µm/px of the tiles."""
    px: int = 256
    """Pixels along one side of a tile."""
    overlap: int = 0
    """Pixels that neighbours share."""
    min_tissue: float = 0.25
    """Fraction of tissue from which a tile is kept."""
    png: bool = False
    """Whether the tiles themselves are written."""
    slide_mpp: float | None = None
    """µm per level-0 pixel of every slide, over what the files say."""
    mpp_csv: Path | None = None
    """Table with columns slide and mpp, for slides that say nothing or lie."""
    tissue: TissueConfig = field(default_factory=TissueConfig)

    def run(self, say: Say) -> int:
        """0 unless no slide at all could be tiled."""
        config = TileConfig(
            mpp=self.mpp, px=self.px, overlap=self.overlap, min_tissue=self.min_tissue
        )
        slides = find_slides(self.slides)
        table = overrides(slides, one=self.slide_mpp, table=self.mpp_csv, say=say)

        def work(slide: Slide, folder: Path) -> tuple[bool, str, dict[str, Any]]:
            tiles, tissue = tile_slide(
                slide,
                config=config,
                tissue_config=self.tissue,
                png_dir=folder / "tiles" if self.png else None,
            )
            name = slide.info.path.stem
            write_h5(folder / f"{name}.h5", table=tiles)
            write_h5(folder / "clam" / f"{name}.h5", table=tiles, layout="clam")
            write_csv(folder / f"{name}.csv", table=tiles)
            write_preview(folder / "preview.png", slide=slide, table=tiles)
            detail = f"{len(tiles.xy)} tiles; {tissue.reason}"
            return len(tiles.xy) > 0, detail, {"counts": tiles.counts}

        settings = [asdict(config), asdict(self.tissue), self.png]
        summary = process(
            slides,
            out=self.out,
            marker="tiles.json",
            settings=settings,
            mpp=table,
            work=work,
            say=say,
        )
        return summary.exit_code


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Scores slides with a trained model: heat-map, GeoJSON, CSV and a page per slide."""

    slides: tyro.conf.Positional[tuple[Path, ...]]
    """Slides, or folders of them."""
    model: Path
    """Folder that a training left (model.json, model.pt)."""
    out: Path
    """Folder for the results, one folder per slide."""
    features: Path | None = None
    """Folder with the slides' features (NAME.h5), for a model that was trained on features."""
    overlap: float = 0.0
    """Fraction of a tile that neighbours share (metastasis)."""
    batch: int = 32
    """Tiles per forward pass."""
    page_px: int = 2048
    """Longest side of the slide inside each page."""
    origin: Literal["bounds", "level0"] = "bounds"
    """Origin of the GeoJSON: bounds (QuPath) or level0."""
    slide_mpp: float | None = None
    """µm per level-0 pixel of every slide, over what the files say."""
    mpp_csv: Path | None = None
    """Table with columns slide and mpp."""
    tissue: TissueConfig = field(default_factory=TissueConfig)

    def run(self, say: Say) -> int:
        """0 unless no slide at all could be scored."""
        # Torch is slow to import: info and tile do without it.
        from planaria.pathology.bundle import load_bundle
        from planaria.pathology.datasets.features import find_features
        from planaria.pathology.predict import PredictConfig, predict_features, predict_slide

        config = PredictConfig(overlap=self.overlap, batch=self.batch)
        if not 64 <= self.page_px <= 8192:
            raise ConfigError(
                f"page_px is {self.page_px}; 64 to 8192 px, all inside the page's file"
            )
        card, model = load_bundle(self.model)
        self._check_features(wanted=card.features is not None)
        slides = find_slides(self.slides)
        table = overrides(slides, one=self.slide_mpp, table=self.mpp_csv, say=say)
        notes = (*card.notes, f"Trained on: {card.trained_on}.")
        threshold = card.threshold if card.kind == "metastasis" else 0.5

        def work(slide: Slide, folder: Path) -> tuple[bool, str, dict[str, Any]]:
            if self.features is not None:
                path = find_features(self.features, slide.info.path.name)
                found = predict_features(slide, card=card, model=model, path=path)
            else:
                found = predict_slide(
                    slide, card=card, model=model, config=config, tissue_config=self.tissue
                )
            said = "no score" if found.score is None else f"{found.heat.label} {found.score:.3f}"
            call = f"{found.call} ({said}; {found.rule})"
            write_overlays(
                slide,
                folder,
                heat=found.heat,
                call=call,
                notes=notes,
                threshold=threshold,
                origin=self.origin,
                page_px=self.page_px,
            )
            facts = {
                "score": found.score,
                "call": call,
                "threshold": threshold,
                "rule": found.rule,
                "tiles": found.tiles,
                "seconds": round(found.seconds, 3),
                "notes": list(notes),
            }
            return found.score is not None, f"{call}; {found.reason}", facts

        stamp = (self.model / "model.pt").stat()
        settings = [
            (self.model / "model.json").read_text(encoding="utf-8"),
            [stamp.st_size, stamp.st_mtime_ns],
            asdict(config),
            asdict(self.tissue),
            self.page_px,
            self.origin,
        ]
        summary = process(
            slides,
            out=self.out,
            marker="prediction.json",
            settings=settings,
            mpp=table,
            work=work,
            say=say,
            beside=self._beside,
            note=DISCLAIMER,
        )
        say(DISCLAIMER)
        return summary.exit_code

    def _check_features(self, *, wanted: bool) -> None:
        if wanted and self.features is None:
            raise ConfigError(
                f"{self.model}: the model sees features; give --features, a folder of NAME.h5"
            )
        if self.features is not None and not wanted:
            raise ConfigError(f"{self.model}: the model sees pixels; leave --features out")
        if self.features is not None and not self.features.is_dir():
            raise ConfigError(f"--features {self.features}: no such folder; check the path")

    def _beside(self, slide: Path) -> list[int] | None:
        from planaria.pathology.datasets.features import find_features

        if self.features is None:
            return None
        path = find_features(self.features, slide.name)
        if not path.is_file():
            return None
        return [path.stat().st_size, path.stat().st_mtime_ns]


@dataclass(frozen=True, kw_only=True)
class View:
    """Shows the results of ``predict`` in a browser: serves them on this machine until Ctrl-C."""

    folder: tyro.conf.Positional[Path]
    """Folder that ``slide predict`` wrote."""
    port: int = 0
    """Port on 127.0.0.1; 0 takes a free one."""

    def run(self, say: Say) -> int:
        """0 when interrupted."""
        from planaria.pathology.serve import Viewer

        viewer = Viewer(self.folder, port=self.port)
        say(f"{len(viewer.results)} slides at {viewer.url} (Ctrl-C ends)")
        viewer.serve()
        return 0


SlideCommand = (
    Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Tile, tyro.conf.subcommand("tile")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[View, tyro.conf.subcommand("view")]
)
"""What ``planaria slide`` parses."""

COMMANDS: dict[str, type[Any]] = {"info": Info, "tile": Tile, "predict": Predict, "view": View}
"""Subcommands by name."""


def write_overlays(
    slide: Slide,
    folder: Path,
    *,
    heat: HeatMap,
    call: str,
    notes: tuple[str, ...],
    threshold: float,
    origin: str,
    page_px: int,
) -> None:
    """Writes a heat-map in every form: npz, GeoJSON, CSV, overview and page."""
    from planaria.pathology.geojson import stream, write_geojson, write_heat_csv
    from planaria.pathology.viewer import render_page, write_page

    info = slide.info
    save_heat(folder / "heat.npz", heat=heat)
    found = stream(heat, info=info, threshold=threshold, origin=origin)
    write_geojson(folder / f"{info.path.stem}.geojson", found=found)
    write_heat_csv(folder / "heat.csv", heat=heat, info=info)
    pixels, down = thumbnail(slide)
    corner = (info.bounds.x, info.bounds.y)
    save_overview(
        folder / "overview.png",
        pixels=over_thumbnail(pixels, heat=heat, origin=corner, down=down),
    )
    page = render_page(slide, heat=heat, call=call, notes=notes, inline_px=page_px)
    write_page(folder / "index.html", html=page)


def describe(info: SlideInfo) -> dict[str, Any]:
    """The facts that ``slide info`` shows, ready for JSON."""
    choice = info.choice
    return {
        "path": str(info.path),
        "reader": info.reader,
        "size": f"{info.width} x {info.height} px",
        "bounds": [info.bounds.x, info.bounds.y, info.bounds.width, info.bounds.height],
        "levels": [[lv.width, lv.height, round(lv.downsample, 6)] for lv in info.levels],
        "mpp": None if choice.resolution is None else round(choice.resolution.mpp, 6),
        "resolution": choice.reason,
        "refused": list(choice.rejected),
        "objective": info.objective,
        "associated": list(info.associated),
        "icc": info.icc,
        "notes": list(info.notes),
    }


def plain(value: Any) -> str:
    """A fact for people: none for nothing, levels as width x height, lists without brackets."""
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        rows: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        if all(isinstance(row, list) for row in rows):
            return "; ".join(f"{w} x {h} px at 1/{down:g}" for w, h, down in rows)
        return ", ".join(map(str, rows))
    return str(value)


def overrides(
    slides: list[Path], *, one: float | None, table: Path | None, say: Say
) -> dict[str, float]:
    """The user's resolutions by slide name, from ``--slide-mpp`` and the table, which wins."""
    wrong = None if one is None else refuse(one, one)
    if wrong is not None:
        raise ConfigError(f"--slide-mpp is {one:g}: {wrong}; give µm per level-0 pixel")
    found = {} if one is None else {path.stem: one for path in slides}
    if table is not None:
        if not table.is_file():
            raise ConfigError(f"--mpp-csv {table}: no such file; check the path")
        rows, notes = read_mpp_table(table, slides=slides)
        for note in notes:
            say(note)
        found |= rows
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line of this module: parses, runs, prints one line for an error."""

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        command = tyro.cli(SlideCommand, args=arguments, prog="planaria slide")
        return command.run(say)
    except PlanariaError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
