"""Tables, figures and sentences that nobody measured: functions of constants, labelled "calculated".

    calculated_text("tp_calcs", "table", Path("writeup.md"), Path("results/calculated"))

They have the names of problems and the kinds of blocks that measured ones have (`tp_calcs.table`, `.answer`,
`.figures`). Figures go to `results/calculated/figures`; each carries the digest of its data, by which `report --check`
knows whether it is the one that the code gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems import grids
from cs336_systems.accounting import attention_flops, model_bytes, model_flops
from cs336_systems.analysis import HARDWARE, FeedForward, Hardware, Plan, ffn, predict, rank_bytes, rings, xxl
from cs336_systems.analysis.predictor import DEFAULT_EFFICIENCY
from cs336_systems.config import MODEL_SIZES, AttentionShape, Precision
from cs336_systems.distributed.memory_plan import ShardingBytes, fsdp_bytes, long_step_bytes
from cs336_systems.model.chunked_loss import CHUNK_TOKENS
from cs336_systems.report.leaderboard import RECOMPUTED
from cs336_systems.report.markdown import factor, number, table
from cs336_systems.report.points import POINT, Plot

FOLDER = "calculated"  # beside the folders of devices
NOTE = "*Calculated, not measured.*"
GIB = 2**30
MODEL_8B = MODEL_SIZES["8b"]
BATCH_TOKENS = (65_536, 4_194_304)  # of the leaderboard's step, and of a large pre-training batch
DEVICES = tuple(2**power for power in range(15))  # 1 to 16,384
GLOBAL_BATCH = 2048  # sequences of the predicted runs
TRAINING_CONTEXT = 4096
RING_BYTES = 10**9


@dataclass(frozen=True)
class Calculation:
    """What stands under one problem's name."""

    tables: tuple[tuple[str, str], ...] = ()  # title and Markdown
    plots: tuple[Plot, ...] = ()
    answer: tuple[str, ...] = ()


def link_rates(hardware: Hardware) -> list[tuple[str, float]]:
    """The bandwidths W at which a scheme is judged: inside a node, and with one adapter a GPU between nodes."""
    return [
        (f"{hardware.name}, NVLink", hardware.node_bytes_per_s),
        (f"{hardware.name}, network", hardware.network_bytes_per_s),
    ]


def rates() -> list[tuple[str, float, float]]:
    """(name, C, W) of every machine and link."""
    return [(name, machine.flops_per_s, rate) for machine in HARDWARE.values() for name, rate in link_rates(machine)]


def layer(tokens: int) -> FeedForward:
    """The 8b model's feed-forward layer."""
    return FeedForward(tokens=tokens, d_model=MODEL_8B.d_model, d_ff=MODEL_8B.d_ff)


# The 2026 handout's problems


def alternate_ring_all_reduce() -> Calculation:
    """Steps and times of both rings, counted in the simulation."""
    rows = []
    rate = HARDWARE["H200"].node_bytes_per_s
    for num_ranks in (2, 4, 8, 16, 64):
        buffers = [[rank] * num_ranks for rank in range(num_ranks)]  # one element a chunk
        element_bytes = RING_BYTES / num_ranks
        counted = [collective(buffers)[1] for collective in (rings.ring_all_reduce, rings.alternate_ring_all_reduce)]
        times = [1e3 * traffic.seconds(rate, element_bytes) for traffic in counted]
        sent = [traffic.sent[0] / num_ranks for traffic in counted]
        rows.append([str(num_ranks), *(str(traffic.steps) for traffic in counted), *(number(one, 3) for one in sent),
                     *(number(one, 4) for one in times), factor(times[1] / times[0])])  # fmt: skip
    header = ["N", "ring steps", "alternate steps", "ring sent / S", "alternate sent / S", "ring (ms)",
              "alternate (ms)", "alternate over ring"]  # fmt: skip
    title = f"All-reduce of {number(RING_BYTES / 1e9, 1)} GB, simulated step by step, W = {number(rate / 1e9, 3)} GB/s"
    return Calculation(tables=((title, table(header, rows)),))


def data_parallel_calcs() -> Calculation:
    rows = []
    for name, c, w in rates():
        limits = [ffn.data_parallel_limit(layer(tokens), flops_per_s=c, bytes_per_s=w) for tokens in BATCH_TOKENS]
        rows.append([name, number(w / 1e9, 3), number(c / w, 4), *(number(limit, 4) for limit in limits)])
    header = ["C, W of", "W (GB/s)", "C/W: tokens a device", *(f"N at B = {tokens:,}" for tokens in BATCH_TOKENS)]
    return Calculation(
        tables=(("Largest N of data parallelism and of FSDP (forward and backward) without a bottleneck",
                 table(header, rows)),),
        plots=tuple(_times_plot("data_parallel", tokens, ("DP backward",)) for tokens in BATCH_TOKENS[1:]),
    )  # fmt: skip


def fsdp_calcs() -> Calculation:
    series = ("FSDP forward", "FSDP backward")
    return replace(data_parallel_calcs(), plots=(_times_plot("fsdp", BATCH_TOKENS[1], series),))


def tp_calcs() -> Calculation:
    rows = []
    for name, c, w in rates():
        limits = [ffn.tp_limit(layer(1), mode, flops_per_s=c, bytes_per_s=w) for mode in ("forward", "backward")]
        rows.append([name, number(w / 1e9, 3), *(number(limit, 4) for limit in limits)])
    header = ["C, W of", "W (GB/s)", "N forward", "N backward"]
    title = f"Largest N of tensor parallelism without a bottleneck, d_ff = {MODEL_8B.d_ff:,}, any batch"
    plot = _times_plot("tp", BATCH_TOKENS[1], ("TP forward", "TP backward"))
    return Calculation(tables=((title, table(header, rows)),), plots=(plot,))


def fsdp_tp_calcs() -> Calculation:
    rows = []
    for tokens in BATCH_TOKENS:
        for name, c, w in rates():
            cells = []
            for overlap in (True, False):
                limit = ffn.fsdp_tp_limit(layer(tokens), flops_per_s=c, bytes_per_s=w, overlap=overlap)
                whole = ffn.best_integer_grid(layer(tokens), flops_per_s=c, bytes_per_s=w, overlap=overlap)
                grid = f"{number(limit.fsdp, 4)} × {number(limit.tp, 3)}"
                cells += [grid, number(limit.devices, 4), f"{whole[0]} × {whole[1]} = {whole[0] * whole[1]:,}"]
            rows.append([name, f"{tokens:,}", *cells])
    header = ["C, W of", "B", "N_FSDP × N_TP, overlapped", "N", "in whole numbers", "N_FSDP × N_TP, not overlapped",
              "N ", "in whole numbers "]  # fmt: skip
    plot = _limits_plot()
    return Calculation(tables=(("Largest N of FSDP + TP, forward", table(header, rows, 2)),), plots=(plot,))


# The 2025 handout's problem


def communication_accounting() -> Calculation:
    model, mesh = xxl.XXL, xxl.V5P
    fixed, activations = xxl.fixed_bytes(model), xxl.saved_bytes(model, 1)
    rows = []
    for tokens in (0, 512, 1024, 2048, 4096, 8192):
        fewest = xxl.fewest_devices(model, tokens)
        saved = xxl.saved_bytes(model, tokens)
        rows.append(
            [
                f"{tokens:,}",
                number(saved / 1e9, 4),
                number((fixed + saved) / xxl.H100_BYTES, 4),
                str(fewest),
                number(xxl.bytes_per_device(model, tokens, fewest) / 1e9, 4),
            ]
        )
    header = ["tokens", "saved for backward (GB)", "H100s (80 GB)", "fewest N_FSDP (95 GB)", "GB a device there"]
    alone, shared = (xxl.smallest_batch_per_device(model, mesh, overlap=overlap) for overlap in (True, False))
    said = (
        f"(a) {number(model.parameters / 1e9, 4)} billion parameters take {number(fixed / 1e12, 4)} TB for master "
        f"weights, gradients and two moments in float32, {number(fixed / xxl.H100_BYTES, 4)} H100s' worth, and save "
        f"{number(activations / 1e6, 4)} MB a token for backward in bfloat16.",
        f"(b) A device holds (16 P + A/2)/N + A/2 bytes. Without activations N_FSDP = {xxl.fewest_devices(model, 0)} "
        f"is the first below 95 GB; each token costs {number(activations / 2e6, 4)} MB that no N removes, so that "
        f"{int(xxl.V5P_BYTES // (activations / 2)):,} tokens a device fill it whatever N.",
        f"(c) α = C/W = {number(mesh.flops_per_s / mesh.link_bytes_per_s, 4)}. Compute-bound from α/(M_X·Y) = "
        f"{number(alone, 4)} tokens a device on, {number(alone * mesh.devices, 5)} tokens on all {mesh.devices}; with "
        f"the two axes' collectives one after the other, {number(shared, 4)} and {number(shared * mesh.devices, 5)}.",
    )
    return Calculation(
        tables=(("XXL's memory by the tokens whose activations it saves", table(header, rows)),), answer=said
    )


# Predictions


def training_at_scale() -> Calculation:
    """The 8b model on 8 to 16,384 H200: fixed global batch, FSDP alone and with tensor parallelism in a node."""
    model = replace(MODEL_8B, context_length=TRAINING_CONTEXT)
    rows, marks = [], []
    for name, machine in HARDWARE.items():
        for scheme, tensor in (("bucketed", 1), ("zero1", 1), ("fsdp", 1), ("fsdp", 8)):
            label = scheme + (f" + TP {tensor}" if tensor > 1 else "")
            for devices in DEVICES[3:]:
                replicas = devices // tensor
                if replicas > GLOBAL_BATCH:
                    continue  # less than a sequence each
                plan = Plan(scheme=scheme, data_parallel=replicas, tensor_parallel=tensor)
                batch = GLOBAL_BATCH // replicas
                step = predict(model, plan, machine, batch=batch)
                style = {"bucketed": "tiled", "zero1": "sdpa_cudnn"}.get(scheme, "triton" if tensor == 1 else "flex")
                marks.append(_mark(name, label, style, devices, 100 * step.utilization))
                if name == "H200" and devices in (8, 64, 512, 2048, 4096, 16_384):
                    used = rank_bytes(model, plan, batch=1, checkpointed=True)
                    rows.append(
                        [
                            f"{devices:,}", label, str(batch), number(1e3 * step.step_s, 4),
                            number(1e3 * step.communication_s, 3), number(1e3 * step.exposed_s, 3),
                            f"{number(100 * step.utilization, 3)} %", number(used.peak / GIB, 3),
                        ]
                    )  # fmt: skip
    header = ["H200s", "scheme", "sequences a replica", "step (ms)", "communication (ms)", "exposed (ms)", "MFU",
              "GiB a GPU, batch 1, checkpointed"]  # fmt: skip
    rows.sort(key=lambda row: int(row[0].replace(",", "")))
    title = (
        f"8b, context {TRAINING_CONTEXT:,}, {GLOBAL_BATCH:,} sequences a step, "
        f"matmuls assumed at {number(100 * DEFAULT_EFFICIENCY, 2)} % of the peak"
    )
    plot = Plot(
        name="mfu",
        title=f"Predicted model FLOPs utilization\n{title}",
        kind="lines",
        data=pd.DataFrame(marks, columns=list(POINT)),
        x_label="GPUs",
        y_label="MFU (%)",
        notes=("Calculated, not measured. A line ends where a replica would have less than one sequence.",),
    )
    return Calculation(tables=((title, table(header, rows, 2)),), plots=(plot,))


def memory_prediction() -> Calculation:
    """GiB of every scheme at the handout's largest sizes on two GPUs."""
    rows = []
    for size in ("xl", "10b"):
        model = MODEL_SIZES[size]
        for scheme in ("bucketed", "flat", "sharded-optimizer", "zero1", "fsdp"):
            used = rank_bytes(model, Plan(scheme=scheme, data_parallel=2), batch=2)
            fits = "yes" if used.peak < 0.95 * HARDWARE["H200"].memory_bytes else "no"
            parts = (used.parameters, used.gradients, used.optimizer, used.gathered + used.buffers, used.activations)
            rows.append([size, scheme, *(number(part / GIB, 3) for part in (*parts, used.peak)), fits])
    header = ["model", "scheme", "parameters", "gradients", "moments", "gathered, buffers", "activations", "peak",
              "fits an H200"]  # fmt: skip
    title = "Memory of each of two GPUs (GiB), batch 2 each, context 512, bfloat16 compute, float32 masters"
    return Calculation(tables=((title, table(header, rows, 2)),))


def leaderboard_2026_memory() -> Calculation:
    """GiB of each of two GPUs in the leaderboard's step, by what is computed again, and with whole logits."""
    options: dict[str, Any] = {
        "num_ranks": 2, "attention": "hopper", "compute_dtype": "bfloat16", "reduce_dtype": "float32",
    }  # fmt: skip
    plans = [("whole", "whole blocks", fsdp_bytes(MODEL_8B, 1, checkpointing=True, **options))]
    for recompute, name in RECOMPUTED.items():
        options |= {"recompute": recompute, "chunk_tokens": CHUNK_TOKENS}
        plans.append(("in chunks", name, long_step_bytes(MODEL_8B, 1, **options)))
    rows = []
    for loss, name, plan in plans:
        parts = (plan.parameters, plan.optimizer, plan.gradients, plan.gathered, plan.unreduced, plan.activations,
                 plan.logits, plan.peak)  # fmt: skip
        fits = "yes" if plan.fits(HARDWARE["H200"].memory_bytes) else "no"
        rows.append([loss, name, *(number(part / GIB, 3) for part in parts), fits])
    header = ["logits", "computed again", "parameters", "moments", "gradients", "gathered", "being reduced",
              "activations", "loss", "peak", "fits an H200"]  # fmt: skip
    title = f"Memory of each of two GPUs (GiB), 8b, {MODEL_8B.context_length:,} tokens each, bfloat16, float32 masters"
    return Calculation(tables=((title, table(header, rows, 2)),), answer=_why_it_needs_all(plans[0][2]))


def _why_it_needs_all(plain: ShardingBytes) -> tuple[str, ...]:
    unshared = model_bytes(MODEL_8B, Precision()).total
    forward = model_flops(MODEL_8B, 1, "forward")
    shape = AttentionShape(
        batch=1, heads=MODEL_8B.num_heads, seqlen_q=MODEL_8B.context_length, seqlen_k=MODEL_8B.context_length,
        head_dim=MODEL_8B.head_dim, is_causal=True, dtype="bfloat16",
    )  # fmt: skip
    attention = MODEL_8B.num_layers * attention_flops(shape, "forward")
    step = model_flops(MODEL_8B, 1, "train_step")
    return (
        f"Weights, gradients and moments, in float32 and unshared, take {number(unshared / GIB)} GiB.",
        f"Whole logits in float32 take {number(4 * MODEL_8B.context_length * MODEL_8B.vocab_size / GIB)} GiB of the "
        f"first row's activations, and the temporaries of the loss's backward {number(plain.logits / GIB)} GiB more.",
        f"Attention is {number(100 * attention / forward, 3)} % of the forward's FLOPs at this length.",
        f"A rank's step has {number(step / 1e15)} PFLOP: {number(1e3 * step / HARDWARE['H200'].flops_per_s)} ms at an "
        f"H200's peak.",
    )


def hilbert_order() -> Calculation:
    """Block density of 2-D neighbourhood masks with tokens in rows and along Hilbert's curve."""
    rows = []
    for n in (64, 128):
        for block_size in (64, 128):
            for radius in (1, 3, 7, 15):
                densities = [
                    grids.neighbourhood_block_density(n, radius=radius, block_size=block_size, order=order(n))
                    for order in (grids.row_major_order, grids.hilbert_order)
                ]
                shares = [f"{number(100 * density, 3)} %" for density in densities]
                rows.append([f"{n} × {n}", str(block_size), str(radius), *shares, factor(densities[1] / densities[0])])
    header = ["grid", "block size", "radius", "rows", "Hilbert's curve", "curve over rows"]
    title = "Block density of a neighbourhood mask by the order of the tokens"
    return Calculation(tables=((title, table(header, rows, 3)),))


CALCULATIONS: dict[str, Callable[[], Calculation]] = {
    "communication_accounting": communication_accounting,
    "alternate_ring_all_reduce": alternate_ring_all_reduce,
    "data_parallel_calcs": data_parallel_calcs,
    "fsdp_calcs": fsdp_calcs,
    "tp_calcs": tp_calcs,
    "fsdp_tp_calcs": fsdp_tp_calcs,
    "training_at_scale": training_at_scale,
    "memory_prediction": memory_prediction,
    "leaderboard_2026_memory": leaderboard_2026_memory,
    "hilbert_order": hilbert_order,
}


@cache
def calculation(problem: str) -> Calculation:
    return CALCULATIONS[problem]()


def calculated_text(problem: str, kind: str, folder: Path, link: Callable[[str, Path], str]) -> str:
    """Content of the block `<problem>.<kind>`; `link` makes an image's Markdown from its title and path."""
    found = calculation(problem)
    if kind == "table":
        return "\n\n".join([*(f"**{title}**\n\n{body}" for title, body in found.tables), NOTE])
    if kind == "answer":
        return "\n".join(f"- {sentence}" for sentence in found.answer) or f"*`{problem}` has no sentence.*"
    links = [link(plot.title, figure_path(folder, problem, plot)) for plot in found.plots]
    return "\n\n".join(links) or f"*`{problem}` has no figure.*"


def figure_path(folder: Path, problem: str, plot: Plot) -> Path:
    return folder / "figures" / f"{problem}_{plot.name}.png"


def calculated_figures(folder: Path) -> list[tuple[Path, Plot, str]]:
    """Path, plot and digest of every calculated figure."""
    plots = [(problem, plot) for problem in CALCULATIONS for plot in calculation(problem).plots]
    return [(figure_path(folder, problem, plot), plot, plot_digest(plot)) for problem, plot in plots]


def plot_digest(plot: Plot) -> str:
    """A fingerprint of what `plot` shows, to ten digits, so that another machine's last bit is no difference."""
    text = plot.title + plot.data.to_csv(float_format="%.10g")
    return "calculated sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


# Figures


def _mark(panel: str, series: str, style: str, x: float, y: float) -> dict[str, object]:
    return {
        "panel": panel, "series": series, "style": style, "x": x, "y": y, "low": y, "high": y,
        "status": "ok", "message": "", "drawn": True,
    }  # fmt: skip


SERIES = {  # of `_times_plot`: style, and seconds of communication
    "DP backward": ("sdpa_flash", lambda one, n, w: ffn.data_parallel_seconds(one, n, bytes_per_s=w)),
    "FSDP forward": ("tiled", lambda one, n, w: ffn.fsdp_seconds(one, "forward", n, bytes_per_s=w)),
    "FSDP backward": ("triton", lambda one, n, w: ffn.fsdp_seconds(one, "backward", n, bytes_per_s=w)),
    "TP forward": ("flex", lambda one, n, w: ffn.tp_seconds(one, "forward", n, bytes_per_s=w)),
    "TP backward": ("sdpa_cudnn", lambda one, n, w: ffn.tp_seconds(one, "backward", n, bytes_per_s=w)),
}


def _times_plot(name: str, tokens: int, series: Sequence[str]) -> Plot:
    """Computation and communication of one layer against N: communication-bound where its line is the higher one."""
    one = layer(tokens)
    marks = []
    for panel, c, w in rates():
        for devices in DEVICES[1:]:
            for mode, style in (("forward", "compiled"), ("backward", "eager")):
                if any(mode in label for label in series):
                    seconds = ffn.ffn_flops(one, mode, devices) / c
                    marks.append(_mark(panel, f"computation {mode}", style, devices, 1e3 * seconds))
            for label in series:
                style, communication = SERIES[label]
                marks.append(_mark(panel, label, style, devices, 1e3 * communication(one, devices, w)))
    return Plot(
        name=f"{name}_times",
        title=f"One feed-forward layer of 8b, {tokens:,} tokens, split over N GPUs",
        kind="lines",
        data=pd.DataFrame(marks, columns=list(POINT)),
        x_label="N",
        y_label="time (ms)",
        notes=("Calculated, not measured. Communication-bound where communication lies above computation.",),
    )


def _limits_plot() -> Plot:
    """Largest N of each scheme's forward against the batch."""
    marks = []
    for panel, c, w in rates():
        for tokens in (2**power for power in range(14, 25, 2)):
            one = layer(tokens)
            limits = (
                ("FSDP", "triton", ffn.fsdp_limit(one, "forward", flops_per_s=c, bytes_per_s=w)),
                ("TP", "flex", ffn.tp_limit(one, "forward", flops_per_s=c, bytes_per_s=w)),
                ("FSDP + TP, overlapped", "sdpa_flash", ffn.fsdp_tp_limit(one, flops_per_s=c, bytes_per_s=w).devices),
                (
                    "FSDP + TP, not overlapped",
                    "sdpa_cudnn",
                    ffn.fsdp_tp_limit(one, flops_per_s=c, bytes_per_s=w, overlap=False).devices,
                ),
            )
            marks += [_mark(panel, series, style, tokens, limit) for series, style, limit in limits]
    return Plot(
        name="limits",
        title="GPUs at which the forward of 8b's feed-forward layer becomes communication-bound",
        kind="lines",
        data=pd.DataFrame(marks, columns=list(POINT)),
        x_label="tokens of the whole batch",
        y_label="largest N",
        notes=("Calculated, not measured. d_model 4096, d_ff 11,008.",),
    )
