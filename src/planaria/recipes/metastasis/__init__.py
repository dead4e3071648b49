"""The metastasis recipe: lymph-node patches classified by a boosted EfficientNet.

``planaria.recipes.metastasis.train:main`` is what a worker runs; importing this package does not
import torch, so the launcher can check a configuration and the data by itself.
"""

from planaria.recipes.metastasis.config import MetastasisConfig
from planaria.recipes.metastasis.data import prepare

__all__ = ["MetastasisConfig", "prepare"]
