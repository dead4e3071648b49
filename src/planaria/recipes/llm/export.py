"""The result as a Hugging Face folder, written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from planaria.errors import CheckpointError
from planaria.recipes.llm.config import LlmConfig, as_toml
from planaria.recipes.llm.models import architecture, unwrap
from planaria.recipes.llm.tokenizer import Vocabulary


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's tensors by transformers' names, in host memory of the caller's own.

    A collective under FSDP2, where only rank 0 receives them (the others get an empty dictionary);
    local under DDP.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(unwrap(model), options=options)
    return {name: value.detach().clone() for name, value in state.items()}


def write(
    folder: Path, *, state: dict[str, Tensor], config: LlmConfig, vocabulary: Vocabulary
) -> Path:
    """Model, tokenizer, generation settings and the run's configuration in ``folder``.

    Everything is written beside it first and renamed at the end: ``folder`` is complete if it is
    there. One that exists is replaced. ``AutoModelForCausalLM.from_pretrained(folder)`` and
    ``AutoTokenizer.from_pretrained(folder)`` load it.

    Raises:
        CheckpointError: the disk is full or not writable; nothing is left half-written.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _save(partial, state, config, vocabulary)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        # safetensors reports a full disk by an error type of its own.
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise CheckpointError(
                f"export: cannot write {folder}: {reason}; free space and run again "
                "from the newest checkpoint"
            ) from None
        raise
    return folder


@contextmanager
def _without_bars() -> Generator[None]:
    """A worker's log is no terminal: transformers' bars would fill it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _save(
    folder: Path, state: dict[str, Tensor], config: LlmConfig, vocabulary: Vocabulary
) -> None:
    settings = architecture(config, vocabulary)
    # Without storage: the tensors of `state` become the parameters, not copies of them.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    with _without_bars():
        model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(vocabulary.folder / "tokenizer.json"),
        bos_token=vocabulary.end_text,
        eos_token=vocabulary.end_text,
        pad_token=vocabulary.end_text,
        model_max_length=config.sequence,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(folder))
    (folder / "planaria.toml").write_text(as_toml(config), encoding="utf-8")
