"""Where one call of attention spends its time: mask, casts, forward, preprocess, dK and dV, dQ.

The kernels' code marks its stages (`measure/stages.py`). Each call here reaches other stages: plain
causal attention only the passes, a sliding window also builds its lists, and float32 inputs under
autocast are cast first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cs336_systems.attention import BlockMask, flash_attention
from cs336_systems.attention.contract import compute_oracle
from cs336_systems.config import AttentionShape, DTypeName, RunConfig
from cs336_systems.experiments import Bars, Cell, Experiment, Pick, Row, Sample, Wide, problem
from cs336_systems.inputs import attention_inputs
from cs336_systems.measure.stages import STAGES, TOTAL, time_stages
from cs336_systems.subjects.attention_builders import check_backend, ran
from cs336_systems.subjects.attention_passes import RESULTS, checked_error

# (heads, tokens, head dim)
SIZES = {"tiny": (1, 64, 64), "smoke": (2, 256, 64), "handout": (16, 8192, 128)}
WINDOW = 8  # a query of the sliding window sees this part of the tokens: one in eight


@dataclass(frozen=True, kw_only=True)
class StagedCall:
    """One call of attention, forward and backward, whose stages are timed."""

    call: str  # causal, window or autocast
    heads: int
    seqlen: int
    head_dim: int
    dtype: DTypeName  # of the kernels; under autocast the inputs are float32


ROWS = {stage: Row("forward_backward", f"{stage}_time", "ms") for stage in (*STAGES, TOTAL)}
# Stages that each call reaches beside the passes.
REACHED = {"causal": (), "window": ("mask_build",), "autocast": ("cast",)}


@problem(title="The stages of one call of attention", order=14)
class AttentionStages(Experiment):
    implementations = ("triton", "hopper")

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return each call with each back end; the rows are the stages that the call reaches."""
        heads, seqlen, head_dim = SIZES[run.scale]
        # The interpreter has no bfloat16.
        dtype: DTypeName = "bfloat16" if run.device == "cuda" else "float16"
        cases = [
            StagedCall(call=call, heads=heads, seqlen=seqlen, head_dim=head_dim, dtype=dtype)
            for call in REACHED
        ]
        return [
            Cell(
                case=case,
                implementation=name,
                rows=tuple(ROWS[stage] for stage in stages_of(case.call)),
            )
            for case in cases
            for name in self.implementations
        ]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Check the call against the oracle, then time each of its stages and the whole call."""
        case: StagedCall = cell.case
        call, inputs, mask = staged_call(case, cell.implementation, run)
        dense = None if mask is None else mask.to_dense()
        oracle = compute_oracle(*inputs, is_causal=mask is None, mask=dense)
        error = checked_error(oracle, dict(zip(RESULTS, call())))
        del oracle, dense
        few = run.device == "cpu"
        samples = time_stages(
            call, device=run.device, num_samples=2 if few else 30, warmup=0 if few else 5
        )
        kernel = ran(cell.implementation, run.device)
        for stage in stages_of(case.call):
            yield Sample(row=ROWS[stage], samples=samples[stage], kernel=kernel, error=error)

    tables = {
        "stages": Wide(
            title="Milliseconds of each stage of one call, forward and backward",
            down={"call": "call", "implementation": "implementation"},
            columns={
                stage.replace("_", " "): Pick(where={"quantity": row.quantity})
                for stage, row in ROWS.items()
            },
        )
    }
    figures = {
        "stages": Bars(
            title="Stages of one call of attention",
            x="call",
            color="quantity",
            facet="implementation",
            y_title="ms",
            where={"quantity": [row.quantity for stage, row in ROWS.items() if stage != TOTAL]},
        )
    }


def stages_of(call: str) -> Sequence[str]:
    """Return the stages that a call reaches, in order, and the whole call last."""
    return *(
        stage for stage in STAGES if stage in ("preprocess", "forward", "dq", "dkv", *REACHED[call])
    ), TOTAL


def staged_call(
    case: StagedCall, backend: str, run: RunConfig
) -> tuple[Callable[[], tuple[Tensor, ...]], list[Tensor], BlockMask | None]:
    """Return the call to time, its inputs as the kernels get them, and its mask.

    The inputs are q, k, v and the output's gradient in the kernels' dtype. `Unsupported` if the
    back end cannot run the call here.
    """
    shape = AttentionShape(
        batch=1,
        heads=case.heads,
        seqlen_q=case.seqlen,
        seqlen_k=case.seqlen,
        head_dim=case.head_dim,
        is_causal=True,
        dtype="float32" if case.call == "autocast" else case.dtype,
    )
    check_backend(
        backend,
        replace(shape, dtype=case.dtype),
        run.device,
        layout="block_mask" if case.call == "window" else "dense",
    )
    q, k, v, grad_output = attention_inputs(shape, device=run.device, seed=run.seed)
    dtype = getattr(torch, case.dtype)
    lowered = [x.to(dtype) for x in (q, k, v, grad_output)]
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def window() -> BlockMask:
        return BlockMask.sliding_window(
            case.seqlen, window=case.seqlen // WINDOW, device=run.device
        )

    def call() -> tuple[Tensor, ...]:
        mask = window() if case.call == "window" else None
        with torch.autocast(run.device, dtype) if case.call == "autocast" else nullcontext():
            output = flash_attention(
                *leaves, is_causal=mask is None, block_mask=mask, backend=backend
            )
        assert isinstance(output, Tensor)
        return output.detach(), *torch.autograd.grad(output, leaves, lowered[3])

    return call, lowered, window() if case.call == "window" else None
