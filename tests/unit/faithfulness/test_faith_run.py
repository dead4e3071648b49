"""Resume, budget, dry run, the command line, and selection from a real (given) model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.errors import ConfigError
from planaria.faithfulness.chains import Chain, Question, chain_to_row
from planaria.faithfulness.commands import main
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.models import InspectJudge, ModelSettings
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.judges.protocol import Usage, Verdict, decide
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.run import Report, Tick, estimate_cost, score_chains
from planaria.faithfulness.sampling import sample_chains
from planaria.faithfulness.scores import Settings
from planaria.faithfulness.store import Journal, Limits, Spending

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]
SMALL = Settings(splits=1, trials=2)


def reply(prompt: str) -> str:
    if "Continuation A" in prompt:
        return "Verdict: A"
    return "Verdict: yes" if "lead to the answer" in prompt else "Verdict: right"


def run(chains: list[Chain], judge: object, **options: object) -> Report:
    return asyncio.run(
        score_chains(chains, judge=judge, perturber=RulePerturber(), settings=SMALL, **options)
    )


def write(path: Path, *chains: Chain) -> Path:
    path.write_text("\n".join(json.dumps(chain_to_row(c)) for c in chains) + "\n")
    return path


def test_a_second_run_pays_nothing(tmp_path: Path, chain: Chain, model_of: Callable) -> None:
    first = run([chain], InspectJudge(model_of(reply)), out=tmp_path / "r")
    model = model_of(reply)
    again = run([chain], InspectJudge(model), out=tmp_path / "r")
    assert first.usage.calls > 10
    assert (again.usage.calls, model.prompts) == (0, [])
    assert again.means["reliability"] == first.means["reliability"]


def test_a_killed_run_goes_on_where_it_was(
    tmp_path: Path, chain: Chain, model_of: Callable
) -> None:
    other = replace(chain, question=chain.question + " (2)", id="", question_id="")
    whole = run([chain, other], InspectJudge(model_of(reply)), out=tmp_path / "whole")
    killed = model_of(reply)

    def deadly(prompt: str) -> str:
        if len(killed.prompts) == 9:
            raise KeyboardInterrupt
        return reply(prompt)

    killed = model_of(deadly)
    with pytest.raises(KeyboardInterrupt):
        run([chain, other], InspectJudge(killed), out=tmp_path / "r", concurrency=1)
    journal = tmp_path / "r" / "answers.jsonl"
    paid = len(journal.read_text().splitlines())
    assert paid > 0
    with journal.open("a") as stream:
        stream.write('{"key": "cut')  # what a kill leaves of the last line
    rest = model_of(reply)
    done = run([chain, other], InspectJudge(rest), out=tmp_path / "r")
    assert done.usage.calls == len(rest.prompts) == whole.usage.calls - paid
    assert done.means["reliability"] == whole.means["reliability"]


def test_failures_are_never_kept(tmp_path: Path, chain: Chain, model_of: Callable) -> None:
    def broken(prompt: str) -> str:
        raise RuntimeError("no network")

    judge = InspectJudge(model_of(broken), settings=ModelSettings(max_retries=0))
    report = run([chain], judge, out=tmp_path / "r")
    assert report.states["unscored"] == 1
    assert report.counts["compare.failed"] > 0
    assert not (tmp_path / "r" / "answers.jsonl").exists()


def test_repeats_are_asked_apart(chain: Chain, model_of: Callable) -> None:
    model = model_of(reply)
    report = run([chain], InspectJudge(model))
    assert len(report.scores[0].supports) == 2
    assert sum("lead to the answer" in prompt for prompt in model.prompts) == 2


def test_a_budget_stops_asking_and_says_so(chain: Chain, model_of: Callable) -> None:
    model = model_of(reply)
    report = run([chain], InspectJudge(model), limits=Limits(calls=5))
    assert len(model.prompts) == 5
    reasons = [v.reason for c in report.scores[0].contrasts for v in c.verdicts]
    assert "the budget of 5 calls is used up" in reasons
    assert report.scores[0].consistency == 1.0
    assert Spending(Limits(tokens=1)).refusal() is None
    with pytest.raises(ConfigError, match="has a negative part: give 0 for no limit"):
        Limits(money=-1)


def test_other_settings_do_not_mix(tmp_path: Path, chain: Chain) -> None:
    run([chain], CalculatorJudge(), out=tmp_path / "r")
    with pytest.raises(
        ConfigError, match=r"with another splits \(1, now 3\), trials \(2, now 3\): choose another"
    ):
        asyncio.run(
            score_chains(
                [chain], judge=CalculatorJudge(), perturber=RulePerturber(), out=tmp_path / "r"
            )
        )


def test_the_dry_run_counts_what_the_run_asks(chain: Chain, model_of: Callable) -> None:
    model = model_of(reply)
    judge = InspectJudge(model)
    estimate = asyncio.run(
        estimate_cost(
            [chain], judge=judge, perturber=RulePerturber(), settings=SMALL, prices=(1.0, 2.0)
        )
    )
    assert model.prompts == []
    report = run([chain], judge)
    assert report.usage.calls <= estimate.calls <= report.usage.calls + 4
    assert estimate.money == pytest.approx(
        (estimate.input_tokens + 2 * estimate.output_tokens) / 1e6
    )


def test_progress_and_panel(chain: Chain, model_of: Callable) -> None:
    ticks: list[Tick] = []
    panel = PanelJudge([CalculatorJudge(), InspectJudge(model_of(reply))])
    report = run([chain], panel, progress=ticks.append)
    assert (ticks[-1].done, ticks[-1].total, ticks[-1].remaining_seconds) == (1, 1, 0.0)
    assert report.scores[0].supports[0].reason.startswith("calculator: ")


def test_sixty_four_requests_are_under_way_and_no_more(chain: Chain) -> None:
    class Slow(CalculatorJudge):
        name = "slow/1"
        concurrent = True
        flying = most = 0

        async def ask(self, requests: list) -> list[Verdict]:
            self.flying += 1
            self.most = max(self.most, self.flying)
            await asyncio.sleep(0.01)
            self.flying -= 1
            return [decide(0.9, "slow") for _ in requests]

    judge = Slow()
    many = [
        replace(chain, question=f"{chain.question} {i}", id="", question_id="") for i in range(10)
    ]
    run(many, judge, concurrency=64)
    assert judge.most == 64  # of ten chains: their questions do not wait for one another
    run(many, judge, concurrency=1)
    assert (judge.most, judge.flying) == (64, 0)


def test_sampling_needs_variety_and_resumes(tmp_path: Path, model_of: Callable) -> None:
    question = Question(text="3 + 4?", reference="7")

    async def sample(model: object, temperature: float) -> object:
        return await sample_chains(
            [question],
            model=model,
            n=3,
            settings=ModelSettings(temperature=temperature),
            journal=Journal(tmp_path / "s.jsonl"),
            spending=Spending(),
        )

    model = model_of(lambda prompt: "3 + 4 = 7\nAnswer: 7")
    with pytest.raises(ConfigError, match="3 chains at temperature 0 would be 3 times the same"):
        asyncio.run(sample(model, 0.0))
    made = asyncio.run(sample(model, 1.0))
    assert [c.labels.correct for c in made.chains] == [True] * 3
    again = model_of(lambda prompt: "nothing")
    assert asyncio.run(sample(again, 1.0)).chains == made.chains
    assert again.prompts == []


def test_the_command_line(tmp_path: Path, chain: Chain, capsys: pytest.CaptureFixture) -> None:
    wrong = replace(chain, steps=(chain.steps[0], "16 - 7 = 8"), id="w", question_id="w")
    path = write(tmp_path / "c.jsonl", chain, wrong)
    with path.open("a") as stream:
        stream.write("{broken\n")
    out = tmp_path / "run"
    assert main(["score", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "1 row left out:" in said
    assert " chains with a step that is held to be wrong" in said
    assert main(["view", str(out)]) == 0
    assert (out / "view.html").is_file()
    assert main(["exemplars", str(path), "-k", "1"]) == 0
    assert "Answer: 18" in capsys.readouterr().out
    assert main(["select", str(path), "--out", str(tmp_path / "s")]) == 0
    assert "no combiner: it needs 30 labelled questions" in capsys.readouterr().out
    assert main(["score", str(path), "--out", str(out), "--dry-run"]) == 0
    assert "cost: $0.00" in capsys.readouterr().out


def test_meta_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [
        {"input": f"{i} + 1 =", "steps": [f"{i} + 1 = {i + 1 + bad}"], "target": str(i + 1),
         "answer": str(i + 1 + bad), "mistake_index": 0 if bad else None}
        for i in range(6) for bad in (0, 1)
    ]  # fmt: skip
    path = tmp_path / "b.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["meta", str(path), "--json", str(tmp_path / "m.json")]) == 0
    measures = json.loads((tmp_path / "m.json").read_text())["measures"]
    assert measures["auroc"]["estimate"] == 1.0
    assert measures["first_error_accuracy"]["n"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "{missing}", "--out", "x"], "is no file: give a .jsonl, .json or .eval file"),
        (["score", "{file}", "--out", "x", "--judge", "nobody/x"], "no judge or model 'nobody/x'"),
        (["score", "{file}", "--out", "x", "--preset", "old"], "unknown preset 'old'"),
        (["score", "{file}", "--out", "x", "--preset", "released"], "needs a model as judge"),
        (["view", "{missing}"], "holds no finished run (scores.jsonl, report.json)"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    tmp_path: Path,
    chain: Chain,
    capsys: pytest.CaptureFixture,
    arguments: list[str],
    message: str,
) -> None:
    path = write(tmp_path / "c.jsonl", chain)
    places = {"{missing}": str(tmp_path / "missing"), "{file}": str(path), "x": str(tmp_path / "o")}
    assert main([places.get(a, a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, planaria.faithfulness, planaria.faithfulness.commands\n"
        "print(sorted({'torch', 'transformers', 'inspect_ai', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_progress_tells_money_only_where_a_judge_was_called() -> None:
    free = Tick(done=2, total=4, usage=Usage(), seconds=6.0)
    assert free.line() == "2/4 chains, about 6 s to go"
    paid = Tick(done=4, total=4, usage=Usage(calls=3, money=0.5), seconds=6.0)
    assert paid.line() == "4/4 chains, 3 calls, $0.50 spent"
