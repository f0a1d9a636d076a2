"""What a rank of FSDP needs, predicted before anything is allocated.

    plan = fsdp_bytes(MODEL_SIZES["10b"], 4, num_ranks=2, attention="triton", compute_dtype="bfloat16",
                      checkpointing=True)
    plan.fits(139 * 2**30)

Every term is a count of elements times their bytes, by the shapes of `ModelConfig`; no fragmentation, no workspaces.
"""

from dataclasses import dataclass, replace

from cs336_systems.accounting import LOSS_BACKWARD_COPIES, activation_bytes, block_saved_bytes, num_parameters
from cs336_systems.config import BYTES_PER_ELEMENT, DTypeName, ModelConfig, Precision
from cs336_systems.model.block_parts import KEPT_WIDTHS, Recompute
from cs336_systems.model.chunked_loss import loss_bytes

GATHERED_UNITS = 2  # the one in use and the one behind it
GRADIENTS_IN_FLIGHT = 2  # units whose whole gradients wait for, or are in, a reduce-scatter


@dataclass(frozen=True, kw_only=True)
class ShardingBytes:
    """Bytes of one rank, by what they are for."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int  # whole weights of the units that are gathered
    unreduced: int  # whole gradients that wait for their reduction
    activations: int  # saved for backward, or recomputed
    logits: int  # temporaries of the loss

    @property
    def peak(self) -> int:
        """The larger of two moments: the loss, when gradients are not there yet, and the end of the backward."""
        resting = self.parameters + self.optimizer + self.gathered
        start_of_backward = self.activations + self.logits
        end_of_backward = self.gradients + self.unreduced
        return resting + max(start_of_backward, end_of_backward)

    def fits(self, memory_bytes: int, *, usable: float = 0.95) -> bool:
        """Whether the peak is within `usable` of a device's memory."""
        return self.peak <= usable * memory_bytes


def fsdp_bytes(
    model: ModelConfig,
    batch: int,
    *,
    num_ranks: int,
    attention: str,
    compute_dtype: str | None = None,
    reduce_dtype: str | None = None,
    checkpointing: bool = False,
    parameters: DTypeName = "float32",
) -> ShardingBytes:
    """Bytes of a rank that trains `model` with AdamW on `batch` sequences of its own, sharded by blocks.

    Weights, gradients and both moments rest in the dtype `parameters`.
    """
    master = BYTES_PER_ELEMENT[parameters]
    computed: DTypeName = compute_dtype or parameters  # type: ignore[assignment]
    compute = BYTES_PER_ELEMENT[computed]
    reduced = BYTES_PER_ELEMENT[reduce_dtype or computed]
    elements = num_parameters(model)
    replicated = (2 * model.num_layers + 1) * model.d_model
    own = -(-(elements - replicated) // num_ranks) + replicated
    block = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    unit = max(block, model.vocab_size * model.d_model)
    precision = Precision(parameters=computed)
    tokens = batch * model.context_length
    activations = activation_bytes(model, batch, attention=attention, precision=precision)
    if checkpointing:  # one block's, and the inputs of all
        one = sum(block_saved_bytes(model, batch, attention=attention, precision=precision).values())
        activations += one + model.num_layers * (tokens * model.d_model * compute - one)
    return ShardingBytes(
        parameters=own * master,
        gradients=own * master,
        optimizer=2 * own * master,
        gathered=GATHERED_UNITS * unit * compute,
        unreduced=GRADIENTS_IN_FLIGHT * unit * (compute + (reduced if reduced != compute else 0)),
        activations=activations,
        logits=LOSS_BACKWARD_COPIES * tokens * model.vocab_size * 4,
    )


def long_step_bytes(
    model: ModelConfig,
    batch: int,
    *,
    num_ranks: int,
    attention: str,
    recompute: Recompute,
    chunk_tokens: int,
    compute_dtype: str | None = None,
    reduce_dtype: str | None = None,
    parameters: DTypeName = "float32",
    wide_blocks: int = 0,
) -> ShardingBytes:
    """As `fsdp_bytes`, with blocks in parts (`run_in_parts`, compiled) and the loss in chunks (`LossTransformer`).

    Activations are what every block keeps, what the final norm keeps, and what one block computes again: all that it
    would save without checkpoints, less what of it is kept anyway.
    """
    plan = fsdp_bytes(
        model, batch, num_ranks=num_ranks, attention=attention, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype,
        parameters=parameters,
    )  # fmt: skip
    computed: DTypeName = compute_dtype or parameters  # type: ignore[assignment]
    compute = BYTES_PER_ELEMENT[computed]
    tokens = batch * model.context_length
    precision = Precision(parameters=computed)
    one = sum(block_saved_bytes(model, batch, attention=attention, precision=precision).values())
    width = tokens * model.d_model * compute
    kept = one
    if recompute != "nothing":
        log_sum_exp = 4 * tokens * model.num_heads if recompute != "block" else 0
        kept = min(one, KEPT_WIDTHS[recompute] * width + log_sum_exp)
    wider = width + 2 * tokens * model.d_ff * compute  # w1's and w3's input and outputs
    final_norm = (2 * model.d_model + 1) * tokens * max(4, compute) + width
    return replace(
        plan,
        activations=model.num_layers * kept + wide_blocks * wider + (one - kept) + final_norm,
        logits=loss_bytes(tokens, model.vocab_size, model.d_model, chunk_tokens, compute),
    )
