"""What ``planaria status`` shows, out of the membership."""

from __future__ import annotations

from collections.abc import Callable

from planaria.runtime.control import protocol as control
from planaria.runtime.membership.state import State
from planaria.runtime.messages import Worker


def standing(
    state: State,
    *,
    run: str,
    step_of: Callable[[Worker], int],
    swaps: int,
    reason: str,
    exit_code: int | None,
) -> control.Status:
    """Shards with owners and holders, spares, and why the last decision was taken."""
    rows: list[control.ShardStatus] = []
    for shard in range(state.config.world):
        owner = state.owners.get(shard)
        rows.append(
            control.ShardStatus(
                shard=shard,
                owner=owner,
                node="" if owner is None else state.members[owner].node,
                holder=state.holders.get(shard),
                generation=state.ledger.get(shard, state.committed),
                protected=state.protected and shard in state.holders,
                step=0 if owner is None else step_of(owner),
            )
        )
    return control.Status(
        run=run,
        phase=state.phase,
        epoch=state.epoch,
        world=state.config.world,
        generation=state.committed,
        shards=tuple(rows),
        spares=tuple(sorted(state.spares)),
        swaps=swaps,
        reason=reason,
        exit_code=exit_code,
    )
