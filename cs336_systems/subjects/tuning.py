"""Time configurations of the attention kernels' tiles, and propose rows of the tables from records.

The problem `tile_choice` and the command `cs336-systems tune flash` measure the same cells. Results
are checked against the oracle on the same inputs before they are timed. A kernel of the backward
runs together with the table's others, and its time is that of its own stage, so that a good kernel
cannot hide a bad one.

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

from cs336_systems.attention.call import Saved
from cs336_systems.attention.tiles import KernelConfig, head_tile, select_config, tuning_grid
from cs336_systems.attention.tiles.choice import TABLES
from cs336_systems.attention.tiles.kernel_config import tma_reads_rows
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
from cs336_systems.subjects.attention_builders import query_and_key
from cs336_systems.subjects.attention_passes import FORWARD, checked_error, inputs_of, oracle_of

TUNE_FLASH = "tune_flash"  # the command's name in records
TILE_CHOICE = "tile_choice"  # the problem that measures the same cells
# name of what `select_config` chooses: `table` for a backward, `table_<kernel>` for one kernel
TABLE = "table"
ROWS = {  # kernel -> the row of its own time
    "forward": FORWARD,
    "dkdv": Row(mode="backward", quantity="dkdv_time", unit="ms"),
    "dq": Row(mode="backward", quantity="dq_time", unit="ms"),
}
STAGES = {ROWS["dkdv"]: "dkv", ROWS["dq"]: "dq"}  # as `launch_backward` marks them
NUM_SAMPLES = {"cuda": 10, "cpu": 5}


def chosen_tiles(
    kernel: str, shape: AttentionShape, capability: tuple[int, int] | None, tma: bool | None = None
) -> KernelConfig:
    """Return the table's tiles of `kernel` for inputs of `shape`.

    `tma` says whether TMA can read the inputs; None means as for contiguous ones.
    """
    tma = tma_reads_rows(shape.head_dim, BYTES_PER_ELEMENT[shape.dtype]) if tma is None else tma
    return select_config(
        kernel,
        capability=capability,
        head_dim=shape.head_dim,
        batch=shape.batch,
        heads=shape.heads,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        dtype=shape.dtype,
        is_causal=shape.is_causal,
        tma=tma,
    )


# Measuring


def measure_tiles(cell: Cell, run: RunConfig, configs: Sequence[KernelConfig]) -> Sample:
    """Check `configs` against the oracle, time the cell's only row, and return its sample.

    Raises Unsupported if a configuration does not compile or does not fit this GPU's shared memory,
    and Disagreement if a result is wrong.
    """
    from triton.errors import TritonError

    (row,) = cell.rows
    try:
        call, used = launches_of(inputs_of(cell.case, run), cell.case.is_causal, configs)
        results = call()
    except TritonError as error:
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
    """Return a function that launches `configs` and returns named results, and all configurations.

    `configs` are one of the forward, or one or both of the backward's (dkdv, dq). The other kernel
    of a backward has the table's configuration. For a backward, a forward runs here.
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
            Saved(q, k, v, saved["output"], saved["lse"], grad_output, None),
            is_causal=is_causal,
            scale=scale,
            dkdv_config=used["dkdv"],
            dq_config=used["dq"],
        )
        return dict(zip(("grad_q", "grad_k", "grad_v"), gradients))

    return backward, [used["dkdv"], used["dq"]]


# Compiling ahead

# A configuration with a shape, since Triton compiles anew for lengths and heads that 16 does not
# divide.
Tiles = tuple[AttentionShape, KernelConfig]


def compile_ahead(tiles: Iterable[Tiles], arch: str) -> None:
    """Compile the kernels that measuring `tiles` launches into Triton's cache on disk.

    Each core has a process. Errors are ignored here: the cell of such a configuration reports them.
    """
    for _ in compile_all(list(dict.fromkeys(tiles)), partial(compile_on_shape, arch)):
        pass


def compile_on_shape(arch: str, tiles: Tiles) -> str:
    """Compile one configuration for `arch` without launching it; return the error's first line.

    The line is "" if there is no error. It runs in a child process of `compile_all`.
    """
    shape, config = tiles
    q, k = query_and_key(shape, "meta")

    def call() -> None:
        """Launch the configuration on meta tensors."""
        launches_of(AttentionInputs(q=q, k=k, v=k, grad_output=q), shape.is_causal, [config])[0]()

    try:
        # Timing by stages launches other kernels, which do not overlap, so both ways are compiled.
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
    """Return a cell for every configuration to try of each of `kernels` on every shape.

    They are the ones that `names` name, or without names the grid of the `target` table. With a
    `capability` the table's own configuration for the kernel and shape comes first. Raises
    ValueError if a name is of an unknown table, or if none is of `kernels`.
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
    """Return the records of the command on `shapes` as records of the problem `tile_choice`.

    The configuration that the table has for the shape is renamed to `table_<kernel>`.
    """
    cases = {case_key(case_to_dict(shape)): shape for shape in shapes}
    found = []
    for record in records:
        shape, config = (
            cases.get(case_key(record.case)),
            KernelConfig.from_name(record.implementation),
        )
        # Older records, which time whole backwards, are left out.
        if shape is not None and record.quantity == ROWS[config.kernel].quantity:
            is_table = config == chosen_tiles(config.kernel, shape, capability)
            name = f"{TABLE}_{config.kernel}" if is_table else config.name
            found.append(msgspec.structs.replace(record, problem=TILE_CHOICE, implementation=name))
    return found


def proposed_rows(frame: pd.DataFrame) -> list[str]:
    """Return a proposed table row, as source text, for each kernel, element width and head tile.

    `frame` is of `tile_choice`. Of the configurations that ran on every shape, the row has the one
    with the best geometric mean of its times over each shape's best. If TMA must read its tiles,
    the row also has the best one for other inputs, or `...` for a person to fill in.
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
