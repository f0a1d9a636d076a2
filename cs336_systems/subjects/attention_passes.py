"""Check and time passes of attention; define rows, cells and names of shapes for its experiments.

Each pass is checked against the float64 oracle on the same inputs, and only then timed.
`AttentionExperiment` measures one implementation per cell: a pass that runs out of memory loses
neither the pass before it nor another implementation, and a peak belongs to one implementation.
Experiments on ratios of speed use `AttentionByTurns`, which measures several by turns in one cell;
both define in `built` what is measured.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from cs336_systems.accounting import attention_flops, tflops_per_s
from cs336_systems.attention.contract import Oracle, compute_oracle, contract_errors
from cs336_systems.bench.axes import OF_THE_MASK
from cs336_systems.bench.spec import Cell, Disagreement, Experiment, Row, Sample, Unsupported
from cs336_systems.bench.turns import Call
from cs336_systems.book.figures import Bars
from cs336_systems.book.frames import span, with_speeds
from cs336_systems.book.tables import Pivot, TableSpec
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.measure.allocations import (
    MIB,
    kept_for_a_case,
    peak_cuda_bytes,
    release,
    saved_for_backward,
)
from cs336_systems.measure.timing import MIN_SAMPLES, time_calls, time_once
from cs336_systems.subjects.attention_builders import Built
from cs336_systems.subjects.implementations import IMPLEMENTATIONS, REGISTRY, build_case
from cs336_systems.subjects.mask_builders import is_plain, mask_of, masked_of, shape_of

FORWARD = Row(mode="forward", quantity="time", unit="ms")
BACKWARD = Row(mode="backward", quantity="time", unit="ms")
BOTH = Row(mode="forward_backward", quantity="time", unit="ms")
PEAK = Row(mode="forward_backward", quantity="peak_memory", unit="MiB", gpu_only=True)
SAVED = Row(mode="backward", quantity="saved_for_backward", unit="MiB")
BEFORE_BACKWARD = Row(mode="backward", quantity="memory_before_backward", unit="MiB", gpu_only=True)
MASK_TIME = Row(mode="forward", quantity="mask_time", unit="ms")
TIMES = ("time", "graph_time")  # quantities that are a pass's time

BUDGET_MS = {"cuda": 150.0, "cpu": 50.0}  # time for the samples of a row
# An H200 at its power limit lowers its clock by up to a tenth within 100 ms of large kernels and
# holds it there. After a second of them the clock swings by up to a fifth. Between these two, times
# repeat to 1 %.
REST_MS = 500.0
SETTLE_MS = 300.0
# Samples kept per row: quartiles need no more, and a file of four thousand rows stays small.
KEPT_SAMPLES = 25
MODE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
}
BY_SHAPE = {"batch × heads × length × head dim": "shape"}  # a table's first column
# choice of the rows that are times of both passes together
BOTH_TIMES = {"quantity": "time", "mode": "forward_backward"}
RESULTS = ("output", "grad_q", "grad_k", "grad_v")
# batch, heads, length, head_dim, causal, and key heads if there are fewer
Sizes = tuple[int, int, int, int, bool] | tuple[int, int, int, int, bool, int]
# head dims of the handout's two grids, by scale
HEAD_DIMS = {"tiny": (32,), "smoke": (32, 64), "handout": (16, 32, 64, 128)}
SMALL: dict[str, tuple[Sizes, ...]] = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 128, 64, True),),
}


class AttentionExperiment(Experiment):
    """Base class of attention experiments: every implementation on the shapes of `sizes`."""

    sizes: ClassVar[Mapping[str, Sequence[Sizes]]]  # scale -> sizes of the cases
    rows: tuple[Row, ...] = (FORWARD, BACKWARD, BOTH)
    # True: the loss is the output's sum, whose gradient is a stride-0 tensor of ones. False: the
    # output's gradient is random.
    sum_loss: bool = False
    # True: before a GPU times a pass, it rests and then runs the pass until its clock has settled
    settled: bool = False

    def cases(self, run: RunConfig) -> Sequence[AttentionShape]:
        """Return the shapes of `sizes` at the run's scale."""
        return [sized_shape(run, *sizes) for sizes in self.sizes[run.scale]]

    def built(self, name: str, case: Any, run: RunConfig) -> Built:
        """Return the implementation `name` for `case`; raise Unsupported if it does not exist."""
        return build_case(name, case, run)

    def samples_of(self, call: Call, case: Any, run: RunConfig) -> list[float]:
        """Return milliseconds of repeated `call`s: at most KEPT_SAMPLES, evenly spaced in time."""
        samples = time_calls(call, device=run.device, warmup=1, budget_ms=BUDGET_MS[run.device])
        if (count := len(samples)) > KEPT_SAMPLES:
            samples = [samples[place * count // KEPT_SAMPLES] for place in range(KEPT_SAMPLES)]
        return samples

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Yield the promised densities of the case's mask, then the samples of its passes.

        The densities are the shares of attended pairs and of live tiles.
        """
        for row in cell.rows:
            if row.quantity in OF_THE_MASK:
                mask = mask_of(masked_of(cell.case), run)
                yield Sample(row=row, samples=[getattr(mask, row.quantity)])
        passes = tuple(row for row in cell.rows if row.quantity not in OF_THE_MASK)
        yield from self.measure_passes(replace(cell, rows=passes), run)

    def measure_passes(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Check and time the passes of the cell's implementation: forward, backward, then both.

        The forward is timed without a graph, the backward on a graph that is built beforehand, both
        together from scratch. The interpreter's times say nothing of speed, and a call takes
        seconds: a single call is the only sample.
        """
        case, device = cell.case, run.device
        built = self.built(cell.implementation, case, run)
        kernel, interpreted = built.kernel, built.kernel.startswith("interpreter")
        if MASK_TIME in cell.rows and built.build_mask is not None:
            samples = time_calls(built.build_mask, device=device, num_samples=MIN_SAMPLES)
            yield Sample(row=MASK_TIME, samples=samples)
        inputs = inputs_of(case, run, self.sum_loss)
        passes = Passes(built, inputs, self.sum_loss)

        def checked(
            call: Callable[[], Sequence[Tensor]], names: Sequence[str]
        ) -> tuple[float, float]:
            """Return the milliseconds of one call and the largest error of its results / bound."""
            returned: list[Tensor] = []
            first_ms = time_once(lambda: returned.extend(call()), device)
            results = {name: built.unpack(x) for name, x in zip(names, returned)}
            # The oracle comes after the call: a call that runs out of memory needs none.
            return first_ms, checked_error(
                oracle_of(case, run, self.sum_loss), results, cell.implementation
            )

        def timed(mode: str, call: Call, first_ms: float, error: float) -> Iterator[Sample]:
            """Yield the samples of the cell's time rows of `mode`."""
            for row in cell.rows:
                if row.mode == mode and row.quantity in TIMES:
                    if self.settled and device == "cuda":
                        settle(call)
                    samples = [first_ms] if interpreted else self.samples_of(call, case, run)
                    yield Sample(row=row, samples=samples, kernel=kernel, error=error)

        with built.context():
            # forward
            first_ms, error = checked(passes.forward, RESULTS[:1])
            yield from timed("forward", passes.forward, first_ms, error)
            if all(row.mode == "forward" for row in cell.rows):
                return

            # backward
            first_ms, gradient_error = checked(passes.both, RESULTS[1:])
            error = max(error, gradient_error)
            if SAVED in cell.rows:
                yield Sample(
                    row=SAVED, samples=[saved_for_backward(passes.output) / MIB], kernel=kernel
                )
            release(device)
            allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
            output = passes.output()
            if BEFORE_BACKWARD in cell.rows:
                torch.cuda.synchronize()
                used = torch.cuda.memory_allocated() - allocated + sum(x.nbytes for x in inputs)
                yield Sample(row=BEFORE_BACKWARD, samples=[used / MIB], kernel=kernel)
            backward = partial(passes.backward, output)
            backward_ms = (
                time_once(backward, device) if interpreted and BACKWARD in cell.rows else math.nan
            )
            yield from timed("backward", backward, backward_ms, error)
            del output, backward

            # forward and backward
            yield from timed("forward_backward", passes.both, first_ms, error)
            if PEAK in cell.rows:
                yield Sample(row=PEAK, samples=[peak_cuda_bytes(passes.both) / MIB], kernel=kernel)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns `shape` and `pass` in words, and `tflops`.

        `tflops` is the rate of a measured time in TFLOP/s, and NaN for other rows.
        """
        shape = AttentionShape(**{name: row[name] for name in AttentionShape.__dataclass_fields__})
        heads = (
            f"{shape.heads}/{shape.kv_heads}"
            if shape.kv_heads not in (None, shape.heads)
            else str(shape.heads)
        )
        keys = f" on {shape.seqlen_k:,}" if shape.seqlen_k != shape.seqlen_q else ""
        sizes = f"{shape.batch} × {heads} × {shape.seqlen_q:,}{keys} × {shape.head_dim}"
        rate = math.nan
        if row["quantity"] == "time" and row["median"] > 0:
            rate = tflops_per_s(attention_flops(shape, row["mode"]), row["median"])
        words = f"{sizes} {'causal' if shape.is_causal else 'full'}"
        return {"shape": words, "pass": MODE_WORDS[row["mode"]], "tflops": rate}


def rate_tables(
    ratios: Sequence[tuple[str, str]],
    down: Mapping[str, str] = BY_SHAPE,
    titles: Mapping[str, str] = MODE_WORDS,
) -> dict[str, TableSpec]:
    """Return a table of TFLOP/s for each mode of `titles`, with columns for `ratios` of speed."""
    return {
        mode: Pivot(
            title=title,
            down=down,
            value="tflops",
            unit="TFLOP/s",
            where={"quantity": "time", "mode": mode},
            ratios=ratios,
        )
        for mode, title in titles.items()
    }


def over_fa4_claim(rows: pd.DataFrame) -> str:
    """Return a title: hopper's speed relative to FlashAttention-4's, "" without common shapes."""
    compared = with_speeds(rows, "over_fa4", {"implementation": "fa4"})
    speeds = compared.loc[compared["implementation"] == "hopper", "over_fa4"].dropna()
    return f"hopper runs at {span(speeds)} times FlashAttention-4's speed" if len(speeds) else ""


def rate_bars(
    title: str, x: str = "shape", color: str = "implementation", facet: str | None = None
) -> Bars:
    """Return bars of TFLOP/s of forward and backward together, titled by `over_fa4_claim`."""
    subtitle = "forward + backward" + (
        ", batch × heads × tokens × head dim" if x == "shape" else ""
    )
    return Bars(
        title=title,
        claim=over_fa4_claim,
        subtitle=subtitle,
        x=x,
        y="tflops",
        y_title="TFLOP/s",
        color=color,
        facet=facet,
        where=BOTH_TIMES,
    )


def sized_shape(
    run: RunConfig,
    batch: int,
    heads: int,
    seqlen: int,
    head_dim: int,
    is_causal: bool,
    kv_heads: int | None = None,
) -> AttentionShape:
    """Return the self-attention shape of these sizes: bfloat16 on a GPU, float32 on a CPU.

    Triton's interpreter, which runs on the CPU, needs float32.
    """
    return AttentionShape(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        is_causal=is_causal,
        dtype="bfloat16" if run.device == "cuda" else "float32",
        kv_heads=kv_heads,
    )


def settle(call: Call) -> None:
    """Leave the GPU idle for REST_MS, then repeat `call` for SETTLE_MS, one at a time."""
    torch.cuda.synchronize()
    time.sleep(REST_MS / 1e3)
    end = time.perf_counter() + SETTLE_MS / 1e3
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()


class Passes:
    """The passes of one implementation on packed inputs, to be called within its context.

    With `sum_loss`, `both` differentiates the sum of the output, else `inputs.grad_output` is the
    output's gradient.
    """

    def __init__(self, built: Built, inputs: AttentionInputs, sum_loss: bool = False) -> None:
        *packed, self.grad_output = (built.pack(x) for x in inputs)
        self.leaves = [x.detach().clone().requires_grad_() for x in packed]
        self.attend, self.no_backward, self.sum_loss = built.attend, built.no_backward, sum_loss

    def forward(self) -> tuple[Tensor]:
        """Return (output,), packed, without a graph."""
        # detached, since FlexAttention on a CPU refuses inputs that require gradients
        with torch.no_grad():
            return (self.attend(*(x.detach() for x in self.leaves)),)

    def output(self) -> Tensor:
        """Return the packed output with its graph."""
        return self.attend(*self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        """Run forward and backward, and return the packed gradients of q, k and v."""
        if self.no_backward:
            raise Unsupported(self.no_backward)
        output = self.output()
        if self.sum_loss:
            return torch.autograd.grad(output.sum(), self.leaves)
        return torch.autograd.grad(output, self.leaves, self.grad_output)

    def backward(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return the packed gradients of q, k and v from `output`, whose graph is kept."""
        return torch.autograd.grad(output, self.leaves, self.grad_output, retain_graph=True)


def checked_error(oracle: Oracle, results: Mapping[str, Tensor], implementation: str = "") -> float:
    """Return the largest error of `results` over its bound; raise Disagreement if it is above 1.

    The message names the result, and says for an `implementation` with a library's kernel that the
    kernel is another project's.
    """
    errors = contract_errors(oracle, results)
    name, worst = max(errors.items(), key=lambda item: item[1])
    if not worst <= 1:
        library = REGISTRY[implementation].library if implementation in IMPLEMENTATIONS else ""
        whose = f"; the kernel is {library}'s, not this repository's" if library else ""
        raise Disagreement(
            f"{name} is off by {worst:.3g} times the numerical contract's bound{whose}"
        )
    return worst


# A sweep measures the implementations of a case in a row; they share these inputs and this oracle.
@kept_for_a_case
def inputs_of(case: Any, run: RunConfig, sum_loss: bool = False) -> AttentionInputs:
    """Return the inputs of `case`, kept until another case; with `sum_loss` grad_output is ones."""
    oracle_of.cache_clear()
    release(run.device)
    inputs = attention_inputs(shape_of(case), device=run.device, seed=run.seed)
    if sum_loss:
        inputs = inputs._replace(grad_output=inputs.q.new_ones(()).expand(inputs.q.shape))
    return inputs


@kept_for_a_case
def oracle_of(case: Any, run: RunConfig, sum_loss: bool = False) -> Oracle:
    """Return the oracle of `inputs_of` the same arguments, kept until another case."""
    release(run.device)
    oracle = oracle_on(case, run, inputs_of(case, run, sum_loss))
    release(run.device)
    return oracle


def oracle_on(case: Any, run: RunConfig, inputs: AttentionInputs) -> Oracle:
    """Return the oracle of `inputs` under the mask of `case`."""
    masked = masked_of(case)
    token_mask = (
        None if masked is None or is_plain(masked.mask) else mask_of(masked, run).to_dense()
    )
    return compute_oracle(*inputs, is_causal=shape_of(case).is_causal, mask=token_mask)
