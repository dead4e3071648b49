"""What a launcher is told: :class:`LaunchConfig` for a run, :class:`JoinConfig` for more spares."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import pickle
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import tomli_w

import planaria
from planaria.errors import ConfigError, UserError
from planaria.runtime.control import protocol as control
from planaria.runtime.inject import Fault, parse
from planaria.runtime.membership.limits import SHORTEST

CONFIG_FILE = "config.toml"
MAX_WORKERS = 16_384
"""Shards that the coordinator is tested with."""
_LONGEST = 200
"""Characters of a script's arguments that are told to others as they are; our choice."""


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What runs in each worker, and how a launcher behaves."""

    script: str | None = None
    """Path of a Python file that each worker runs as ``__main__``."""
    function: tuple[str, str] | None = None
    """``(module, name)``: a function that each worker calls with ``argument`` instead."""
    argument: Any = None
    """Picklable argument of ``function``, such as a recipe's configuration."""
    arguments: tuple[str, ...] = ()
    """The script's own command line, without its name."""
    spares: int = 0
    """Warm processes that wait to take the place of a lost worker."""
    node: str = ""
    """Failure domain of this machine's workers; empty: its host name."""
    threads: int = 0
    """Of the operators of each worker (``OMP_NUM_THREADS``); 0: that variable, or 1 without it, as
    torchrun does."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before workers are forked, besides torch and Planaria's."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Set for all workers before they import torch, where the launcher's own environment does not
    set it otherwise."""
    timeout: float = 30.0
    """Seconds; the one time-out from which all others of the run derive."""
    quiet: bool = False
    """Show errors only."""
    ca: str = ""
    """PEM file of the authority that signed the coordinator's certificate; empty: no TLS."""
    client_certificate: str = ""
    """PEM file that launcher and workers show to the coordinator."""
    client_key: str = ""
    """PEM file with its key."""

    def __post_init__(self) -> None:
        check_target(self.script, self.function)
        _check_argument(self.function, self.argument)
        if not 0 <= self.spares <= MAX_WORKERS:
            raise ConfigError(f"spares is {self.spares}: give 0 to {MAX_WORKERS}")
        if not SHORTEST <= self.timeout <= 86_400.0:
            raise ConfigError(f"timeout is {self.timeout:g} s: give {SHORTEST:g} to 86400 seconds")
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}: give 1 or more, or 0 to leave it open")
        if self.threads == 0:
            object.__setattr__(self, "threads", _default_threads())
        _ = self.tls
        for module in self.preload:
            _check_preload(module)

    @property
    def tls(self) -> control.Tls | None:
        """Credentials of launcher and workers; None without TLS."""
        return control.client_tls(
            ca=self.ca, certificate=self.client_certificate, key=self.client_key
        )

    @cached_property
    def digest(self) -> str:
        """What has to be equal in all workers of a run, on all machines: a line for each thing.

        Its first word names the thing, so that who is refused hears what differs. With the threads,
        because sums of floats depend on their number.
        """
        if self.script is not None:
            lines = [f"script {_short(Path(self.script).read_bytes())}"]
        else:
            name = ".".join(self.function or ())
            lines = [f"function {name} {_short(repr(self.argument).encode())}"]
        words = shlex.join(self.arguments)
        if len(words) > _LONGEST:
            words = _short(words.encode())
        # A line of its own stays one, whatever an argument holds.
        lines.append(f"arguments {' '.join(words.split()) or 'none'}")
        return "\n".join([*lines, f"threads {self.threads}"])


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(_Common):
    """A run on this machine, with its coordinator. Raises :class:`UserError` with one line."""

    workers: int = 1
    """Shards of the run, each owned by a process."""
    out: Path = Path("runs/run")
    """The run's folder: journal, summary, logs, configuration, checkpoints."""
    host: str = "127.0.0.1"
    """Address that the coordinator listens on; one that other machines reach lets them join."""
    port: int = 0
    """Port of the coordinator; 0: any free one."""
    max_redo: int | None = None
    """Most steps that may have to be done again after a loss; None: what the script says."""
    on_no_spare: Literal["wait", "end"] = "wait"
    """When a worker is lost and no spare is there: wait for one to join, or end the run."""
    refill: bool = True
    """Whether a lost worker is replaced by a fresh warm spare."""
    max_restarts: int = 3
    """How often a script that never joins may be started anew as a whole."""
    inject: tuple[str, ...] = ()
    """Faults for tests, ``kill:worker=W,step=S,phase=P`` (see :mod:`.inject`)."""
    fresh: bool = False
    """Begin anew in a folder that holds a run; that one is put aside (see :mod:`.reuse`)."""
    resume: bool = False
    """Go on from the checkpoint in the folder even where it is another command's."""
    results: tuple[str, ...] = ()
    """Names in ``out`` of what the run leaves besides the runtime's files: put aside with them."""
    certificate: str = ""
    """PEM file of the coordinator's certificate; with ``key`` and ``ca``: TLS."""
    key: str = ""
    """PEM file with its key."""
    faults: tuple[Fault, ...] = field(init=False, repr=False, default=())
    prefix: str = field(init=False, repr=False, default="w")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"workers is {self.workers}: give 1 to {MAX_WORKERS}")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port is {self.port}: give 1 to 65535, or 0 for any free port")
        if ":" in self.host:
            raise ConfigError(
                f"host is {self.host!r}: give an IPv4 address or the name of this machine; "
                "the workers' groups do not speak IPv6"
            )
        if self.max_redo not in (None, 1, 2):
            raise ConfigError(
                f"max_redo is {self.max_redo}: give 1 or 2; the interrupted step itself counts"
            )
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts}: give 0 or more")
        if self.fresh and self.resume:
            raise ConfigError(
                "fresh and resume are both given: give --fresh to begin anew, or --resume to go on"
            )
        if self.on_no_spare not in ("wait", "end"):
            raise ConfigError(f"on_no_spare is {self.on_no_spare!r}: give 'wait' or 'end'")
        _ = control.Tls(certificate=self.certificate, key=self.key)
        if bool(self.certificate) != bool(self.ca):
            raise ConfigError(
                "TLS needs the coordinator's certificate and key, and the authority (ca) by which "
                "workers check it; give all three PEM files"
            )
        faults = tuple(parse(text, workers=self.workers) for text in self.inject)
        object.__setattr__(self, "faults", faults)

    @property
    def logs(self) -> Path:
        return self.out / "logs"


@dataclass(frozen=True, kw_only=True)
class JoinConfig(_Common):
    """Spares for a run that lives already, on this machine or another."""

    address: str
    """``host:port`` of its coordinator."""
    token: str = field(repr=False)
    """Its secret."""
    spares: int = 1
    out: Path = Path("runs/joined")
    """Folder of the logs."""
    prefix: str = field(init=False, repr=False, default="")
    workers: int = field(init=False, repr=False, default=0)
    max_redo: int | None = field(init=False, repr=False, default=None)
    faults: tuple[Fault, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spares < 1:
            raise ConfigError(f"spares is {self.spares}: give 1 or more to join with")
        object.__setattr__(self, "prefix", f"j{secrets.token_hex(3)}-")

    @property
    def logs(self) -> Path:
        return self.out / "logs"


def for_recipe(
    recipe: Any, *, module: str, preload: Sequence[str] = (), **fields: Any
) -> LaunchConfig:
    """The run of a recipe: ``module.main(recipe)`` in each worker.

    ``recipe`` is the recipe's frozen configuration, with ``out``, ``max_redo`` and ``threads``;
    ``fields`` are those of :class:`LaunchConfig`.
    """
    return LaunchConfig(
        function=(module, "main"),
        argument=recipe,
        out=recipe.out,
        max_redo=recipe.max_redo,
        threads=recipe.threads,
        preload=(module, *preload),
        # Recipes know what torch's C++ side warns of, and chose it.
        environment={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        **fields,
    )


def check_target(script: str | None, function: tuple[str, str] | None) -> None:
    """Raise :class:`UserError` with one line where there is nothing to run."""
    if (script is None) == (function is None):
        raise UserError("give either a script or a function to run")
    if script is None:
        return
    path = Path(script)
    if not path.exists():
        raise UserError(f"script {script} does not exist; give the path of a Python file")
    if path.is_dir():
        raise UserError(f"script {script} is a folder; give the path of a Python file")
    if not os.access(path, os.R_OK):
        raise UserError(f"script {script} cannot be read; check its permissions")


def _check_preload(module: str) -> None:
    """The server leaves out what it cannot import, so a wrong name is found here.

    Only the first part of a name: more of it would import its package, perhaps torch.
    """
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:
        found = None
    if found is None:
        raise UserError(f"preload {module!r} is no module that can be imported; check its name")


def _check_argument(function: tuple[str, str] | None, argument: Any) -> None:
    """Workers get the argument as a pickle, and have no copy of the launcher's own main file."""
    if function is None:
        return
    name = ".".join(function)
    if type(argument).__module__ == "__main__":
        raise UserError(
            f"argument of {name} cannot be pickled: {type(argument).__name__} is defined in the "
            "main file; move it into a module that workers can import"
        )
    try:
        pickle.dumps(argument)
    except Exception as error:
        raise UserError(
            f"argument of {name} cannot be pickled: {error}; give plain values or a dataclass"
        ) from None


def versions() -> str:
    """``planaria/torch/python`` versions, without importing torch."""
    import platform

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UserError("torch is not installed; run pip install 'torch>=2.13'") from None
    return f"{planaria.__version__}/{torch}/{platform.python_version()}"


def write_config(config: LaunchConfig) -> None:
    """Write the resolved configuration to ``OUT/config.toml``, in one piece.

    Raises :class:`UserError` where the folder cannot be written.
    """
    launch = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.init and f.name not in ("argument", "fresh", "resume", "results")
    }
    names = ("planaria", "torch", "python")
    document: dict[str, Any] = {
        "launch": _plain(launch),
        "versions": dict(zip(names, versions().split("/"), strict=True)),
        "command": command_of(config),
    }
    path = config.out / CONFIG_FILE
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        config.logs.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(tomli_w.dumps(document).encode())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(
            f"out {config.out} cannot be written ({error.strerror}); give another folder with --out"
        ) from None


def command_of(config: LaunchConfig) -> dict[str, Any]:
    """What a run runs, as values of TOML: by it the same command is known when it comes again."""
    if config.script is not None:
        text = hashlib.sha256(Path(config.script).read_bytes()).hexdigest()
        return {"script": config.script, "text": text, "arguments": list(config.arguments)}
    assert config.function is not None
    given, command = config.argument, {"function": ".".join(config.function)}
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {**command, "argument": _plain(dataclasses.asdict(given))}
    return {**command, "argument": repr(given)}


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def make_logs(config: JoinConfig) -> None:
    """Make the folder of the logs; :class:`UserError` where it cannot be."""
    try:
        config.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out {config.out} cannot be written ({error.strerror}); give another folder with --out"
        ) from None


def _plain(value: Any) -> Any:
    """``value`` in what TOML knows; None has no place there and is left out."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value if item is not None]
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def _default_threads() -> int:
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isdigit() and int(text) > 0 else 1


def contact(
    target: str, token_file: Path | None = None, *, secure: bool = False
) -> tuple[str, str]:
    """Address and token of the run that ``target`` names: its folder, or ``HOST:PORT``.

    For ``HOST:PORT`` the token comes from ``token_file``. ``secure``: whether an authority for TLS
    was given. Raises :class:`UserError` with one line.
    """
    if Path(target).is_dir():
        found, token = control.read_contact(Path(target))
        found.check_tls(secure)
        return found.address, token
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) <= 65_535:
        raise UserError(
            f"{target!r} is neither the folder of a run nor HOST:PORT of its coordinator"
        )
    if token_file is None:
        raise UserError(
            f"{target} asks for the run's token; give --token-file "
            f"(the run keeps it in OUT/{control.TOKEN_FILE})"
        )
    return target, control.read_token(token_file)
