"""The language-model recipe: GPT-2 and Llama models trained from nothing on packed text.

``planaria.recipes.llm.train:main`` is what a worker runs; importing this package does not import
torch, so the launcher can check a configuration and tokenise the corpus by itself.
"""

from planaria.recipes.llm.config import LlmConfig, demo
from planaria.recipes.llm.data import prepare

__all__ = ["LlmConfig", "demo", "prepare"]
