"""Faults: their text, their errors, and that they are real signals that fire once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from planaria.errors import UserError
from planaria.runtime.inject import PHASES, Fault, Injector, parse
from planaria.runtime.messages import Injected

SYNTAX = "write kill|stop:worker=W|node=N,step=S,phase=P"
EXAMPLE = f"{SYNTAX}, for example kill:worker=1,step=7,phase=backward"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_text_of_a_fault_comes_back(action: str, phase: str) -> None:
    text = f"{action}:worker=3,step=12,phase={phase}"
    fault = parse(text, workers=4)
    assert fault == Fault(action=action, worker=3, step=12, phase=phase)  # pyright: ignore
    assert str(fault) == text


def test_order_of_fields_is_free_and_a_node_can_be_named() -> None:
    assert str(parse("stop:phase=data, step=2 ,node=n-1")) == "stop:node=n-1,step=2,phase=data"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "explode:worker=1",
            f"fault 'explode:worker=1': {EXAMPLE}",
        ),
        ("kill", f"fault 'kill': {EXAMPLE}"),
        (
            "kill:worker=1,step=2,phase=lunch",
            "fault 'kill:worker=1,step=2,phase=lunch': phase 'lunch' is unknown; use data, "
            "forward, backward, collective, optimizer, capture, replicate, commit",
        ),
        (
            "kill:worker=1,step=2",
            f"fault 'kill:worker=1,step=2': phase is missing; {SYNTAX}",
        ),
        (
            "kill:worker=1,phase=data",
            f"fault 'kill:worker=1,phase=data': step is missing; {SYNTAX}",
        ),
        (
            "kill:worker=1,step=0,phase=data",
            "fault 'kill:worker=1,step=0,phase=data': step 0 is below 1, the first step",
        ),
        (
            "kill:worker=-1,step=1,phase=data",
            "fault 'kill:worker=-1,step=1,phase=data': worker -1 is below 0, the first one",
        ),
        (
            "kill:worker=4,step=1,phase=data",
            "fault 'kill:worker=4,step=1,phase=data': worker 4 does not exist; "
            "this run has workers 0 to 3",
        ),
        (
            "kill:worker=one,step=1,phase=data",
            "fault 'kill:worker=one,step=1,phase=data': worker 'one' is not a whole number",
        ),
        (
            "kill:step=1,phase=data",
            f"fault 'kill:step=1,phase=data': name either worker=W or node=N; {SYNTAX}",
        ),
        (
            "kill:worker=1,node=a,step=1,phase=data",
            f"fault 'kill:worker=1,node=a,step=1,phase=data': name either worker=W or node=N; "
            f"{SYNTAX}",
        ),
        (
            "kill:worker=1,rank=2,step=1,phase=data",
            f"fault 'kill:worker=1,rank=2,step=1,phase=data': 'rank=2' is not understood; {SYNTAX}",
        ),
        (
            "kill:worker=1,worker=2,step=1,phase=data",
            f"fault 'kill:worker=1,worker=2,step=1,phase=data': worker is given twice; {SYNTAX}",
        ),
        (
            "kill:node=a b,step=1,phase=data",
            "fault 'kill:node=a b,step=1,phase=data': node 'a b' is no node name; "
            "use letters, digits, '.', '_' and '-'",
        ),
    ],
)
def test_bad_fault_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, workers=4)
    assert str(caught.value) == line
    assert caught.value.exit_code == 2


CHILD = """
import sys
from planaria.runtime.inject import Injector, parse

def announce(record):
    print(record.fault, record.step, record.phase, flush=True)

faults = map(parse, sys.argv[3:])
injector = Injector(faults, shard=int(sys.argv[1]), node=sys.argv[2], announce=announce)
for step in (1, 2, 3):
    for phase in ("data", "backward", "commit"):
        injector.at(step, phase)
print("end", flush=True)
"""


def spawn(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_kill_is_announced_and_is_sigkill() -> None:
    child = spawn("1", "here", "kill:worker=1,step=2,phase=backward")
    out, _ = child.communicate(timeout=30)
    assert out == "kill:worker=1,step=2,phase=backward 2 backward\n"
    assert child.returncode == -signal.SIGKILL


def test_stop_is_sigstop_and_does_not_fire_again() -> None:
    child = spawn("0", "here", "stop:node=here,step=1,phase=data")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    os.kill(child.pid, signal.SIGCONT)
    out, _ = child.communicate(timeout=30)
    assert out == "stop:node=here,step=1,phase=data 1 data\nend\n"


def test_only_the_first_owner_is_hit() -> None:
    fault = parse("kill:worker=2,step=1,phase=data")
    announced: list[Injected] = []
    for shard in (0, 1, None):
        injector = Injector([fault], shard=shard, node="n", announce=announced.append)
        assert injector.waiting == ()
        injector.at(1, "data")
    assert announced == []
    assert Injector([fault], shard=2, node="n", announce=announced.append).waiting == (fault,)


def test_fires_once_when_threads_arrive_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # The signal alone is taken out: eight threads race for one fault.
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    announced: list[Injected] = []
    injector = Injector(
        [parse("kill:worker=0,step=1,phase=capture")],
        shard=0,
        node="n",
        announce=announced.append,
    )
    gate = threading.Barrier(8)

    def arrive() -> None:
        gate.wait()
        injector.at(1, "capture")

    threads = [threading.Thread(target=arrive) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent == [(os.getpid(), signal.SIGKILL)]
    assert len(announced) == 1
