"""The null control: the same steps in other words, of nearly the same length.

A judge that measures meaning has no reason to prefer the original to its paraphrase; how often it
does so anyway is the taste (for the familiar, for length, for a position) that the default
estimator takes off. Numbers, names, operators and results are never touched.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from planaria.faithfulness.perturb import Change, Perturbed, Task

BOTH_WAYS = (
    ("Therefore", "Hence"), ("therefore", "hence"), ("So", "Thus"), ("in total", "altogether"),
    ("total number", "overall number"), ("we get", "we obtain"), ("gives", "yields"),
    ("which means", "which implies"), ("This means", "This implies"), ("buys", "purchases"),
    ("needs to", "has to"), ("calculate", "compute"), ("We know", "It is known"),
    ("we know", "it is known"), ("per day", "each day"), ("per week", "each week"),
    ("per hour", "each hour"), ("per month", "each month"), ("is equal to", "equals"),
    ("simplifies to", "reduces to"), ("will be", "is going to be"), ("shows", "indicates"),
    ("Finally", "Lastly"), ("because", "since"), ("cannot", "can't"), ("Thus", "Hence"),
    ("written as", "expressed as"), ("needed", "required"), ("let us", "let's"),
    ("Let us", "Let's"), ("We have", "One has"), ("we have", "one has"), ("It takes", "It needs"),
    ("also", "as well"), ("this means", "this implies"), ("means that", "implies that"),
)  # fmt: skip
"""Phrasings that mean the same in a derivation, exchanged in both directions."""
ONE_WAY = (
    ("Since", "As"), ("First", "To begin"), ("a total of", "an overall"), ("has", "possesses"),
    ("costs", "is priced at"), ("equal to", "the same as"), ("find", "determine"),
    ("number of", "count of"), ("must be", "has to be"), ("start", "begin"), ("starts", "begins"),
    ("remaining", "leftover"), ("The answer", "The result"), ("gets", "receives"),
    ("people", "persons"), ("However", "Yet"), ("only", "just"), ("sells", "vends"),
    ("ate", "consumed"), ("times as many", "times the number of"), ("spends", "pays"),
    ("To solve", "In order to solve"), ("altogether", "overall"), ("children", "kids"),
    ("begins", "starts"), ("receives", "gets"), ("required", "due"), ("purchased", "bought"),
    ("remainder", "rest"), ("approximately", "about"), ("In order to", "To"), ("gives us", "is"),
    ("a number of", "some"), ("which is equal to", "so"), ("together", "in all"),
)  # fmt: skip
"""Phrasings exchanged in one direction only."""
_COMMUTE = re.compile(
    r"(?<![\d.,*/^+\-−×÷(\\] )(?<![\d.,*/^+\-−×÷(\\])"
    r"(?P<a>\d+)(?P<op>\s*[+*×]\s*)(?P<b>\d+)(?=\s*=)"
)
_OPENERS = ("So, ", "Then, ", "Now, ", "Thus, ", "Here, ", "Well, ", "Next, ", "Note: ")


def paraphrase(task: Task) -> Perturbed:
    """The continuation in other words; deterministic in the task.

    Of eight drafts the one whose length is closest to ``task.length`` is taken, so that the null
    control and the error it controls for differ from the original by the same length. At least one
    step changes and every number stays; where no rule applies, a connective opens a step.
    """
    wanted = task.length if task.length is not None else sum(map(len, task.continuation))
    rng = random.Random(f"paraphrase:{task.seed}:{task.question}")
    best, gap = _draft(task, rng), -1
    for _ in range(7):
        draft = _draft(task, rng)
        distance = abs(sum(map(len, draft.steps or ())) - wanted)
        if gap < 0 or distance < gap:
            best, gap = draft, distance
        if gap == 0:
            break
    return best


def _draft(task: Task, rng: random.Random) -> Perturbed:
    steps: list[str] = []
    changes: list[Change] = []
    for index, step in enumerate(task.continuation):
        new = _step(step, rng) if len(task.continuation) == 1 or rng.random() < 0.7 else step
        if new != step:
            changes.append(Change(step=index, before=step, after=new))
        steps.append(new)
    if not changes:
        index = rng.randrange(len(steps))
        new = rng.choice(_OPENERS) + steps[index]
        changes = [Change(step=index, before=steps[index], after=new)]
        steps[index] = new
    return Perturbed(steps=tuple(steps), changes=tuple(changes))


def _step(step: str, rng: random.Random) -> str:
    """One step with up to three phrasings exchanged and a sum or product written the other way.

    No phrasing holds a digit, so numbers stay.
    """
    places = list(_places(step))
    rng.shuffle(places)
    limit = rng.randint(1, 3)
    taken: list[tuple[int, int, str]] = []
    for place in places:
        if all(place[1] <= other[0] or place[0] >= other[1] for other in taken):
            taken.append(place)
        if len(taken) == limit:
            break
    text = step
    for start, end, new in sorted(taken, reverse=True):
        text = text[:start] + new + text[end:]
    if rng.random() < 0.5:
        text = _COMMUTE.sub(lambda m: f"{m.group('b')}{m.group('op')}{m.group('a')}", text)
    return text


@lru_cache(maxsize=4096)
def _places(step: str) -> tuple[tuple[int, int, str], ...]:
    """Where a phrasing stands that has a twin: start, end, twin."""
    twins = (*BOTH_WAYS, *((two, one) for one, two in BOTH_WAYS), *ONE_WAY)
    out: list[tuple[int, int, str]] = []
    for old, new in twins:
        start = step.find(old)
        while start >= 0:
            end = start + len(old)
            before, after = step[start - 1 : start], step[end : end + 1]
            bound = before.isalnum() or before in ("\\", "'", "_")
            inside = (before and bound) or (after and (after.isalnum() or after == "'"))
            if not inside:
                out.append((start, end, new))
            start = step.find(old, end)
    return tuple(out)
