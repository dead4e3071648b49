"""Spares that would not hear it are not called, over real processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.support.control_plane import ClientProcess, coordinator, wait_for

from planaria.runtime.coordinator import journal
from planaria.runtime.coordinator.status import status


def test_a_stopped_spare_is_passed_over_when_an_owner_is_lost(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--world", "2", "--timeout", "12", "--no-refill") as process:
        clients: dict[str, ClientProcess] = {}
        try:
            for name in ("w0", "w1", "s0", "s1"):
                clients[name] = ClientProcess(process.ready(), name)
                if name in ("w1", "s0"):  # the owners first, then the spare whose turn it is
                    wait_for(lambda: status(tmp_path).phase == "training" or None)
                if name == "s0":
                    wait_for(lambda: status(tmp_path).spares == ("s0",) or None)
            wait_for(lambda: status(tmp_path).spares == ("s0", "s1") or None)
            clients["s0"].process.send_signal(signal.SIGSTOP)
            # Nobody needs it: its silence is no loss.
            time.sleep(1.5)
            assert process.entries(journal.Detected) == []
            clients["w1"].process.kill()
            wait_for(lambda: len(process.entries(journal.Detected)) == 2 or None)
            # On a machine without time to spare its silence may be found only once it is called.
            found = sorted((d.worker, d.how) for d in process.entries(journal.Detected))
            assert found == [("s0", "silence"), ("w1", "stream")]
            owners = {"w0", "s1"}
            wait_for(lambda: {row.owner for row in status(tmp_path).shards} == owners or None)
            wait_for(lambda: status(tmp_path).phase == "training" or None)
        finally:
            for client in clients.values():
                client.close()
