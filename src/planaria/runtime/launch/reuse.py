"""A run's folder that holds a run already: go on with that run, refuse, or put it aside.

:func:`decide` is pure; :func:`settle` looks at the folder, does what was decided and returns the
line that the user is told. Nothing is ever deleted: what is put aside goes to ``OUT/before-N``, which
is again the folder of a run.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planaria.errors import DataError, UserError
from planaria.runtime.coordinator import journal, lock, publish, summary
from planaria.runtime.launch.config import CONFIG_FILE, LaunchConfig, command_of

_OWN = (journal.JOURNAL_FILE, summary.SUMMARY_FILE, CONFIG_FILE, "logs", publish.FOLDER)
"""What the runtime itself leaves in a run's folder, besides the coordinator's address."""
_SHOWN = 3
"""Differences that a line names; our choice."""
_ELSEWHERE = frozenset({"out", "cache", "threads", "max_redo", "log_every", "checkpoint_every"})
"""Fields of a recipe that say where and how it runs, not what."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a folder holds of an earlier run."""

    begun: bool
    """Whether a run has begun there."""
    generation: int | None = None
    """Its newest complete checkpoint."""
    steps: int | None = None
    """Steps it had committed when it ended; None where it left no summary."""
    exit_code: int | None = None
    workers: int | None = None
    command: Mapping[str, Any] | None = None
    """What it ran, as :func:`.config.command_of` tells it; None where nobody wrote it."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """``begin``: the folder is free. ``resume``, ``aside``: see the module. ``refuse``: an error."""

    action: Literal["begin", "resume", "aside", "refuse"]
    reason: str


def decide(config: LaunchConfig, found: Found) -> Decision:
    """What becomes of a folder in which ``found`` was found, and why, as a line for the user."""
    out = config.out
    if not found.begun and found.generation is None:
        return Decision(action="begin", reason="")
    if config.fresh:
        return Decision(action="aside", reason=f"{out} holds a run already (--fresh)")
    if found.generation is None:
        return Decision(
            action="aside", reason=f"{out} holds a run that left no checkpoint to go on from"
        )
    differing = differences(found.command, command_of(config))
    if differing and not config.resume:
        return Decision(
            action="refuse",
            reason=f"out {out} holds the run of another command, at step {found.generation}: "
            f"{_listed(differing)}; give another --out, or --fresh to put that run aside, or "
            "--resume to go on from its checkpoint nevertheless",
        )
    line = (
        f"goes on from the checkpoint of generation {found.generation} in "
        f"{publish.complete_path(out, found.generation)}"
    )
    if found.exit_code == 0 and found.steps is not None:
        line += f"; the run had finished at step {found.steps}"
    if found.steps is not None and (again := found.steps - found.generation) > 0:
        line += f"; {_steps(again)} after it {'is' if again == 1 else 'are'} done again"
    if found.workers not in (None, config.workers):
        line += f"; workers are {config.workers}, were {found.workers}"
    if differing:
        line += f"; {_listed(differing)} (--resume)"
    return Decision(action="resume", reason=line)


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> tuple[str, ...]:
    """What two commands differ in, one phrase each; nothing where the old one is not known."""
    if old is None:
        return ()
    found: list[str] = []
    if "script" in old and "script" in new:
        if old.get("text") != new.get("text"):
            same = Path(old["script"]).name == Path(new["script"]).name
            found.append(
                f"{new['script']} has been changed since"
                if same
                else f"script is {new['script']}, was {old['script']}"
            )
    elif _target(old) != _target(new):
        found.append(f"it runs {_target(new)}, ran {_target(old)}")
        return tuple(found)
    mine, theirs = new.get("arguments", []), old.get("arguments", [])
    if mine != theirs:
        found.append(f"its arguments are {_words(mine)}, were {_words(theirs)}")
    return (*found, *_fields(old.get("argument"), new.get("argument")))


def settle(config: LaunchConfig) -> str:
    """See to the run's folder before anything is written into it; the line for the user, or "".

    Raises:
        UserError: another run lives there, or it holds the run of another command.
    """
    decision = check(config)
    if decision.action == "aside":
        folder = put_aside(config.out, (*_OWN, *config.results))
        return f"{decision.reason}; it is now {folder}, and this one begins anew"
    return decision.reason


def check(config: LaunchConfig) -> Decision:
    """What :func:`settle` will do; raises as it does, and changes nothing."""
    lock.check(config.out)
    decision = decide(config, look(config.out))
    if decision.action == "refuse":
        raise UserError(decision.reason)
    return decision


def look(out: Path) -> Found:
    """What ``out`` holds of an earlier run; files that cannot be read tell nothing."""
    complete = publish.kept(out)
    written = _document(out / CONFIG_FILE)
    launch = written.get("launch", {})
    steps = exit_code = None
    try:
        last = summary.read_summary(out)
    except DataError:
        pass
    else:
        steps, exit_code = last.steps, last.exit_code
    return Found(
        begun=(out / journal.JOURNAL_FILE).exists(),
        generation=complete[-1] if complete else None,
        steps=steps,
        exit_code=exit_code,
        workers=launch.get("workers") if isinstance(launch, dict) else None,
        command=written.get("command"),
    )


def put_aside(out: Path, names: Sequence[str]) -> Path:
    """Move what is there of ``names`` to the next free ``OUT/before-N``, and return that folder."""
    number = 1
    while (out / f"before-{number}").exists():
        number += 1
    folder = out / f"before-{number}"
    try:
        with lock.hold(out):
            folder.mkdir()
            for name in names:
                if (out / name).exists():
                    os.replace(out / name, folder / name)
    except OSError as error:
        raise UserError(
            f"the run in {out} cannot be put aside ({error.strerror}: {error.filename}); give "
            "another folder with --out"
        ) from None
    return folder


def unfired(config: LaunchConfig) -> tuple[str, ...]:
    """The faults of ``config`` that never fired, by the journal of the run that has just ended."""
    if not config.faults:
        return ()
    fired: set[str] = set()
    try:
        for entry in journal.read(config.out / journal.JOURNAL_FILE):
            if isinstance(entry, journal.Opened) and not entry.resumed:
                fired.clear()
            elif isinstance(entry, journal.Injected):
                fired.add(entry.fault)
    except DataError:
        return ()  # said elsewhere
    return tuple(str(fault) for fault in config.faults if str(fault) not in fired)


def _fields(old: Any, new: Any) -> tuple[str, ...]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return () if old == new else ("its argument is another one",)
    names = [name for name in {**new, **old} if name not in _ELSEWHERE]
    return tuple(
        f"{name} is {new.get(name, 'not given')}, was {old.get(name, 'not given')}"
        for name in names
        if new.get(name) != old.get(name)
    )


def _listed(differing: Sequence[str]) -> str:
    more = len(differing) - _SHOWN
    tail = (f"{more} more",) if more > 0 else ()
    return ", and ".join((*differing[:_SHOWN], *tail))


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _words(arguments: Sequence[str]) -> str:
    return f"'{shlex.join(arguments)}'" if arguments else "none"


def _target(command: Mapping[str, Any]) -> str:
    return str(command.get("script") or command.get("function"))


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
