"""Tiny Gluon kernels that say what racecheck makes of the mechanisms of the Hopper kernels.

    python -m tests.sanitizer_controls ring

  dispatch   three partitions of `gl.warp_specialize` that share nothing, two warp groups and a warp
  ring       a producer warp stores rows into a ring of two slots, guarded by mbarriers, and two consumers load them:
             as L and delta travel in the Hopper backward
  exchange   two warp groups exchange rows behind a named barrier: as its consumers exchange dS

All are right, and each is as small as its mechanism. What racecheck reports of them it reports because it does not see
how Triton orders the accesses. `tools/sanitize.py` runs them in every run of racecheck and takes a hazard of a Hopper
kernel for explained only if a control shows the same. Exit code 1 if a result is wrong.

What is wrong between specialised warps racecheck (2025.3.1) seldom sees: it reported nothing of `exchange` without its
barrier, nothing of `ring` without its mbarriers, and of rows that one group stores over and over while another loads
them hazards in one trial and none in the next. So no control that is wrong stands here, and a clean verdict on such
kernels would say little.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from cs336_systems.attention.hopper.builtins import meet_consumers

CONTROLS = ("dispatch", "ring", "exchange")
COLUMNS = gl.constexpr(512)
SLOTS = gl.constexpr(2)
# Four columns a thread, which takes them in one load or store; one at a time Triton would move them as matrices.
BY_GROUP = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
BY_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
STEPS, PROGRAMS = 8, 4
ROWS_ARE_WRITTEN = gl.constexpr(9)  # a named barrier of the hardware that Triton does not take


@gluon.jit
def _copy(rows_ptr, output_ptr, PARTITION: gl.constexpr, LAYOUT: gl.constexpr):
    """This partition's row, through registers."""
    place = (gl.program_id(0) * 3 + PARTITION) * COLUMNS + gl.arange(0, COLUMNS, LAYOUT)
    gl.store(output_ptr + place, gl.load(rows_ptr + place))


@gluon.jit
def dispatch_kernel(rows_ptr, output_ptr):
    """`output` (programs, 3, columns) is `rows`."""
    gl.warp_specialize([
        (_copy, (rows_ptr, output_ptr, gl.constexpr(0), BY_GROUP)),
        (_copy, (rows_ptr, output_ptr, gl.constexpr(1), BY_GROUP)),
        (_copy, (rows_ptr, output_ptr, gl.constexpr(2), BY_WARP)),
    ], [4, 1], [64, 32])  # fmt: skip


@gluon.jit
def _produce(rows_ptr, row_slots, full, empty, steps):
    columns = gl.arange(0, COLUMNS, BY_WARP)
    for step in range(steps):
        row = gl.load(rows_ptr + (gl.program_id(0) * steps + step) * COLUMNS + columns)
        slot = step % SLOTS
        mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
        row_slots.index(slot).store(row)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _consume(output_ptr, row_slots, full, empty, steps, GROUP: gl.constexpr):
    columns = gl.arange(0, COLUMNS, BY_GROUP)
    total = gl.zeros([COLUMNS], gl.float32, BY_GROUP)
    for step in range(steps):
        slot = step % SLOTS
        mbarrier.wait(full.index(slot), (step // SLOTS) & 1)
        total += row_slots.index(slot).load(BY_GROUP)
        mbarrier.arrive(empty.index(slot), count=1)
    gl.store(output_ptr + (gl.program_id(0) * 2 + GROUP) * COLUMNS + columns, total)


@gluon.jit(do_not_specialize=["steps"])
def ring_kernel(rows_ptr, output_ptr, steps):
    """Both rows of `output` (programs, 2, columns) are the sums of `rows` (programs, steps, columns)."""
    row_slots = gl.allocate_shared_memory(gl.float32, [SLOTS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (output_ptr, row_slots, full, empty, steps, gl.constexpr(0))),
        (_consume, (output_ptr, row_slots, full, empty, steps, gl.constexpr(1))),
        (_produce, (rows_ptr, row_slots, full, empty, steps)),
    ], [4, 1], [64, 32])  # fmt: skip


@gluon.jit
def _swap(rows_ptr, output_ptr, shared_rows, GROUP: gl.constexpr):
    place = gl.program_id(0) * 2 * COLUMNS + gl.arange(0, COLUMNS, BY_GROUP)
    shared_rows.index(GROUP).store(gl.load(rows_ptr + place + GROUP * COLUMNS))
    meet_consumers(ROWS_ARE_WRITTEN)
    other = shared_rows.index(1 - GROUP).load(BY_GROUP)
    gl.store(output_ptr + place + GROUP * COLUMNS, other)


@gluon.jit
def exchange_kernel(rows_ptr, output_ptr):
    """`output` (programs, 2, columns) is `rows` with the two rows of each program exchanged."""
    shared_rows = gl.allocate_shared_memory(gl.float32, [2, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([
        (_swap, (rows_ptr, output_ptr, shared_rows, gl.constexpr(0))),
        (_swap, (rows_ptr, output_ptr, shared_rows, gl.constexpr(1))),
    ], [4], [64])  # fmt: skip


def run_control(name: str, device: str) -> tuple[Tensor, Tensor]:
    """(result, what it must be) of the kernel of a control."""
    rows = torch.arange(PROGRAMS * STEPS * COLUMNS.value, device=device, dtype=torch.float32)
    rows = rows.view(PROGRAMS, STEPS, COLUMNS.value)
    rows_of_a_program = rows[:, : 3 if name == "dispatch" else 2].contiguous()
    output = torch.full_like(rows_of_a_program, torch.nan)
    if name == "ring":
        ring_kernel[(PROGRAMS,)](rows, output, STEPS, num_warps=4)
        return output, rows.sum(1, keepdim=True).expand_as(output)
    kernel = dispatch_kernel if name == "dispatch" else exchange_kernel
    kernel[(PROGRAMS,)](rows_of_a_program, output, num_warps=4)
    return output, rows_of_a_program.flip(1) if name == "exchange" else rows_of_a_program


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a control kernel.")
    parser.add_argument("name", choices=CONTROLS)
    name = parser.parse_args().name
    begin = time.monotonic()
    output, expected = run_control(name, "cuda")
    wrong = not torch.equal(output, expected)  # sums of integers: exact
    print(f"1 calls of the control {name}, in {time.monotonic() - begin:.0f} s")
    if wrong:
        print(f"WRONG {name}: {(output != expected).sum().item()} of {output.numel()} elements")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
