"""Tiles of the attention kernels: how one configuration is timed on one shape, and rows that
records propose.

The problem `tile_choice` and the command `cs336-systems tune flash` measure the same cells. What is
timed has agreed with the oracle on the same inputs. A kernel of the backward runs beside the
table's others, and its time is that of its own stage, so that a good kernel cannot hide a bad one.

Nothing here writes a table: a person reads the proposals and edits `attention/tiles/choice.py`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import msgspec
import numpy as np
import pandas as pd
from torch import Tensor

from cs336_systems.attention.tiles import KernelConfig, head_tile, tuning_grid
from cs336_systems.attention.tiles.choice import TABLES
from cs336_systems.bench.records import Record, case_key, case_to_dict
from cs336_systems.bench.spec import Cell, Row, Sample, Unsupported
from cs336_systems.compiler.offline import (
    compile_all,
    compiled_launches,
    compiler_errors,
    first_line,
)
from cs336_systems.config import BYTES_PER_ELEMENT, AttentionShape, RunConfig
from cs336_systems.inputs import AttentionInputs
from cs336_systems.measure.stages import time_stages
from cs336_systems.measure.timing import time_calls
from cs336_systems.subjects.attention_passes import FORWARD, checked_error, inputs_of, oracle_of
from cs336_systems.subjects.implementations import chosen_tiles, query_and_key

TUNE_FLASH = "tune_flash"  # the command's name in records
TILE_CHOICE = "tile_choice"  # the problem that measures the same cells
# what `select_config` chooses: `table` for a backward, `table_<kernel>` for one kernel
TABLE = "table"
ROWS = {  # of each kernel alone
    "forward": FORWARD,
    "dkdv": Row(mode="backward", quantity="dkdv_time", unit="ms"),
    "dq": Row(mode="backward", quantity="dq_time", unit="ms"),
}
STAGES = {ROWS["dkdv"]: "dkv", ROWS["dq"]: "dq"}  # as `launch_backward` marks them
NUM_SAMPLES = {"cuda": 10, "cpu": 5}


# Measuring


def measure_tiles(cell: Cell, run: RunConfig, configs: Sequence[KernelConfig]) -> Sample:
    """The sample of a cell with one row: `configs` checked against the oracle, then the row's
    kernels timed.
    """
    from triton.errors import TritonError

    (row,) = cell.rows
    try:
        call, used = launches_of(inputs_of(cell.case, run), cell.case.is_causal, configs)
        results = call()
    except TritonError as error:  # does not compile, or not into this GPU's shared memory
        raise Unsupported(f"{cell.implementation}: {str(error).strip().splitlines()[0]}") from None
    error_ratio = checked_error(oracle_of(cell.case, run), results)
    del results
    num_samples = NUM_SAMPLES[run.device]
    if row in STAGES:
        samples = time_stages(call, device=run.device, num_samples=num_samples, warmup=0)[
            STAGES[row]
        ]
    else:
        samples = time_calls(call, device=run.device, num_samples=num_samples, warmup=1)
    kernel = " ".join(["interpreter"] * (run.device == "cpu") + [config.name for config in used])
    return Sample(row=row, samples=samples, kernel=kernel, error=error_ratio)


def launches_of(
    inputs: AttentionInputs, is_causal: bool, configs: Sequence[KernelConfig]
) -> tuple[Callable[[], dict[str, Tensor]], list[KernelConfig]]:
    """The launches that show `configs`, giving named results, and all configurations in them.

    One of the forward, or one or both of the backward's; the other kernels' are the table's.
    """
    from cs336_systems.attention.triton.backward import launch_backward
    from cs336_systems.attention.triton.forward import launch_forward
    from cs336_systems.attention.triton.passes import kernel_config

    q, k, v, grad_output = inputs
    scale = 1 / math.sqrt(q.shape[-1])
    shown = {config.kernel: config for config in configs}
    used = {kernel: kernel_config(kernel, q, k, is_causal=is_causal) for kernel in ROWS} | shown

    def forward() -> dict[str, Tensor]:
        output, lse = launch_forward(
            q, k, v, is_causal=is_causal, scale=scale, config=used["forward"]
        )
        return {"output": output, "lse": lse}

    if "forward" in shown:
        return forward, [used["forward"]]
    saved = forward()

    def backward() -> dict[str, Tensor]:
        gradients = launch_backward(
            q,
            k,
            v,
            saved["output"],
            saved["lse"],
            grad_output,
            None,
            is_causal=is_causal,
            scale=scale,
            dkdv_config=used["dkdv"],
            dq_config=used["dq"],
        )
        return dict(zip(("grad_q", "grad_k", "grad_v"), gradients))

    return backward, [used["dkdv"], used["dq"]]


# Compiling ahead

# Triton compiles anew for lengths and heads of which 16 is no divisor
Tiles = tuple[AttentionShape, KernelConfig]


def compile_ahead(tiles: Iterable[Tiles], arch: str) -> None:
    """Compile what measuring `tiles` launches, a process a core, into Triton's cache on disk.

    What does not compile is left to its own cell, which says so.
    """
    for _ in compile_all(list(dict.fromkeys(tiles)), partial(compile_on_shape, arch)):
        pass


def compile_on_shape(arch: str, tiles: Tiles) -> str:
    """Compile in this process, a child of the pool, without launching; what went wrong, empty if
    nothing.
    """
    shape, config = tiles
    q, k = query_and_key(shape, "meta")

    def call() -> None:
        launches_of(AttentionInputs(q=q, k=k, v=k, grad_output=q), shape.is_causal, [config])[0]()

    try:
        # Where stages are timed, nothing overlaps: those are other kernels.
        for launch in (call, lambda: time_stages(call, device="cpu", num_samples=1, warmup=0)):
            compiled_launches(arch, f"_{config.kernel}_", launch)
    except compiler_errors() as error:
        return first_line(error)
    return ""


# The command


def tune_cells(
    shapes: Sequence[AttentionShape],
    kernels: Sequence[str],
    target: str,
    names: Sequence[str],
    capability: tuple[int, int] | None = None,
) -> list[Cell]:
    """Every configuration to try on every shape: the named ones, or the grid of the `target` table.

    With a `capability` the table's own for the kernel and shape comes before them.
    """
    named = [KernelConfig.from_name(name) for name in dict.fromkeys(names)]
    for config in named:
        if config.target not in TABLES:
            raise ValueError(
                f"--config must name a table of {', '.join(TABLES)}, got {config.name}"
            )
    if named and not any(config.kernel in kernels for config in named):
        raise ValueError(
            f"--config must name configurations of {', '.join(kernels)}, got {', '.join(names)}"
        )
    cells: list[Cell] = []
    for shape, kernel in product(shapes, kernels):
        grid = named or tuning_grid(kernel, arch=target, head_dim=shape.head_dim, dtype=shape.dtype)
        configs = [config for config in grid if config.kernel == kernel]
        if configs and capability is not None:
            configs = [chosen_tiles(kernel, shape, capability), *configs]
        cells += [
            Cell(
                problem=TUNE_FLASH,
                measured_by="tile_choice",
                case=shape,
                implementation=config.name,
                rows=(ROWS[kernel],),
            )
            for config in dict.fromkeys(configs)
        ]
    return cells


def tuned_on(
    shapes: Sequence[AttentionShape], records: Iterable[Record], capability: tuple[int, int] | None
) -> list[Record]:
    """Those of the command's records that are of `shapes`, as `tile_choice` has them, with its
    names of the table's.
    """
    cases = {case_key(case_to_dict(shape)): shape for shape in shapes}
    found = []
    for record in records:
        shape, config = (
            cases.get(case_key(record.case)),
            KernelConfig.from_name(record.implementation),
        )
        # older ones time whole backwards
        if shape is not None and record.quantity == ROWS[config.kernel].quantity:
            is_table = config == chosen_tiles(config.kernel, shape, capability)
            name = f"{TABLE}_{config.kernel}" if is_table else config.name
            found.append(msgspec.structs.replace(record, problem=TILE_CHOICE, implementation=name))
    return found


def proposed_rows(frame: pd.DataFrame) -> list[str]:
    """A row of the tables for each kernel, width of element and head tile timed in a frame of
    `tile_choice`.

    Of the configurations that ran on every shape it has the one with the best geometric mean of its
    times over the best ones'; where TMA must read its tiles, also the best one for other inputs, or
    `...` for a person to fill.
    """
    timed = frame[(frame["alone"] != "") & (frame["status"] == "ok")]
    best_ms = timed.groupby(["case", "alone"])["median"].transform("min")
    widths, tiles = timed["dtype"].map(BYTES_PER_ELEMENT), timed["head_dim"].map(head_tile)
    timed = timed.assign(ratio=timed["median"] / best_ms, width=widths, tile=tiles)
    rows = []
    for (kernel, width, tile), group in timed.groupby(["alone", "width", "tile"], sort=False):
        ratios = group.pivot(index="case", columns="config", values="ratio").dropna(axis="columns")
        means = np.log(ratios).mean().sort_values(kind="stable")
        if means.empty:
            continue
        best, *others = (KernelConfig.from_name(name) for name in means.index)
        row = f'"{best.spelling}"'
        if best.tma:
            by_pointers = next(
                (f'"{config.spelling}"' for config in others if not config.tma), "..."
            )
            row = f"(Only({row}, tma=True), {by_pointers})"
        remark = f"at most {ratios[best.name].max():.2f} x the best of {len(ratios)} shapes"
        shipped = TABLES[best.target][kernel, width, tile]  # type: ignore[index]
        if best.precision != shipped.configs[-1].precision:
            remark += f"; only if all kernels of the head tile take {best.precision}"
        rows.append(f'("{kernel}", {width}, {tile}): {row},  # {remark}')
    return rows
