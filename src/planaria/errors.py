"""The error tree.

Every error that Planaria raises on purpose is a :class:`PlanariaError`. Its message says what went
wrong, with which value, and what to do about it, in one line; the command line prints that line and
nothing else. ``exit_code`` is what the process then ends with: 2 where the user can mend the input,
1 where the run failed.
"""

from __future__ import annotations


class PlanariaError(Exception):
    """Root of the tree. ``exit_code`` is 1 for a failed run and 2 for bad input."""

    exit_code: int = 1


class UserError(PlanariaError):
    """Bad input: a flag, a file, a value. Nothing was started, nothing was written."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration value is out of range or contradicts another one."""


class DataError(UserError):
    """A corpus, a slide or a table cannot be read or holds too little."""


class JoinError(UserError):
    """A worker was refused by its run: wrong token, other version, other configuration."""


class RunError(PlanariaError):
    """The run cannot go on; what was committed is still there."""


class NotRecoverable(RunError):
    """State was lost together with every copy of it, in memory and on disk."""


class NonFiniteLoss(RunError):
    """The loss is NaN or infinite on at least one shard; the attempt was not committed."""


class ChecksumError(RunError):
    """Bytes that arrived differ from bytes that were sent."""


class CheckpointError(RunError):
    """A durable checkpoint could not be written or read."""


class CommError(PlanariaError):
    """Root of communicator errors."""


class AttemptBroken(CommError):
    """A peer was lost: this attempt cannot commit.

    ``Attempt.__exit__`` swallows it, recovery runs, and the loop yields the next attempt. User code
    should let it pass.
    """


class EpochSuperseded(CommError):
    """A newer membership exists; whatever waits for an older one is to be given up."""
