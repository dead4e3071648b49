"""Optimizers that are cut over the workers and send little: AdamS, Sharded and Scape."""

from planaria.optim.adams import AdamS
from planaria.optim.groups import param_groups
from planaria.optim.options import ScapeOptions
from planaria.optim.scape import Scape
from planaria.optim.sharded import Sharded

__all__ = ["AdamS", "Scape", "ScapeOptions", "Sharded", "param_groups"]
