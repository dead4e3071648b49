"""From a worker's message to the event that membership is told."""

from __future__ import annotations

from planaria.runtime import messages
from planaria.runtime.membership import events
from planaria.runtime.messages import Worker


def event_of(worker: Worker, message: messages.FromWorker) -> events.AnyEvent:
    """The event of ``message``; ``ValueError`` for one that membership is not concerned with."""
    match message:
        case messages.Ready():
            return events.BecameReady(worker=worker)
        case messages.Joinless():
            return events.JoinlessSeen(worker=worker)
        case messages.Report():
            return events.Reported(worker=worker, message=message)
        case messages.Restored():
            return events.RestoredBy(worker=worker, message=message)
        case messages.Committed():
            return events.CommittedBy(worker=worker, message=message)
        case messages.Finished():
            return events.FinishedBy(worker=worker, message=message)
        case messages.Failed():
            return events.FailedBy(worker=worker, message=message)
        case messages.Durable():
            return events.DurableBy(worker=worker, message=message)
        case _:
            raise ValueError(f"{type(message).__name__} is no event of membership")
