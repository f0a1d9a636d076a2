"""Records as one pandas frame: a row a record, the case flattened into columns, the samples summarised.

Every table, figure and sentence of the report is made from this frame:

    frame = load_frame(read_records(path))
    rows = select(frame, "time", "forward")      # one row a cell, cells that failed elsewhere included

Columns: problem, scale, implementation, label, interpreted, mode, quantity, unit, status, message, kernel; of the case:
case, case_type, seqlen, seqlen_k, head_dim, batch, heads, kv_heads, causal, dtype, model, context, attention,
precision, warmup, mask; of the samples (in the row's unit, see SHOWN_UNITS): samples (how many), values, first, median,
quartile_low, quartile_high, mean, std; error; tflops (timed attention only); of the run: device, device_kind, driver,
torch, triton, commit, dirty, date.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pandas as pd

from cs336_systems.accounting import attention_flops, tflops_per_s
from cs336_systems.config import AttentionShape
from cs336_systems.measure.samples import summarize
from cs336_systems.records import Record, case_key, latest

OURS = "triton"  # the implementation that speed-ups are about
OUR_KERNELS = (OURS, "hopper")  # those that headlines set against the best of others
BASELINE = "eager"  # what speed-ups are relative to
IMPLEMENTATIONS = (  # the order of columns, legends and bars
    "eager",
    "compiled",
    "tiled",
    "tiled_compiled",
    "triton",
    "hopper",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "flex",
)
PEERS = ("eager", "compiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex")  # what others wrote
MODES = ("forward", "backward", "forward_backward", "train_step")
MODELS = ("small", "medium", "large", "xl", "10b")  # proxies stand behind the size that they stand for
MODE_TITLES = {
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
    "train_step": "full training step",
}
NOT_MEASURED = "not measured"  # status of a cell that no record mentions
MS_PER_UNIT = {"ms": 1.0, "s": 1e3}
SHOWN_UNITS = {"time": "ms", "compile_time": "s"}  # as headings and axes say; samples in another are converted
# The columns that name an attention cell; a table shows those of the second line only when they vary.
ATTENTION_KEYS = ("head_dim", "seqlen")
ATTENTION_VARIANTS = ("batch", "heads", "kv_heads", "causal", "dtype")
MODEL_VARIANTS = ("context", "batch", "attention", "precision")  # the same of model cases
DTYPE_ORDER = ("bfloat16", "float16", "float32")
NUMBERS = ("batch", "heads", "kv_heads", "seqlen", "seqlen_k", "head_dim", "context", "warmup")


def load_frame(records: Iterable[Record]) -> pd.DataFrame:
    """The newest record of each key as a frame, sorted, so that the order of the file does not matter.

    Raises ValueError naming the devices (or scales) when `records` come from more than one: numbers of two machines
    in one table invite a comparison that says nothing.
    """
    kept = latest(records)
    refuse_mixture("devices", [str(record.device.get("name")) for record in kept])
    refuse_mixture("scales", [record.scale for record in kept])
    frame = pd.DataFrame([_row(record) for record in kept])
    if not len(frame):
        return frame
    for name in NUMBERS:
        frame[name] = pd.to_numeric(frame[name])  # None becomes NaN
    return sort_cells(frame)


def refuse_mixture(what: str, values: Iterable[str]) -> None:
    """Raise ValueError naming `values` unless all are the same."""
    distinct = sorted(set(values))
    if len(distinct) > 1:
        raise ValueError(f"records of different {what} cannot share a table: {', '.join(distinct)}")


def select(frame: pd.DataFrame, quantity: str, mode: str | None = None) -> pd.DataFrame:
    """Rows of `quantity` (in `mode`): one for each cell that has it, and one for each cell that broke before it.

    An out-of-memory error in the forward pass may leave a record of that pass only; the backward table must still say
    OOM. So a cell without the wanted row borrows its first row that is not ok.
    """
    wanted = frame[(frame["quantity"] == quantity) & ((frame["mode"] == mode) if mode else True)]
    cell = ["implementation", "case"]
    have = set(wanted[cell].itertuples(index=False, name=None))
    broken = frame[frame["status"] != "ok"].drop_duplicates(cell)
    if quantity == "compile_time":  # not attempted by most implementations
        broken = broken[broken["implementation"].isin(wanted["implementation"])]
    borrowed = broken.loc[[row.Index for row in tuples(broken) if (row.implementation, row.case) not in have]]
    if borrowed.empty:
        return wanted
    if mode is None and len(wanted):
        mode = wanted["mode"].iloc[0]
    return sort_cells(pd.concat([wanted, borrowed.assign(quantity=quantity, mode=mode or borrowed["mode"])]))


def complete(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """`rows` with a "not measured" row for each combination of `label` and (existing) `keys` that has none.

    Raises ValueError when two rows are the same cell of a table or figure with these keys.
    """
    index = ["label", *keys]
    doubled = rows[rows.duplicated(index)]
    if len(doubled):
        cell = ", ".join(f"{key}={doubled.iloc[0][key]}" for key in index)
        raise ValueError(f"{doubled.iloc[0]['problem']}: several records for one cell ({cell})")
    grid = (
        rows[["label", "implementation", "interpreted"]]
        .drop_duplicates()
        .merge(rows[list(keys)].drop_duplicates(), how="cross")
    )
    merged = grid.merge(rows.drop(columns=["implementation", "interpreted"]), on=index, how="left")
    absent = merged["status"].isna()
    merged.loc[absent, "status"] = NOT_MEASURED
    merged.loc[absent, "message"] = "no record"
    return sort_cells(merged)


def tuples(rows: pd.DataFrame) -> list[Any]:
    """The rows as named tuples, whose fields are of any type: row.median, row.status."""
    return list(rows.itertuples())


def variants(rows: pd.DataFrame, candidates: Sequence[str]) -> list[str]:
    """Those columns of `candidates` that take more than one value in `rows`, so that they must be shown."""
    return [name for name in candidates if name in rows and rows[name].nunique(dropna=False) > 1]


def ordered(values: Iterable[Any], order: Sequence[str]) -> list[Any]:
    """Distinct `values`: those of `order` first and in its order, the others sorted behind them."""
    return sorted(set(values), key=lambda value: (_rank(value, order), str(value)))


def labels(rows: pd.DataFrame) -> list[str]:
    """Labels in `rows`, in the order of columns and legends."""
    return ordered(rows["label"], IMPLEMENTATIONS)


def sort_cells(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` sorted by everything that names a cell, sizes and implementations in the order a reader expects."""
    ranks = {"label": IMPLEMENTATIONS, "mode": MODES, "model": MODELS}
    keys = ["problem", "case_type", "model", "context", "dtype", "precision", "batch", "heads", "kv_heads", "causal"]
    keys += ["head_dim", "seqlen", "seqlen_k", "mask_rank", "warmup", "label", "mode", "quantity", "case"]
    present = [key for key in keys if key in frame]

    def sortable(column: pd.Series) -> pd.Series:
        if column.name in ranks:
            order = ranks[str(column.name)]
            return column.map(lambda value: f"{_rank(value, order):03d} {value}")
        return column if column.name in NUMBERS else column.map(str)

    return frame.sort_values(present, key=sortable, kind="stable", ignore_index=True)


def _rank(value: Any, order: Sequence[str]) -> int:
    """Place of `value` in `order`; "triton (interpreter)" stands with "triton", "small-proxy" with "small"."""
    name = str(value)
    for candidate in (name, name.split(" (")[0], name.removesuffix("-proxy")):
        if candidate in order:
            return order.index(candidate)
    return len(order)


def _in_shown_unit(record: Record) -> Record:
    """`record` with its times in the unit that the tables name."""
    unit = SHOWN_UNITS.get(record.quantity, record.unit)
    if unit == record.unit:
        return record
    ratio = MS_PER_UNIT[record.unit] / MS_PER_UNIT[unit]
    return replace(record, unit=unit, samples=[sample * ratio for sample in record.samples])


def _row(record: Record) -> dict[str, Any]:
    record = _in_shown_unit(record)
    # Triton without a GPU is the interpreter, also in the rows of cells that broke before they could say so.
    on_cpu = record.device.get("kind") == "cpu" and record.implementation.startswith(OURS)
    interpreted = on_cpu or "interpreter" in record.kernel
    return {
        "problem": record.problem,
        "scale": record.scale,
        "implementation": record.implementation,
        "label": f"{record.implementation} (interpreter)" if interpreted else record.implementation,
        "interpreted": interpreted,
        "mode": record.mode,
        "quantity": record.quantity,
        "unit": record.unit,
        "status": record.status,
        "message": record.message,
        "kernel": record.kernel,
        "error": float("nan") if record.error is None else record.error,
        **_case_columns(record.case),
        **_sample_columns(record.samples if record.status == "ok" else []),
        "tflops": _tflops(record),
        "device": str(record.device.get("name")),
        "device_kind": str(record.device.get("kind") or ""),
        "driver": str(record.device.get("driver") or ""),
        "torch": record.software.get("torch", ""),
        "triton": record.software.get("triton", ""),
        "commit": record.commit,
        "dirty": record.dirty,
        "date": record.date,
    }


def _case_columns(case: dict[str, Any]) -> dict[str, Any]:
    model, precision = case.get("model") or {}, case.get("precision") or {}
    autocast = precision.get("autocast")
    return {
        "case": case_key(case),
        "case_type": case.get("type", ""),
        "seqlen": case.get("seqlen_q"),
        "seqlen_k": case.get("seqlen_k"),
        "head_dim": case.get("head_dim"),
        "batch": case.get("batch"),
        "heads": case.get("heads"),
        "kv_heads": case.get("kv_heads"),
        "causal": case.get("is_causal"),
        "dtype": case.get("dtype", ""),
        "model": model.get("name", ""),
        "context": model.get("context_length"),
        "attention": case.get("attention", ""),
        "precision": f"{autocast} autocast" if autocast else precision.get("parameters", ""),
        "warmup": case.get("warmup"),
        "mask": case.get("mask", ""),
    }


def _sample_columns(samples: list[float]) -> dict[str, Any]:
    columns: dict[str, Any] = {"samples": len(samples), "values": tuple(samples)}
    nothing = dict.fromkeys(("first", "median", "quartile_low", "quartile_high", "mean", "std"), float("nan"))
    if not samples:
        return columns | nothing
    summary = summarize(samples)
    return columns | {name: getattr(summary, name) for name in nothing if name != "first"} | {"first": samples[0]}


def _tflops(record: Record) -> float:
    """TFLOP/s of a timed attention call, by its exact mask area; NaN for anything else."""
    if record.status != "ok" or record.quantity != "time" or record.case.get("type") != "AttentionShape":
        return float("nan")
    known = {field.name for field in fields(AttentionShape)}
    shape = AttentionShape(**{name: value for name, value in record.case.items() if name in known})
    ms = summarize(record.samples).median * MS_PER_UNIT[record.unit]
    return tflops_per_s(attention_flops(shape, record.mode), ms) if ms > 0 else float("nan")
