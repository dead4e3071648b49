"""The corpus as packed samples, in an order that is a pure function of a step's number.

Documents are tokenised once, each ended by the end-of-text token, and joined into two arrays of
token numbers: training text and held-out text. A *sample* is a window of ``sequence`` consecutive
tokens; windows do not overlap, and what is left at the end is dropped. A label is the next token of
the same window: it never comes from another window, and no window holds both training and held-out
text. Inside a window, documents follow each other and the model sees the ones before (as in
transformers' ``run_clm`` and nanoGPT).

Shapes: B samples, T = ``sequence`` tokens. Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock

from planaria.errors import DataError
from planaria.recipes.llm import corpus, tokenizer
from planaria.recipes.llm.config import LlmConfig

_log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Numbers = npt.NDArray[np.int64]

_FORMAT = "packed-1"
_CHUNK = 256
"""Documents that are tokenised together."""
_QUIET = 2.0
"""Seconds of tokenising without, and between, progress lines."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenised corpus, memory-mapped."""

    vocabulary: tokenizer.Vocabulary
    sequence: int
    """Tokens per sample."""
    train: Tokens
    """All training tokens, one dimension."""
    held_out: Tokens
    """All held-out tokens, one dimension."""
    documents: tuple[int, int]
    """Documents in training and held-out text."""

    @property
    def samples(self) -> int:
        """Windows of training text."""
        return len(self.train) // self.sequence

    @property
    def held_out_samples(self) -> int:
        """Windows of held-out text."""
        return len(self.held_out) // self.sequence

    def batch(self, ids: Numbers) -> Numbers:
        """Training samples ``ids`` (B,), as :class:`Order` numbers them, as (B, T)."""
        return _windows(self.train, ids % self.samples, self.sequence)

    def held_out_batch(self, windows: Numbers) -> Numbers:
        """Held-out windows (B,) as (B, T)."""
        return _windows(self.held_out, windows, self.sequence)


def _windows(tokens: Tokens, windows: Numbers, sequence: int) -> Numbers:
    columns = windows[:, None] * sequence + np.arange(sequence)
    return tokens[columns].astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which samples a worker consumes: a pure function of (seed, step, shard, micro-batch).

    A sample's number is ``epoch * samples + window``, so it names the pass over the data, too. Each
    step lies within one epoch: an epoch has ``samples // per step`` steps and leaves out a
    remainder, another one each time. The order depends on world, batch and accumulate only through
    their product: the samples of a step are the same however they are dealt out.
    """

    samples: int
    """Windows of training text."""
    seed: int
    world: int
    """Shards that each consume a part."""
    batch: int
    """Samples per shard and micro-batch."""
    accumulate: int
    """Micro-batches per step."""

    def __post_init__(self) -> None:
        if self.samples < self.per_step:
            raise DataError(
                f"data: the corpus makes {self.samples:,} samples, but a step of {self.world} "
                f"workers x {self.accumulate} micro-batches x {self.batch} takes "
                f"{self.per_step:,}; give more text, or lower --batch, --accumulate or --sequence"
            )

    @property
    def per_step(self) -> int:
        """Samples that all shards together consume in a step."""
        return self.world * self.accumulate * self.batch

    def ids(self, step: int, *, shard: int, micro: int) -> Numbers:
        """Numbers (B,) of the samples that ``shard`` takes in micro-batch ``micro`` of ``step``."""
        epoch, index = divmod(step - 1, self.samples // self.per_step)
        first = index * self.per_step + (micro * self.world + shard) * self.batch
        positions = np.arange(first, first + self.batch, dtype=np.uint64)
        window = permute(positions, size=self.samples, key=(self.seed, epoch))
        return epoch * self.samples + window.astype(np.int64)


def permute(
    positions: npt.NDArray[np.uint64], *, size: int, key: tuple[int, ...]
) -> npt.NDArray[np.uint64]:
    """Images of ``positions`` (each below ``size``) under the permutation of 0..size-1 by ``key``.

    A Feistel network over the next power of four, walked until the image is below ``size`` (Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002): no table, so a corpus of any size
    costs nothing.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(
        b"".join(xxhash.xxh3_64_digest(repr((*key, i)).encode()) for i in range(6)), dtype=">u8"
    ).astype(np.uint64)

    def once(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (_mix(right ^ k) & mask)
        return (left << half) | right

    image = once(positions)
    while (outside := image >= size).any():
        image[outside] = once(image[outside])
    return image


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def prepare(config: LlmConfig, *, world: int = 1) -> Corpus:
    """The corpus of ``config``, tokenised now or by whoever was first; safe in many processes.

    Call it before any worker is started: then a bad corpus ends the run before it begins. Progress
    goes to this module's logger when it takes more than two seconds.

    Raises:
        DataError: text cannot be read or is too little, or the cache cannot be written.
    """
    config = corpus.settle(config)
    vocabulary = tokenizer.vocabulary(config)
    name = xxhash.xxh3_128_hexdigest(
        f"{_FORMAT}\0{corpus.fingerprint(config)}\0{config.held_out!r}\0{vocabulary.digest}".encode()
    )
    folder = config.cache_folder / f"corpus-{name}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):
                if not folder.exists():
                    _build(config, vocabulary, folder)
        except OSError as error:
            raise DataError(
                f"cache: cannot write {folder}: {error.strerror}; free space or set cache"
            ) from None
    packed = _open(config, vocabulary, folder)
    _check_size(config, packed)
    Order(
        samples=packed.samples,
        seed=config.seed,
        world=world,
        batch=config.batch,
        accumulate=config.accumulate,
    )
    return packed


def _build(config: LlmConfig, vocabulary: tokenizer.Vocabulary, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        counts = _tokenise(config, vocabulary, partial)
        (partial / "corpus.json").write_text(json.dumps({"documents": counts}), encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _tokenise(config: LlmConfig, vocabulary: tokenizer.Vocabulary, folder: Path) -> list[int]:
    encoder = vocabulary.load()
    dtype = np.dtype(np.uint16 if vocabulary.size <= 2**16 else np.uint32)
    progress = _Progress(sum(s.size for s in corpus.sources(config)))
    counts = [0, 0]
    with (
        _TokenFile(folder / "train.npy", dtype) as train,
        _TokenFile(folder / "held_out.npy", dtype) as held_out,
    ):
        files = (train, held_out)
        for texts in _chunks(corpus.read(config), _CHUNK):
            encoded = encoder.encode_batch_fast(texts, add_special_tokens=False)
            for text, tokens in zip(texts, encoded, strict=True):
                where = int(corpus.held_out(text, config.held_out))
                counts[where] += 1
                files[where].append([*tokens.ids, vocabulary.end])
            progress.advance(sum(len(t.encode()) for t in texts), len(texts))
    return counts


def _chunks(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while chunk := list(islice(texts, size)):
        yield chunk


class _Progress:
    """Says how far tokenising is, after two seconds and every two seconds from then on."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bytes = 0
        self._documents = 0
        self._started = self._said = time.monotonic()

    def advance(self, size: int, documents: int) -> None:
        self._bytes += size
        self._documents += documents
        now = time.monotonic()
        if now - self._said >= _QUIET:
            self._said = now
            total = f" of {self._total / 1e6:,.1f}" if self._total else ""
            _log.info(
                "tokenising: %.1f%s MB, %s documents, %.1f MB/s",
                self._bytes / 1e6,
                total,
                f"{self._documents:,}",
                self._bytes / 1e6 / (now - self._started),
            )


class _TokenFile:
    """A one-dimensional .npy that grows; its header is written again when the length is known.

    numpy pads a header so that the first dimension can grow in place.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file: BinaryIO = path.open("wb")
        self._dtype = dtype
        self._length = 0
        self._start = self._header()

    def _header(self) -> int:
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self._length,),
            },
        )
        return self._file.tell()

    def append(self, tokens: list[int]) -> None:
        self._file.write(np.asarray(tokens, dtype=self._dtype).tobytes())
        self._length += len(tokens)

    def __enter__(self) -> _TokenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                end = self._header()
                assert end == self._start, "numpy's header has no room to grow"


def _open(config: LlmConfig, vocabulary: tokenizer.Vocabulary, folder: Path) -> Corpus:
    try:
        meta: Any = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        arrays = [_map(folder / name) for name in ("train.npy", "held_out.npy")]
        first, second = meta["documents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"cache: {folder} is damaged ({reason}); delete it, it will be made anew"
        ) from None
    return Corpus(
        vocabulary=vocabulary,
        sequence=config.sequence,
        train=arrays[0],
        held_out=arrays[1],
        documents=(int(first), int(second)),
    )


def _map(path: Path) -> Tokens:
    # An empty file cannot be mapped.
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if shape == (0,):
        return np.empty(0, dtype=dtype)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _check_size(config: LlmConfig, packed: Corpus) -> None:
    names = ", ".join(config.data)
    train, held_out = packed.documents
    if train + held_out == 0:
        raise DataError(f"data: {names} holds no text; give files with text")
    if packed.held_out_samples == 0:
        raise DataError(
            f"data: {len(packed.held_out):,} tokens of {held_out} held-out documents (of "
            f"{train + held_out:,}) make no sample of {config.sequence}; give more documents, "
            "raise --held-out, lower --sequence, or cut files with --documents paragraph or line"
        )
    if packed.samples == 0:
        raise DataError(
            f"data: {len(packed.train):,} training tokens make no sample of {config.sequence}; "
            "give more text, or lower --sequence or --held-out"
        )
