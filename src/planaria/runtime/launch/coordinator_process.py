"""The coordinator as the launcher sees it: a child process that is started, watched and ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

from planaria.errors import RunError, UserError
from planaria.runtime.control import protocol as control
from planaria.runtime.launch.config import LaunchConfig
from planaria.runtime.launch.fleet import describe_code

_START = 30.0
"""Seconds from start to listening; it takes well under one where the machine is not overloaded."""
_RESTARTS = 3
"""How often a coordinator that dies is started again in one run; our choice."""
_LEAVE = 600.0
"""Seconds for it to write its summary, as long as that of a long run takes, and leave after the run
has ended."""
_END = 30.0
"""The same after SIGTERM, where the run has not ended for it; our choice."""
_PR_SET_PDEATHSIG = 1


class CoordinatorProcess:
    """``python -m planaria.runtime.coordinator`` for one run.

    It has a session of its own, so that Ctrl-C does not reach it, and a parent-death signal, so
    that it does not outlive its launcher. Its output goes to ``OUT/logs/coordinator.log``.
    """

    def __init__(self, config: LaunchConfig, *, run: str, token: str) -> None:
        self.log = config.logs / "coordinator.log"
        self._config = config
        self._run = run
        self._token = token
        self._restarts = 0
        self._process = self._popen(_options(config, run=run))

    async def ready(self) -> str:
        """Its address, once it listens. Raises its own one line where it cannot start."""
        end = time.monotonic() + _START
        while time.monotonic() < end:
            code = self._process.poll()
            if code is not None:
                line = self._last_line()
                raise (UserError if code == 2 else RunError)(line)
            with contextlib.suppress(UserError):
                contact, _ = control.read_contact(self._config.out)
                if contact.pid == self._process.pid:
                    return contact.address
            await asyncio.sleep(0.01)
        raise RunError(f"the coordinator does not listen after {_START:g} s; see {self.log}")

    async def wait(self) -> str:
        """How it ended, in words, as soon as it has."""
        return describe_code(await asyncio.to_thread(self._process.wait))

    async def restart(self) -> bool:
        """Start it again where the old one was, from what it has stored; False where it may not."""
        if self._restarts >= _RESTARTS or (self._process.poll() or 0) >= 0:
            return False  # it left by its own decision, or this does not help
        self._restarts += 1
        self._process = self._popen(["--resume", str(self._config.out)])
        try:
            await self.ready()
        except (UserError, RunError):
            return False
        return True

    def end(self, *, over: bool) -> None:
        """Let it leave; make it, where it does not, or where the run is not ``over`` for it.

        Blocks until the summary is written.
        """
        patience = _LEAVE if over else 0.0
        for number, seconds in ((None, patience), (signal.SIGTERM, _END), (signal.SIGKILL, 5.0)):
            if number is not None:
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                return

    def _popen(self, options: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, control.TOKEN_ENV: self._token}
        libc = ctypes.CDLL(None)

        def die_with_launcher() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        try:
            opened = self.log.open("ab")
        except OSError as error:
            raise UserError(
                f"log {self.log} cannot be written ({error.strerror}); give another folder with --out"
            ) from None
        with opened as log:
            return subprocess.Popen(
                [sys.executable, "-m", "planaria.runtime.coordinator", *options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # Sets one kernel attribute and takes no lock.
                preexec_fn=die_with_launcher,
            )

    def _last_line(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return text.splitlines()[-1] if text else f"the coordinator ended at once; see {self.log}"


def _options(config: LaunchConfig, *, run: str) -> list[str]:
    """Its command line; the token goes through the environment."""
    values: dict[str, object] = {
        "out": config.out,
        "run": run,
        "world": config.workers,
        "spares": config.spares,
        "host": config.host,
        "port": config.port,
        "timeout": config.timeout,
        "max-redo": config.max_redo,
        "on-no-spare": config.on_no_spare,
        "max-restarts": config.max_restarts,
        "certificate": config.certificate or None,
        "key": config.key or None,
        "client-ca": config.ca if config.client_certificate else None,
    }
    given = [(name, value) for name, value in values.items() if value is not None]
    refill = "--refill" if config.refill else "--no-refill"
    return [*(item for name, value in given for item in (f"--{name}", str(value))), refill]
