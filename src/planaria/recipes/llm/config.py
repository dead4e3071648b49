"""What can be set for a language-model run, and what each setting may be.

Nothing here imports torch: the launcher reads, checks and stores a configuration before any worker
exists.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from planaria.errors import ConfigError
from planaria.optim import choice
from planaria.optim.choice import SparseConfig

STDLIB = "stdlib"
"""The corpus that needs no download: the Python standard library's own sources."""

HUB_PREFIX = "datasets:"
"""``datasets:NAME`` loads the train split of NAME with the package ``datasets``."""

MODELS: dict[str, str] = {
    "gpt2-tiny": "2 blocks of 64, for tests",
    "gpt2-small": "12 blocks of 768 (124 M with GPT-2's vocabulary)",
    "gpt2-medium": "24 blocks of 1,024 (345 M with GPT-2's vocabulary)",
    "llama-tiny": "2 blocks of 64, for tests and demonstrations",
    "llama-demo": "4 blocks of 96, what `planaria demo` trains",
    "llama-1m": "4 blocks of 128",
    "llama-30m": "8 blocks of 512",
    "llama-500m": "24 blocks of 1,280",
    "llama-1.8b": "24 blocks of 2,304",
}
"""Names that ``LlmConfig.model`` may have; :mod:`.models` holds their dimensions."""

MAX_SEQUENCE = 131_072


@dataclass(frozen=True, kw_only=True)
class LlmConfig:
    """A language model trained on packed text; one instance describes a run completely.

    Raises:
        ConfigError: a value is out of range or contradicts another one.
    """

    model: str = "llama-1m"
    """Name of a model: gpt2-tiny, gpt2-small, gpt2-medium, llama-tiny, llama-demo, llama-1m,
    llama-30m, llama-500m, llama-1.8b. Source: GPT-2 as released; Llama's block with widths of our
    choice (llama-500m and llama-1.8b: the sizes that arXiv 2607.01678 trains)."""

    regime: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every worker holds everything (*replicated*); fsdp: parameters, gradients and optimizer
    are sharded by FSDP2, block by block (*all sharded*)."""

    out: Path = Path("runs/llm")
    """Folder of the run: model, TensorBoard scalars, configuration, and the cache unless `cache`
    names another."""

    cache: Path | None = None
    """Folder of tokenizers and tokenised corpora, shared by all workers of a machine and by runs
    with the same data; default OUT/cache."""

    data: tuple[str, ...] = (STDLIB,)
    """Corpus: files, folders and globs of .txt, .py, .md (a file is a document), .jsonl and
    .parquet (a row is a document), `datasets:NAME` (needs the package datasets and a reachable hub
    or its cache), or `stdlib` (the Python standard library's sources on this machine)."""

    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""

    documents: Literal["auto", "file", "paragraph", "line"] = "auto"
    """What a document is in a plain text file: all of it, a stretch between blank lines, a line;
    auto: all of it, and smaller parts where too few files would leave no held-out text."""

    max_bytes: int | None = None
    """Bytes of UTF-8 text after which the rest of the corpus is left out; default: all of it."""

    held_out: float = 0.02
    """Share of the documents that is never trained on; a hash of the text decides, so the same
    document is held out in whatever order files come (our choice)."""

    tokenizer: str = "train"
    """`train`: a byte-level BPE (GPT-2's kind) is trained on the corpus; else a folder with
    tokenizer.json."""

    vocab_size: int = 4096
    """Entries of a tokenizer that is trained, the end-of-text token included."""

    tokenizer_bytes: int = 16 * 2**20
    """Bytes of training text that a tokenizer is trained on, at most (our choice)."""

    sequence: int = 256
    """Tokens per sample."""

    batch: int = 8
    """Samples per worker and micro-batch."""

    accumulate: int = 1
    """Micro-batches per step; a step sees world x accumulate x batch samples."""

    steps: int = 200
    """Optimizer steps of the run."""

    optimizer: str = "adamw"
    """adamw (decoupled weight decay, arXiv 1711.05101); adams (half its state, arXiv 2505.16363);
    sharded: AdamW, its state cut over the workers (ZeRO-1); scape: AdamS, cut, that sends a share of
    the weights (arXiv 2607.01678). sharded and scape reduce gradients themselves, without DDP."""

    sparse: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    """Options of optimizer = scape."""

    lr: float = 1e-3
    """Highest learning rate, reached after the warm-up."""

    warmup: int | None = None
    """Steps of linear warm-up from lr / warmup; None: a tenth of steps, at most 20."""

    lr_floor: float = 0.1
    """Share of `lr` at the end of the cosine (0.1: as in arXiv 2203.15556)."""

    weight_decay: float = 0.1
    """Decay of matrices and embeddings; vectors (norms, biases) never decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment (0.9, 0.95: as in GPT-3, arXiv 2005.14165)."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    clip: float | None = 1.0
    """Largest norm of the whole gradient; None does not clip."""

    dropout: float | None = None
    """Dropout rate in blocks, attention and embeddings; default: 0.1 for GPT-2 as released, 0 for
    Llama, whose attention is the only place that has one."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """fp32, or bf16 autocast of the forward pass with fp32 parameters and optimizer."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """torch's scaled_dot_product_attention, or transformers' written-out form."""

    compile: bool = False
    """Compile each block with torch.compile (needs a C++ compiler on a CPU); the first step takes
    minutes."""

    seed: int = 0
    """Seed of weights, order of samples and dropout."""

    eval_every: int = 50
    """Steps between evaluations on held-out text; 0: only at the last step."""

    eval_batches: int = 8
    """Batches of held-out text that each worker scores in an evaluation."""

    log_every: float = 2.0
    """Seconds between two progress lines of a run without a launcher, where the output is not a
    terminal; under the launcher the run's own lines say how it goes."""

    checkpoint_every: int = 0
    """Steps between durable checkpoints; 0: only when the run is asked to stop."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss does: end the run, or roll the step back and skip its samples."""

    max_redo: int = 2
    """Steps that a swap may have to do again, the interrupted one included. 1 waits for each
    commit, 2 lets it overlap with the whole next step."""

    threads: int = 1
    """CPU threads per worker (torchrun's default is 1, too)."""

    def __post_init__(self) -> None:
        _one_of("model", self.model, tuple(MODELS))
        _one_of("regime", self.regime, ("ddp", "fsdp"))
        _one_of("documents", self.documents, ("auto", "file", "paragraph", "line"))
        choice.check(self.optimizer, self.sparse)
        if self.owned and self.regime == "fsdp":
            raise ConfigError(
                f"regime: fsdp cuts the weights, and optimizer = {self.optimizer} needs whole ones on "
                "each worker; use regime = ddp, which it then does without"
            )
        _one_of("dtype", self.dtype, ("fp32", "bf16"))
        _one_of("attention", self.attention, ("sdpa", "eager"))
        _one_of("on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        if not self.data or not all(self.data):
            raise ConfigError(
                f"data: {self.data!r} names no corpus; give files, globs, datasets:NAME or stdlib"
            )
        if not self.text_field:
            raise ConfigError("text_field: '' names no field; give the one that holds the text")
        if not self.tokenizer:
            raise ConfigError("tokenizer: '' names nothing; give train, or a tokenizer's folder")
        for name, low, high in _INTEGERS:
            _integer(name, getattr(self, name), low, high)
        if self.max_bytes is not None:
            _integer("max_bytes", self.max_bytes, 1, None)
        for name, low, high, open_low in _FLOATS:
            _number(name, getattr(self, name), low, high, open_low)
        for value in self.betas:
            _number("betas", value, 0.0, 1.0, False)
            if value == 1.0:
                raise ConfigError("betas: 1.0 never forgets; each must be below 1")
        if self.clip is not None:
            _number("clip", self.clip, 0.0, None, True)
        if self.dropout is not None:
            _number("dropout", self.dropout, 0.0, 0.99, False)
        if self.warmup is not None:
            _integer("warmup", self.warmup, 0, None)
        if self.warmup is not None and self.warmup > self.steps:
            raise ConfigError(
                f"warmup: {self.warmup} steps do not fit into steps = {self.steps}; "
                "lower warmup or raise steps"
            )

    @property
    def owned(self) -> bool:
        """Whether the optimizer reduces gradients itself, so that nothing wraps the model."""
        return self.optimizer in choice.OWNED

    @property
    def cache_folder(self) -> Path:
        """Where tokenizers and tokenised corpora lie."""
        return self.out / "cache" if self.cache is None else self.cache

    @property
    def warmup_steps(self) -> int:
        """``warmup``, or its default for ``steps``."""
        return min(20, self.steps // 10) if self.warmup is None else self.warmup

    def per_step(self, world: int) -> int:
        """Samples that ``world`` workers consume in a step."""
        return world * self.accumulate * self.batch


_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("vocab_size", 257, 2**31 - 1),
    ("tokenizer_bytes", 1, None),
    ("sequence", 2, MAX_SEQUENCE),
    ("batch", 1, None),
    ("accumulate", 1, None),
    ("steps", 1, None),
    ("seed", 0, 2**63 - 1),
    ("eval_every", 0, None),
    ("eval_batches", 1, None),
    ("checkpoint_every", 0, None),
    ("max_redo", 1, None),
    ("threads", 1, None),
)

_FLOATS: tuple[tuple[str, float, float | None, bool], ...] = (
    ("held_out", 0.0, 0.5, True),
    ("lr", 0.0, None, True),
    ("lr_floor", 0.0, 1.0, False),
    ("weight_decay", 0.0, None, False),
    ("eps", 0.0, None, True),
    ("log_every", 0.0, None, True),
)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is unknown; choose one of {', '.join(allowed)}")


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}: {value!r} is not a whole number; give one")
    if value < low:
        raise ConfigError(f"{name}: {value} is too small; it must be at least {low}")
    if high is not None and value > high:
        raise ConfigError(f"{name}: {value} is too large; it must be at most {high}")


def _number(name: str, value: object, low: float, high: float | None, open_low: bool) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{name}: {value!r} is not a finite number; give one")
    if value < low or (open_low and value == low):
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        raise ConfigError(f"{name}: {value:g} is too small; it must be {bound}")
    if high is not None and value > high:
        raise ConfigError(f"{name}: {value:g} is too large; it must be at most {high:g}")


def as_dict(config: LlmConfig) -> dict[str, Any]:
    """The resolved configuration as plain values (paths as text, None left out), for TOML."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            continue
        if isinstance(value, Path):
            value = str(value)
        elif dataclasses.is_dataclass(value):
            value = {k: v for k, v in vars(value).items() if v is not None}
        elif isinstance(value, tuple):
            value = list(value)
        plain[field.name] = value
    return plain


def as_toml(config: LlmConfig) -> str:
    """The resolved configuration as a TOML document; what a run writes beside its results."""
    return tomli_w.dumps({"llm": as_dict(config)})


def demo(*, out: Path = Path("runs/demo"), steps: int = 40) -> LlmConfig:
    """What ``planaria demo`` trains: a small Llama on the standard library, with 4 workers."""
    return LlmConfig(
        model="llama-demo",
        out=out,
        max_bytes=2 * 2**20,
        held_out=0.05,
        vocab_size=2048,
        tokenizer_bytes=2**20,
        sequence=128,
        batch=4,
        steps=steps,
        lr=1e-2,
        warmup=min(5, steps),
        eval_every=20,
        eval_batches=2,
    )
