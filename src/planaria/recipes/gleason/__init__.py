"""The Gleason recipe: whole prostate slides graded from boards of their tissue.

``planaria.recipes.gleason.train:main`` is what a worker runs; importing this package does not import
torch, so the launcher can check a configuration and cut the tiles by itself.
"""

from planaria.recipes.gleason.config import GleasonConfig
from planaria.recipes.gleason.data import prepare

__all__ = ["GleasonConfig", "prepare"]
