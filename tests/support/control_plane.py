"""A real coordinator process and real client processes on loopback, for tests of the control plane."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from planaria.runtime.control import protocol as control
from planaria.runtime.control.member import Member
from planaria.runtime.coordinator import journal

TOKEN = "a-token-of-the-tests-0123456789"
T = TypeVar("T")


def wait_for(what: Callable[[], T | None], *, seconds: float = 20.0) -> T:
    """The first true value of ``what()``; fails with its source after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = what()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what.__qualname__} did not come true within {seconds:g} s")


class CoordinatorProcess:
    """``python -m planaria.runtime.coordinator``."""

    def __init__(self, out: Path, *options: str, token: str = TOKEN) -> None:
        self.out = out
        self.token = token
        self.started = time.monotonic()
        self.process = self._popen("--out", str(out), "--run", "test", *options)

    def _popen(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "planaria.runtime.coordinator", *arguments],
            env={**os.environ, control.TOKEN_ENV: self.token},
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> str:
        """Its address once it listens."""

        def contact() -> str | None:
            assert self.process.poll() is None, self.errors()
            try:
                found, _ = control.read_contact(self.out)
            except Exception:
                return None
            return found.address if found.pid == self.process.pid else None

        return wait_for(contact)

    def resume(self) -> None:
        self.process = self._popen("--resume", str(self.out))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def entries(self, kind: type[journal.Entry] = journal.Entry) -> list[journal.AnyEntry]:
        path = self.out / journal.JOURNAL_FILE
        return [entry for entry in journal.read(path) if isinstance(entry, kind)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextmanager
def coordinator(out: Path, *options: str) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(out, *options)
    try:
        process.ready()
        yield process
    finally:
        process.close()


def invitation(
    address: str,
    worker: str,
    *,
    token: str = TOKEN,
    run: str = "test",
    config: str = "c",
    version: str = "v",
    node: str = "n0",
    rank: int | None = None,
    ca: str = "",
) -> control.Invitation:
    return control.Invitation(
        address=address,
        token=token,
        run=run,
        worker=worker,
        node=node,
        config=config,
        version=version,
        rank=rank,
        ca=ca,
    )


class ClientProcess:
    """A process with one member that is ready, answers pings and prints what it is told, as JSON."""

    def __init__(self, address: str, worker: str, *options: str) -> None:
        self.worker = worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.control_plane", address, worker, *options],
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> dict[str, object]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, f"{self.worker} has ended with {self.process.wait()}"
        return json.loads(text)

    def until(self, kind: str) -> dict[str, object]:
        while (line := self.line())["type"] != kind:
            pass
        return line

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def own(member: Member, *, out: IO[str]) -> None:
    """Take part in epochs as an owner without state does: report, restore, commit generation 0."""
    from planaria.runtime import messages

    shards: dict[int, int] = {}

    def tell(message: messages.Message) -> None:
        import msgspec

        out.write(msgspec.json.encode(message).decode() + "\n")
        out.flush()

    def assigned(message: messages.Assign) -> None:
        shards[0] = message.shard
        tell(message)
        # A worker of these tests holds everything, so that every plan has a source.
        member.send(
            messages.Report(
                epoch=message.epoch,
                shard=message.shard,
                live=0,
                clean=True,
                captured=(0,),
            )
        )

    def broken(message: messages.Break) -> None:
        tell(message)
        member.send(
            messages.Report(epoch=message.epoch, shard=shards[0], live=0, clean=True, captured=(0,))
        )

    def planned(message: messages.Plan) -> None:
        tell(message)
        member.send(
            messages.Restored(
                epoch=message.epoch, generation=0, phases={"drain": 0.01, "rebuild": 0.02}
            )
        )
        member.send(messages.Committed(epoch=message.epoch, shard=shards[0], generation=0, bytes=7))

    member.on(messages.Assign, assigned)
    member.on(messages.Break, broken)
    member.on(messages.Plan, planned)
    for kind in (messages.Released, messages.AllCommitted, messages.Stop, messages.Fence):
        member.on(kind, tell)
    member.on_gone(lambda reason: tell(messages.Failed(reason=reason)))
    member.send(messages.Ready())


def _main(arguments: Sequence[str]) -> None:
    address, worker, *options = arguments
    member = Member(invitation(address, worker, node=options[0] if options else "n0"))
    own(member, out=sys.stdout)
    member.closed.wait()
    time.sleep(0.2)
    if member.gone is None:
        member.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
