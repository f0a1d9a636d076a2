"""What `doctor` prints about a machine: facts, versions, back ends and, on request, real rates."""

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from cs336_systems.commands.terminal import show_table, show_text

# Shapes on which back ends are timed: a common layer on a GPU, about a second of work on a CPU.
SHAPES = {
    "cuda": {
        "batch": 1,
        "heads": 16,
        "seqlen_q": 4096,
        "seqlen_k": 4096,
        "head_dim": 64,
        "dtype": "bfloat16",
    },
    "cpu": {
        "batch": 1,
        "heads": 2,
        "seqlen_q": 256,
        "seqlen_k": 256,
        "head_dim": 32,
        "dtype": "float32",
    },
}


def describe_machine(device: str, measure: bool) -> dict[str, Any]:
    """Return everything that `doctor` prints, as JSON values; `measure` adds measured rates.

    ValueError if `device` names a device that this machine lacks.
    """
    from cs336_systems.attention.choose import available_backends
    from cs336_systems.bench.harness import software_versions
    from cs336_systems.device import device_peak, get_device_info, recommended_dtype

    info = get_device_info(device)
    peak = device_peak(info)
    described: dict[str, Any] = {
        "device": info.to_dict(),
        "software": software_versions(),
        "recommended_dtype": recommended_dtype(info.compute_capability),
        "peak": None if peak is None else asdict(peak),
        "backends": available_backends(info),
    }
    if measure:
        described["measured"] = measure_machine(info.kind)
    return described


def measure_machine(kind: str) -> dict[str, Any]:
    """Return the device's measured copy and matmul rates, and each back end's times on one shape.

    `kind` is "cuda" or "cpu". `auto_over_fastest` is the time of the automatic choice over the
    fastest.
    """
    from cs336_systems.config import AttentionShape
    from cs336_systems.measure.reach import copy_rate, matmul_rate
    from cs336_systems.subjects.backend_times import auto_ratio, benchmark_backends

    shape = AttentionShape(is_causal=True, **SHAPES[kind])  # type: ignore[arg-type]
    rows = benchmark_backends(shape, device=kind)
    return {
        "copy": copy_rate(kind),
        "bfloat16_matmul": matmul_rate(kind),
        "backend_shape": asdict(shape),
        "backends": [asdict(row) for row in rows],
        "auto_over_fastest": auto_ratio(rows),
    }


def show_machine(device: str, *, measure: bool, as_json: bool) -> None:
    """Print what `describe_machine` returns, as a table or as JSON."""
    described = describe_machine(device, measure)
    if as_json:
        typer.echo(json.dumps(described, indent=2))
        return
    table = Table(show_header=False, box=None)
    for key, value in {**described["device"], **described["software"]}.items():
        if key == "memory_bytes":
            table.add_row("memory", f"{value / 2**30:.1f} GiB")
        elif value is not None:
            table.add_row(key.replace("_", " "), str(value))
    table.add_row("recommended dtype", described["recommended_dtype"])
    if described["device"]["kind"] == "cuda":
        table.add_row("peak", _peak(described["peak"]))
    for backend, state in described["backends"].items():
        table.add_row(f"backend {backend}", state)
    if measure:
        measured = described["measured"]
        for name in ("copy", "bfloat16_matmul"):
            table.add_row(f"measured {name.replace('_', ' ')}", _rate(measured[name]))
    show_table(table)
    if measure:
        _show_backends(described["measured"])


def _peak(peak: dict[str, Any] | None) -> str:
    """Return the peak rates of a GPU as text; None stands for an unknown GPU."""
    if peak is None:
        return "unknown GPU: no peak, so no MFU"
    rates = f"{peak['bf16_tflops']:g} bf16 TFLOP/s, {peak['fp32_tflops']:g} float32 TFLOP/s"
    return f"{rates}, {peak['memory_gb_per_s']:g} GB/s ({peak['source']})"


def _rate(rate: dict[str, Any]) -> str:
    """Return a measured rate as text: median, unit and quartiles."""
    spread = f"{rate['quartile_low']:.4g} to {rate['quartile_high']:.4g}"
    return f"{rate['median']:.4g} {rate['unit']} (quartiles {spread})"


def _show_backends(measured: dict[str, Any]) -> None:
    """Print a table of the back ends' measured times, below the shape they were measured on."""
    shape = measured["backend_shape"]
    sizes = " x ".join(str(shape[name]) for name in ("batch", "heads", "seqlen_q", "head_dim"))
    table = Table("back end", "forward (ms)", "forward + backward (ms)", "", box=None)
    for row in measured["backends"]:
        times = [
            f"{row[name]:.4g}" if row[name] is not None else row["status"]
            for name in ("forward_ms", "forward_backward_ms")
        ]
        note = "interpreted: no speed" if row["interpreted"] else row["reason"]
        table.add_row(row["backend"], *times, note)
    show_text(f"our back ends, causal, {shape['dtype']}, {sizes}:")
    show_table(table)
    ratio = measured["auto_over_fastest"]
    if ratio is not None:
        show_text(f"auto takes {ratio:.2f} x the time of the fastest")
