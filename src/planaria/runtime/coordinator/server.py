"""``python -m planaria.runtime.coordinator``: the process that gives each shard an owner.

A gRPC server on one event loop around a :class:`~.desk.ControlDesk`; no torch, so that it listens in
a few tenths of a second. Its address goes to ``OUT/coordinator.json``, the token to a file of its own
beside it, both readable by this user only. ``--resume OUT`` takes over a run whose coordinator died.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc.aio
import tyro

from planaria.errors import ConfigError, PlanariaError, UserError
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import journal, lock, publish, store
from planaria.runtime.coordinator.desk import ControlDesk
from planaria.runtime.coordinator.service import TokenCheck, handlers
from planaria.runtime.membership.limits import Timeouts
from planaria.runtime.membership.state import MembershipConfig, State
from planaria.runtime.messages import Limits

LEAVE = 2.0
"""Seconds for workers and launchers to take their last message and go; our choice."""
SUM_UP = 600.0
"""Seconds for the summary; a million steps take about half a minute. Our choice."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """A run as its coordinator sees it. The token comes by environment or descriptor only."""

    world: int
    """Number of shards, at least 1."""
    out: Path
    """The run's folder: journal, summary, contact, checkpoints."""
    run: str = ""
    """Id of the run; empty: a random one."""
    spares: int = 0
    """Warm workers beside the owners, as the launcher starts them."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0: any free one."""
    advertise: str = ""
    """Host name by which others reach this one; empty: ``host``, or this machine's name where
    ``host`` means all addresses."""
    timeout: float = 30.0
    """Seconds; the one time-out from which all others derive (see ``membership.limits``)."""
    max_redo: int = 2
    """Steps that may have to be done again after a loss; kept for the record, workers enforce it."""
    on_no_spare: Literal["wait", "end"] = "wait"
    """When a worker is lost and no spare is there: wait for one, or end the run."""
    max_swaps_per_step: int = 3
    """How often one step may be interrupted by the loss of the same shard's owner."""
    max_restarts: int = 3
    """How often a script that never joins may be started anew as a whole."""
    refill: bool = True
    """Whether a lost worker is replaced by a fresh spare."""
    keep: int = 2
    """Durable checkpoints that are kept, the newest ones."""
    certificate: str = ""
    """PEM file with this server's certificate; with ``key``: TLS."""
    key: str = ""
    """PEM file with its key."""
    client_ca: str = ""
    """PEM file; given, clients have to show a certificate that this authority signed."""
    max_message: int = control.MAX_MESSAGE
    """Bytes of one message, both ways."""
    token_fd: int | None = None
    """Open file descriptor to read the token from, instead of PLANARIA_TOKEN."""

    def __post_init__(self) -> None:
        _ = self.membership, self.limits, self.tls
        if self.spares < 0:
            raise ConfigError(f"spares is {self.spares}: give 0 or more")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port is {self.port}: give 1 to 65535, or 0 for any free port")
        if self.max_redo not in (1, 2):
            raise ConfigError(f"max_redo is {self.max_redo}: give 1 or 2")
        if self.keep < 1:
            raise ConfigError(f"keep is {self.keep}: give 1 or more durable checkpoints to keep")
        if not 65_536 <= self.max_message <= 1 << 30:
            raise ConfigError(f"max_message is {self.max_message} bytes: give 65536 to {1 << 30}")

    @property
    def limits(self) -> Limits:
        """Every time-out, in seconds."""
        return Timeouts(timeout=self.timeout).limits()

    @property
    def membership(self) -> MembershipConfig:
        """The rules of the pure part."""
        return MembershipConfig(
            world=self.world,
            on_no_spare=self.on_no_spare,
            no_spare=self.limits.no_spare,
            max_swaps_per_step=self.max_swaps_per_step,
            max_restarts=self.max_restarts,
            refill=self.refill,
        )

    @property
    def tls(self) -> control.Tls | None:
        """Server side credentials, or None for plain connections."""
        if not (self.certificate or self.key or self.client_ca):
            return None
        tls = control.Tls(certificate=self.certificate, key=self.key, ca=self.client_ca)
        if not tls.certificate:
            raise ConfigError("client_ca is given without certificate and key; give all three")
        return tls


async def serve(
    config: CoordinatorConfig, *, token: str, state: State | None = None, address: str = ""
) -> int:
    """Run the coordinator until its run is over; returns the run's exit code.

    ``state`` and ``address`` come from a coordinator that died. Raises ``PlanariaError`` with one
    line where it cannot begin.
    """
    resumed = state is not None
    if state is None:
        publish.sweep(config.out)
        durable = publish.published(config.out)
        state = State(config=config.membership, durable=durable[-1] if durable else None)
    _check_free(config.host, config.port)
    server = grpc.aio.server(
        interceptors=(TokenCheck(token, lambda who, reason: desk.refused(who, reason)),),
        options=control.options(
            max_message=config.max_message, keepalive=max(1.0, config.limits.silence)
        ),
    )
    address = _bind(server, config, known=address)
    book = journal.Journal(config.out / journal.JOURNAL_FILE)
    header = store.Header(config=_plain(config), run=config.run, address=address)
    desk = ControlDesk(
        state,
        run=config.run,
        token=token,
        out=config.out,
        spares=config.spares,
        keep=config.keep,
        limits=config.limits,
        book=book,
        store=store.Store(config.out, header),
    )
    server.add_generic_rpc_handlers((handlers(desk),))
    await server.start()
    contact = control.Contact(
        address=address, run=config.run, pid=os.getpid(), tls=config.tls is not None
    )
    try:
        control.write_contact(config.out, contact, token)
    except OSError as error:
        raise UserError(
            f"out {config.out} cannot be written ({error.strerror}); give another folder with --out"
        ) from None
    desk.begin(address=address, resumed=resumed)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, desk.interrupt, number)
    looking = asyncio.create_task(_look(desk, config.limits.ping))
    try:
        code = await desk.over
        await desk.emptied(seconds=LEAVE)
        await desk.ending.finished(seconds=SUM_UP)
        await asyncio.to_thread(publish.sweep, config.out)
    finally:
        looking.cancel()
        desk.close()
        await server.stop(grace=0.2)
        # A full disk refuses even these, and the run's exit code is known by now.
        with contextlib.suppress(OSError):
            book.close()
        for name in (control.CONTACT_FILE, control.TOKEN_FILE, store.STATE_FILE):
            with contextlib.suppress(OSError):
                (config.out / name).unlink(missing_ok=True)
    return code


def _bind(server: grpc.aio.Server, config: CoordinatorConfig, *, known: str) -> str:
    """Take the port; the address to tell others, which is ``known`` to them after a resumption."""
    where = f"{_bracketed(config.host)}:{config.port}"
    tls = config.tls
    try:
        if tls is None:
            port = server.add_insecure_port(where)
        else:
            port = server.add_secure_port(where, tls.server())
    except RuntimeError as error:
        raise UserError(f"cannot listen on {where}: {error}; choose another host or port") from None
    host = config.advertise or config.host
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return known or f"{_bracketed(host)}:{port}"


async def _look(desk: ControlDesk, ping: float) -> None:
    while True:
        await asyncio.sleep(ping)
        try:
            desk.look()
        except Exception as error:
            desk.fail(error)
            return


def _check_free(host: str, port: int) -> None:
    """One line of ours instead of gRPC's several where the port is taken."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: a connection of the last coordinator that lingers is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        if port:
            reason = f"port {port} on {host} cannot be used: {error.strerror}"
            raise UserError(f"{reason}; choose another --port, or 0 for any free one") from None
        raise UserError(
            f"cannot listen on host {host}: {error.strerror}; give an address of this machine"
        ) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _plain(config: CoordinatorConfig) -> dict[str, str | int | float | bool | None]:
    values = dataclasses.asdict(config)
    values["out"] = str(config.out)
    values["token_fd"] = None
    return values


def start(config: CoordinatorConfig) -> int:
    """A new run, with the token of its launcher or one of its own; returns the exit code."""
    token = control.token_from(fd=config.token_fd) or secrets.token_urlsafe(32)
    config = dataclasses.replace(config, run=config.run or secrets.token_hex(4))
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out {config.out} cannot be made: {error.strerror}; choose another folder"
        ) from None
    with _alone(config.out):
        return asyncio.run(serve(config, token=token))


@contextlib.contextmanager
def _alone(out: Path) -> Generator[None]:
    """One run in ``out``, and one in its folder of checkpoints, which may be a link that two share."""
    with contextlib.ExitStack() as held:
        held.enter_context(lock.hold(out))
        checkpoints = publish.prepare(out)
        if checkpoints.is_symlink():
            held.enter_context(lock.hold(checkpoints))
        yield


def resume(out: Path) -> int:
    """Take over the run in ``out`` on the port it had; returns the exit code."""
    header, state = store.read(out)
    contact, token = control.read_contact(out)
    if _alive(contact.pid):
        raise UserError(
            f"the coordinator of {out} is alive (pid {contact.pid}); end it before another takes over"
        )
    _ = control.token_from()
    values: dict[str, Any] = {**header.config, "out": out, "run": header.run}
    values["port"] = int(header.address.rpartition(":")[2])
    config = CoordinatorConfig(**values)
    with _alone(out):
        return asyncio.run(serve(config, token=token, state=state, address=header.address))


def _alive(pid: int) -> bool:
    """Whether ``pid`` is a coordinator that runs; a zombie is none."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"planaria.runtime.coordinator" in command
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; a ``PlanariaError`` becomes its one line and its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["--resume"]:
            if len(arguments) != 2:
                raise UserError("--resume takes one argument: the --out folder of the run")
            return resume(Path(arguments[1]))
        return start(
            tyro.cli(CoordinatorConfig, args=arguments, prog="planaria.runtime.coordinator")
        )
    except PlanariaError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
