"""One order of parameters inside the buckets of DDP, on every worker.

DDP re-cuts its buckets after its first iteration, in the order in which gradients became ready. A DDP
that a spare has just made still has the first cut: with other sizes gloo ends the process, with equal
sizes it *silently sums the wrong parameters* (decision 6 of the design). :func:`align` brings a fresh
DDP to the order of its peers without any data: it lets each parameter's gradient become ready in that
order, in solo mode, and has the reducer re-cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from planaria.errors import RunError

Order = tuple[int, ...]


def ddp_modules(modules: Mapping[str, torch.nn.Module]) -> dict[str, DistributedDataParallel]:
    """DDP modules among the parts, by part and path."""
    found: dict[str, DistributedDataParallel] = {}
    for part, module in modules.items():
        for path, inner in module.named_modules():
            if isinstance(inner, DistributedDataParallel):
                found[f"{part}.{path}" if path else part] = inner
    return found


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


def reset(ddp: DistributedDataParallel) -> None:
    """Give ``ddp`` the cut that it was built with, where it has re-cut its buckets since.

    For a way back to before the first step, which an undisturbed run takes with that cut: other
    buckets add up gradients in another order, and the results differ in their last bits. Nothing is
    communicated. The reducer is made anew, as when a DDP is unpickled.
    """
    if not order(ddp):
        return
    ddp.reducer._remove_autograd_hooks()
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp._set_static_graph()
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)


def align(ddp: DistributedDataParallel, wanted: Order) -> None:
    """Bring ``ddp`` to the bucket order ``wanted`` of its peers.

    Raises :class:`RunError` where that cannot be done: the worker must not train then, since wrong
    buckets would sum gradients of different parameters.
    """
    if order(ddp) == wanted:
        return
    if order(ddp):
        raise RunError(
            "buckets of DistributedDataParallel differ between workers and were re-cut on both: "
            f"{_short(order(ddp))} here, {_short(wanted)} on peers; use find_unused_parameters=True, "
            "which keeps the first cut, if gradients become ready in another order each time"
        )
    _pretend_backward(ddp, [index for index in wanted if index >= 0])
    settle(ddp)
    if order(ddp) != wanted:
        raise RunError(
            "a fresh DistributedDataParallel could not be brought to the buckets of its peers: "
            f"{_short(order(ddp))} here, {_short(wanted)} on peers; use find_unused_parameters=True"
        )


def _pretend_backward(ddp: DistributedDataParallel, indices: Sequence[int]) -> None:
    """One iteration in which gradients (zeros) become ready in the order of ``indices``."""
    parameters = [p for p in ddp.module.parameters() if p.requires_grad and p not in _ignored(ddp)]
    if sorted(indices) != list(range(len(parameters))):
        raise RunError(
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
