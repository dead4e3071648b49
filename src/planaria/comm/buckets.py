"""One order of parameters inside the buckets of DDP, on every worker.

DDP re-cuts its buckets after its first iteration, in the order in which gradients became ready. A DDP
that a spare has just made still has the first cut: with other sizes gloo ends the process, with equal
sizes it *silently sums the wrong parameters* (decision 6 of the design). :func:`align` brings a fresh
DDP to the order of its peers without any data: it lets each parameter's gradient become ready in that
order, in solo mode, and has the reducer re-cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from planaria.errors import CommError

Order = tuple[int, ...]


def order(ddp: DistributedDataParallel) -> Order:
    """Parameter indices bucket by bucket, with -1 after each bucket; empty while not re-cut.

    Source: DDP's own log of its re-cut (``rebuilt_per_bucket_param_indices``, torch 2.13).
    """
    assert ddp.logger is not None
    ddp.logger.set_runtime_stats_and_log()  # it lags by an iteration otherwise
    data = ddp._get_ddp_logging_data()
    text = str(data.get("rebuilt_per_bucket_param_indices", ""))
    if not int(data.get("has_rebuilt_buckets", 0)) or not text:
        return ()
    flat: list[int] = []
    for bucket in text.split(","):
        flat.extend(int(index) for index in bucket.split())
        flat.append(-1)
    return tuple(flat)


def settle(ddp: DistributedDataParallel) -> None:
    """Re-cut now where the first iteration is over and the next has not begun.

    Call it in solo or broken mode: the re-cut broadcasts its order, and a peer that is already past it
    would not answer.
    """
    ddp.reducer._rebuild_buckets()


def align(ddp: DistributedDataParallel, wanted: Order) -> None:
    """Bring ``ddp`` to the bucket order ``wanted`` of its peers.

    Raises :class:`CommError` where that cannot be done: the worker must not train then, since wrong
    buckets would sum gradients of different parameters.
    """
    if order(ddp) == wanted:
        return
    if order(ddp):
        raise CommError(
            "buckets of DistributedDataParallel differ between workers and were re-cut on both: "
            f"{_short(order(ddp))} here, {_short(wanted)} on peers; use find_unused_parameters=True, "
            "which keeps the first cut, if gradients become ready in another order each time"
        )
    _pretend_backward(ddp, [index for index in wanted if index >= 0])
    settle(ddp)
    if order(ddp) != wanted:
        raise CommError(
            "a fresh DistributedDataParallel could not be brought to the buckets of its peers: "
            f"{_short(order(ddp))} here, {_short(wanted)} on peers; use find_unused_parameters=True"
        )


def _pretend_backward(ddp: DistributedDataParallel, indices: Sequence[int]) -> None:
    """One iteration in which gradients (zeros) become ready in the order of ``indices``."""
    parameters = [p for p in ddp.module.parameters() if p.requires_grad and p not in _ignored(ddp)]
    if sorted(indices) != list(range(len(parameters))):
        raise CommError(
            f"DistributedDataParallel has {len(parameters)} trained parameters here and "
            f"{len(indices)} on peers: build() must make the same model on every worker"
        )
    with torch.enable_grad():
        ddp.reducer.prepare_for_forward()  # the log counts iterations here
        ddp.reducer.prepare_for_backward([])
        for index in indices:
            # One backward per parameter: the order is then ours and not the engine's.
            (parameters[index].sum() * 0).backward()
    for parameter in parameters:
        parameter.grad = None


def _ignored(ddp: DistributedDataParallel) -> set[torch.nn.Parameter]:
    names = set(ddp.parameters_to_ignore)
    return {p for name, p in ddp.module.named_parameters() if name in names}


def _short(wanted: Order) -> str:
    text = " ".join("|" if index < 0 else str(index) for index in wanted)
    return text if len(text) <= 60 else text[:57] + "..."
