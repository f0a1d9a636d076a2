"""`leaderboard_2026`: the step of two gloo ranks against one process, and what its cells promise."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec import structs
from torch import Tensor

from cs336_systems.bench.harness import planned_cells
from cs336_systems.bench.spec import Disagreement, Unsupported, load
from cs336_systems.book.frames import load_frame
from cs336_systems.config import MODEL_SIZES, Precision, RunConfig
from cs336_systems.distributed.fsdp.unit import State
from cs336_systems.distributed.spawn import run_ranks
from cs336_systems.experiments import leaderboard_2026
from cs336_systems.experiments.leaderboard_2026 import (
    LongStep,
    LongStepCase,
    check_long_step,
    long_step_bytes,
    long_step_cell,
)
from cs336_systems.grading.counting import LiveBytes
from cs336_systems.inputs import token_batch
from cs336_systems.measure.allocations import MIB
from cs336_systems.model import TransformerLM, cross_entropy
from cs336_systems.model.chunked_loss import LossHead
from cs336_systems.subjects.parallel_step import fsdp_case_bytes
from tests.one_job import OneJob
from tests.sharding_models import TINY
from tests.test_records import RUN, gpu_record

COVERS = (
    "cs336_systems/attention",
    "cs336_systems/distributed",
    "cs336_systems/model",
    "tests/sharding_models.py",
)
CPU = RunConfig(scale="tiny", device="cpu")
SMALL = LongStepCase(
    model=replace(TINY, name="8b-small"),
    batch=2,
    num_ranks=2,
    backend="gloo",
    attention="sdpa",
    chunk_tokens=5,
)
PURE = replace(
    SMALL, precision=Precision(parameters="bfloat16"), recompute="after_attention", wide_blocks=TINY.num_layers
)  # fmt: skip
HANDOUT = RunConfig(scale="handout", device="cuda")
LEADERBOARD = load("leaderboard_2026")


def loss_and_gradients(rank: int, num_ranks: int, implementation: str, recompute: Any) -> None:
    """The ranks' mean loss and averaged gradients are those of one process on both batches."""
    step = LongStep(implementation, replace(SMALL, recompute=recompute), CPU, rank)
    single = TransformerLM.from_config(SMALL.model, attention="sdpa")
    for parameter, value in zip(single.parameters(), step.full_parameters()):
        parameter.data.copy_(value)
    total = step.forward_backward()
    batches = [
        token_batch(SMALL.model, SMALL.batch, device="cpu", seed=CPU.seed + one)
        for one in range(num_ranks)
    ]
    tokens, targets = (torch.cat(parts) for parts in zip(*batches))
    loss = cross_entropy(single(tokens), targets)
    loss.backward()
    torch.distributed.all_reduce(total)
    assert abs(total / num_ranks - loss) <= 1e-6
    for one, other in zip(step.full_gradients(), single.parameters()):
        assert (one - other.grad).abs().max() <= 1e-6


VARIANTS = [("fsdp", "around_attention"), ("fsdp", "after_attention"), ("fsdp", "block"),
            ("torch_fsdp", "around_attention")]  # fmt: skip
TWO_RANKS = OneJob(2, *((loss_and_gradients, *variant) for variant in VARIANTS))


@pytest.mark.parametrize("implementation, recompute", VARIANTS)
def test_losses_and_gradients_are_those_of_one_process(implementation, recompute):
    TWO_RANKS.results(loss_and_gradients, implementation, recompute)


class OneChunkLess(LossHead):
    """Known wrong: the tokens of the last chunk do not count."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        end = hidden.shape[1] - self.chunk_tokens
        return super().forward(hidden[:, :end], targets[:, :end])


@TWO_RANKS.check
def test_a_loss_that_leaves_tokens_out_is_not_timed(rank: int, num_ranks: int) -> None:
    for case, what in ((SMALL, "changes of weights in 3 steps"), (PURE, "averaged gradients")):
        assert check_long_step("fsdp", case, CPU, rank) <= 1
        with (
            patch.object(leaderboard_2026.LossTransformer, "head_class", OneChunkLess),
            pytest.raises(Disagreement, match=f"{what} are off by .* times the bound"),
        ):
            check_long_step("fsdp", case, CPU, rank)


@TWO_RANKS.check
def test_the_head_is_gathered_once_for_all_chunks_forward_and_backward(
    rank: int, num_ranks: int
) -> None:
    step = LongStep("fsdp", SMALL, CPU, rank)
    step.train_step()
    gathered: list[str] = []
    for unit in step.model.units:

        def noting(unit: Any = unit, gather: Any = unit.gather) -> None:
            if unit.state is State.REST:
                gathered.append(unit.name)
            gather()

        unit.gather = noting
    step.train_step()
    assert gathered.count("lm_head") == 1
    assert all(gathered.count(f"layers.{index}") <= 2 for index in range(TINY.num_layers))


@TWO_RANKS.check
def test_the_predicted_peak_is_near_what_a_step_allocates(rank: int, num_ranks: int) -> None:
    """Of a model large enough for its tensors to matter."""
    model = replace(TINY, d_model=64, d_ff=172, num_layers=6, context_length=256, vocab_size=2000)
    case = replace(SMALL, model=model, batch=1, chunk_tokens=32, recompute="around_attention")
    step = LongStep("fsdp", case, CPU, rank)
    step.train_step()
    with LiveBytes() as live:
        step.train_step()
    assert 0.6 * long_step_bytes(case).peak <= live.peak <= 1.2 * long_step_bytes(case).peak


def test_the_8b_step_fits_two_h200_only_without_its_logits():
    model, h200 = MODEL_SIZES["8b"], 139 * 2**30
    options: dict[str, Any] = {"attention": "hopper", "num_ranks": 2, "reduce_dtype": "float32"}
    case = LongStepCase(
        model=model, batch=1, backend="nccl", precision=Precision(autocast="bfloat16"), **options
    )
    plans = {
        recompute: long_step_bytes(replace(case, recompute=recompute))
        for recompute in ("nothing", "after_attention", "around_attention", "block")
    }
    assert not plans["nothing"].fits(h200)
    assert all(
        plans[name].fits(h200, usable=0.85)
        for name in ("after_attention", "around_attention", "block")
    )
    whole = fsdp_case_bytes(case, checkpointing=True)
    assert not whole.fits(h200) and whole.loss > 40 * 2**30 > 8 * plans["block"].loss * 0.9
    width = model.context_length * model.d_model * 2
    kept = plans["around_attention"].activations - plans["block"].activations
    # q, k, v and the output of all blocks but one
    assert kept / (33 * 4 * width) == pytest.approx(1, abs=0.01)


# Cells


def test_a_users_model_is_skipped_with_the_reason():
    with pytest.raises(Unsupported, match="the user's model has no head that computes"):
        list(LEADERBOARD.measure(long_step_cell(SMALL, "fsdp"), replace(CPU, model="a.b:C")))


def test_the_handouts_cells_are_the_leaderboards():
    cells = planned_cells("leaderboard_2026", HANDOUT)
    assert {cell.case.model for cell in cells} == {MODEL_SIZES["8b"]}
    assert {(cell.case.batch, cell.case.num_ranks, cell.implementation) for cell in cells} == {
        (1, 2, "fsdp"), (1, 2, "torch_fsdp")
    }  # fmt: skip
    masters, pure, first, second = cells[:4]
    assert (first.implementation, second.implementation) == (
        "fsdp",
        "torch_fsdp",
    ) and first.case == second.case
    assert masters.case.precision == Precision(autocast="bfloat16")
    assert (
        pure.case.precision == Precision(parameters="bfloat16") and pure.case.reduce_dtype is None
    )
    assert 34 > pure.case.wide_blocks > masters.case.wide_blocks > 0
    for case in (masters.case, pure.case):
        one_more = replace(case, wide_blocks=case.wide_blocks + 1)
        assert case.predicted_bytes <= 0.97 * 150_109_880_320 < long_step_bytes(one_more).peak
    assert {cell.case.recompute for cell in cells} == {
        "around_attention",
        "after_attention",
        "block",
    }
    assert {cell.case.compiled for cell in cells} == {True, False}
    assert 100 * 2**30 < first.predicted_bytes < 139 * 2**30
    assert {"peak_memory", "start_time", "communication_time"} <= {
        row.quantity for row in first.rows
    }


@pytest.mark.slow
def test_a_measured_cell_keeps_its_promises():
    cell = long_step_cell(SMALL, "fsdp")
    found = list(LEADERBOARD.measure(cell, CPU))
    assert [measurement.row for measurement in found] != [] and {one.row for one in found} == set(
        cell.rows
    )
    by_name = {measurement.row.quantity: measurement for measurement in found}
    assert len(by_name["time"].samples) == leaderboard_2026.STEPS["tiny"]
    error = by_name["time"].error
    assert error is not None and 0 <= error <= 1
    assert by_name["predicted_peak_memory"].samples == [cell.case.predicted_bytes / 2 / MIB]


# On GPUs


def check_both_on_gpus(rank: int, num_ranks: int) -> list[float]:
    """Compiled, in bfloat16, with the attention that the handout's cells would have: errors over
    their bounds.
    """
    run = RunConfig(scale="smoke", device="cuda")
    listed = LEADERBOARD.cells(run)
    return [check_long_step(cell.implementation, cell.case, run, rank) for cell in listed]


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_compiled_blocks_in_bfloat16_train_like_float32_on_gpus():
    for errors in run_ranks(check_both_on_gpus, 2, backend="nccl", device="cuda"):
        assert len(errors) == 4 and max(errors) <= 1


def test_the_share_of_the_peak_is_the_devices_own():
    """A laptop's report had a column with shares of an H200's."""
    found = {}
    for name, backend in (("NVIDIA H200", "nccl"), ("NVIDIA A10", "nccl"), ("a processor", "gloo")):
        device = {"name": name, "kind": "cpu" if backend == "gloo" else "cuda"}
        record = gpu_record(
            "leaderboard_2026", replace(SMALL, backend=backend), "fsdp", [1.0], mode="train_step"
        )
        record = structs.replace(record, run=structs.replace(RUN, device=device))
        (row,) = load_frame(LEADERBOARD, [record]).to_dict("records")
        found[name] = (row["tflops"] > 0, row["of_peak"] > 0)
    assert found == {
        "NVIDIA H200": (True, True),
        "NVIDIA A10": (True, False),
        "a processor": (False, False),
    }
