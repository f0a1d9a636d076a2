"""Bytes on each GPU for every way of training in parallel: what says that a model fits before it is built.

    rank_bytes(MODEL_SIZES["10b"], Plan(scheme="fsdp", data_parallel=2), batch=2).peak / 2**30       # GiB

Parameters, gradients and AdamW's two moments are float32; activations are of the compute dtype. As `accounting`, whose
counts of activations these are: an estimate of what tensors need, without the allocator's fragmentation, the CUDA
context and NCCL's buffers (about 1 GiB together).
"""

from __future__ import annotations

from dataclasses import dataclass

from cs336_systems.accounting import LOSS_BACKWARD_COPIES, activation_bytes, block_saved_bytes
from cs336_systems.analysis.traffic import MASTER_BYTES, Plan, fsdp_units, parameters
from cs336_systems.config import ModelConfig, Precision

OPTIMIZER_MOMENTS = 2
COMPUTE_DTYPES = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes on one GPU, by what they are for."""

    parameters: int  # master weights that the rank keeps all the time
    gradients: int  # when backward is done
    optimizer: int
    gathered: int  # FSDP: whole weights of the layers in use and on their way, and one whole gradient
    buffers: int  # copies made only to communicate
    activations: int  # saved for backward when it starts
    loss: int  # temporaries of the logits' size when backward starts
    block: int  # what one block saved: all that is left of the activations when backward ends

    @property
    def persistent(self) -> int:
        """What outlives a step in which gradients are set to None."""
        return self.parameters + self.optimizer

    @property
    def peak(self) -> int:
        """The larger of backward's start, with all activations, and its end, with all gradients."""
        start = self.activations + self.loss
        end = self.gradients + max(self.block, self.buffers)
        return self.persistent + self.gathered + max(start, end)


def rank_bytes(
    model: ModelConfig, plan: Plan, *, batch: int, attention: str = "triton", checkpointed: bool = False
) -> RankBytes:
    """Bytes of each rank with `batch` sequences on it.

    DDP keeps everything on every rank, `flat` a second copy of the gradients while it reduces. The sharded optimizer
    and ZeRO-1 keep 1/N of the moments, ZeRO-1 also the averaged 1/N of the gradients. FSDP keeps 1/N, rounded up, of
    every matrix, its gradient and its moments, and gathers the unit in use and `plan.prefetch` more; norms are whole on
    every rank. Tensor parallelism divides the matrices and, a little too well, all activations. `checkpointed` saves
    only each block's input.
    """
    held = parameters(model, plan.tensor_parallel)
    ranks = plan.data_parallel
    total = sum(parameter.elements for parameter in held)
    kept = total
    if plan.scheme == "fsdp":
        kept = sum(-(-one.elements // ranks) if one.is_matrix else one.elements for one in held)
    moments = -(-total // ranks) if plan.scheme in ("sharded-optimizer", "zero1") else kept
    activations, block, loss = _activations(model, plan, batch, attention, checkpointed)
    return RankBytes(
        parameters=MASTER_BYTES * kept,
        gradients=MASTER_BYTES * kept,
        optimizer=OPTIMIZER_MOMENTS * MASTER_BYTES * moments,
        gathered=_gathered_bytes(model, plan),
        buffers=MASTER_BYTES * {"flat": total if ranks > 1 else 0, "zero1": moments}.get(plan.scheme, 0),
        activations=activations,
        loss=loss,
        block=block,
    )


def _gathered_bytes(model: ModelConfig, plan: Plan) -> int:
    """Most that `prefetch` + 1 consecutive units and one unit's gradients take, in the compute dtype."""
    if plan.scheme != "fsdp" or plan.data_parallel == 1:
        return 0
    held = parameters(model, plan.tensor_parallel)
    sizes = [sum(held[position].elements for position in unit) for unit in fsdp_units(held, plan)]
    window = plan.prefetch + 1
    weights = max(sum(sizes[start : start + window]) for start in range(max(1, len(sizes) - window + 1)))
    return plan.compute_bytes * (weights + max(sizes))


def _activations(
    model: ModelConfig, plan: Plan, batch: int, attention: str, checkpointed: bool
) -> tuple[int, int, int]:
    """(saved for backward, one block's part of it, temporaries of the loss)."""
    if plan.compute_bytes not in COMPUTE_DTYPES:
        raise ValueError(f"plan.compute_bytes must be 2 or 4 to count activations, got {plan.compute_bytes}")
    precision = Precision(parameters=COMPUTE_DTYPES[plan.compute_bytes])  # type: ignore[arg-type]
    block = sum(block_saved_bytes(model, batch, attention=attention, precision=precision).values())
    saved = activation_bytes(model, batch, attention=attention, precision=precision)
    tokens = batch * model.context_length
    if checkpointed:
        saved += block + model.num_layers * (tokens * model.d_model * plan.compute_bytes - block)
    loss = LOSS_BACKWARD_COPIES * tokens * model.vocab_size * MASTER_BYTES
    split = plan.tensor_parallel
    return saved // split, block // split, loss // split
