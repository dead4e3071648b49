"""The judge that reads log-probabilities of a local model.

``compare`` takes the continuation with the larger mean log-probability per token given question and
prefix; the order of the two cannot matter. ``supports`` is what the chain adds to the answer:
``log p(answer | question, chain) - log p(answer | question)``, squashed. It does not answer
``verify``: how probable a step is says too little about whether it is right.

What continuations share is computed once: one pass over the longest of them serves all others as
far as they begin like it, and each goes on from a slice of its keys and values where it leaves it.

Shapes: B batch, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planaria.errors import ConfigError
from planaria.faithfulness.judges.protocol import (
    Compare,
    Request,
    Supports,
    Usage,
    Verdict,
    abstain,
    decide,
    tie,
)

if TYPE_CHECKING:
    import torch

Pieces = tuple[str, ...]
"""A context in pieces that are tokenised apart, so that a shorter context is a prefix in tokens."""
Job = tuple[tuple[int, ...], int]
"""Tokens of context and continuation, and where the continuation begins."""
BATCH_TOKENS = 1024
"""Continuation tokens of one forward pass, padding included."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Log-probability of a continuation."""

    total: float
    """Sum over its tokens, in nats; 0 for an empty continuation."""
    tokens: int
    """Its tokens."""

    @property
    def mean(self) -> float:
        """Per token; 0 for an empty continuation."""
        return self.total / self.tokens if self.tokens else 0.0


class Scorer:
    """Log-probabilities of continuations under a causal language model.

    ``model`` and ``tokenizer`` are those of ``transformers``; the model is put into evaluation mode
    and left in its dtype on its device. ``share`` off recomputes each prefix for each continuation:
    the slow reference that the fast path is tested against. ``max_tokens`` cuts the *front* of
    contexts that do not fit, pieces kept whole where they fit.
    """

    def __init__(
        self, model: Any, *, tokenizer: Any, share: bool = True, max_tokens: int | None = None
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.share = share
        limit = int(getattr(model.config, "max_position_embeddings", 2048) or 2048)
        self.max_tokens = min(max_tokens or limit, limit)
        if self.max_tokens < 8:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}: a model with at least 8 positions is needed"
            )
        self._ids: dict[str, list[int]] = {}
        names = inspect.signature(model.base_model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def ids(self, text: str) -> list[int]:
        """Tokens of a piece, without special tokens."""
        known = self._ids.get(text)
        if known is None:
            if len(self._ids) > 20000:
                self._ids.clear()
            known = self._ids[text] = list(self.tokenizer.encode(text, add_special_tokens=False))
        return known

    def _start(self) -> list[int]:
        token = self.tokenizer.bos_token_id
        if token is None:
            token = self.tokenizer.eos_token_id
        return [0 if token is None else int(token)]

    def score(self, requests: Sequence[tuple[Pieces, str]]) -> list[Scored]:
        """Log-probability of each continuation after its context, in order.

        Equal requests are computed once.
        """
        import torch

        keys = [self._job(pieces, text) for pieces, text in requests]
        done: dict[Job, Scored] = {}
        with torch.inference_mode():
            if not self.share:
                return [self._separate(*key) for key in keys]
            for trunk, members in _groups(list(dict.fromkeys(keys))):
                self._shared(trunk, members, done)
        return [done[key] for key in keys]

    def _job(self, pieces: Pieces, text: str) -> Job:
        """All tokens, and where the continuation begins; the front of a long context is cut."""
        continuation = self.ids(text)[: self.max_tokens - 2]
        context = self._start() + [i for piece in pieces for i in self.ids(piece)]
        room = self.max_tokens - len(continuation)
        if len(context) > room:
            context = self._start() + context[len(context) - room + 1 :]
        return (*context, *continuation), len(context)

    def _shared(self, trunk: tuple[int, ...], jobs: Sequence[Job], done: dict[Job, Scored]) -> None:
        """Scores of jobs that begin like ``trunk``: what they share with it is read off its pass,
        the rest goes on from its keys and values."""
        import torch

        device = next(self.model.parameters()).device
        ids_1T = torch.tensor([trunk], device=device)
        result = self._forward(input_ids=ids_1T)
        hidden_TH = result.last_hidden_state[0]
        layers = [(layer.keys, layer.values) for layer in _cache_of(result).layers]
        shared = {job: _common(trunk, job[0]) for job in jobs}
        totals: dict[Job, float] = {}
        for job in jobs:
            (ids, start), common = job, shared[job]
            # Tokens start..common are predicted by positions of the trunk; at ``common`` the job
            # leaves it, and its token there is still predicted by the trunk's last shared position.
            stop = min(common + 1, len(ids))
            log_TV = self._log_probs(hidden_TH[start - 1 : stop - 1])
            totals[job] = _gathered(log_TV, ids[start:stop]) if stop > start else 0.0
        # A job that leaves the trunk inside its context goes on from there; its own tokens before
        # the continuation are fed, and not counted.
        rest = [job for job in jobs if len(job[0]) - 1 > max(shared[job], 0)]
        for batch in _batches(rest, [len(job[0]) - 1 - shared[job] for job in rest]):
            for job, total in self._continue(layers, batch, shared):
                totals[job] += total
        for job in jobs:
            done[job] = Scored(total=totals[job], tokens=len(job[0]) - job[1])

    def _continue(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        batch: Sequence[Job],
        shared: dict[Job, int],
    ) -> list[tuple[Job, float]]:
        """What is left of each job after the tokens that it shares with the trunk.

        Rows leave the trunk at different places, so each row's mask hides what lies between its own
        place and the farthest one.
        """
        import torch
        from transformers import DynamicCache

        device = layers[0][0].device
        count = len(batch)
        farthest = max(shared[job] for job in batch)
        fed = [job[0][shared[job] : -1] for job in batch]
        width = max(map(len, fed))
        cache = DynamicCache()
        for number, (keys, values) in enumerate(layers):
            cache.update(
                keys[:, :, :farthest].expand(count, -1, -1, -1),
                values[:, :, :farthest].expand(count, -1, -1, -1),
                number,
            )
        padded_BT = torch.zeros(count, width, dtype=torch.long)
        mask_BT = torch.zeros(count, farthest + width, dtype=torch.long)
        positions_BT = torch.zeros(count, width, dtype=torch.long)
        for row, (job, ids) in enumerate(zip(batch, fed, strict=True)):
            padded_BT[row, : len(ids)] = torch.tensor(ids)
            mask_BT[row, : shared[job]] = 1
            mask_BT[row, farthest : farthest + len(ids)] = 1
            positions_BT[row] = torch.arange(shared[job], shared[job] + width)
        result = self._forward(
            input_ids=padded_BT.to(device),
            attention_mask=mask_BT.to(device),
            position_ids=positions_BT.to(device),
            cache=cache,
        )
        out: list[tuple[Job, float]] = []
        for row, job in enumerate(batch):
            ids, start = job
            # Row position k predicts token shared + k + 1.
            begin = max(start, shared[job] + 1)
            first = begin - shared[job] - 1
            log_TV = self._log_probs(
                result.last_hidden_state[row, first : len(ids) - 1 - shared[job]]
            )
            out.append((job, _gathered(log_TV, ids[begin:])))
        return out

    def _forward(self, *, cache: Any = None, **inputs: Any) -> Any:
        """The model without its head; ``cache`` under the name that this version of transformers
        gives it."""
        base = self.model.base_model
        named = {self._cache_name: cache} if cache is not None else {}
        return base(**inputs, **named, use_cache=True)

    def _separate(self, ids: tuple[int, ...], start: int) -> Scored:
        """The reference: a job in a pass of its own, nothing shared."""
        import torch

        device = next(self.model.parameters()).device
        ids_1T = torch.tensor([ids], device=device)
        hidden_TH = self.model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        total = 0.0
        if len(ids) > start:
            total = _gathered(self._log_probs(hidden_TH[start - 1 : -1]), ids[start:])
        return Scored(total=total, tokens=len(ids) - start)

    def _log_probs(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        return head(hidden_TH).float().log_softmax(dim=-1)


def _gathered(log_TV: torch.Tensor, ids: Sequence[int]) -> float:
    import torch

    if not ids:
        return 0.0
    targets_T1 = torch.tensor(ids, dtype=torch.long, device=log_TV.device)[:, None]
    return float(log_TV.gather(1, targets_T1).sum())


def _cache_of(result: Any) -> Any:
    cache = getattr(result, "cache", None)
    return cache if cache is not None else result.past_key_values


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _groups(jobs: Sequence[Job]) -> list[tuple[tuple[int, ...], list[Job]]]:
    """Jobs that share at least a quarter of their tokens with the longest of them."""
    groups: list[tuple[tuple[int, ...], list[Job]]] = []
    for job in sorted(jobs, key=lambda job: -len(job[0])):
        for trunk, members in groups:
            if 4 * _common(trunk, job[0]) >= len(job[0]):
                members.append(job)
                break
        else:
            groups.append((job[0], [job]))
    return groups


def _batches(jobs: Sequence[Job], widths: Sequence[int]) -> list[list[Job]]:
    """Jobs in batches of similar width, at most ``BATCH_TOKENS`` padded tokens each."""
    out: list[list[Job]] = []
    for width, job in sorted(zip(widths, jobs, strict=True), key=lambda pair: pair[0]):
        if out and width * (len(out[-1]) + 1) <= BATCH_TOKENS:
            out[-1].append(job)
        else:
            out.append([job])
    return out


@dataclass(frozen=True, kw_only=True)
class LikelihoodSettings:
    """How log-probabilities become verdicts."""

    sharpness: float = 8.0
    """Nats per token to the log-odds of ``compare``; it moves no win rate, only ``p``."""
    tie: float = 1e-6
    """Difference per token, in nats, below which two continuations tie."""
    context: bool = True
    """Show question and prefix; off is the control that reads the continuation alone."""

    def __post_init__(self) -> None:
        if self.sharpness <= 0 or self.tie < 0:
            raise ConfigError(
                f"sharpness is {self.sharpness} and tie {self.tie}: the first is above 0, the "
                "second at least 0"
            )


class LikelihoodJudge:
    """Answers ``compare`` and ``supports`` from a :class:`Scorer`; never samples, order is
    indifferent."""

    answers = frozenset({Compare, Supports})
    order_matters = False
    samples = False

    def __init__(
        self, scorer: Scorer, *, name: str, settings: LikelihoodSettings | None = None
    ) -> None:
        self.scorer = scorer
        self.settings = settings or LikelihoodSettings()
        control = "" if self.settings.context else "/no-context"
        self.name = f"likelihood/1:{name}:{self.settings.sharpness:g}{control}"

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """Verdicts in one batch; prefixes that the requests share are computed once."""
        wanted: list[tuple[Pieces, str]] = []
        for request in requests:
            if isinstance(request, Compare):
                pieces = self.context(request.question, request.prefix)
                wanted += [(pieces, _text(request.a)), (pieces, _text(request.b))]
            elif isinstance(request, Supports):
                stated = f"The answer is {request.answer.strip()}"
                with_chain = self.context(request.question, request.steps)
                wanted += [(with_chain, stated), (self.context(request.question, ()), stated)]
        scored = iter(self.scorer.score(wanted))
        out: list[Verdict] = []
        for request in requests:
            if isinstance(request, Compare):
                out.append(self._compare(next(scored), next(scored)))
            elif isinstance(request, Supports):
                out.append(self._supports(next(scored), next(scored)))
            else:
                out.append(abstain("a likelihood judge does not verify steps"))
        return out

    def context(self, question: str, steps: tuple[str, ...]) -> Pieces:
        """Question and steps as pieces; nothing where the control shows no context."""
        if not self.settings.context:
            return ()
        return (f"Question: {question.strip()}\nAnswer:\n", *(f"{step}\n" for step in steps))

    def _compare(self, one: Scored, two: Scored) -> Verdict:
        usage = Usage(calls=1, input_tokens=one.tokens + two.tokens)
        difference = one.mean - two.mean
        reason = f"{one.mean:.3f} against {two.mean:.3f} nats a token"
        if not one.tokens or not two.tokens:
            return abstain("a continuation is empty", usage=usage)
        if abs(difference) <= self.settings.tie:
            return tie(reason, usage=usage)
        return decide(_sigmoid(self.settings.sharpness * difference), reason, usage=usage)

    def _supports(self, with_chain: Scored, without: Scored) -> Verdict:
        usage = Usage(calls=1, input_tokens=with_chain.tokens + without.tokens)
        gain = with_chain.total - without.total
        return decide(_sigmoid(gain), f"the chain adds {gain:.2f} nats to the answer", usage=usage)


def _text(steps: tuple[str, ...]) -> str:
    return "\n".join(steps)


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, value))))
