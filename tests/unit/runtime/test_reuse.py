"""What becomes of a folder that holds a run already, and the line that the user reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import UserError
from planaria.runtime.coordinator import journal, publish, summary
from planaria.runtime.launch import reuse
from planaria.runtime.launch.config import LaunchConfig, command_of, write_config
from planaria.runtime.launch.reuse import Found, decide, differences


@dataclass(frozen=True)
class Recipe:
    steps: int = 6
    lr: float = 1e-3
    out: str = "a"
    threads: int = 1


def config(
    folder: Path, *, script: str = "train.py", text: str = "", **fields: Any
) -> LaunchConfig:
    path = folder / script
    path.write_text(text)
    return LaunchConfig(script=str(path), out=folder / "out", **fields)


def an_old_run(of: LaunchConfig, *, generation: int | None, steps: int, code: int) -> None:
    """The files that a run of ``of`` leaves."""
    write_config(of)
    book = journal.Journal(of.out / journal.JOURNAL_FILE)
    book.write(journal.Opened(run="r", world=of.workers, spares=0, address="a:1", pid=1))
    book.write(journal.AllCommitted(epoch=1, generation=steps))
    book.write(journal.Ended(exit_code=code, reason="over"))
    book.close()
    summary.write_summary(of.out)
    if generation is not None:
        folder = publish.complete_path(of.out, generation)
        folder.mkdir(parents=True)
        (folder / publish.COMPLETE).write_text("{}")


def test_a_fresh_folder_is_begun_without_a_word(tmp_path: Path) -> None:
    assert reuse.settle(config(tmp_path)) == ""
    assert not (tmp_path / "out").exists()


def test_the_same_command_goes_on_and_says_from_where(tmp_path: Path) -> None:
    mine = config(tmp_path, workers=2)
    an_old_run(mine, generation=306, steps=330, code=0)
    folder = tmp_path / "out" / "checkpoints" / "step-306"
    assert reuse.settle(mine) == (
        f"goes on from the checkpoint of generation 306 in {folder}; the run had finished at step "
        "330; 24 steps after it are done again"
    )
    assert (tmp_path / "out" / "journal.jsonl").exists()
    other = config(tmp_path, workers=3)
    assert reuse.settle(other).endswith("; workers are 3, were 2")


def test_an_interrupted_run_had_not_finished(tmp_path: Path) -> None:
    mine = config(tmp_path)
    an_old_run(mine, generation=4, steps=5, code=130)
    said = reuse.settle(mine)
    assert "had finished" not in said
    assert said.endswith("step-4; 1 step after it is done again")


def test_another_command_is_refused_by_what_differs(tmp_path: Path) -> None:
    mine = config(tmp_path, script="slow.py", text="a", arguments=("--lr", "1"))
    an_old_run(mine, generation=7, steps=7, code=130)
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    other = config(tmp_path, script="train.py", text="b", arguments=("--lr", "1"))
    with pytest.raises(UserError) as caught:
        reuse.settle(other)
    assert str(caught.value) == (
        f"out {tmp_path / 'out'} holds the run of another command, at step 7: script is "
        f"{tmp_path / 'train.py'}, was {tmp_path / 'slow.py'}; give another --out, or --fresh to put "
        "that run aside, or --resume to go on from its checkpoint nevertheless"
    )
    after = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {p: b for p, b in after.items() if p.name != ".lock"} == before
    changed = config(tmp_path, script="slow.py", text="c", arguments=("--lr", "2"))
    with pytest.raises(UserError, match=r"slow\.py has been changed since, and its arguments are "):
        reuse.settle(changed)
    again = config(tmp_path, script="slow.py", text="c", arguments=("--lr", "1"), resume=True)
    assert reuse.settle(again).endswith("slow.py has been changed since (--resume)")


def test_a_copy_of_the_script_is_the_same_script(tmp_path: Path) -> None:
    an_old_run(config(tmp_path, script="a.py", text="x"), generation=1, steps=1, code=130)
    said = reuse.settle(config(tmp_path, script="b.py", text="x"))
    assert said.startswith("goes on from the checkpoint of generation 1 in ")


@pytest.mark.parametrize("fresh", [False, True])
def test_what_has_no_checkpoint_or_is_not_wanted_is_put_aside(tmp_path: Path, fresh: bool) -> None:
    out = tmp_path / "out"
    for number in (1, 2):
        mine = config(tmp_path, fresh=fresh, results=("model",))
        an_old_run(mine, generation=3 if fresh else None, steps=3, code=1)
        (out / "model").mkdir()
        (out / "mine.txt").write_text("the user's own")
        (out / "logs" / "w0.log").write_text(f"of run {number}")
        why = "already (--fresh)" if fresh else "that left no checkpoint to go on from"
        assert reuse.settle(mine) == (
            f"{out} holds a run {why}; it is now {out / f'before-{number}'}, and this one begins anew"
        )
        old = out / f"before-{number}"
        names = {"journal.jsonl", "summary.json", "config.toml", "logs", "model"}
        assert {p.name for p in old.iterdir()} == names | ({"checkpoints"} if fresh else set())
        assert (old / "logs" / "w0.log").read_text() == f"of run {number}"
        assert json.loads((old / "summary.json").read_text())["steps"] == 3
        assert (out / "mine.txt").exists()
        assert not (out / "journal.jsonl").exists()


def test_fields_of_a_recipe_are_named_and_where_it_runs_is_none_of_them(tmp_path: Path) -> None:
    def of(recipe: Any) -> dict[str, Any]:
        config = LaunchConfig(function=("m", "main"), argument=recipe, out=tmp_path)
        return command_of(config)

    old = of(Recipe())
    assert differences(old, of(Recipe(out="b", threads=2))) == ()
    assert differences(old, of(Recipe(steps=9, lr=1.0))) == (
        "steps is 9, was 6",
        "lr is 1.0, was 0.001",
    )
    assert differences(old, of(5)) == ("its argument is another one",)
    assert differences(None, of(5)) == ()
    script = command_of(config(tmp_path))
    assert differences(script, old) == (f"it runs m.main, ran {tmp_path / 'train.py'}",)


def test_no_more_than_three_differences_are_listed(tmp_path: Path) -> None:
    old = {"function": "m.main", "argument": dict.fromkeys("abcde", 1)}
    new = {"function": "m.main", "argument": dict.fromkeys("abcde", 2)}
    mine = config(tmp_path)
    found = Found(begun=True, generation=1, command=old)
    assert len(differences(old, new)) == 5
    decision = decide(mine, found)
    assert decision.action == "refuse"
    assert reuse._listed(differences(old, new)) == (
        "a is 2, was 1, and b is 2, was 1, and c is 2, was 1, and 2 more"
    )


def test_faults_that_never_fired_are_known(tmp_path: Path) -> None:
    faults = ("kill:worker=0,step=3,phase=data", "kill:worker=0,step=9,phase=data")
    mine = config(tmp_path, inject=faults)
    an_old_run(mine, generation=None, steps=5, code=0)
    assert reuse.unfired(mine) == faults
    book = journal.Journal(mine.out / journal.JOURNAL_FILE)
    book.write(journal.Injected(worker="w0", fault=faults[0], step=3, phase="data"))
    book.close()
    assert reuse.unfired(mine) == faults[1:]
    assert reuse.unfired(config(tmp_path)) == ()
