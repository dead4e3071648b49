"""Tokens, contacts and keys, without a coordinator process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests.support.control_plane import invitation

from planaria.errors import ConfigError, EpochSuperseded, UserError
from planaria.runtime.control import caller
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import store
from planaria.runtime.coordinator.keys import EpochKeys
from planaria.runtime.membership.rules import MembershipConfig, State


def pipe_with(text: str) -> int:
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    return reading


def test_a_token_comes_by_descriptor_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(control.TOKEN_ENV, raising=False)
    assert control.token_from() is None
    assert control.token_from(fd=pipe_with("0123456789abcdef\n")) == "0123456789abcdef"
    monkeypatch.setenv(control.TOKEN_ENV, "fedcba9876543210")
    assert control.token_from() == "fedcba9876543210"
    assert control.TOKEN_ENV not in os.environ, "children must not inherit it"
    with pytest.raises(ConfigError) as caught:
        control.token_from(fd=pipe_with("short"))
    assert str(caught.value) == (
        "the token has 5 characters; give 16 to 256 printable ASCII characters"
    )
    with pytest.raises(ConfigError, match=r"^the token cannot be read from descriptor 9999: "):
        control.token_from(fd=9999)


def test_an_invitation_does_not_show_its_token() -> None:
    shown = repr(invitation("127.0.0.1:1", "w0", token="very-secret-token"))
    assert shown == "Invitation(address='127.0.0.1:1', run='test', worker='w0')"


def test_messages_are_checked_when_they_are_read() -> None:
    data = control.encode(control.Get(epoch=1, key="k", timeout=2.0))
    assert control.decode(data, control.Get).key == "k"
    with pytest.raises(ValueError, match=r"^3 bytes are not a message of this service: "):
        control.decode(b"\xc1ab", control.Get)
    with pytest.raises(ValueError, match=r"Invalid value 'Fire'"):
        control.decode(b"\x81\xa4type\xa4Fire", control.Requested)


def test_tls_files_have_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        control.Tls(ca=str(tmp_path / "ca.pem"))
    assert str(caught.value) == (
        f"TLS ca {tmp_path}/ca.pem cannot be read; give a readable PEM file"
    )


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        control.read_contact(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no run to talk to (No such file or directory: "
        f"{tmp_path}/coordinator.json); give the --out folder of a run that was started"
    )
    contact = control.Contact(address="127.0.0.1:5", run="r", pid=3)
    control.write_contact(tmp_path, contact, "0123456789abcdef")
    assert control.read_contact(tmp_path) == (contact, "0123456789abcdef")
    (tmp_path / control.CONTACT_FILE).write_text("{}")
    with pytest.raises(UserError, match=r"coordinator\.json is damaged \(Object missing required"):
        control.read_contact(tmp_path)


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no coordinator to take over \(No such file"):
        store.read(tmp_path)
    header = store.Header(config={"world": 2}, run="r", address="127.0.0.1:5")
    state = State(config=MembershipConfig(world=2), epoch=3)
    kept = store.Store(tmp_path, header)
    kept.flush(state)
    assert store.read(tmp_path) == (header, state)
    (tmp_path / store.STATE_FILE).write_bytes(b"\x80")
    with pytest.raises(UserError, match=r"coordinator\.state is damaged \("):
        store.read(tmp_path)


def test_keys_are_bounded_and_belong_to_one_epoch() -> None:
    async def use() -> None:
        keys = EpochKeys(epoch=1, max_bytes=100)
        keys.put(1, "a", bytes(60))
        keys.put(1, "a", bytes(90))
        with pytest.raises(UserError) as caught:
            keys.put(1, "b", bytes(20))
        assert str(caught.value) == (
            "the keys of epoch 1 would take over 100 bytes with 'b'; "
            "state goes through the data plane"
        )
        keys.put(1, "b", bytes(8))
        assert keys.check(1, ["a", "b"])
        waits = [asyncio.create_task(keys.get(1, ["a", key], timeout=5.0)) for key in "xxy"]
        await asyncio.sleep(0)
        keys.begin(2)
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert [str(error) for error in ended] == [
            "epoch 1 is superseded: the run is in epoch 2"
        ] * 3
        assert all(isinstance(error, EpochSuperseded) for error in ended)
        assert not keys.check(2, ["a"])

    asyncio.run(use())


def test_what_a_failed_stream_has_not_taken_is_kept() -> None:
    queue: SimpleQueue[tuple[bytes, bool] | None] = SimpleQueue()
    for item in ((b"hello", False), (b"a", True), (b"pong", False), (b"b", True), None):
        queue.put(item)
    taken: list[bytes] = []
    sent = caller._drain(queue, taken)
    assert [next(sent), next(sent)] == [b"hello", b"a"]
    assert (taken, list(caller._rest(queue))) == ([b"a"], [b"b"])
