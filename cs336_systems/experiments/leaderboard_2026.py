"""The 2026 leaderboard: a full training step of an 8B model, 32,768 tokens on each of two GPUs.

The model has 34 layers and 152 thousand words. It is trained with AdamW and computes in bfloat16,
with float32 masters; in another case weights, gradients and moments are bfloat16 as well. Three
things make it fit. FSDP, this package's or PyTorch's, shards these states over both ranks. Blocks
keep attention's tensors and compute the rest again, except as many wide blocks as memory allows
(`run_in_parts`). The logits never exist as a whole (`LossTransformer`).

Phases on every rank:

- cold start: from launching the ranks to the end of the first step, with empty compilation caches;
- timed steps, together; the peak of memory since the start;
- one traced step, on rank 0;
- check: a shallow model of the same width and settings trains as one in float32 without any of
  this.

The check comes last, so that the start is really cold.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor, nn

from cs336_systems import accounting
from cs336_systems.analysis import HARDWARE, RankBytes
from cs336_systems.attention.choose import available_backends
from cs336_systems.book.frames import digits
from cs336_systems.book.tables import Pick, Wide
from cs336_systems.config import BYTES_PER_ELEMENT, MODEL_SIZES, ModelConfig, Precision, RunConfig
from cs336_systems.device import PEAKS
from cs336_systems.experiments import (
    Bars,
    Cell,
    Disagreement,
    Experiment,
    Row,
    Sample,
    Unsupported,
    problem,
)
from cs336_systems.measure.allocations import MIB, release
from cs336_systems.model.block_parts import KEPT_WIDTHS, Recompute, run_in_parts
from cs336_systems.model.chunked_loss import CHUNK_TOKENS, LossTransformer, loss_bytes
from cs336_systems.subjects import parallel_step as steps
from cs336_systems.subjects import ranks
from cs336_systems.subjects.parallel_step import (
    CHECK_BOUND,
    ParallelStep,
    RanksCase,
    ShardingCase,
    fsdp_case_bytes,
)

IMPLEMENTATIONS = ("fsdp", "torch_fsdp")
NUM_RANKS, BATCH = 2, 1  # one sequence per rank: a global batch of two
STEPS = {"tiny": 3, "smoke": 3, "handout": 5}  # timed steps
WARMUP = 1  # steps after the first one, which compiles
ATTENTIONS = ("hopper", "triton")  # the first that runs here is taken, else PyTorch's
LEARNING_RATE = 1e-4
# The fused AdamW reads and writes every tensor once; ours touches some of them three times.
FUSED_ADAMW: Any = partial(torch.optim.AdamW, fused=True)
GPU_BYTES = 150_109_880_320  # of an H200 as PyTorch counts; it is sold as 141 GB
USED_SHARE = 0.97  # of GPU_BYTES that a plan may need by the prediction
# Freed activations leave pieces whose sizes do not fit the next tensors. With expandable segments
# the pages of such pieces can be mapped again. Without them, float32 masters with ten wide blocks
# ran out of an H200's memory, with 115 GiB in tensors and 23 GiB in such pieces.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
CHECK_LAYERS, CHECK_CONTEXT, CHECK_VOCABULARY = 2, 512, 8192
# Of SGD: large enough for its steps to stand out of float32's rounding of the weights.
CHECK_LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class LongStepCase(RanksCase):
    """A training step under FSDP with one long sequence per rank."""

    reduce_dtype: str | None = None  # of averaged gradients; None: the dtype of the computation
    # the part of a block that is computed again; see model/block_parts.py
    recompute: Recompute = "around_attention"
    wide_blocks: int = 0  # blocks that also keep the outputs of w1 and w3
    compiled: bool = False  # torch.compile for the parts of blocks
    chunk_tokens: int = CHUNK_TOKENS  # tokens in a chunk of the loss

    @property
    def predicted_bytes(self) -> int:
        """Return a rank's peak, or that of all ranks if they share the host's memory."""
        return (self.num_ranks if self.backend == "gloo" else 1) * long_step_bytes(self).peak


def widest(case: LongStepCase) -> LongStepCase:
    """Return `case` with as many wide blocks as an H200 has room for by the prediction.

    The prediction is some GiB too high.
    """
    options = (replace(case, wide_blocks=number) for number in range(case.model.num_layers, 0, -1))
    return next(
        (option for option in options if long_step_bytes(option).peak <= USED_SHARE * GPU_BYTES),
        case,
    )


def long_step_cell(case: LongStepCase, implementation: str) -> Cell:
    """Return the cell of a case with every row that its device can give."""
    memory = ("predicted_peak_memory", *(("peak_memory",) if case.backend == "nccl" else ()))
    cell = ranks.step_cell(case, implementation, memory)
    return replace(cell, rows=(*cell.rows, Row("train_step", "start_time", "s")))


def long_step_bytes(case: LongStepCase) -> RankBytes:
    """Return the predicted memory of a rank, as `fsdp_case_bytes` with blocks in parts.

    Here the blocks run in compiled parts (`run_in_parts`), the loss in chunks (`LossTransformer`).
    Activations are what every block keeps, what the final norm keeps, and what one block computes
    again: all that it would save without checkpoints, less what of it is kept anyway.
    """
    model, parameters = case.model, case.precision.parameters
    computed = case.precision.autocast or parameters
    compute, tokens = BYTES_PER_ELEMENT[computed], case.batch * model.context_length

    # What one block would save without checkpoints, and how much of it is kept.
    precision = Precision(parameters=computed)
    one = sum(
        accounting.block_saved_bytes(
            model, case.batch, attention=case.attention, precision=precision
        ).values()
    )
    width = tokens * model.d_model * compute
    kept = one
    if case.recompute != "nothing":
        log_sum_exp = 4 * tokens * model.num_heads if case.recompute != "block" else 0
        kept = min(one, KEPT_WIDTHS[case.recompute] * width + log_sum_exp)
    wider = width + 2 * tokens * model.d_ff * compute  # w1's and w3's input and outputs
    final_norm = (2 * model.d_model + 1) * tokens * max(4, compute) + width
    return replace(
        fsdp_case_bytes(case),
        activations=model.num_layers * kept + case.wide_blocks * wider + (one - kept) + final_norm,
        loss=loss_bytes(tokens, model.vocab_size, model.d_model, case.chunk_tokens, compute),
    )


class LongStep(ParallelStep):
    """The wrapped model of a case with its optimizer and this rank's sequence."""

    def _build(self, case: LongStepCase, run: RunConfig) -> nn.Module:
        """Return the case's model on the meta device, in parts and with the loss in chunks."""
        with torch.device("meta"):  # no rank ever holds the whole model
            module = LossTransformer.for_loss(
                case.model,
                attention=case.attention,
                chunk_tokens=case.chunk_tokens,
                compiled=case.compiled,
            )
        module = module.to(getattr(torch, case.precision.parameters))
        torch.manual_seed(run.seed)
        return run_in_parts(
            module, recompute=case.recompute, compiled=case.compiled, wide_blocks=case.wide_blocks
        )

    def loss(self) -> Tensor:
        """Return the loss of this rank's sequence, which the model itself computes in chunks."""
        loss: Tensor = self.model(self.tokens, self.targets)
        return loss


def _measure_rank(
    rank: int,
    num_ranks: int,
    implementation: str,
    case: LongStepCase,
    run: RunConfig,
    launched: float,
) -> ranks.RankReport:
    """Run the phases of this file's docstring on one rank and return its report.

    `launched` is the time at which the job began, in seconds since the epoch.
    """
    with _empty_caches() if case.compiled else nullcontext():
        step = LongStep(implementation, case, run, rank, FUSED_ADAMW, LEARNING_RATE)
        losses = [step.train_step().item()]  # `item` waits for the step
        found = {"start_time": [time.time() - launched]}
        for _ in range(WARMUP):
            step.train_step()

        def call() -> None:
            losses.append(step.train_step().item())

        # Time the steps, all ranks together, then take the peak and one trace.
        found["time"] = [ranks.time_together(call, run.device) for _ in range(STEPS[run.scale])]
        if not all(map(math.isfinite, losses)):
            raise Disagreement(
                f"losses must be finite, got {', '.join(f'{loss:.4g}' for loss in losses)}"
            )
        found["peak_memory"] = ranks.peak_mib(run.device)
        samples = {("train_step", name): values for name, values in found.items()}
        samples |= ranks.trace_on_first(step.train_step, rank, run.device)

        del step
        release(run.device)
        return ranks.RankReport(
            error=check_long_step(implementation, case, run, rank), samples=samples
        )


@contextmanager
def _empty_caches() -> Iterator[None]:
    """Compile into empty temporary caches, so that no earlier cell has warmed the start."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        with patch.dict(os.environ, places):
            yield


def check_long_step(implementation: str, case: LongStepCase, run: RunConfig, rank: int) -> float:
    """Return the error of a shallow model's training over its bound; Disagreement above 1.

    The shallow model has the same width and settings. It is compared with DDP in float32 with whole
    logits and nothing computed again, after training with SGD. bfloat16 weights round away most of
    what SGD does to them, so with them the gradients of one step are compared.
    """
    model = replace(
        case.model,
        num_layers=min(CHECK_LAYERS, case.model.num_layers),
        context_length=min(CHECK_CONTEXT, case.model.context_length),
        vocab_size=min(CHECK_VOCABULARY, case.model.vocab_size),
    )
    # Several chunks, the last of them shorter.
    chunk_tokens = min(case.chunk_tokens, model.context_length // 3)
    shallow = replace(
        case, model=model, chunk_tokens=chunk_tokens, wide_blocks=min(1, case.wide_blocks)
    )
    optimizer: Any = torch.optim.SGD
    step = LongStep(implementation, shallow, run, rank, optimizer, CHECK_LEARNING_RATE)
    plain = ShardingCase(
        model=model,
        batch=case.batch,
        num_ranks=case.num_ranks,
        backend=case.backend,
        attention="sdpa",
    )
    reference = ParallelStep("unsharded", plain, run, rank, optimizer, CHECK_LEARNING_RATE)
    if case.precision.parameters == "bfloat16":
        return steps.compare_gradients(step, reference, CHECK_BOUND["bfloat16"])
    return steps.compare_training(step, reference, CHECK_BOUND[case.precision.autocast])


RECOMPUTED: dict[Recompute, str] = {
    "nothing": "nothing",
    "after_attention": "after attention",
    "around_attention": "around attention",
    "block": "whole blocks",
}
RECORD_MS, RECORD_GPU = 3837.0, "B200"  # the class's record, on two of these GPUs


def memory_lines() -> str:
    """Return a table's lines: a rank's GiB by what is computed again, and with whole logits.

    The numbers are predictions in closed form.
    """
    masters, pure = (
        cell.case for cell in Leaderboard2026().cells(RunConfig(scale="handout", device="cuda"))[:2]
    )
    case = replace(masters, attention="hopper", wide_blocks=0)
    plans = {"whole logits, whole blocks": fsdp_case_bytes(case, checkpointing=True)}
    plans |= {
        words: long_step_bytes(replace(case, recompute=name)) for name, words in RECOMPUTED.items()
    }
    plans[f"after attention, {masters.wide_blocks} wide blocks"] = long_step_bytes(masters)
    plans[f"after attention, {pure.wide_blocks} wide blocks, all in bfloat16"] = long_step_bytes(
        pure
    )
    lines = []
    for words, plan in plans.items():
        states = plan.parameters + plan.optimizer + plan.gradients
        parts = (states, plan.gathered + plan.buffers, plan.activations, plan.loss, plan.peak)
        fits = "yes" if plan.fits(GPU_BYTES, usable=USED_SHARE) else "no"
        lines.append(
            "| " + " | ".join([words, *(digits(part / 2**30) for part in parts), fits]) + " |"
        )
    return "\n".join(lines)


def fastest_claim(rows: pd.DataFrame) -> str:
    """Return the fastest steps of our FSDP and of PyTorch's with our attention."""
    times = rows.groupby("implementation")["median"].min()
    if not {"fsdp", "torch_fsdp"} <= set(times.index):
        return ""
    ours, theirs = digits(times["fsdp"]), digits(times["torch_fsdp"])
    return f"Our fastest training step takes {ours} s, PyTorch's FSDP with our attention {theirs} s"


@problem()
class Leaderboard2026(Experiment):
    implementations = IMPLEMENTATIONS

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return the widest plans in two precisions, then both FSDPs with equal settings.

        The widest plans use all memory, with float32 masters and in pure bfloat16. At handout scale
        ours also runs with whole blocks computed again, other attention, and no compiler.
        """
        cuda = run.device == "cuda"
        available = available_backends() if cuda and torch.cuda.is_available() else {}
        base = ranks.ranks_case(
            LongStepCase,
            run,
            NUM_RANKS,
            Precision(autocast="bfloat16" if cuda else None),
            model=ranks.sized_model(run, "8b", contexts=(64, 128)),
            batch=BATCH,
            attention=next((name for name in ATTENTIONS if available.get(name) == "ok"), "sdpa"),
            reduce_dtype="float32" if cuda else None,
            compiled=cuda,
            chunk_tokens={"tiny": 24, "smoke": 100, "handout": CHUNK_TOKENS}[run.scale],
        )
        kept = replace(base, recompute="after_attention")
        pure = replace(kept, precision=Precision(parameters="bfloat16"), reduce_dtype=None)
        cases = [
            (widest(kept), "fsdp"),
            (widest(pure), "fsdp"),
            *((base, name) for name in IMPLEMENTATIONS),
        ]
        if run.scale == "handout":
            cases.append((replace(base, recompute="block"), "fsdp"))
            if base.attention != "sdpa":
                cases.append((replace(base, attention="sdpa"), "fsdp"))
            if base.compiled:
                cases.append((replace(base, compiled=False), "fsdp"))
        return [long_step_cell(case, name) for case, name in cases]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        case: LongStepCase = cell.case
        if run.model is not None:
            raise Unsupported("the user's model has no head that computes the loss in chunks")
        rows = {row.quantity: row for row in cell.rows}
        yield Sample(row=rows["predicted_peak_memory"], samples=[long_step_bytes(case).peak / MIB])
        with patch.dict(os.environ, ALLOCATOR):
            yield from ranks.measure_step(
                partial(_measure_rank, launched=time.time()), cell, run, from_scratch=True
            )

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add the settings in words, TFLOP/s, the percentage of the peak, and tokens per second."""
        names = [row["implementation"], RECOMPUTED[row["recompute"]], row["attention"]]
        if row["wide_blocks"]:
            names[1] += f" ({row['wide_blocks']} wide blocks)"
        names.append("compiled" if row["compiled"] else "eager")
        names += ["all in bfloat16"] * (row["precision"] == "bfloat16")
        fields = ModelConfig.__dataclass_fields__
        model = ModelConfig(
            **{name: row["model" if name == "name" else f"model.{name}"] for name in fields}
        )
        rate = math.nan
        if row["quantity"] == "time" and row["median"] > 0 and row["backend"] == "nccl":
            rate = accounting.tflops_per_s(
                accounting.model_flops(model, row["batch"], "train_step"), row["median"]
            )
        peak = PEAKS.get(row["device"].removeprefix("NVIDIA "))
        tokens = row["num_ranks"] * row["batch"] * model.context_length
        return {
            "settings": ", ".join(names),
            "tflops": rate,
            "of_peak": 100 * rate / peak.bf16_tflops if peak else math.nan,
            "tokens_per_s": 1e3 * tokens / row["median"] if row["quantity"] == "time" else math.nan,
        }

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return `memory_lines` and numbers of the 8B model.

        These are attention's share of the forward's FLOPs, the GiB of all states at 16 bytes a
        parameter, and the share of the peak that the class's record reaches.
        """
        model = MODEL_SIZES["8b"]
        area = accounting.causal_area(model.context_length, model.context_length)
        attention = (
            accounting.ATTENTION_FLOPS_PER_PAIR["forward"] * area * model.d_model * model.num_layers
        )
        step = accounting.model_flops(model, 1, "train_step")
        return {
            "memory_lines": memory_lines,
            "attention_share": (
                f"{digits(100 * attention / accounting.model_flops(model, 1, 'forward'))} %"
            ),
            "states": f"{digits(16 * accounting.num_parameters(model) / 2**30)} GiB",
            "record_share": digits(1e5 * step / HARDWARE[RECORD_GPU].flops_per_s / RECORD_MS),
        }

    tables = {
        "steps": Wide(
            title="Full training step of two ranks, a sequence each",
            down={"FSDP, computed again, attention, blocks": "settings"},
            columns={
                "step (ms)": Pick({"quantity": "time"}, significant=4),
                "TFLOP/s a GPU": Pick({"quantity": "time"}, value="tflops"),
                "of the peak (%)": Pick({"quantity": "time"}, value="of_peak"),
                "tokens/s": Pick({"quantity": "time"}, value="tokens_per_s", significant=4),
                "peak (GiB)": Pick({"quantity": "peak_memory"}, "GiB"),
                "predicted (GiB)": Pick({"quantity": "predicted_peak_memory"}, "GiB"),
                "cold start (s)": Pick({"quantity": "start_time"}),
                "communication (ms)": Pick({"quantity": "communication_time"}),
                "hidden (ms)": Pick({"quantity": "overlap_time"}),
                "run": Pick({"quantity": "time"}, value="run"),
            },
        )
    }
    figures = {
        "times": Bars(
            claim=fastest_claim,
            subtitle="fsdp is ours",
            title="Full training step of two ranks",
            x="settings",
            color="implementation",
            unit="s",
            where={"quantity": "time"},
        )
    }
