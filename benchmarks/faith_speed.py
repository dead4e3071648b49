"""The speed of benchmarks/faith.py: requests under latency, and shared prefixes.

    python benchmarks/faith_speed.py --data FOLDER

Throughput is measured twice: by the wall clock, and on a clock that counts this process's own
processor time and what it waits for, but not the time that other programs of the machine took from
it. The second is what an idle machine would show; the first is what was seen.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from planaria.faithfulness.chains import Chain
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.readers import read_chains
from planaria.faithfulness.run import score_chains
from planaria.faithfulness.scores import Settings

LATENCY = 2.0
"""Seconds that the stub takes for an answer."""
CONNECTIONS = 64


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


class _Skipping(selectors.DefaultSelector):
    """Does not wait: remembers for how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0 if timeout else timeout)
        if not ready and timeout:
            self.skipped += timeout
        return ready


class UndisturbedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is the process's processor time plus what it waited for."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds."""
        return time.process_time() + self._skipping.skipped


@dataclass
class Stub:
    """A model behind Inspect that answers after a while."""

    latency: float = LATENCY

    async def __call__(self, messages: Any, tools: Any, choice: Any, config: Any) -> Any:
        """Its output."""
        from inspect_ai.model import ModelOutput, ModelUsage

        if self.latency:
            await asyncio.sleep(self.latency)
        text = messages[-1].text
        says = "A" if "Continuation A" in text else "yes" if "lead to the" in text else "right"
        output = ModelOutput.from_content("mockllm/model", f"Verdict: {says}")
        output.usage = ModelUsage(input_tokens=9, output_tokens=3, total_tokens=12)
        return output


def judge_of(stub: Stub) -> Any:
    """The judge that asks the stub through Inspect."""
    from inspect_ai.model import GenerateConfig, get_model

    from planaria.faithfulness.judges.models import InspectJudge

    config = GenerateConfig(max_connections=CONNECTIONS)
    model = get_model("mockllm/model", custom_outputs=stub, config=config, memoize=False)
    return InspectJudge(model)


async def send(count: int, stub: Stub) -> float:
    """Seconds, on the loop's clock, for so many requests to one judge."""
    from planaria.faithfulness.judges.protocol import Verify

    judge, loop = judge_of(stub), asyncio.get_running_loop()
    await judge.ask([Verify(question="q", prefix=(), step="the first one imports")])
    start = loop.time()
    await judge.ask([Verify(question="q", prefix=(), step=f"step {i}") for i in range(count)])
    return loop.time() - start


async def score(chains: Sequence[Chain], stub: Stub) -> tuple[float, int]:
    """Seconds and calls for a set scored as the command line does it, journal and report
    written."""
    judge, loop = judge_of(stub), asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        start = loop.time()
        out = Path(folder) / "run"
        report = await score_chains(chains, judge=judge, perturber=RulePerturber(), out=out)
        return loop.time() - start, report.usage.calls


def eggs(count: int) -> list[Chain]:
    """Chains of two steps about different numbers."""
    return [
        Chain(
            question=f"Ann has {i + 9} eggs and eats 7. She sells the rest for $2 each. How much?",
            steps=(
                f"{i + 9} - 7 = {i + 2} eggs are left.",
                f"So {i + 2} * 2 = {2 * i + 4} dollars.",
            ),
            answer=str(2 * i + 4),
        )
        for i in range(count)
    ]


def throughput() -> list[str]:
    """What Inspect can send, and what a latency of 2 s at 64 connections allows."""
    loops: tuple[tuple[str, Callable[[], asyncio.AbstractEventLoop]], ...] = (
        ("wall clock", asyncio.SelectorEventLoop),
        ("undisturbed", UndisturbedLoop),
    )

    def run(
        factory: Callable[[], asyncio.AbstractEventLoop], work: Coroutine[Any, Any, Any]
    ) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)

    rows: list[tuple[object, ...]] = []
    ceilings: dict[str, float] = {}
    chains = eggs(75)
    for name, factory in loops:
        seconds = run(factory, send(1280, Stub()))
        rows.append(("1,280 requests to one judge", name, 1280, *_share(seconds, 1280)))
        seconds, calls = run(factory, score(chains, Stub()))
        rows.append(
            (f"`score_chains` of {len(chains)} chains", name, calls, *_share(seconds, calls))
        )
        ceilings[name] = 1280 / run(factory, send(1280, Stub(latency=0.0)))
    return [
        "## Throughput",
        "",
        f"Through Inspect to a stub of {LATENCY:g} s latency with {CONNECTIONS} connections, which "
        f"allows {CONNECTIONS / LATENCY:g} calls a second. By the wall clock, and on a clock that "
        "counts the process's own processor time and its waiting, but not what other programs of "
        "the machine took: what an idle machine would show. `score_chains` writes its journal and "
        "report.",
        "",
        *table(("what", "clock", "calls", "time", "of what the latency allows"), rows),
        "Inspect's own ceiling, the same calls without latency: "
        + ", ".join(f"{rate:.0f} calls/s ({name})" for name, rate in ceilings.items())
        + f". Load average of the two cores after it: {os.getloadavg()[0]:.1f}.",
        "",
    ]


def _share(seconds: float, calls: int) -> tuple[str, str]:
    allowed = LATENCY * calls / CONNECTIONS
    return f"{seconds:.1f} s", f"{100 * allowed / seconds:.0f} %"


async def sharing(data: Path) -> list[str]:
    """The likelihood judge with and without shared prefixes, in processor time."""
    from planaria.faithfulness.judges.embedded import NAME, embedded_folder, local_scorer
    from planaria.faithfulness.judges.likelihood import LikelihoodJudge, Scorer

    fast = local_scorer(embedded_folder())
    slow = Scorer(fast.model, tokenizer=fast.tokenizer, share=False)
    chain = read_chains(data / "gsm8k_questions.jsonl").chains[5]
    rows: list[tuple[object, ...]] = []
    for name, horizon in (("whole continuations", 0), ("the next step only", 1)):
        seconds: list[float] = []
        for scorer in (fast, slow):
            start = time.process_time()
            await score_chain(
                chain,
                judge=LikelihoodJudge(scorer, name=NAME),
                perturber=RulePerturber(),
                settings=Settings(horizon=horizon),
            )
            seconds.append(time.process_time() - start)
        rows.append(
            (name, f"{seconds[0]:.1f} s", f"{seconds[1]:.1f} s", f"{seconds[1] / seconds[0]:.1f}")
        )
    head = ("compared", "shared", "each on its own", "times faster")
    return [
        "## Shared prefixes",
        "",
        "One GSM8K chain, three splits, all kinds and null controls, processor time of one thread.",
        "",
        *table(head, rows),
    ]


def measure(data: Path, out: Path) -> list[str]:
    """Measure all, and keep it in ``out`` for benchmarks/faith.py."""
    lines = [*throughput(), *asyncio.run(sharing(data))]
    out.write_text("\n".join(lines), encoding="utf-8")
    return lines


@dataclass(frozen=True)
class Speed:
    """Where the data are."""

    data: Path
    """Folder with the labelled data."""
    out: Path = Path(__file__).resolve().parent.parent / "docs" / "results" / "faith" / "speed.md"
    """Where the result goes, which benchmarks/faith.py puts into its page."""


if __name__ == "__main__":
    config = tyro.cli(Speed)
    print("\n".join(measure(config.data, config.out)))
