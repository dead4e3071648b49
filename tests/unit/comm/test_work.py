"""A collective that ends in no other way is given up, and its group is never waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planaria.comm.domain import Domain
from planaria.comm.handle import RebuildableGroup
from planaria.comm.transport import GlooTransport
from planaria.errors import AttemptBroken
from tests.support.polled_kv import PolledKeyValue


class Unshut(GlooTransport):
    """Its sockets stay open, so that an operation hangs as one that gloo has lost does."""

    def free(self, groups: Iterable[Any]) -> int:
        return 0


def two_domains(
    *, timeout: float, rebuild: float = 20.0
) -> tuple[list[Domain], list[RebuildableGroup]]:
    """Two ranks in this process, with a group that stands."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("newest", "1")
    domains = [
        Domain(Unshut(), PolledKeyValue(server.port), timeout=timeout, rebuild=rebuild)
        for _ in range(2)
    ]
    groups = [
        RebuildableGroup(domain, name="g", rank=rank, size=2) for rank, domain in enumerate(domains)
    ]

    def stand(rank: int) -> None:
        domains[rank].begin(1, rank=rank, world=2, solo=False)
        domains[rank].handles["g"] = groups[rank]
        groups[rank].fill()

    other = threading.Thread(target=stand, args=(1,))
    other.start()
    stand(0)
    other.join(20)
    return domains, groups


def test_an_operation_that_gloo_has_lost_is_given_up() -> None:
    domains, groups = two_domains(timeout=4.0)
    value = torch.ones(3)
    work = groups[0].allreduce([value])  # the peer never takes part
    assert (domains[0].entered, domains[0].outstanding) == (1, 1)
    begun = time.monotonic()
    threading.Thread(target=domains[0].supersede, args=(2, "a peer was lost"), daemon=True).start()
    with pytest.raises(AttemptBroken, match=r"^attempt given up: a peer was lost$"):
        work.wait()
    seconds = time.monotonic() - begun
    assert 1.5 < seconds < 3.9
    assert work.is_completed()
    assert domains[0].outstanding == 0
    inner = groups[0].inner
    begun = time.monotonic()
    groups[0].drop()
    # To let it go would wait for gloo's thread, for as long as the operation may take.
    assert domains[0].lost == [inner]
    assert time.monotonic() - begun < 1.0
    domains[0].rest()
    # When gloo's own time-out has come, nobody minds.
    time.sleep(max(0.0, 4.5 - seconds))
    assert value.shape == (3,)
    domains[0].lost.clear()
    groups[1].drop()


def test_who_reported_in_a_living_epoch_does_not_stand_still() -> None:
    """The first plan builds no new groups: after the report that came before it, training goes on
    over the same ones, and what gloo loses there must be given up, too.
    """
    domains, groups = two_domains(timeout=30.0, rebuild=0.5)
    told: list[tuple[int, str]] = []
    domains[0].on_given_up = lambda epoch, reason: told.append((epoch, reason))
    domains[0].rest()
    work = groups[0].allreduce([torch.ones(3)])  # the peer never takes part
    freeing = threading.Thread(
        target=domains[0].supersede, args=(2, "a peer was lost"), daemon=True
    )
    freeing.start()
    begun = time.monotonic()
    with pytest.raises(AttemptBroken, match=r"^attempt given up: a peer was lost$"):
        work.wait()
    assert time.monotonic() - begun < 15.0  # half of what gloo would take
    domains[0].rest()
    freeing.join(20.0)
    groups[0].drop()
    line = "1 collective did not end though its sockets were shut 10 times: given up"
    assert told == [(1, line)]
    groups[1].drop()  # its sockets go, and so the operation ends
    domains[0].lost.clear()


def test_a_receive_that_gloo_has_lost_is_given_up_too() -> None:
    """Such works have no future and end only in ``wait``, of which nobody can be called out."""
    domains, groups = two_domains(timeout=30.0, rebuild=0.5)
    received = groups[0].recv([torch.ones(3)], 1, 0)
    forgotten = groups[0].recv([torch.ones(3)], 1, 1)  # nobody waits for it
    threading.Thread(target=domains[0].supersede, args=(2, "a peer was lost"), daemon=True).start()
    begun = time.monotonic()
    with pytest.raises(AttemptBroken, match=r"^attempt given up: a peer was lost$"):
        received.wait()
    assert received.is_completed()
    assert not forgotten.is_completed()
    domains[0].rest()
    domains[0].close()
    assert time.monotonic() - begun < 15.0
    assert len(domains[0].lost) == 1
    groups[1].drop()
    domains[0].lost.clear()


def test_a_receive_waits_as_long_as_a_collective_may_take() -> None:
    """Not as long as gloo's constructor may, 0.17 s here: a stage may wait for a slow one."""
    _, groups = two_domains(timeout=20.0, rebuild=0.5)
    value = torch.zeros(3)
    received = groups[1].recv([value], 0, 7)

    def later() -> None:
        time.sleep(0.6)
        groups[0].send([torch.arange(3.0)], 1, 7).wait()

    sender = threading.Thread(target=later)
    sender.start()
    assert received.wait()
    sender.join()
    assert value.tolist() == [0.0, 1.0, 2.0]
    for group in groups:
        group.drop()


def test_insides_are_not_dropped_under_a_collective_of_another_thread() -> None:
    """The training thread stands still, so nobody else gives up what a thread beside it waits for."""
    domains, groups = two_domains(timeout=30.0, rebuild=0.5)
    inner = groups[0].inner
    work = groups[0].allreduce([torch.ones(3)])
    assert domains[0].overtake(2, "a peer was lost")
    domains[0].rest()
    begun = time.monotonic()
    domains[0].close()
    assert time.monotonic() - begun < 15.0
    assert work.is_completed()
    assert domains[0].lost == [inner]
    groups[1].drop()
    domains[0].lost.clear()


def test_a_reduce_scatter_has_a_future_and_the_right_part() -> None:
    _, groups = two_domains(timeout=4.0)
    inputs = [torch.arange(6.0), torch.arange(6.0) * 10]
    outputs = [torch.empty(3), torch.empty(3)]
    works = [g.reduce_scatter_single(o, i) for g, o, i in zip(groups, outputs, inputs, strict=True)]
    for work in works:
        assert work.wait()
    assert outputs[0].tolist() == [0.0, 11.0, 22.0]
    assert outputs[1].tolist() == [33.0, 44.0, 55.0]
    assert inputs[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    for group in groups:
        group.drop()
