"""Configurations of what is run: model sizes, attention shapes, precisions and run options.

All are frozen dataclasses. The file needs the standard library only, so that every other module
may import it. Model sizes exist here and nowhere else: `MODEL_SIZES["xl"].d_ff == 10240`. A bad
value raises FieldError, a ValueError with the field's name.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

DTypeName = Literal["float64", "float32", "float16", "bfloat16"]
Scale = Literal["tiny", "smoke", "handout"]
Mode = Literal["forward", "backward", "forward_backward", "train_step"]

# Attentions of a model: the first store the probabilities for backward, the second are one operator
# and store the log-sum-exp. sdpa is PyTorch's scaled_dot_product_attention, the others are this
# package's back ends.
SCORE_STORING_ATTENTION = ("reference", "compiled")
FUSED_ATTENTION = ("tiled", "triton", "hopper", "sdpa")
ATTENTION_NAMES = (*SCORE_STORING_ATTENTION, *FUSED_ATTENTION)
DTYPES: tuple[str, ...] = get_args(DTypeName)
SCALES: tuple[str, ...] = get_args(Scale)
MODES: tuple[str, ...] = get_args(Mode)
MAX_CELL_TIMEOUT_S = 24 * 60 * 60  # far longer waits on a pipe overflow
MAX_SEED = 2**63 - 1  # the largest that a torch.Generator takes
BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class FieldError(ValueError):
    """Raised for a wrong value of a configuration's field or a function's argument.

    The message is `RunConfig.seed must be ...` in Python, and `--seed must be ...` in the command
    line, whose option for the field may have another name.

    Args:
        field: the name of the field or argument.
        problem: what is wrong, the rest of the message.
        owner: the class of the configuration; "" for an argument.
    """

    def __init__(self, field: str, problem: str, owner: str = "") -> None:
        super().__init__(field, problem, owner)  # as pickle passes them on to another process
        self.field, self.problem, self.owner = field, problem, owner

    def __str__(self) -> str:
        name = f"{self.owner}.{self.field}" if self.owner else self.field
        return f"{name} {self.problem}"


def require_positive(config: Any, fields: list[str]) -> None:
    """Raise FieldError naming the first of `fields` of `config` that is not a positive int."""
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FieldError(
                field, f"must be a positive int, got {value!r}", owner=type(config).__name__
            )


def require_choice(config: Any, field: str, choices: tuple[str, ...]) -> None:
    """Raise FieldError naming `field` of `config` unless its value is one of `choices`."""
    value = getattr(config, field)
    if value not in choices:
        raise FieldError(
            field,
            f"must be one of {', '.join(choices)}, got {value!r}",
            owner=type(config).__name__,
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Transformer language model (CS336 assignment 1's architecture)."""

    name: str  # how tables call it
    d_model: int  # width of the residual stream
    d_ff: int  # hidden width of the SwiGLU feed-forward layer
    num_layers: int  # Transformer blocks
    num_heads: int  # attention heads; must divide d_model into even head dims (RoPE rotates pairs)
    vocab_size: int = 10_000  # tokens in the vocabulary
    context_length: int = 512  # longest sequence in tokens
    rope_theta: float = 10_000.0  # base of the rotary frequencies

    def __post_init__(self) -> None:
        require_positive(
            self, ["d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length"]
        )
        if self.d_model % self.num_heads or self.head_dim % 2:
            raise FieldError(
                "num_heads",
                f"must divide d_model into even head dims, "
                f"got d_model={self.d_model}, num_heads={self.num_heads}",
                owner="ModelConfig",
            )
        if not self.rope_theta > 0:
            raise FieldError(
                "rope_theta", f"must be positive, got {self.rope_theta!r}", owner="ModelConfig"
            )

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.d_model // self.num_heads


MODEL_SIZES: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        # The handout's table, 2026 edition.
        ModelConfig(name="small", d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        ModelConfig(name="medium", d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
        ModelConfig(name="large", d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
        ModelConfig(name="xl", d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
        ModelConfig(name="10b", d_model=4608, d_ff=12288, num_layers=50, num_heads=36),
        # The 2025 edition's two largest; its 2.7b has the shape of the 2026 edition's xl.
        ModelConfig(name="xl-2025", d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
        ModelConfig(name="2.7b-2025", d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
        # The 2026 leaderboard's full training step.
        ModelConfig(
            name="8b",
            d_model=4096,
            d_ff=11008,
            num_layers=34,
            num_heads=32,
            vocab_size=151_936,
            context_length=32_768,
        ),
    )
}
HANDOUT_SIZES = ("small", "medium", "large", "xl", "10b")  # of the 2026 edition
# Of the 2025 edition, whose 2.7b has the shape of xl.
SIZES_2025 = ("small", "medium", "large", "xl-2025", "xl")
# Of both editions: each shape once, by the number of parameters.
SIZES_OF_BOTH = ("small", "medium", "large", "xl-2025", "xl", "10b")


def proxy_model(size: str, d_model: int = 256) -> ModelConfig:
    """Return a model of `size`'s proportions, scaled down to width `d_model`, named `<size>-proxy`.

    Depth and feed-forward width shrink by the same factor as the width (at least two layers), so
    that the share of attention, feed-forward and head stays recognisable; heads have 64 dimensions.
    """
    full = MODEL_SIZES[size]
    factor = d_model / full.d_model
    return replace(
        full,
        name=f"{size}-proxy",
        d_model=d_model,
        d_ff=round(full.d_ff * factor / 64) * 64,
        num_layers=max(2, round(full.num_layers * factor)),
        num_heads=max(1, d_model // 64),
    )


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Shape, mask and dtype of one attention call: q is (batch, heads, seqlen_q, head_dim)."""

    batch: int
    heads: int  # query heads
    seqlen_q: int  # queries
    seqlen_k: int  # keys
    head_dim: int
    is_causal: bool  # top-left aligned, as in SDPA and the handout
    dtype: DTypeName
    # key and value heads under grouped-query attention; None: as many as query heads
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, ["batch", "heads", "seqlen_q", "seqlen_k", "head_dim"])
        require_choice(self, "dtype", DTYPES)
        if self.kv_heads is not None:
            require_positive(self, ["kv_heads"])
            if self.heads % self.kv_heads:
                raise FieldError(
                    "kv_heads",
                    f"must divide heads={self.heads}, got {self.kv_heads}",
                    owner="AttentionShape",
                )


@dataclass(frozen=True, kw_only=True)
class MaskCase:
    """Self-attention under a named mask; q, k and v are (batch, heads, seqlen_q, head_dim)."""

    mask: str  # as `doctor --mask` takes it: causal, random:0.1, document:100,28+causal, ...
    batch: int
    heads: int  # attention heads; they share the mask
    seqlen_q: int  # queries, and as many keys
    head_dim: int
    dtype: DTypeName
    query_block: int = 128  # rows of the mask's tiles
    key_block: int = 128  # columns of the mask's tiles

    def __post_init__(self) -> None:
        require_positive(
            self, ["batch", "heads", "seqlen_q", "head_dim", "query_block", "key_block"]
        )
        require_choice(self, "dtype", DTYPES)

    @property
    def shape(self) -> AttentionShape:
        """Return the same case for the dense kernels, whose only masks are causal and none."""
        return AttentionShape(
            batch=self.batch,
            heads=self.heads,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_q,
            head_dim=self.head_dim,
            is_causal=self.mask == "causal",
            dtype=self.dtype,
        )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Where low precision is used: the parameters' dtype, and autocast's dtype if it is on."""

    parameters: DTypeName = "float32"
    autocast: DTypeName | None = None  # None: no autocast

    def __post_init__(self) -> None:
        require_choice(self, "parameters", DTYPES)
        if self.autocast is not None:
            require_choice(self, "autocast", ("float16", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One timed model configuration: `batch` sequences of `model.context_length` tokens."""

    model: ModelConfig
    batch: int
    attention: str  # inside the model, one of ATTENTION_NAMES
    precision: Precision = Precision()
    # steps before the first timed one, in a fresh process where the problem is about warm-up
    warmup: int = 5

    def __post_init__(self) -> None:
        require_positive(self, ["batch"])
        if self.warmup < 0:
            raise FieldError(
                "warmup", f"must not be negative, got {self.warmup}", owner="ModelCase"
            )


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
DISTRIBUTED_BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """One collective on float32 tensors among the ranks of one host."""

    operation: str  # one of COLLECTIVES
    # of the whole tensor: all-gather's output on each rank, reduce-scatter's input on each rank
    num_bytes: int
    num_ranks: int
    backend: str  # gloo moves host memory, nccl GPU memory

    def __post_init__(self) -> None:
        require_choice(self, "operation", COLLECTIVES)
        require_choice(self, "backend", DISTRIBUTED_BACKENDS)
        require_positive(self, ["num_bytes", "num_ranks"])


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Modes and sizes of attention that a run sets; an empty axis leaves each problem's own."""

    # forward, backward, forward_backward; rows of other modes are left out
    modes: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    seqlens: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()

    @property
    def sizes(self) -> bool:
        """Return whether the run sets heads, sequence lengths or head dimensions."""
        return bool(self.heads or self.seqlens or self.head_dims)

    @property
    def options(self) -> str:
        """Return the command-line options of the axes that are set: "--mode, --heads"."""
        names = {
            "--mode": self.modes,
            "--heads": self.heads,
            "--seqlen": self.seqlens,
            "--head-dim": self.head_dims,
        }
        return ", ".join(name for name, values in names.items() if values)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of one `cs336-systems run`, the same for every problem it runs."""

    scale: Scale  # tiny: CI's minute; smoke: a laptop's minutes; handout: the full grid
    device: Literal["cpu", "cuda"]
    seed: int = 0  # of inputs and initial weights
    model: str | None = None  # "package.module:Class" of the user's own model; None: this package's
    cell_timeout_s: int = 600  # a cell that takes longer becomes a failed row
    axes: Axes = Axes()  # modes and sizes of the sweeps of attention

    def __post_init__(self) -> None:
        require_choice(self, "scale", SCALES)
        require_choice(self, "device", ("cpu", "cuda"))
        require_positive(self, ["cell_timeout_s"])
        if self.cell_timeout_s > MAX_CELL_TIMEOUT_S:
            raise FieldError(
                "cell_timeout_s",
                f"must be at most {MAX_CELL_TIMEOUT_S} (a day), got {self.cell_timeout_s}",
                owner="RunConfig",
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise FieldError(
                "seed", f"must be from 0 to {MAX_SEED}, got {self.seed}", owner="RunConfig"
            )
