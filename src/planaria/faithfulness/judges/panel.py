"""Several judges as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from planaria.errors import ConfigError
from planaria.faithfulness.judges.protocol import (
    Judge,
    Outcome,
    Request,
    Usage,
    Verdict,
    abstain,
)


class PanelJudge:
    """Asks each member that answers a question and takes the mean of what the decided ones say.

    Members that abstain, tie or fail do not vote; only when nobody decided does a tie, then an
    unread answer, then a failure speak for the panel. Raises
    :class:`~planaria.errors.ConfigError` without members.
    """

    def __init__(self, members: Sequence[Judge]) -> None:
        if not members:
            raise ConfigError("a panel has no members: give at least one judge")
        self.members = tuple(members)
        self.name = "panel/1(" + ",".join(member.name for member in members) + ")"
        self.answers = frozenset[type]().union(*(member.answers for member in members))
        self.order_matters = any(member.order_matters for member in members)
        self.samples = any(member.samples for member in members)
        self.concurrent = any(getattr(member, "concurrent", False) for member in members)

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """One verdict per request."""
        heard: list[list[tuple[Judge, Verdict]]] = [[] for _ in requests]

        async def one(member: Judge) -> None:
            mine = [i for i, r in enumerate(requests) if type(r) in member.answers]
            verdicts = await member.ask([requests[i] for i in mine])
            for index, verdict in zip(mine, verdicts, strict=True):
                heard[index].append((member, verdict))

        await asyncio.gather(*(one(member) for member in self.members))
        return [self._combined(verdicts) for verdicts in heard]

    def _combined(self, heard: list[tuple[Judge, Verdict]]) -> Verdict:
        # Members finish in any order; the panel's reason keeps theirs.
        heard = sorted(heard, key=lambda pair: self.members.index(pair[0]))
        usage = sum((verdict.usage for _, verdict in heard), Usage())
        reason = " | ".join(
            f"{judge.name.split('/')[0]}: {verdict.reason}" for judge, verdict in heard
        )
        decided = [v.p for _, v in heard if v.decided and v.p is not None]
        if decided:
            p = sum(decided) / len(decided)
            return Verdict(outcome=Outcome.DECIDED, p=p, reason=reason, usage=usage)
        outcomes = [verdict.outcome for _, verdict in heard]
        if Outcome.TIE in outcomes:
            return Verdict(outcome=Outcome.TIE, p=0.5, reason=reason, usage=usage)
        for outcome in (Outcome.UNPARSED, Outcome.FAILED):
            if outcome in outcomes:
                return Verdict(outcome=outcome, reason=reason, usage=usage)
        return abstain(reason or "no member answers this question", usage=usage)
