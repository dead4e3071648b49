"""Patch-based image reconstruction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planaria.errors import ConfigError, DataError
from planaria.pathology.boards import (
    BoardConfig,
    cut_tiles,
    fixed_board,
    orient,
    random_board,
    whole_board,
)
from planaria.pathology.slides import open_slide
from planaria.pathology.synthetic.paint import ink
from tests.support.slides import tissue_pixels, write_pyramid

SMALL = BoardConfig(tiles=9, px=8, mpp=0.5)


def stack(count: int, px: int = 8) -> np.ndarray:
    """Tiles that tell their number in red and their orientation in green."""
    out = np.zeros((count, px, px, 3), dtype=np.uint8)
    out[..., 0] = np.arange(count)[:, None, None]
    out[..., 1] = np.arange(px * px).reshape(px, px)
    return out


def reds(board: np.ndarray, px: int = 8) -> list[int]:
    return board[::px, ::px, 0].ravel().tolist()


def test_a_test_board_is_the_best_tiles_in_order_without_chance() -> None:
    tiles = stack(14)
    first = fixed_board(tiles, config=SMALL)
    assert reds(first) == list(range(9))
    np.random.seed(0)
    np.testing.assert_array_equal(first, fixed_board(tiles, config=SMALL))
    assert reds(fixed_board(tiles, config=SMALL, shift=3)) == [6, 7, 8, 0, 1, 2, 3, 4, 5]


def test_a_training_board_draws_tiles_places_and_ways() -> None:
    tiles = stack(14)
    boards = [random_board(tiles, config=SMALL, rng=np.random.default_rng(i)) for i in range(200)]
    drawn = [set(reds(board)) for board in boards]
    assert all(len(numbers) == 9 for numbers in drawn)
    assert set.union(*drawn) == set(range(14))
    firsts = {reds(board)[0] for board in boards}
    assert firsts == set(range(14))
    again = random_board(tiles, config=SMALL, rng=np.random.default_rng(7))
    np.testing.assert_array_equal(again, boards[7])


def test_switches_of_chance() -> None:
    config = BoardConfig(tiles=9, px=8, mpp=0.5, turn=False, permute=False)
    board = random_board(stack(9), config=config, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(board, fixed_board(stack(9), config=config))


def test_fewer_tiles_leave_white_places() -> None:
    board = fixed_board(stack(4), config=SMALL)
    assert reds(board) == [0, 1, 2, 3] + [255] * 5
    assert (random_board(stack(0), config=SMALL, rng=np.random.default_rng(0)) == 255).all()
    drawn = random_board(stack(4), config=SMALL, rng=np.random.default_rng(0))
    assert sorted(reds(drawn)) == [0, 1, 2, 3] + [255] * 5


def test_the_eight_ways_are_different_and_zero_is_the_identity() -> None:
    tile = stack(1)[0]
    ways = [orient(tile, way=way) for way in range(8)]
    assert len({way.tobytes() for way in ways}) == 8
    np.testing.assert_array_equal(ways[0], tile)
    for way in ways:
        np.testing.assert_array_equal(np.sort(way.ravel()), np.sort(tile.ravel()))


def test_the_best_tiles_of_the_real_slide(cmu: Path) -> None:
    slide = open_slide(cmu)
    config = BoardConfig(tiles=4, px=128, mpp=1.0, candidates=2)
    found = cut_tiles(slide, config=config)
    assert found.pixels.shape == (8, 128, 128, 3)
    assert (np.diff(found.tissue) <= 0).all()
    assert found.tissue[0] > 0.9
    moved = cut_tiles(slide, config=config, rng=np.random.default_rng(0))
    assert not np.array_equal(found.xy, moved.xy)
    np.testing.assert_array_equal(cut_tiles(slide, config=config).pixels, found.pixels)
    slide.close()


def test_ink_does_not_win(tmp_path: Path) -> None:
    rgb = tissue_pixels(1024, 512, box=(0, 0, 512, 512))
    black = np.full((512, 512, 3), 240, dtype=np.uint8)
    ink(black, colour="black", width_px=200, rng=np.random.default_rng(2))
    rgb[:, 512:] = black
    slide = open_slide(write_pyramid(tmp_path / "a.tif", rgb, downsamples=()))
    found = cut_tiles(slide, config=BoardConfig(tiles=16, px=128, mpp=0.5, candidates=1))
    # By darkness, as the field chooses, the stroke would come first.
    assert (found.xy[:, 0] < 512).all()
    assert len(found.pixels) == 16
    slide.close()


def test_a_slide_without_tissue_gives_no_tiles_and_a_white_board(tmp_path: Path) -> None:
    glass = np.full((300, 300, 3), 240, dtype=np.uint8)
    slide = open_slide(write_pyramid(tmp_path / "a.tif", glass, downsamples=()))
    found = cut_tiles(slide, config=SMALL)
    assert found.pixels.shape == (0, 8, 8, 3)
    assert found.reason.startswith("no tissue")
    assert (fixed_board(found.pixels, config=SMALL) == 255).all()
    slide.close()


def test_without_pbir_the_slide_fills_the_board_unstretched(cmu: Path) -> None:
    slide = open_slide(cmu)
    board = whole_board(slide, config=BoardConfig(tiles=4, px=64, pbir=False))
    assert board.shape == (128, 128, 3)
    width = round(2220 / (2967 / 128))
    left = (128 - width) // 2
    assert (board[:, : left - 1] == 255).all()
    assert (board[:, left + 2 : left + width - 2] < 255).any(axis=(0, 2)).all()
    slide.close()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tiles": 10}, "tiles is 10; a board needs a square number (16, 25, 36)"),
        ({"px": 4}, "tiles of 4 px at 1.0 µm/px: at least 8 px, positive"),
        ({"candidates": 0.5}, "candidates is 0.5; M is at least N, so 1 or more"),
    ],
)
def test_configuration_errors(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        BoardConfig(**values)
    assert str(error.value) == said


def test_tiles_of_another_size_are_refused() -> None:
    with pytest.raises(DataError) as error:
        fixed_board(stack(3, px=4), config=SMALL)
    assert str(error.value) == "tiles have shape (3, 4, 4, 3); expected [M, 8, 8, 3]"
