"""Who is in the run, who owns what: a pure function from an event to the next state.

Events and actions are in :mod:`.events`, :class:`State` and :class:`Transition` in :mod:`.state`.
"""

from __future__ import annotations

from collections.abc import Iterator

from planaria.runtime.events import Attached, Broadcast
from planaria.runtime.messages import Worker
from planaria.runtime.state import MembershipConfig, State, Transition

__all__ = ["MembershipConfig", "State", "Transition", "recipients", "refusal"]


def recipients(state: State, broadcast: Broadcast) -> Iterator[Worker]:
    """The workers of ``state`` that ``broadcast`` goes to."""
    everyone = state.owners.values() if broadcast.to == "owners" else state.members.keys()
    return (worker for worker in everyone if worker not in broadcast.but)


def refusal(state: State, event: Attached) -> str | None:
    """Why this worker may not attach, as one line for its ``Hello``; None where it may."""
    if state.phase == "ended":
        return f"the run has ended: {state.end}"
    fenced = state.fenced.get(event.worker)
    if fenced is not None:
        return f"worker {event.worker} was declared lost ({fenced}); start one with a new name"
    for what, mine, theirs in (
        ("configuration", event.config, state.run_config),
        ("version", event.version, state.run_version),
    ):
        if theirs and mine != theirs:
            return (
                f"worker {event.worker} has {what} {mine or 'none'}, its run has {theirs}; "
                "start it with the script, arguments and versions of the run"
            )
    return None
