"""The methods of ``scape_table.py`` and ``links.py`` by name: how each is built and planned.

A name is ``family-density/key=value/...``. Families: adamw and adams (dense, sharded), frozen,
moved and local (Scape), topk, demo, steps (local steps), powersgd. Keys are keywords of the class,
and ``embeddings=dense``.
"""

from __future__ import annotations

import json
from typing import Any

from planaria.optim.plan_comm import Arithmetic, Job

SCAPE = ("frozen", "moved", "local")
DRIFTING = ("local", "steps")
"""Families whose workers hold different weights; the model to evaluate is the mean."""


def parse(method: str) -> tuple[str, float, dict[str, Any]]:
    """Family, density and further keywords of a name."""
    name, *choices = method.split("/")
    family, _, share = name.partition("-")
    options: dict[str, Any] = {}
    for choice in choices:
        key, _, value = choice.partition("=")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return family, float(share or 1), options


def setup(
    method: str,
    model: Any,
    *,
    lr: float,
    clip: float | None = None,
    dense_steps: float = 0,
    total_steps: int | None = None,
    group: Any = None,
) -> tuple[Any, Any]:
    """The module to call and the optimizer of a method.

    ``dense_steps`` first steps (a count, or a share of ``total_steps``) are dense in the methods
    that send little; a name may have its own.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from planaria.optim import AdamS, Scape, Sharded, checks, param_groups, peers

    family, density, options = parse(method)
    dense_embeddings = options.pop("embeddings", "sparse") == "dense"
    groups = param_groups(model, dense_embeddings=dense_embeddings)
    options.setdefault("dense_steps", dense_steps)
    if family in SCAPE:
        options |= {"density": density, "unsent": family, "total_steps": total_steps}
        return model, Scape(groups, lr=lr, max_norm=clip, check_every=0, group=group, **options)
    for own in groups:
        del own["dense"]
    if family == "adams":
        return model, Sharded(AdamS, groups, lr=lr, max_norm=clip, group=group)
    if family == "adamw":
        options = {"lr": lr, "betas": (0.9, 0.95), "max_norm": clip, "group": group}
        return model, Sharded(torch.optim.AdamW, groups, **options)
    first = checks.steps("dense_steps", options.pop("dense_steps"), total=total_steps or 0)
    if family == "powersgd":
        # One bucket: the hook's own callbacks send, and those of two buckets come in another order
        # on each worker, which gloo, without names for what it carries, takes for one another.
        ddp = DistributedDataParallel(model, bucket_cap_mb=1024)
        shapes = [p.shape for p in model.parameters()]
        state = peers.powersgd(shapes, density=density, dense_steps=first)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, AdamS(groups, lr=lr)
    classes = {"topk": peers.TopK, "demo": peers.DemoLike, "steps": peers.LocalSteps}
    if family not in classes:
        raise SystemExit(f"method {method} is unknown; see the families in {__file__}")
    return model, classes[family](groups, lr=lr, density=density, dense_steps=first, **options)


def job(
    method: str,
    *,
    params: int,
    vectors: int,
    workers: int,
    compute: float = 0.0,
    tensors: int = 0,
    arithmetic: dict[str, float] | None = None,
) -> Job:
    """What ``plan-comm`` has to know about a method's step."""
    from planaria.optim.options import ScapeOptions

    family, density, options = parse(method)
    found: dict[str, Any] = {}
    if family in SCAPE:
        options.pop("embeddings", None)
        options.pop("dense_steps", None)
        chosen = ScapeOptions(density=density, unsent=family, **options)
        found = {"wire": chosen.wire, "average_moments": chosen.average_moments}
        found["masked"] = chosen.statistic != "cycle"
    if arithmetic is not None:
        found["dense_arithmetic"] = found["sparse_arithmetic"] = Arithmetic(**arithmetic)
    return Job(
        params=params,
        dense_params=vectors,
        workers=workers,
        compute=compute,
        tensors=tensors,
        **found,
    )
