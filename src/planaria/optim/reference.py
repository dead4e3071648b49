"""SCAPE in one process, in the paper's symbols: the slow, readable oracle.

N workers are simulated on one vector of P weights; the distributed optimizer is compared with it on
whole tensors. ``parts[r]`` are the coordinates of worker r, ``dense`` those that are always sent.

    w weights [P]                      g gradients of all workers [N, P]
    m synchronised first moment [P]    a every worker's own first moment [N, P]
    tau steps since a coordinate was last sent [P]    mask the coordinates sent at this step [P]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """The rule of an update, named as in :class:`planaria.optim.ScapeOptions`."""

    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    wd: float = 0.1
    decay: str = "moved"
    step_scale: float = 1.0
    scale_cap: float = 10.0
    clamp_after: int = 8
    feedback: bool = False
    clear: bool = False
    aged: bool = True
    moved: bool = False
    outer_rate: float = 1.0
    outer_momentum: float = 0.3
    average_moments: bool = True
    half_wire: bool = False


def adams(w: Tensor, g: Tensor, m: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Dense AdamS: new weights and moment."""
    nu = (rule.b2 * (m * m)).addcmul(g, g, value=1 - rule.b2)
    m = torch.lerp(m, g, 1 - rule.b1)
    w = ((1 - rule.lr * rule.wd) * w).addcdiv(m, nu.sqrt() + rule.eps, value=-rule.lr)
    return w, m


def mean(rows: Tensor) -> Tensor:
    """Mean over workers, summed in their order."""
    return sum(rows[1:], start=rows[0]) / len(rows)


def coded(x: Tensor, rule: Rule) -> Tensor:
    """What arrives of ``x``."""
    return x.to(torch.bfloat16).float() if rule.half_wire else x


def choose(score: Tensor, part: Tensor, k: int) -> Tensor:
    """The k coordinates of a part with the largest scores; of equal ones the first of the part."""
    return part[torch.argsort(score[part], descending=True, stable=True)[:k]]


class Frozen:
    """The paper's family: weights that are not sent stay (or follow their owner, ``moved``)."""

    def __init__(self, w: Tensor, parts: list[Tensor], dense: Tensor, k: int, rule: Rule) -> None:
        self.w, self.parts, self.dense, self.k, self.rule = w.clone(), parts, dense, k, rule
        self.m, self.tau = torch.zeros_like(w), torch.zeros_like(w)
        self.a, self.left = torch.zeros(len(parts), len(w)), torch.zeros_like(w)
        self.mask = w.new_zeros(len(w), dtype=torch.bool)

    def dense_step(self, g: Tensor) -> None:
        """All coordinates are sent."""
        if not self.rule.feedback:
            self.a = torch.lerp(self.a, g, 1 - self.rule.b1)
        self.w, self.m = adams(self.w, mean(g), self.m, self.rule)
        self.tau.zero_()
        self.next_mask()

    def sparse_step(self, g: Tensor) -> None:
        """The mask's coordinates are sent, and the dense ones."""
        rule, sent, before = self.rule, self.mask, self.a
        self.a = self.a + g if rule.feedback else torch.lerp(self.a, g, 1 - rule.b1)
        z = mean(coded(self.a, rule))
        past = self.m * torch.pow(rule.b1, self.tau)
        if rule.feedback:
            g_hat, m = z, torch.lerp(past, z, 1 - rule.b1)
        elif rule.clear:
            g_hat, m = z / (1 - rule.b1), past * rule.b1 + z
        else:
            g_hat, m = (z - past * rule.b1) / (1 - rule.b1), z
        if not rule.feedback:
            limit = z.abs() / (1 - rule.b2) ** 0.5
            g_hat = torch.where(self.tau >= rule.clamp_after, g_hat.clamp(-limit, limit), g_hat)
        if rule.clear or rule.feedback:
            self.a = torch.where(sent, self.a - coded(self.a, rule), self.a)
        nu = (rule.b2 * (past * past)).addcmul(g_hat, g_hat, value=1 - rule.b2)
        scale = (self.tau + 1).pow(rule.step_scale).clamp(max=rule.scale_cap)
        keep = 1 - rule.lr * rule.wd
        exponent = self.tau + 1 if rule.decay == "lazy" and not rule.moved else 1
        w = self.w * torch.pow(torch.tensor(keep), torch.as_tensor(exponent))
        w = w.addcdiv(m * scale, nu.sqrt() + rule.eps, value=-rule.lr)
        old = rest = self.w * keep if rule.decay == "all" else self.w
        if rule.moved:
            rest = rest.clone()
            for r, part in enumerate(self.parts):
                rest[part], _ = adams(self.w[part], g[r, part], before[r, part], rule)
        w = torch.where(sent, w, rest)
        if rule.half_wire:
            movement, back = w - old + self.left, sent | rule.moved
            w = torch.where(back, old + coded(movement, rule), old)
            self.left = torch.where(back, movement - coded(movement, rule), self.left)
        m = torch.where(sent, m, self.m)
        both = zip(adams(self.w, mean(g), self.m, rule), (w, m), strict=True)
        self.w, self.m = (torch.where(self.dense, dense, rest) for dense, rest in both)
        self.tau = torch.where(sent, 0.0, self.tau + 1)
        self.next_mask()

    def next_mask(self) -> None:
        """Every owner chooses by its own first moment; used at the next step."""
        self.mask = torch.zeros_like(self.mask)
        for r, part in enumerate(self.parts):
            score = self.a[r].square() * (self.tau + 1) if self.rule.aged else self.a[r].abs()
            self.mask[choose(score, part[~self.dense[part]], self.k)] = True


class Local:
    """Local drift: weights of worker i are ``w[i]``; ``sent`` is the part averaged at this step."""

    def __init__(self, w: Tensor, workers: int, dense: Tensor, rule: Rule) -> None:
        self.w, self.dense, self.rule = w.repeat(workers, 1), dense, rule
        self.m, self.anchor, self.v = torch.zeros_like(self.w), w.clone(), torch.zeros_like(w)

    def step(self, g: Tensor, sent: Tensor) -> None:
        """Every worker moves by its own gradient, or by the mean one where ``dense``."""
        rule = self.rule
        g = torch.where(self.dense, mean(g), g)
        self.w, self.m = adams(self.w, g, self.m, rule)
        delta = mean(coded(self.anchor - self.w, rule))
        v = rule.outer_momentum * self.v + delta
        move = rule.outer_rate * torch.add(delta, v, alpha=rule.outer_momentum)
        self.v = torch.where(sent, v, self.v)
        self.anchor = torch.where(sent, self.anchor - coded(move, rule), self.anchor)
        self.w = torch.where(sent, self.anchor, self.w)
        if rule.average_moments:
            self.m = torch.where(sent, coded(mean(coded(self.m, rule)), rule), self.m)
