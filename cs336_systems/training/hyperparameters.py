"""Configuration of a training run, which decides its losses, and its learning rates.

model = byte_model(MODEL_SIZES["small"], context_length=256)
config = TrainingConfig(model=model, steps=2000)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cs336_systems.config import MAX_SEED, FieldError, ModelConfig, Precision

NUM_BYTES = 256  # the vocabulary: a token is a byte
WRAPPERS = ("none", "naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "fsdp")
OPTIMIZERS = ("adamw", "muon")
NANO = ModelConfig(
    name="nano",
    d_model=128,
    d_ff=384,
    num_layers=4,
    num_heads=4,
    vocab_size=NUM_BYTES,
    context_length=128,
)


def byte_model(model: ModelConfig, context_length: int) -> ModelConfig:
    """Return `model` with the vocabulary of bytes, for sequences of `context_length`."""
    return replace(model, vocab_size=NUM_BYTES, context_length=context_length)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Configuration of a training run; two runs of one config on one text have the same losses.

    Runs that differ only in wrapper and number of ranks have them up to rounding.
    """

    model: ModelConfig = NANO
    wrapper: str = "none"  # how gradients, optimizer state and weights are shared: one of WRAPPERS
    num_ranks: int = 1
    context_parallel: int = 1  # neighbouring ranks that share each sequence
    tensor_parallel: int = 1  # neighbouring ranks that split the model's matrices
    sequence_parallel: bool = False  # these also share the positions between the layers
    replicas: int = 1  # of fsdp: groups of ranks that each hold the whole model (HSDP)
    optimizer: str = "adamw"  # or muon: for the matrices of the blocks, AdamW for all else
    attention: str = "sdpa"  # name of the attention inside the model
    precision: Precision = Precision()
    batch: int = 16  # sequences a step, over all ranks and micro-batches
    accumulation: int = 1  # micro-batches a step on each rank
    steps: int = 300
    learning_rate: float = 2e-3  # the highest, at the end of the warm-up
    final_learning_rate: float = 2e-4  # at the last step
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0  # of all gradients as one vector; None: no clipping
    seed: int = 0  # of weights and order of data

    def __post_init__(self) -> None:
        for name in (
            "num_ranks",
            "context_parallel",
            "tensor_parallel",
            "replicas",
            "batch",
            "accumulation",
            "steps",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FieldError(
                    name, f"must be a positive int, got {value!r}", owner="TrainingConfig"
                )
        share = max(1, self.num_ranks // self.ranks_a_batch) * self.accumulation
        length, split = self.model.context_length, self.tensor_parallel
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        most_seed = MAX_SEED // 2**16  # leaves room for the number of the epoch
        conditions = [
            ("wrapper", self.wrapper in WRAPPERS, f"one of {', '.join(WRAPPERS)}"),
            (
                "wrapper",
                self.wrapper != "none" or self.num_ranks == split,
                f"one that shares {self.num_ranks} ranks' work",
            ),
            (
                "wrapper",
                self.wrapper != "zero1" or split == 1,
                "another one for tensor_parallel, whose parts zero1 would mix",
            ),
            (
                "tensor_parallel",
                self.num_ranks % split == 0,
                f"a divisor of {self.num_ranks} ranks",
            ),
            ("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            (
                "optimizer",
                self.optimizer != "muon" or (split == 1 and self.wrapper != "zero1"),
                "adamw with tensor_parallel or zero1, which cut matrices",
            ),
            (
                "tensor_parallel",
                split == 1 or self.context_parallel == 1,
                f"1 with context_parallel {self.context_parallel}",
            ),
            (
                "tensor_parallel",
                self.model.num_heads % split == self.model.d_ff % split == 0,
                f"a divisor of {self.model.num_heads} heads and d_ff {self.model.d_ff}",
            ),
            (
                "sequence_parallel",
                not self.sequence_parallel or (split > 1 and length % split == 0),
                "False without tensor_parallel, and unless that divides the context length "
                f"{length}",
            ),
            (
                "replicas",
                self.replicas == 1
                or (self.wrapper == "fsdp" and self.num_ranks % (self.replicas * split) == 0),
                f"1 without the wrapper fsdp, else a divisor of {self.num_ranks // split} ranks",
            ),
            (
                "context_parallel",
                self.num_ranks % self.context_parallel == 0,
                f"a divisor of {self.num_ranks} ranks",
            ),
            (
                "context_parallel",
                length % chunks == 0,
                f"a divisor of half the context length {length}",
            ),
            (
                "batch",
                self.batch % share == 0,
                "a multiple of num_ranks / (context_parallel * tensor_parallel) * accumulation "
                f"= {share}",
            ),
            ("model", self.model.vocab_size == NUM_BYTES, f"of vocab_size {NUM_BYTES}"),
            ("warmup_steps", self.warmup_steps >= 0, "not negative"),
            ("clip_norm", self.clip_norm is None or self.clip_norm > 0, "positive or None"),
            ("seed", 0 <= self.seed <= most_seed, f"from 0 to {most_seed}"),
            ("learning_rate", 0 <= self.learning_rate < math.inf, "finite and not negative"),
            (
                "final_learning_rate",
                0 <= self.final_learning_rate < math.inf,
                "finite and not negative",
            ),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "finite and not negative"),
        ]
        for name, holds, wanted in conditions:
            if not holds:
                raise FieldError(
                    name,
                    f"must be {wanted}, got {getattr(self, name)!r}",
                    owner="TrainingConfig",
                )

    @property
    def ranks_a_batch(self) -> int:
        """Return how many neighbouring ranks get the same sequences."""
        return self.context_parallel * self.tensor_parallel

    @property
    def rank_batch(self) -> int:
        """Return the sequences a step of one rank, or of ranks that get the same."""
        return self.batch // (self.num_ranks // self.ranks_a_batch)

    @property
    def step_tokens(self) -> int:
        """Return the tokens of a step over all ranks."""
        return self.batch * self.model.context_length


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of step `step`, counted from 0.

    It rises linearly over `warmup_steps` to the highest, (step + 1)/warmup_steps of it at each
    step, then falls along half a cosine to the rate of the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    fall = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + fall * (1 + math.cos(math.pi * min(1.0, progress))) / 2
