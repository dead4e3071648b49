"""Losses that know how far apart two grades are.

N samples, C grades; w(i, j) = (i - j)^2 / (C - 1)^2. Source: quadratic weighted mean square error,
arXiv 2011.14301 (abstract); the three forms are our reading, the weight matrix is Cohen's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planaria.errors import ConfigError, DataError

VARIANTS = ("qwmse", "qwmse-ordinal", "expected-cost", "mse", "cross-entropy")


def quadratic_weights(classes: int) -> Tensor:
    """w [C, C], 0 on the diagonal and 1 between the outermost grades."""
    if classes < 2:
        raise ConfigError(f"classes is {classes}; grades need at least 2")
    grade = torch.arange(classes, dtype=torch.float32)
    return ((grade[:, None] - grade[None, :]) / (classes - 1)) ** 2


def qwmse(
    logits_NC: Tensor, grade_N: Tensor, *, strength: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """mean_n sum_j (1 + strength w(y_n, j)) (softmax(z)_nj - t_nj)^2, a scalar.

    With ``strength`` 0 this is C times ``torch.nn.functional.mse_loss``, to which every wrong grade
    is equally far. Zero only for a perfect prediction.
    """
    _check(logits_NC, grade_N, classes=logits_NC.shape[-1], strength=strength)
    classes = logits_NC.shape[1]
    weight_NC = 1 + strength * quadratic_weights(classes).to(logits_NC)[grade_N]
    target_NC = nn.functional.one_hot(grade_N, classes).to(logits_NC)
    return _reduce((weight_NC * (logits_NC.softmax(dim=1) - target_NC) ** 2).sum(dim=1), reduction)


def qwmse_ordinal(
    score_N: Tensor,
    grade_N: Tensor,
    *,
    classes: int,
    strength: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """mean_n (1 + strength w(y_n, round(score_n))) (score_n - y_n)^2, a scalar.

    ``score_N`` is one number per sample on the scale of grades. The weight is detached, so the loss
    jumps where the rounded score changes.
    """
    score_N = score_N.reshape(grade_N.shape)
    _check(score_N, grade_N, classes=classes, strength=strength)
    nearest_N = score_N.detach().round().clamp(0, classes - 1).long()
    weight_N = 1 + strength * quadratic_weights(classes).to(score_N)[grade_N, nearest_N]
    return _reduce(weight_N * (score_N - grade_N.to(score_N)) ** 2, reduction)


def expected_cost(logits_NC: Tensor, grade_N: Tensor, *, reduction: str = "mean") -> Tensor:
    """mean_n sum_j w(y_n, j) softmax(z)_nj, a scalar: the numerator of kappa in expectation."""
    _check(logits_NC, grade_N, classes=logits_NC.shape[-1], strength=0.0)
    weight_NC = quadratic_weights(logits_NC.shape[1]).to(logits_NC)[grade_N]
    return _reduce((weight_NC * logits_NC.softmax(dim=1)).sum(dim=1), reduction)


class GradeLoss(nn.Module):
    """The loss called ``variant`` over network outputs and grades [N]: a scalar.

    ``outputs`` tells how many numbers per sample the network must give: ``classes``, or 1 for
    ``qwmse-ordinal``.
    """

    def __init__(self, variant: str = "qwmse", *, classes: int, strength: float = 1.0) -> None:
        super().__init__()
        if variant not in VARIANTS:
            raise ConfigError(f"loss is {variant!r}; it is one of {', '.join(VARIANTS)}")
        if strength < 0:
            raise ConfigError(f"strength is {strength}; a weight of errors is 0 or more")
        quadratic_weights(classes)
        self.variant, self.classes, self.strength = variant, classes, strength
        self.outputs = 1 if variant == "qwmse-ordinal" else classes

    def forward(
        self, output: Tensor, grade_N: Tensor, *, weights_C: Tensor | None = None
    ) -> Tensor:
        """The loss, a scalar; ``weights_C`` [classes] weighs each sample by its grade."""
        each = self._each(output, grade_N)
        return each.mean() if weights_C is None else (weights_C[grade_N] * each).mean()

    def _each(self, output: Tensor, grade_N: Tensor) -> Tensor:
        if self.variant == "qwmse-ordinal":
            return qwmse_ordinal(
                output, grade_N, classes=self.classes, strength=self.strength, reduction="none"
            )
        if self.variant == "expected-cost":
            return expected_cost(output, grade_N, reduction="none")
        if self.variant == "cross-entropy":
            _check(output, grade_N, classes=self.classes, strength=0.0)
            return nn.functional.cross_entropy(output, grade_N, reduction="none")
        strength = 0.0 if self.variant == "mse" else self.strength
        return qwmse(output, grade_N, strength=strength, reduction="none")

    def score(self, output: Tensor) -> Tensor:
        """Expected grade [N] of network outputs, on the scale 0 to C - 1."""
        if self.variant == "qwmse-ordinal":
            return output.reshape(-1).clamp(0, self.classes - 1)
        grades = torch.arange(self.classes, dtype=output.dtype, device=output.device)
        return output.softmax(dim=1) @ grades


def _reduce(each_N: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "none"):
        raise ConfigError(f"reduction is {reduction!r}; it is 'mean' or 'none'")
    return each_N.mean() if reduction == "mean" else each_N


def _check(output: Tensor, grade_N: Tensor, *, classes: int, strength: float) -> None:
    if strength < 0:
        raise ConfigError(f"strength is {strength}; a weight of errors is 0 or more")
    if output.shape[0] != grade_N.shape[0] or grade_N.ndim != 1:
        raise DataError(
            f"outputs {tuple(output.shape)} and grades {tuple(grade_N.shape)} do not pair; grades "
            "are one integer per sample"
        )
    if grade_N.numel() and not (int(grade_N.min()) >= 0 and int(grade_N.max()) < classes):
        worst = int(grade_N.max()) if int(grade_N.max()) >= classes else int(grade_N.min())
        raise DataError(f"grade {worst} is outside 0 to {classes - 1}; check the labels")
