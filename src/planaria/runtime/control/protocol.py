"""The plumbing that coordinator, members, launcher and command line share.

One gRPC service, ``planaria.Control``, by generic handlers: bodies are MessagePack of
``msgspec.Struct`` (no protobuf files), so that decoding validates. Every call carries the run's
token as metadata; every message is bounded both ways. Nothing here imports torch, and no gRPC
object is made at import: forked workers make their own.

| method     | kind   | request → reply                                                   |
| ---------- | ------ | ----------------------------------------------------------------- |
| Attach     | stream | messages.FromWorker → messages.FromCoordinator                     |
| Launcher   | stream | FromLauncher → ToLauncher                                          |
| Put        | unary  | Put → Done                                                         |
| Get        | unary  | Get → Values of one                                                |
| GetMany    | unary  | GetMany → Values                                                   |
| Add        | unary  | Add → Counter                                                      |
| Check      | unary  | Check → Present                                                    |
| Inject     | unary  | Inject → Done, once it is in the journal                           |
| Request    | unary  | StopRun or SaveCheckpoint → Done                                   |
| Status     | unary  | Look → Status                                                      |
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from planaria.errors import ConfigError, UserError
from planaria.runtime.messages import Injected, Shard, Worker

if TYPE_CHECKING:
    import grpc

SERVICE = "planaria.Control"
ATTACH, LAUNCHER = "Attach", "Launcher"
PUT, GET, GET_MANY, ADD, CHECK = "Put", "Get", "GetMany", "Add", "Check"
INJECT, REQUEST, STATUS = "Inject", "Request", "Status"

TOKEN_KEY = "planaria-token"
TOKEN_ENV = "PLANARIA_TOKEN"
"""Set by launchers only; read in :func:`token_from` and removed from the environment there."""

MAX_MESSAGE = 16 << 20
"""Bytes; state never goes through the control plane. Our choice."""

CONTACT_FILE, TOKEN_FILE = "coordinator.json", "coordinator.token"

T = TypeVar("T")


def path_of(method: str) -> str:
    """``/planaria.Control/METHOD``, as gRPC wants it."""
    return f"/{SERVICE}/{method}"


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs to join a run; made by the launcher, handed over a pipe."""

    address: str
    """``host:port`` of the coordinator."""
    token: str
    """The run's secret; never on a command line, hidden in ``repr``."""
    run: str
    worker: Worker
    node: str
    """Failure domain; equal for all workers of one machine."""
    config: str
    """Digest of script, arguments and resolved configuration; equal on all workers of a run."""
    version: str
    """``planaria/torch/python`` versions; equal on all workers of a run."""
    rank: int | None = None
    """RANK that the launcher has promised to the script; None for a spare."""
    log: str = ""
    """File that the worker's output goes to; empty: the terminal."""
    out: str = ""
    """The run's folder."""
    ca: str = ""
    """PEM file with the authority that signed the coordinator's certificate; empty: no TLS."""
    certificate: str = ""
    """PEM file with this client's certificate, where the coordinator asks for one."""
    key: str = ""
    """PEM file with the key of ``certificate``."""

    def __repr__(self) -> str:
        return f"Invitation(address={self.address!r}, run={self.run!r}, worker={self.worker!r})"

    @property
    def tls(self) -> Tls | None:
        """Client side credentials, or None where the run is plain."""
        if not self.ca:
            return None
        return Tls(ca=self.ca, certificate=self.certificate, key=self.key)


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what is said outside the workers' stream."""


class Put(Body, frozen=True):
    epoch: int
    key: str
    value: bytes


class Get(Body, frozen=True):
    """Waits until ``key`` is there, at most ``timeout`` seconds."""

    epoch: int
    key: str
    timeout: float


class GetMany(Body, frozen=True):
    epoch: int
    keys: tuple[str, ...]
    timeout: float


class Add(Body, frozen=True):
    """Adds to a decimal counter as torch's ``Store.add`` does; a missing key counts as 0."""

    epoch: int
    key: str
    amount: int


class Check(Body, frozen=True):
    """Whether all keys are there now."""

    epoch: int
    keys: tuple[str, ...]


class Values(Body, frozen=True):
    values: tuple[bytes, ...]


class Counter(Body, frozen=True):
    value: int


class Present(Body, frozen=True):
    present: bool


class Done(Body, frozen=True):
    note: str = ""


class Inject(Body, frozen=True):
    """``worker`` is about to let ``fault`` fire; the reply means that the journal has it."""

    worker: Worker
    fault: Injected


class Look(Body, frozen=True):
    """Ask for :class:`Status`."""


class StopRun(Body, frozen=True, tag=True):
    """End the run: ``exit_code`` 0 for a wish, else for an error; ``reason`` is one line."""

    reason: str
    exit_code: int = 0


class SaveCheckpoint(Body, frozen=True, tag=True):
    """Write a durable checkpoint after the running attempt, then stop if so wished."""

    reason: str
    then_stop: bool = False
    exit_code: int = 0
    """With which the run ends then."""


Requested = StopRun | SaveCheckpoint


class LauncherHello(Body, frozen=True, tag=True):
    """First message of a launcher's stream."""

    run: str
    node: str
    pid: int
    spawns: bool = True
    """Whether it starts fresh workers when asked; ``planaria join`` does not."""


class Spawned(Body, frozen=True, tag=True):
    """The launcher has started ``worker``; it may not have attached yet."""

    worker: Worker
    pid: int


class Exited(Body, frozen=True, tag=True):
    """The pidfd of ``worker`` has fired."""

    worker: Worker
    pid: int
    description: str
    """``exit code 1`` or ``killed by SIGKILL``."""
    code: int | None = None
    """Exit code, negative for a signal as in :mod:`subprocess`; None where unknown."""
    at: float = 0.0
    """``time.time()`` when the launcher saw it."""


FromLauncher = LauncherHello | Spawned | Exited


class Attached(Body, frozen=True, tag=True):
    """Answer to :class:`LauncherHello`."""

    run: str


class Kill(Body, frozen=True, tag=True):
    """SIGKILL ``worker``: it is fenced and must not act any more."""

    worker: Worker
    pid: int
    reason: str


class WantSpare(Body, frozen=True, tag=True):
    """Start so many fresh workers."""

    count: int


class RestartAll(Body, frozen=True, tag=True):
    """The script never joined, so the whole set is to be started anew."""

    reason: str


class Line(Body, frozen=True, tag=True):
    """Something for the user's screen."""

    text: str
    kind: str = "event"
    """event, swap, progress or error."""


class EndRun(Body, frozen=True, tag=True):
    """The run is over: end what is left, then exit with ``exit_code``."""

    exit_code: int
    reason: str
    owners: tuple[Worker, ...] = ()
    """Who owned a shard: a script may still do something after its run. Others have nothing to do."""


ToLauncher = Attached | Kill | WantSpare | RestartAll | Line | EndRun


class ShardStatus(Body, frozen=True):
    """One row of ``planaria status``."""

    shard: Shard
    owner: Worker | None
    node: str = ""
    holder: Worker | None = None
    generation: int | None = None
    """Newest generation that this shard has committed."""
    protected: bool = False
    """Whether its holder has the newest generation that is committed for all shards."""
    step: int = 0
    """Step that its owner was last heard to attempt."""


class Status(Body, frozen=True):
    """What the coordinator knows at this moment."""

    run: str
    phase: str
    epoch: int
    world: int
    generation: int | None
    """Newest generation committed for all shards."""
    shards: tuple[ShardStatus, ...] = ()
    spares: tuple[Worker, ...] = ()
    swaps: int = 0
    reason: str = ""
    """Why the last decision was taken."""
    exit_code: int | None = None
    """Set where the run is over."""


_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack of one struct."""
    return _ENCODER.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """A validated ``kind`` (a struct type or a union of tagged ones) out of MessagePack.

    Raises ``ValueError`` with one line where ``data`` is something else.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{len(data)} bytes are not a message of this service: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files. A server needs ``certificate`` and ``key``; a client needs ``ca``.

    A server with ``ca`` demands client certificates signed by it; a client that has ``certificate``
    and ``key`` shows them.
    """

    certificate: str = ""
    key: str = ""
    ca: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            given, missing = ("certificate", "key") if self.certificate else ("key", "certificate")
            raise ConfigError(f"TLS {given} is given without its {missing}; give both PEM files")
        for name in ("certificate", "key", "ca"):
            path = getattr(self, name)
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"TLS {name} {path} cannot be read; give a readable PEM file")

    def _parts(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        names = (self.ca, self.key, self.certificate)
        ca, key, certificate = (Path(name).read_bytes() if name else None for name in names)
        return ca, key, certificate

    def server(self) -> grpc.ServerCredentials:
        """Credentials to listen with."""
        import grpc

        ca, key, certificate = self._parts()
        if key is None or certificate is None:
            raise ConfigError("TLS on a coordinator needs a certificate and a key; give both files")
        return grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=ca, require_client_auth=ca is not None
        )

    def client(self) -> grpc.ChannelCredentials:
        """Credentials to connect with."""
        import grpc

        ca, key, certificate = self._parts()
        return grpc.ssl_channel_credentials(ca, key, certificate)


def client_tls(*, ca: str, certificate: str, key: str) -> Tls | None:
    """Credentials of a client; None without TLS. ``ConfigError`` where a file is missing."""
    tls = Tls(ca=ca, certificate=certificate, key=key)
    if certificate and not ca:
        raise ConfigError(
            "client_certificate is given without ca; give the PEM file of the authority that signed "
            "the coordinator's certificate, too"
        )
    return tls if ca else None


def options(*, max_message: int = MAX_MESSAGE, keepalive: float = 2.0) -> list[tuple[str, int]]:
    """gRPC options of both sides.

    ``keepalive`` seconds: how often an idle connection is probed, so that a connection whose other
    machine has vanished is cut in the end. It is no detector: gRPC gave up a process that was
    stopped (whose kernel goes on acknowledging) only after 61 s. Silence is found by pings of our
    own. No proxy is ever asked, no port is shared with another coordinator.
    """
    milliseconds = max(100, int(keepalive * 1000))
    return [
        ("grpc.max_send_message_length", max_message),
        ("grpc.max_receive_message_length", max_message),
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 50),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def channel(
    address: str, *, tls: Tls | None = None, max_message: int = MAX_MESSAGE, keepalive: float = 2.0
) -> grpc.Channel:
    """A blocking channel to ``address``; to be made after any fork."""
    import grpc

    chosen = options(max_message=max_message, keepalive=keepalive)
    if tls is None:
        return grpc.insecure_channel(address, options=chosen)
    return grpc.secure_channel(address, tls.client(), options=chosen)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    return ((TOKEN_KEY, token),)


def token_from(*, fd: int | None = None) -> str | None:
    """The run's token from an open file descriptor, else from ``PLANARIA_TOKEN``, else None.

    Never from the command line, where every user of the machine can read it. The variable is
    removed, so that children do not inherit it.
    """
    if fd is not None:
        try:
            with os.fdopen(fd, "r", encoding="ascii") as stream:
                token = stream.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token cannot be read from descriptor {fd}: {error}") from None
    else:
        token = os.environ.pop(TOKEN_ENV, "").strip()
        if not token:
            return None
    if not 16 <= len(token) <= 256 or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"the token has {len(token)} characters; give 16 to 256 printable ASCII characters"
        )
    return token


class Contact(Body, frozen=True):
    """``OUT/coordinator.json``: where the coordinator of a run listens."""

    address: str
    run: str
    pid: int
    tls: bool = False

    def check_tls(self, given: bool) -> None:
        """Raises ``UserError`` where the coordinator speaks TLS and no authority was ``given``."""
        if self.tls and not given:
            raise UserError(
                f"the run at {self.address} speaks TLS; give --ca, the PEM file of the authority "
                "that signed its certificate"
            )


def write_private(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees all of it or nothing, readable by this user only."""
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), stat.S_IRUSR | stat.S_IWUSR)
        stream.write(text)
    os.replace(partial, path)


def write_contact(out: Path, contact: Contact, token: str) -> None:
    """Publish ``contact`` in the run's folder, the token in a file of its own; both mode 0600."""
    write_private(out / TOKEN_FILE, token + "\n")
    write_private(out / CONTACT_FILE, json.dumps(msgspec.to_builtins(contact), indent=1) + "\n")


def read_contact(out: Path) -> tuple[Contact, str]:
    """Contact and token of the run in folder ``out``; ``UserError`` where there is none."""
    path = out / CONTACT_FILE
    try:
        contact = msgspec.json.decode(path.read_bytes(), type=Contact)
    except OSError as error:
        raise UserError(
            f"{out} has no run to talk to ({error.strerror}: {error.filename}); "
            "give the --out folder of a run that was started"
        ) from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is damaged ({error}); start the run anew") from None
    return contact, read_token(out / TOKEN_FILE)


def read_token(path: Path) -> str:
    """The run's token out of a file; ``UserError`` with one line where it holds none."""
    advice = f"give the {TOKEN_FILE} of the run"
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise UserError(f"token file {path} cannot be read: {error.strerror}; {advice}") from None
    except UnicodeDecodeError:
        raise UserError(f"token file {path} is no text; {advice}") from None
    if len(words) != 1 or not words[0].isascii():
        raise UserError(f"token file {path} does not hold one line of ASCII; {advice}")
    return words[0]
