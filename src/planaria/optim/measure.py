"""Starts the workers that measure the optimizers' own arithmetic here; imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from planaria.errors import CommError
from planaria.optim.plan_comm import Arithmetic, Measured

LIMIT = 300.0
"""Seconds after which the measurement is given up."""


def here(
    processes: int, *, workers: int, rows: Sequence[tuple[str, float]]
) -> tuple[float, Measured]:
    """Latency in seconds, and arithmetic of the methods and densities in ``rows``.

    ``processes`` workers of a group of ``workers`` run on this machine at once, over loopback, each
    with the threads that ``OMP_NUM_THREADS`` gives it, else one.

    Errors: :class:`planaria.errors.CommError` where one of them fails, with its last line.
    """
    # As the launcher gives them to workers.
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = max(1, int(given)) if given.isdecimal() else 1
    asked = {"processes": processes, "workers": workers, "rows": rows, "threads": threads}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "planaria.optim.calibrate",
                    json.dumps({**asked, "rank": rank, "store": f"{folder}/store"}),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(processes)
        ]
        try:
            ended = [process.communicate(timeout=LIMIT) for process in running]
        except subprocess.TimeoutExpired as error:
            raise CommError(
                f"the measurement has not ended after {LIMIT:g} s; measure with fewer workers than "
                f"{processes}, or leave --measure out"
            ) from error
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
    for rank, (process, (_, err)) in enumerate(zip(running, ended, strict=True)):
        if process.returncode:
            last = (err.strip().splitlines() or ["it said nothing"])[-1]
            raise CommError(
                f"worker {rank} of the measurement failed ({last}); leave --measure out, or see "
                "planaria doctor"
            )
    found = json.loads(ended[0][0].splitlines()[-1])
    arithmetic = [Arithmetic(**one) for one in found["arithmetic"]]
    return float(found["latency"]), dict(zip(rows, arithmetic, strict=True))
