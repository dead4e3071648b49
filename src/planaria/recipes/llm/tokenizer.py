"""Text to token numbers: a byte-level BPE that is trained here, or one from a folder.

Nothing here imports torch; ``transformers`` enters only at the export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from planaria.errors import DataError
from planaria.recipes.llm import corpus
from planaria.recipes.llm.config import LlmConfig

END_OF_TEXT = "<|endoftext|>"
"""Ends every document (GPT-2's token); number 0 of a tokenizer that is trained here."""

TRAIN = "train"
_FALLBACK_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer on disk and what the model has to know about it."""

    folder: Path
    """Holds tokenizer.json."""
    size: int
    """Token numbers are below it; the rows of the embedding."""
    end: int
    """Number of the token that ends a document."""
    end_text: str
    """That token as text."""
    digest: str
    """Names tokenizer and end token: 32 hex digits."""

    def load(self) -> Tokenizer:
        """The tokenizer; text that spells the end token is encoded as ordinary text."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        # A corpus about language models spells "<|endoftext|>"; it must not end a document.
        tokenizer.encode_special_tokens = True
        return tokenizer


def vocabulary(config: LlmConfig) -> Vocabulary:
    """The tokenizer of ``config``: from its folder, or trained once and then read from the cache.

    Raises:
        DataError: the folder has no usable tokenizer, or the corpus has no text to train on.
    """
    if config.tokenizer != TRAIN:
        return _from_folder(Path(config.tokenizer).expanduser())
    name = xxhash.xxh3_128_hexdigest(
        f"bpe-1\0{corpus.fingerprint(config)}\0{config.held_out!r}\0{config.vocab_size}"
        f"\0{config.tokenizer_bytes}".encode()
    )
    folder = config.cache_folder / f"tokenizer-{name}"
    file = folder / "tokenizer.json"
    if not file.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                if not file.exists():
                    partial = folder / "tokenizer.json.partial"
                    partial.write_text(train_bpe(config).to_str(), encoding="utf-8")
                    partial.replace(file)
        except OSError as error:
            raise DataError(
                f"cache: cannot write {folder}: {error.strerror}; free space or set cache"
            ) from None
    return _describe(folder, END_OF_TEXT)


def train_bpe(config: LlmConfig) -> Tokenizer:
    """A byte-level BPE of ``config.vocab_size`` trained on the documents that are not held out.

    The same text gives the same merges in every process: documents come in a fixed order, and ties
    between pairs are broken by their numbers.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = list(_training_text(config))
    if not texts:
        raise DataError(
            f"data: {', '.join(config.data)} holds no text to train a tokenizer on; give more text"
        )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def _training_text(config: LlmConfig) -> Iterator[str]:
    left = config.tokenizer_bytes
    for text in corpus.read(config):
        if corpus.held_out(text, config.held_out):
            continue
        data = text.encode()
        if len(data) >= left:
            yield data[:left].decode(errors="ignore")
            return
        left -= len(data)
        yield text


def _from_folder(folder: Path) -> Vocabulary:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"tokenizer: {folder} has no tokenizer.json; give `train` or the folder of a "
            "saved tokenizer"
        )
    return _describe(folder, _end_of(folder))


def _end_of(folder: Path) -> str | None:
    """The end token that the tokenizer's own settings name, if any."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if file.is_file():
            try:
                settings: Any = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                raise DataError(f"tokenizer: {file} is not JSON; save the tokenizer anew") from None
            end = settings.get("eos_token") if isinstance(settings, dict) else None
            if isinstance(end, dict):
                end = end.get("content")
            if isinstance(end, str):
                return end
    return None


def _describe(folder: Path, end_text: str | None) -> Vocabulary:
    file = folder / "tokenizer.json"
    try:
        data = file.read_bytes()
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises plain Exception for a broken file
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"tokenizer: {file} cannot be read: {reason}; save the tokenizer anew"
        ) from None
    for candidate in (end_text,) if end_text is not None else _FALLBACK_ENDS:
        end = tokenizer.token_to_id(candidate)
        if end is not None:
            break
    else:
        raise DataError(
            f"tokenizer: {folder} names no end-of-text token that it has; "
            "set eos_token in its tokenizer_config.json"
        )
    digest = xxhash.xxh3_128_hexdigest(data + b"\0" + candidate.encode())
    numbers = tokenizer.get_vocab(with_added_tokens=True).values()
    return Vocabulary(
        folder=folder, size=max(numbers) + 1, end=end, end_text=candidate, digest=digest
    )
