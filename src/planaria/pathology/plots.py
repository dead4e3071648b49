"""Confusion matrices and calibration as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planaria.pathology.files import atomic
from planaria.pathology.heat import DISCLAIMER


def calibration(
    labels: ArrayLike, probability: ArrayLike, *, bins: int = 10
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], float]:
    """Mean probability, share of positives and count per bin of equal width, and the expected
    calibration error (mean of their distance, weighted by count). Empty bins are NaN."""
    y, p = np.asarray(labels, dtype=float), np.asarray(probability, dtype=float)
    where = np.clip((p * bins).astype(int), 0, bins - 1)
    count = np.bincount(where, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(where, weights=p, minlength=bins) / count
        share = np.bincount(where, weights=y, minlength=bins) / count
    full = count > 0
    error = float((np.abs(mean - share)[full] * count[full]).sum() / max(len(y), 1))
    return mean, share, count, error


def binary_plots(
    folder: Path, *, labels: ArrayLike, probability: ArrayLike, threshold: float
) -> None:
    """``confusion.png`` at ``threshold`` and ``calibration.png`` in ``folder``."""
    y = np.asarray(labels)
    called = (np.asarray(probability) >= threshold).astype(int)
    counts = np.array([[int(((y == i) & (called == j)).sum()) for j in (0, 1)] for i in (0, 1)])
    plot_confusion(folder / "confusion.png", counts=counts, names=("no tumour", "tumour"))
    mean, share, _, error = calibration(labels, probability)
    figure, axes = _figure()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    axes.plot(mean, share, marker="o", color="#2f4b7c")
    axes.set(
        xlabel="predicted probability",
        ylabel="share of tumour",
        title=f"expected calibration error {error:.3f}",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    _save(figure, folder / "calibration.png")


def plot_confusion(path: Path, *, counts: NDArray[np.int64], names: tuple[str, ...]) -> None:
    """A confusion matrix: rows as given, columns as predicted, counts written in."""
    figure, axes = _figure()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(counts):
        dark = shares[row, column] > 0.5
        axes.text(column, row, str(int(value)), ha="center", color="w" if dark else "k")
    axes.set(
        xticks=range(len(names)),
        yticks=range(len(names)),
        xticklabels=names,
        yticklabels=names,
        xlabel="predicted",
        ylabel="given",
    )
    _save(figure, path)


def _figure() -> tuple[Any, Any]:
    # The object interface: pyplot would keep figures in module-level state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, path: Path) -> None:
    figure.text(0.01, 0.005, DISCLAIMER, fontsize=6, color="0.4")
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
