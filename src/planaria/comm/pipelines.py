"""Pipeline schedules across a rebuild.

A schedule of ``torch.distributed.pipelining`` talks to its neighbours before its first step: a vote,
a warm-up of their connections, shapes where none were declared. One that a spare has just made would
talk to peers that did so long ago. :func:`begin_anew` makes the survivors' schedules do it again.
"""

from __future__ import annotations

from typing import Any

from planaria.errors import UserError

_FLAGS = (
    ("_stage_forward_initialized", "_stage_backward_initialized"),
    ("_stages_forward_initialized", "_stages_backward_initialized"),
)


def begin_anew(schedule: Any) -> None:
    """Let ``schedule`` initialise its stages in its next step, as a new one does.

    Also drops what a broken step has left in them. Raises :class:`UserError` for an object that is
    not a schedule of torch 2.13.
    """
    for names in _FLAGS:
        if all(hasattr(schedule, name) for name in names):
            for name in names:
                setattr(schedule, name, False)
            break
    else:
        raise UserError(
            f"{type(schedule).__name__} is not a pipeline schedule of this torch: pass what "
            "torch.distributed.pipelining's Schedule… classes make"
        )
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for stage in stages:
        stage.clear_runtime_states()
        stage._inference_mode = None
