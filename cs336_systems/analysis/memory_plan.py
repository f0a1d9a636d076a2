"""Bytes on each GPU for every scheme of parallel training, known before a model is built.

    plan = Plan(scheme="fsdp", data_parallel=2)
    rank_bytes(MODEL_SIZES["10b"], plan, batch=2).peak / 2**30    # GiB
    options = {"attention": "triton", "compute_dtype": "bfloat16"}
    fsdp_bytes(MODEL_SIZES["10b"], 4, num_ranks=2, **options).fits(139 * 2**30)

`rank_bytes` is for every scheme, with float32 masters and bfloat16 compute; `fsdp_bytes` is for
FSDP in any dtypes, as `distributed/fsdp` keeps it. Activations are counted as in `accounting`. Both
estimate what tensors need, without the allocator's fragmentation, the CUDA context and NCCL's
buffers (about 1 GiB together).
"""

from __future__ import annotations

from cs336_systems.accounting import (
    LOSS_BACKWARD_COPIES,
    OPTIMIZER_MOMENTS,
    RankBytes,
    activation_bytes,
    block_matrix_elements,
    block_saved_bytes,
    loss_logit_bytes,
    num_parameters,
)
from cs336_systems.analysis import traffic
from cs336_systems.analysis.traffic import COMPUTE_BYTES, MASTER_BYTES, Plan
from cs336_systems.config import BYTES_PER_ELEMENT, DTypeName, ModelConfig, Precision

# Units of `distributed/fsdp` that are whole at once: the one in use and the next.
GATHERED_UNITS = 2
# Units whose whole gradients wait for a reduce-scatter, or are in one.
GRADIENTS_IN_FLIGHT = 2


def rank_bytes(
    model: ModelConfig,
    plan: Plan,
    *,
    batch: int,
    attention: str = "triton",
    checkpointed: bool = False,
) -> RankBytes:
    """Return the bytes of each rank under `plan`, with `batch` sequences a replica of the model.

    DDP keeps everything on every rank, `flat` a second copy of the gradients while it reduces,
    `bucketed` and `zero1` the gradients in buckets that are never freed. The sharded optimizer and
    ZeRO-1 keep 1/N of the moments, ZeRO-1 also the averaged 1/N of the gradients. FSDP keeps 1/N,
    rounded up, of every matrix, its gradient and its moments, and gathers the unit in use and
    PREFETCH more; norms are whole on every rank. Tensor parallelism divides the matrices and, a
    little too well, all activations. `checkpointed` saves only each block's input.
    """
    # Elements that a rank keeps of parameters and gradients, and of each moment
    held = traffic.parameters(model, plan.tensor_parallel)
    ranks = plan.data_parallel
    total = traffic.num_elements(held)
    kept = total
    if plan.scheme == "fsdp":
        kept = sum(-(-one.elements // ranks) if one.is_matrix else one.elements for one in held)
    moments = -(-total // ranks) if plan.scheme in ("sharded-optimizer", "zero1") else kept
    # FSDP's whole tensors: PREFETCH + 1 consecutive units, and one unit's gradients
    gathered = 0
    if plan.scheme == "fsdp" and ranks > 1:
        sizes = list(map(traffic.num_elements, traffic.fsdp_units(held)))
        window = traffic.PREFETCH + 1
        weights = max(
            sum(sizes[start : start + window]) for start in range(max(1, len(sizes) - window + 1))
        )
        gathered = COMPUTE_BYTES * (weights + max(sizes))

    activations, block = saved_bytes(model, batch, attention, "bfloat16", checkpointed)
    logits = LOSS_BACKWARD_COPIES * loss_logit_bytes(model, batch, Precision(parameters="bfloat16"))
    return RankBytes(
        parameters=MASTER_BYTES * kept,
        gradients=MASTER_BYTES * kept,
        optimizer=OPTIMIZER_MOMENTS * MASTER_BYTES * moments,
        gathered=gathered,
        buffers=MASTER_BYTES
        * {"flat": total if ranks > 1 else 0, "zero1": moments}.get(plan.scheme, 0),
        activations=activations // plan.tensor_parallel,
        loss=logits // plan.tensor_parallel,
        block=block // plan.tensor_parallel,
        gradients_stay=plan.scheme in ("bucketed", "zero1"),
    )


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
) -> RankBytes:
    """Return the bytes of an FSDP rank that trains `model` with AdamW on its own `batch` sequences.

    The model is sharded by blocks among `num_ranks` ranks. Weights, gradients and both moments rest
    in the dtype `parameters`. Matmuls run in `compute_dtype` (None: `parameters`), and gradients
    are reduced in `reduce_dtype` (None: the dtype of the matmuls).
    """
    master = BYTES_PER_ELEMENT[parameters]
    computed: DTypeName = compute_dtype or parameters  # type: ignore[assignment]
    compute = BYTES_PER_ELEMENT[computed]
    reduced = BYTES_PER_ELEMENT[reduce_dtype or computed]
    replicated = (2 * model.num_layers + 1) * model.d_model
    own = -(-(num_parameters(model) - replicated) // num_ranks) + replicated
    unit = max(block_matrix_elements(model), model.vocab_size * model.d_model)
    return RankBytes(
        parameters=own * master,
        gradients=own * master,
        optimizer=OPTIMIZER_MOMENTS * own * master,
        gathered=GATHERED_UNITS * unit * compute,
        buffers=GRADIENTS_IN_FLIGHT * unit * (compute + (reduced if reduced != compute else 0)),
        activations=saved_bytes(model, batch, attention, computed, checkpointing)[0],
        loss=LOSS_BACKWARD_COPIES * loss_logit_bytes(model, batch, Precision(parameters=computed)),
    )


def saved_bytes(
    model: ModelConfig, batch: int, attention: str, dtype: DTypeName, checkpointed: bool
) -> tuple[int, int]:
    """Return the bytes saved for backward, and one block's part of them.

    If `checkpointed`, all blocks' inputs and one block's activations are saved.
    """
    precision = Precision(parameters=dtype)
    block = sum(block_saved_bytes(model, batch, attention=attention, precision=precision).values())
    saved = activation_bytes(model, batch, attention=attention, precision=precision)
    if checkpointed:
        width = batch * model.context_length * model.d_model * BYTES_PER_ELEMENT[dtype]
        saved += block + model.num_layers * (width - block)
    return saved, block
