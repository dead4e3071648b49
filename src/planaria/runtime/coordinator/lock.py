"""``OUT/.lock``: one run at a time in a folder.

The kernel gives the lock back when its holder dies, however it dies, so none is ever left over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from planaria.errors import UserError

LOCK_FILE = ".lock"
_UNKNOWN = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK})
"""What a shared file system without locks says; a run has to be possible there, too."""


@contextlib.contextmanager
def hold(out: Path) -> Generator[None]:
    """Keep ``out`` for one run while inside.

    Raises :class:`UserError` where another one lives there, or where the folder cannot be written.
    """
    path = out / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(
            f"out {out} cannot be written ({error.strerror}); give another folder with --out"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise UserError(f"a run lives in {out} (pid {pid}): choose another --out") from None
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
        with contextlib.suppress(OSError):  # a full disk: the number is for the message only
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def check(out: Path) -> None:
    """Raise :class:`UserError` where a run lives in ``out``; a folder that is not there is free."""
    if (out / LOCK_FILE).exists():
        with hold(out):
            pass
