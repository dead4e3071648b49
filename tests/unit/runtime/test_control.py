"""The control plane over real processes: one coordinator, members here and in other processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.control_plane import (
    TOKEN,
    ClientProcess,
    CoordinatorProcess,
    coordinator,
    invitation,
    wait_for,
)

from planaria.errors import (
    CommError,
    ConfigError,
    EpochSuperseded,
    JoinError,
    UserError,
)
from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.control.caller import Caller
from planaria.runtime.control.link import LauncherLink
from planaria.runtime.control.member import Member, Whereabouts
from planaria.runtime.coordinator import journal, lock, publish
from planaria.runtime.coordinator.status import show, status
from planaria.runtime.coordinator.summary import read_summary
from planaria.runtime.launch.config import contact


class Here:
    """A member of this process that notes what it is told."""

    def __init__(self, address: str, worker: str, **fields: str) -> None:
        self.told: list[messages.Message] = []
        self.gone: list[str] = []
        self.member = Member(invitation(address, worker, **fields), attach_timeout=10.0)
        for kind in (
            messages.Assign,
            messages.Break,
            messages.Plan,
            messages.Released,
            messages.AllCommitted,
            messages.Stop,
            messages.Fence,
            messages.SaveDurable,
        ):
            self.member.on(kind, self.told.append)
        self.member.on_gone(self.gone.append)

    def first(self, kind: type[messages.Message], epoch: int | None = None) -> messages.Message:
        def find() -> messages.Message | None:
            for message in list(self.told):
                if isinstance(message, kind) and epoch in (None, getattr(message, "epoch", None)):
                    return message
            return None

        return wait_for(find)

    def ready(self) -> None:
        self.member.send(messages.Ready())

    def report(self, epoch: int, shard: int) -> None:
        self.member.send(
            messages.Report(epoch=epoch, shard=shard, live=0, clean=True, captured=(0,))
        )

    def restored(self, epoch: int, shard: int, generation: int = 0) -> None:
        self.member.send(messages.Restored(epoch=epoch, generation=generation, phases={}))
        self.member.send(messages.Committed(epoch=epoch, shard=shard, generation=generation))

    def commit(self, epoch: int, shard: int, generation: int, size: int = 0) -> None:
        self.member.send(
            messages.Committed(epoch=epoch, shard=shard, generation=generation, bytes=size)
        )


def train(*here: Here) -> int:
    """Bring members, one for each shard, into training; the epoch."""
    for one in here:
        one.ready()
    assigned = [one.first(messages.Assign) for one in here]
    epoch = assigned[0].epoch
    for one, message in zip(here, assigned, strict=True):
        one.report(epoch, message.shard)
    for one, message in zip(here, assigned, strict=True):
        one.first(messages.Plan)
        one.restored(epoch, message.shard)
    for one in here:
        one.first(messages.Released)
        one.first(messages.AllCommitted)
    return epoch


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator of one shard."""
    with coordinator(tmp_path / "run", "--world", "1", "--timeout", "4") as process:
        yield process


def test_contact_is_private_and_the_process_has_no_torch(plain: CoordinatorProcess) -> None:
    contact, token = control.read_contact(plain.out)
    assert (contact.pid, contact.run, token) == (plain.process.pid, "test", TOKEN)
    for name in (control.CONTACT_FILE, control.TOKEN_FILE, "coordinator.state"):
        assert (plain.out / name).stat().st_mode & 0o777 == 0o600, name
    maps = Path(f"/proc/{plain.process.pid}/maps").read_text()
    assert "cygrpc" in maps
    assert "libtorch" not in maps
    command = Path(f"/proc/{plain.process.pid}/cmdline").read_text()
    assert TOKEN not in command
    (opened,) = plain.entries(journal.Opened)
    assert (opened.world, opened.address, opened.resumed) == (1, contact.address, False)


def test_who_is_refused_hears_one_line(plain: CoordinatorProcess) -> None:
    address = plain.ready()
    wrong = "wrong token: give the token of this run (OUT/coordinator.token)"
    with pytest.raises(JoinError) as caught:
        Here(address, "w0", token="another-token-0123456789")
    assert str(caught.value) == wrong
    caller = Caller(address, token="another-token-0123456789")
    with pytest.raises(JoinError) as caught:
        caller.call(control.STATUS, control.Look(), control.Status)
    assert str(caught.value) == wrong
    caller.close()
    with pytest.raises(JoinError, match=r"^worker w0 is for run other, this is run test$"):
        Here(address, "w0", run="other")
    first = Here(address, "w0")
    for field, word, value in (("config", "configuration", "d"), ("version", "version", "w")):
        mine = {"config": "c", "version": "v"}[field]
        with pytest.raises(JoinError) as caught:
            Here(address, "w1", **{field: value})
        assert str(caught.value) == (
            f"worker w1 has {word} {value}, its run has {mine}; "
            "start it with the script, arguments and versions of the run"
        )
    with pytest.raises(JoinError, match=r"^worker w0 is attached already; start one with a new"):
        Here(address, "w0")
    # Who has a wrong token gets one line a minute, and not one for each call.
    refused = [entry.who for entry in plain.entries(journal.Refused)]
    assert refused[1:] == ["w0", "w1", "w1", "w0"]
    assert first.member.welcome.world == 1
    first.member.close()


def test_a_run_that_forms_has_nothing_to_save(plain: CoordinatorProcess) -> None:
    caller = Caller(plain.ready(), token=TOKEN)
    with pytest.raises(UserError) as caught:
        caller.call(control.REQUEST, control.SaveCheckpoint(reason="now"), control.Done)
    assert str(caught.value) == (
        "the run is forming: a durable checkpoint can be written while it trains; ask again then"
    )
    caller.close()


def test_bodies_that_are_no_messages_cost_their_sender_one_line(plain: CoordinatorProcess) -> None:
    caller = Caller(plain.ready(), token=TOKEN)
    with pytest.raises(UserError) as caught:
        caller.call(control.PUT, control.Check(epoch=1, keys=()), control.Done)
    assert str(caught.value) == (
        "14 bytes are not a message of this service: Object missing required field `key`"
    )
    with pytest.raises(CommError) as comm:
        caller.call(control.PUT, control.Put(epoch=0, key="k", value=bytes(17 << 20)), control.Done)
    assert str(comm.value) == (
        "Put of 17825817 bytes is over the bound of 16777216; state goes through the data plane"
    )
    caller.close()


def test_a_port_in_use_and_bad_values_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        process = CoordinatorProcess(tmp_path, "--world", "1", "--port", str(port))
        assert process.process.wait(20) == 2
        assert process.errors() == (
            f"port {port} on 127.0.0.1 cannot be used: Address already in use; "
            "choose another --port, or 0 for any free one\n"
        )
        process.close()
    assert not (tmp_path / control.CONTACT_FILE).exists()
    process = CoordinatorProcess(tmp_path, "--world", "1", token="short")
    assert process.process.wait(20) == 2
    assert process.errors() == (
        "the token has 5 characters; give 16 to 256 printable ASCII characters\n"
    )
    process.close()


def test_keys_wait_wake_and_end_with_their_epoch(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "2", "--timeout", "4") as process:
        address = process.ready()
        a, b, spare = (Here(address, name) for name in "abs")
        epoch = train(a, b)
        spare.ready()
        kv = a.member.kv
        found: list[bytes] = []
        waiter = threading.Thread(target=lambda: found.extend(kv.get_many(epoch, ["x", "y"], 10.0)))
        waiter.start()
        b.member.kv.put(epoch, "x", b"1")
        assert not b.member.kv.has(epoch, ["x", "y"])
        b.member.kv.put(epoch, "y", bytes(5 << 20))
        waiter.join(5)
        assert found == [b"1", bytes(5 << 20)]
        assert [kv.add(epoch, "n", 2), b.member.kv.add(epoch, "n", -5)] == [2, -3]
        with pytest.raises(UserError, match=r"^key 'y' is not a counter: it holds b'"):
            kv.add(epoch, "y", 1)
        with pytest.raises(CommError) as late:
            kv.get_many(epoch, ["x", "z"], 0.1)
        assert "1 of 2 keys of epoch 1 did not come within 0.1 s, 'z' first" in str(late.value)
        ended: list[tuple[float, str]] = []

        def wait() -> None:
            with pytest.raises(EpochSuperseded) as caught:
                kv.get(epoch, "never", 20.0)
            ended.append((time.monotonic(), str(caught.value)))

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.2)
        began = time.monotonic()
        b.member._stream._call.cancel()  # cuts the stream, as a death does
        waiter.join(5)
        assert ended[0][1] == "epoch 1 is superseded: the run is in epoch 2"
        assert ended[0][0] - began < 1.0
        with pytest.raises(EpochSuperseded):
            kv.put(epoch, "x", b"late")
        assert a.first(messages.Break).epoch == 2
        assert spare.first(messages.Assign).shard == 1
        for one in (a, spare):
            one.member._end()


def test_a_killed_process_is_noticed_within_a_tenth_of_a_second(tmp_path: Path) -> None:
    kills = 5
    with coordinator(tmp_path, "--world", "2", "--timeout", "10", "--no-refill") as process:
        address = process.ready()
        clients = [ClientProcess(address, f"w{number}") for number in range(2 + kills)]
        try:
            delays: list[float] = []
            wait_for(lambda: len(status(tmp_path).spares) == kills or None, seconds=60)
            names = {client.worker: client for client in clients}
            for number in range(kills):
                wait_for(lambda: status(tmp_path).phase == "training" or None)
                owners = {row.shard: row.owner for row in status(tmp_path).shards}
                victim = names[owners[number % 2]]
                signalled = time.monotonic()
                victim.process.send_signal(signal.SIGKILL)
                name = victim.worker

                def noticed(name: str = name) -> journal.Detected | None:
                    found = [d for d in process.entries(journal.Detected) if d.worker == name]
                    return found[0] if found else None

                entry = wait_for(noticed)
                assert entry.how == "stream"
                assert entry.shard == number % 2
                delays.append(entry.mono - signalled)
            print(f"noticed after {sorted(delays)} s, median {statistics.median(delays):.4f} s")
            assert statistics.median(delays) < 1.0
            wait_for(lambda: status(tmp_path).phase == "training" or None)
            assert status(tmp_path).spares == ()
            assert status(tmp_path).swaps == kills
        finally:
            for client in clients:
                client.close()


def test_a_stopped_process_is_noticed_by_its_silence(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "2", "--timeout", "12", "--no-refill") as process:
        address = process.ready()
        clients = [ClientProcess(address, f"w{number}") for number in range(3)]
        try:
            wait_for(lambda: status(tmp_path).phase == "training" or None, seconds=60)
            wait_for(lambda: len(status(tmp_path).spares) == 1 or None)
            name = status(tmp_path).shards[1].owner
            victim = next(client for client in clients if client.worker == name)
            signalled = time.monotonic()
            victim.process.send_signal(signal.SIGSTOP)
            (entry,) = wait_for(lambda: process.entries(journal.Detected))
            assert (entry.worker, entry.how, entry.shard) == (name, "silence", 1)
            assert entry.reason.endswith("(limit 0.6 s)")
            assert 0.4 < entry.mono - signalled < 3.0
            wait_for(lambda: status(tmp_path).phase == "training" or None)
            # Awake again, it learns that it is fenced, and nothing else.
            victim.process.send_signal(signal.SIGCONT)
            wait_for(lambda: victim.process.poll() is not None or None)
            assert process.entries(journal.Detected) == [entry]
        finally:
            for client in clients:
                client.close()


def test_pings_are_answered_while_the_training_thread_computes(plain: CoordinatorProcess) -> None:
    here = Here(plain.ready(), "w0")
    here.member.whereabouts = lambda: Whereabouts(step=3, collective=17, inside=True)
    train(here)
    end = time.monotonic() + 3 * here.member.limits.silence
    total = 0
    while time.monotonic() < end:
        total += 1
    assert total > 0
    assert plain.entries(journal.Detected) == []
    assert status(plain.out).shards[0].step == 3
    here.member._end()


def test_a_fault_is_in_the_journal_before_it_may_fire(plain: CoordinatorProcess) -> None:
    here = Here(plain.ready(), "w0")
    here.member.injected(messages.Injected(fault="kill", step=4, phase="backward"))
    (entry,) = plain.entries(journal.Injected)
    assert (entry.worker, entry.fault, entry.step, entry.phase) == ("w0", "kill", 4, "backward")
    here.member.close()


def test_only_what_all_shards_have_written_is_published(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "2", "--timeout", "4", "--keep", "2") as process:
        address = process.ready()
        a, b = Here(address, "a"), Here(address, "b")
        epoch = train(a, b)

        def save(generation: int, error: str | None = None) -> None:
            folder = publish.partial_path(tmp_path, generation, epoch=epoch)
            folder.mkdir(parents=True)
            (folder / ".metadata").touch()
            for shard, one in enumerate((a, b)):
                (folder / f"__{shard}_0.distcp").write_bytes(b"x")
                one.member.send(
                    messages.Durable(
                        epoch=epoch,
                        shard=shard,
                        generation=generation,
                        error=error if shard else None,
                        seconds=0.5,
                    )
                )

        for generation in (2, 4, 6):
            save(generation)
            # The folder has its name a moment before the journal has its line.
            wait_for(
                lambda g=generation: (
                    g in [entry.generation for entry in process.entries(journal.DurableSaved)]
                    or None
                )
            )
        wait_for(lambda: publish.published(tmp_path) == [4, 6] or None)
        assert (tmp_path / "checkpoints/step-6/__1_0.distcp").read_bytes() == b"x"
        save(8, error="No space left on device")
        (failed,) = wait_for(lambda: process.entries(journal.DurableFailed))
        assert failed.generation == 8
        assert failed.reason == (
            "shard 1 could not write the durable checkpoint: No space left on device"
        )
        assert publish.published(tmp_path) == [4, 6]
        assert not publish.partial_path(tmp_path, 8, epoch=epoch).exists()
        saved = process.entries(journal.DurableSaved)
        assert [(entry.generation, entry.seconds) for entry in saved] == [
            (2, 0.5),
            (4, 0.5),
            (6, 0.5),
        ]
        caller = Caller(address, token=TOKEN)
        caller.call(
            control.REQUEST, control.SaveCheckpoint(reason="SIGTERM", then_stop=True), control.Done
        )
        assert a.first(messages.SaveDurable).then_stop
        save(10)
        stop = a.first(messages.Stop)
        assert (stop.reason, stop.exit_code) == (
            "SIGTERM, after the durable checkpoint of generation 10",
            0,
        )
        assert process.process.wait(10) == 0
        assert read_summary(tmp_path).durable == 10
        for one in (a, b, caller):
            getattr(one, "member", one).close()


def test_the_launcher_is_told_and_believed(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "1", "--timeout", "4") as process:
        address = process.ready()
        told: list[control.ToLauncher] = []
        ended: list[str | None] = []
        link = LauncherLink(
            address, token=TOKEN, run="test", node="n0", receive=told.append, ended=ended.append
        )
        link.connect()
        client = ClientProcess(address, "w0")
        link.spawned("w0", pid=client.process.pid)
        spare = Here(address, "w1", node="n1")
        wait_for(lambda: status(tmp_path).phase == "training" or None, seconds=60)
        spare.ready()
        wait_for(lambda: status(tmp_path).spares == ("w1",) or None)
        link.exited("w0", pid=client.process.pid, description="killed by SIGKILL", code=-9)
        (detected,) = wait_for(lambda: process.entries(journal.Detected))
        assert (detected.how, detected.reason) == ("pidfd", "killed by SIGKILL")
        assert spare.first(messages.Assign).epoch == 2
        assert client.until("Fence")["reason"] == "killed by SIGKILL"
        note = link.request(control.SaveCheckpoint(reason="now"))
        assert note == "a durable checkpoint is written after the recovery"
        assert not [m for m in told if isinstance(m, control.WantSpare)]
        spare.report(2, 0)
        plan = spare.first(messages.Plan, epoch=2)
        spare.restored(2, 0, generation=plan.generation)
        wait_for(lambda: [m for m in told if isinstance(m, control.WantSpare)])
        link.request(control.StopRun(reason="enough", exit_code=1))
        last = wait_for(lambda: [m for m in told if isinstance(m, control.EndRun)])[0]
        assert (last.exit_code, last.reason) == (1, "enough")
        assert spare.first(messages.Stop).exit_code == 1
        assert process.process.wait(10) == 1
        wait_for(lambda: ended == [None] or None)
        client.close()
        link.close()
        spare.member.close()


def test_a_run_ends_with_its_last_launcher(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "1", "--timeout", "4") as process:
        link = LauncherLink(
            process.ready(), token=TOKEN, run="test", node="n0", receive=lambda message: None
        )
        link.connect()
        link.close()
        assert process.process.wait(10) == 1
        summary = read_summary(tmp_path)
        assert summary.reason == "the launcher is gone, and its workers with it"


def test_members_go_on_when_their_coordinator_is_killed_and_started_again(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path, "--world", "2", "--timeout", "8")
    try:
        address = process.ready()
        a, b = Here(address, "a"), Here(address, "b")
        epoch = train(a, b)
        for generation in (1, 2):
            a.commit(epoch, 0, generation)
            b.commit(epoch, 1, generation)
        wait_for(lambda: status(tmp_path).generation == 2 or None)
        folder = publish.partial_path(tmp_path, 2, epoch=epoch)
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
        for shard, one in enumerate((a, b)):
            (folder / f"__{shard}_0.distcp").touch()
            one.member.send(messages.Durable(epoch=epoch, shard=shard, generation=2))
        wait_for(lambda: process.entries(journal.DurableSaved))
        process.kill()
        # Said while nobody is there: heard by the next one.
        a.commit(epoch, 0, 3)
        b.commit(epoch, 1, 3)
        process.resume()
        assert process.ready() == address
        wait_for(lambda: status(tmp_path).generation == 3 or None)
        state = status(tmp_path)
        assert (state.phase, state.epoch, state.swaps) == ("training", epoch, 0)
        assert [row.owner for row in state.shards] == ["a", "b"]
        assert a.member.gone is None
        assert [m.generation for m in a.told if isinstance(m, messages.AllCommitted)][-1] == 3
        attached = process.entries(journal.WorkerAttached)
        assert [(e.worker, e.again) for e in attached] == [
            ("a", False),
            ("b", False),
            *[(e.worker, True) for e in attached[2:]],
        ]
        assert sorted(e.worker for e in attached[2:]) == ["a", "b"]
        assert [e.resumed for e in process.entries(journal.Opened)] == [False, True]
        assert process.entries(journal.DurableFailed) == []
        assert len(process.entries(journal.DurableSaved)) == 1
        # The new one still notices a loss, and the keys of the epoch work.
        a.member.kv.put(epoch, "k", b"v")
        assert b.member.kv.get(epoch, "k", 5.0) == b"v"
        b.member._stream._call.cancel()
        assert a.first(messages.Break).epoch == epoch + 1
        a.member._end()
    finally:
        process.close()


def test_a_coordinator_that_died_in_a_recovery_has_the_owners_regroup(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path, "--world", "2", "--timeout", "8")
    try:
        address = process.ready()
        a, b = Here(address, "a"), Here(address, "b")
        for one in (a, b):
            one.ready()
        for one in (a, b):
            one.first(messages.Assign)
        process.kill()
        process.resume()
        process.ready()
        told = a.first(messages.Break)
        assert (told.epoch, told.reason) == (
            2,
            "the coordinator was started again in the middle of a recovery",
        )
        assert b.first(messages.Break).epoch == 2
        for shard, one in enumerate((a, b)):
            one.report(2, shard)
        for shard, one in enumerate((a, b)):
            one.first(messages.Plan, epoch=2)
            one.restored(2, shard)
        assert a.first(messages.Released).epoch == 2
        for one in (a, b):
            one.member._end()
    finally:
        process.close()


def test_a_communicator_that_fails_without_a_loss_has_the_owners_regroup(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "2", "--timeout", "4") as process:
        address = process.ready()
        a, b = Here(address, "a"), Here(address, "b")
        epoch = train(a, b)
        a.member.send(messages.Broke(epoch=epoch, reason="connection reset"))
        assert b.first(messages.Break).reason == (
            "a communicator failed under a and nobody is lost: connection reset"
        )
        assert process.entries(journal.Detected) == []
        for one in (a, b):
            one.member._end()


def test_a_member_is_told_when_its_coordinator_is_gone_for_good(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path, "--world", "1", "--timeout", "2")
    try:
        address = process.ready()
        here = Here(address, "w0")
        process.kill()
        killed = time.monotonic()
        (reason,) = wait_for(lambda: here.gone)
        assert time.monotonic() - killed < 5.0
        assert reason.startswith(f"no coordinator answered at {address} for 2 s: ")
        assert here.member.closed.wait(1.0)
        with pytest.raises(CommError, match=f"^no coordinator answers at {address} "):
            here.member.kv.put(1, "k", b"v")
        here.member._end()
        assert status(tmp_path).phase == "gone"
    finally:
        process.close()


def test_nobody_there_is_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(JoinError, match=f"^no coordinator answered at {address} for 0.5 s: "):
        Member(invitation(address, "w0"), attach_timeout=0.5)


def test_a_handler_that_raises_ends_the_run(plain: CoordinatorProcess) -> None:
    here = Here(plain.ready(), "w0")

    def broken(message: messages.Assign) -> None:
        raise KeyError("shard")

    here.member.on(messages.Assign, broken)
    here.ready()
    (reason,) = wait_for(lambda: here.gone)
    assert reason == "worker w0 could not handle Assign: KeyError: 'shard'"
    assert plain.process.wait(10) == 1
    assert read_summary(plain.out).reason == reason
    here.member.close()


def test_an_owner_that_ends_too_early_ends_the_run(plain: CoordinatorProcess) -> None:
    here = Here(plain.ready(), "w0")
    train(here)
    here.member.close()
    assert plain.process.wait(10) == 1
    assert read_summary(plain.out).reason.startswith(
        "worker w0 ended by itself while it owned shard 0; "
    )
    assert plain.entries(journal.Detected) == []


def test_scripts_that_never_join_end_well_together(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "2", "--timeout", "4") as process:
        address = process.ready()
        for name in "ab":
            here = Here(address, name)
            here.member.send(messages.Joinless())
            here.member.close()
        assert process.process.wait(10) == 0


def test_tls_checks_the_coordinator(tmp_path: Path) -> None:
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
        f" -keyout {tmp_path}/key.pem -out {tmp_path}/cert.pem",
        shell=True,
        check=True,
        capture_output=True,
    )
    out = tmp_path / "run"
    files = ("--certificate", f"{tmp_path}/cert.pem", "--key", f"{tmp_path}/key.pem")
    with coordinator(out, "--world", "1", "--timeout", "4", *files) as process:
        address = process.ready()
        here = Here(address, "w0", ca=f"{tmp_path}/cert.pem")
        assert here.member.welcome.worker == "w0"
        here.member.kv.put(0, "k", b"v")
        assert show(str(out), tls=control.Tls(ca=f"{tmp_path}/cert.pem")) == 0
        for ask in (lambda: show(str(out)), lambda: contact(str(out))):
            with pytest.raises(UserError) as refused:
                ask()
            assert str(refused.value) == (
                f"the run at {address} speaks TLS; give --ca, the PEM file of the authority that "
                "signed its certificate"
            )
        assert contact(str(out), secure=True)[0] == address
        here.member.close()
        with pytest.raises(JoinError, match=r"^no coordinator answered at"):
            Member(invitation(address, "w1"), attach_timeout=0.5)
    with pytest.raises(ConfigError) as caught:
        control.Tls(certificate=f"{tmp_path}/cert.pem")
    assert str(caught.value) == "TLS certificate is given without its key; give both PEM files"


def test_status_of_a_living_and_of_an_ended_run(
    plain: CoordinatorProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here = Here(plain.ready(), "w0")
    train(here)
    assert show(str(plain.out)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:6] == ["run", "test:", "training;", "step", "0", "is"]
    assert lines[0][6:] == [
        "committed",
        "for",
        "the",
        "one",
        "shard;",
        "swaps:",
        "0,",
        "epoch",
        "1",
    ]
    heads = ["shard", "owner", "node", "holder", "committed", "protected", "at", "step"]
    assert lines[2] == heads
    assert lines[3] == ["0", "w0", "n0", "none", "0", "no", "0"]
    assert lines[4] == ["spares:", "none"]
    address = plain.ready()
    assert status(address, token=TOKEN).run == "test"
    with pytest.raises(UserError, match=f"^{address} asks for the token of its run; give --token-"):
        status(address)
    with pytest.raises(UserError, match=r"^nowhere is neither the folder of a run nor HOST:PORT"):
        status("nowhere")
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no journal\.jsonl$"):
        status(tmp_path)
    here.member.failed("the loss is NaN", exit_code=1)
    assert plain.process.wait(10) == 1
    here.member.close()
    after = status(plain.out)
    assert (after.phase, after.exit_code, after.reason) == ("ended", 1, "the loss is NaN")
    assert show(str(plain.out), as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["phase"] == "ended"
    # What the table shows is in there as well, where it has nothing to tell, too.
    assert (document["exit_code"], document["swaps"], document["spares"]) == (1, 0, [])


def test_a_living_coordinator_is_not_taken_over(plain: CoordinatorProcess) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "planaria.runtime.coordinator", "--resume", str(plain.out)],
        capture_output=True,
        text=True,
        env={**os.environ},
        timeout=30,
    )
    assert second.returncode == 2
    assert second.stderr == (
        f"the coordinator of {plain.out} is alive (pid {plain.process.pid}); "
        "end it before another takes over\n"
    )


def test_a_full_disk_ends_the_run_and_hangs_nobody(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "1") as process:
        a = Here(process.ready(), "a")
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        a.member.send(messages.Ready())
        assert process.process.wait(15) == 1
        wait_for(lambda: [m for m in a.told if isinstance(m, messages.Stop)] or a.member.gone)
        a.member.close()
        line = f"journal {tmp_path}/journal.jsonl cannot be written: File too large"
        assert line in process.errors()


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "1") as process:
        other = CoordinatorProcess(tmp_path, "--world", "1")
        assert other.process.wait(15) == 2
        pid = process.process.pid
        line = f"a run lives in {tmp_path} (pid {pid}): choose another --out"
        assert other.errors() == line + "\n"
        other.close()
        with pytest.raises(UserError, match="a run lives in"):
            lock.check(tmp_path)
    lock.check(tmp_path)
