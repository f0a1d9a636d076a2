# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Four schedules of data parallelism
#
# Every rank has the whole model and its own part of the batch; before the optimizer steps, each gradient is replaced by
# its mean over the ranks. The four wrappers of this repository send the same bytes. They differ in when: this notebook
# draws that, first for a model of a step, then for real steps on two processes of this machine, and reads from both how
# much of the communication is hidden.
#
# It needs no GPU. What it runs is imported from `cs336_systems`.
#
# Each exercise has our answer, between `yours` and `to here`. Put yours in its place: the next cell says what is wrong.

# %%
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

import cs336_systems
from cs336_systems.analysis.bandwidth import best_bucket_bytes, bucket_overhead_s, bus_factor
from cs336_systems.bench.spec import load
from cs336_systems.book.pages import Book
from cs336_systems.config import RunConfig
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.measure.overlap import Lanes
from cs336_systems.notebook import check

# %% [markdown]
# ## The four wrappers, in their own lines
#
# All of them broadcast rank 0's parameters at the start. Two do all else when the backward is over; two have a hook
# called as soon as the backward has accumulated a parameter's gradient.

# %%
for lines in (NaiveDDP._synchronize, FlatDDP._synchronize, OverlapDDP._arrive, BucketedDDP._arrive):
    display(Markdown(f"`{lines.__qualname__}`\n```python\n{inspect.cleandoc(inspect.getsource(lines))}\n```"))

# %% [markdown]
# ## Exercise 1: the hook
#
# Ranks must start the same collectives in the same order, or they hang; gradients come in any order.
# Complete the hook: note that gradient `index` has arrived, then send, in the given `order`, all that can go now.
# `sent` is the list of those that went before; send by appending to it.


# %%
def arrive(index: int, order: list[int], arrived: set[int], sent: list[int]) -> None:
    # yours: note the arrival; send what is next in `order` for as long as it has arrived
    arrived.add(index)
    while len(sent) < len(order) and order[len(sent)] in arrived:
        sent.append(order[len(sent)])
    # to here


# %%
def sent_after(arrivals: list[int]) -> list[list[int]]:
    """What a model of four parameters has sent after each arrival."""
    arrived, sent, found = set(), [], []
    for index in arrivals:
        arrive(index, [3, 2, 1, 0], arrived, sent)
        found.append(list(sent))
    return found


check(
    (sent_after([3, 2]), [[3], [3, 2]], "A gradient whose turn it is goes at once."),
    (sent_after([3, 1]), [[3], [3]], "Gradient 1 must wait for 2: on another rank 2 may come first."),
    (sent_after([3, 1, 2]), [[3], [3], [3, 2, 1]], "When 2 comes, 1, which waited for it, goes too."),
    (sent_after([0, 1, 2, 3]), [[], [], [], [3, 2, 1, 0]], "Each is sent once, and the last arrival ends the step."),
)

# %% [markdown]
# ## A model of one step
#
# Ten layers, from the last to the first: each needs 2 ms of backward and then has gradients whose all-reduce takes
# 1.5 ms of sending and 0.3 ms of latency for each of its four tensors. A link sends one thing at a time.
#
# - **naive**: after the backward, tensor by tensor: every latency, and nothing hidden.
# - **flat**: after the backward, all at once: one latency, and nothing hidden.
# - **overlap**: each tensor as soon as it is there: every latency, hidden behind the layers still to come.
# - **bucketed**: several tensors at a time, during the backward: few latencies, and most of it hidden.

# %%
COLOURS = {"compute": "#66a9d8", "communication": "#d55e00"}


def draw(schedules: dict[str, Lanes], title: str) -> None:
    """One panel a schedule: when there was compute, when communication."""
    figure, all_axes = plt.subplots(len(schedules), 1, figsize=(9, 1.1 * len(schedules) + 0.6), sharex=True)
    for axes, (name, lanes) in zip(all_axes, schedules.items()):
        for height, (lane, intervals) in enumerate(
            (("communication", lanes.communication), ("compute", lanes.compute))
        ):
            bars = [(start, end - start) for start, end in intervals]
            axes.broken_barh(bars, (height - 0.4, 0.8), color=COLOURS[lane], edgecolor="white", linewidth=0.3)
        axes.set_yticks([0, 1], ["communication", "compute"], fontsize=8)
        hidden = 100 * lanes.overlap_ms / lanes.communication_ms if lanes.communication_ms else 0.0
        axes.set_title(
            f"{name}: {lanes.span_ms:.1f} ms, {hidden:.0f} % of the communication hidden", fontsize=9, loc="left"
        )
    all_axes[-1].set_xlabel("time (ms)")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    plt.show()


NUM_LAYERS, TENSORS = 10, 4
BACKWARD_MS, SENDING_MS, LATENCY_MS = 2.0, 1.5, 0.3
BACKWARD = [(layer * BACKWARD_MS, (layer + 1) * BACKWARD_MS) for layer in range(NUM_LAYERS)]


def send(ready_ms: list[float], sending_ms: list[float]) -> list[tuple[float, float]]:
    """When each message is under way, in order, on one link that is free at first."""
    free, sent = 0.0, []
    for ready, sending in zip(ready_ms, sending_ms):
        start = max(free, ready)
        free = start + LATENCY_MS + sending
        sent.append((start, free))
    return sent


end = BACKWARD[-1][1]
arrivals = [layer_end for _, layer_end in BACKWARD for _ in range(TENSORS)]
each = [SENDING_MS / TENSORS] * len(arrivals)
in_bucket = 2 * TENSORS  # two layers
buckets = [arrivals[place : place + in_bucket] for place in range(0, len(arrivals), in_bucket)]
modelled = {
    "naive": Lanes(compute=BACKWARD, communication=send([end] * len(arrivals), each)),
    "flat": Lanes(compute=BACKWARD, communication=send([end], [sum(each)])),
    "overlap": Lanes(compute=BACKWARD, communication=send(arrivals, each)),
    "bucketed": Lanes(
        compute=BACKWARD, communication=send([max(bucket) for bucket in buckets], [each[0] * in_bucket] * len(buckets))
    ),
}
draw(modelled, "Modelled steps")

# %% [markdown]
# Hidden means: both lanes are busy. That is all that `Lanes.overlap_ms` computes, the length of the intersection of two
# unions of intervals. The same code reads a profiler's trace.

# %%
for name, lanes in modelled.items():
    print(
        f"{name:9} communication {lanes.communication_ms:5.1f} ms, beside compute {lanes.overlap_ms:5.1f} ms, "
        f"not hidden {lanes.communication_ms - lanes.overlap_ms:5.1f} ms"
    )

# %% [markdown]
# ## How large should a bucket be?
#
# With $n$ buckets of $s/n$ bytes, a link of $w$ bytes per second and a cost of $o$ seconds a call, a step is longer by
# $n\,o + s/(n\,w)$: the calls, and the last bucket, behind which there is nothing left to compute. The minimum is at
# buckets of $\sqrt{s\,w\,o}$ bytes. Below, the numbers of a model with 13 GB of gradients on a link of 300 GB/s.

# %%
total_bytes, bytes_per_s, call_s = 13e9, 300e9, 30e-6
best = best_bucket_bytes(total_bytes, bytes_per_s, call_s)
counts = [2**power for power in range(14)]
figure, axes = plt.subplots(figsize=(7, 3.2))
axes.loglog(
    [total_bytes / count / 2**20 for count in counts],
    [1e3 * bucket_overhead_s(total_bytes, bytes_per_s, call_s, count) for count in counts],
    marker="o",
)
axes.axvline(best / 2**20, color="#444444", linestyle=":")
axes.set_xlabel("bucket (MiB)")
axes.set_ylabel("added to a step (ms)")
axes.set_title(f"least at {best / 2**20:.0f} MiB", fontsize=10)
plt.show()

# %% [markdown]
# ## Exercise 2: the split into buckets
#
# Parameters `0, 1, …` have these sizes in bytes. The backward makes the last one's gradient first, so fill buckets
# from the last parameter on, each with as many as fit into `limit`. Return the buckets as lists of parameters. A
# parameter that is larger than the limit has a bucket of its own.


# %%
def split(sizes: list[int], limit: int) -> list[list[int]]:
    # yours: walk from the last parameter to the first; open a bucket where the last one has no room
    buckets, used = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or used + sizes[index] > limit:
            buckets.append([])
            used = 0
        buckets[-1].append(index)
        used += sizes[index]
    return buckets
    # to here


# %%
check(
    (split([4, 4], 8), [[1, 0]], "Both fit, and the last parameter comes first."),
    (split([4, 4, 4], 8), [[2, 1], [0]], "A third one needs a bucket of its own."),
    (split([2, 9, 2], 8), [[2], [1], [0]], "Nothing joins a parameter that is larger than the limit."),
    (split([6, 1, 3, 5], 8), [[3, 2], [1, 0]], "Count what the open bucket holds from the start when it is opened."),
    (split([], 8), [], "A model without parameters has no bucket, not an empty one."),
)

# %% [markdown]
# ## What a collective asks of a link
#
# Bus bandwidth is algorithm bandwidth times the share of the tensor that a rank must send. For an all-reduce it never
# exceeds two, whatever the number of ranks: that is why a ring scales.

# %%
for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
    factors = ", ".join(f"{ranks} ranks: {bus_factor(operation, ranks):.2f}" for ranks in (2, 4, 8, 64))
    print(f"{operation:15} {factors}")

# %% [markdown]
# ## Real steps
#
# Two processes, gloo, a narrow proxy of the `xl` model. Each wrapper's gradients are compared with the plain mean of
# what the ranks compute alone, its steps are timed, and one more is traced on rank 0. On a CPU, communication and
# compute share the cores, so that hiding one behind the other may save nothing: look at the order first.


# %%
@contextmanager
def without_output() -> Iterator[None]:
    """Drop what child processes print: some builds of the profiler announce themselves."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, descriptor in zip((1, 2), kept):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        os.close(nowhere)


run = RunConfig(scale="smoke", device="cpu")
traced, step_ms = {}, {}
problem = "ddp_overlap_individual_parameters_benchmarking"
experiment = load(problem)
for cell in experiment.cells(run):
    if cell.implementation not in ("naive", "flat", "overlap", "bucketed"):
        continue
    with without_output():
        found = {sample.row.quantity: list(sample.samples) for sample in experiment.measure(cell, run)}
    pairs = {
        lane: list(zip(found[f"{lane}_intervals"][::2], found[f"{lane}_intervals"][1::2]))
        for lane in ("compute", "communication")
    }
    traced[cell.implementation] = Lanes(**pairs)
    step_ms[cell.implementation] = median(found["time"])
draw(traced, "Traced steps, two gloo ranks on this CPU")

# %%
for name, lanes in traced.items():
    begin = lanes.communication[0][0]
    before = sum(min(end, begin) - start for start, end in lanes.compute if start < begin)
    print(
        f"{name:9} communication begins after {100 * before / lanes.compute_ms:3.0f} % of the compute and takes "
        f"{lanes.communication_ms:5.1f} ms, of which {lanes.overlap_ms:5.1f} beside compute"
    )
ranking = sorted(step_ms, key=step_ms.get)
print("medians of untraced steps:", ", ".join(f"{name} {step_ms[name]:.0f} ms" for name in ranking))

# %% [markdown]
# As in the model, `naive` and `flat` communicate when the backward is over, beside nothing, and the other two begin
# before; the compute after a step's communication is the optimizer's. Since it counts too, `naive` and `flat` begin
# before 100 %.
#
# The last line ranks the four on this machine, today: what it says of speed counts, whatever the model says. One traced
# step is no measure of that. Three things are not as in the model:
#
# - The link is not free. gloo adds and copies on the cores that the backward needs, and so slows what it hides behind.
# - A bar begins when rank 0 starts a collective and ends when both ranks are through. It contains waiting for the other
#   rank and for a core, which differs from run to run.
# - Calls and bytes have other prices. `naive` and `flat` send the same bytes, `naive` in a call for each gradient and
#   `flat` in one: the difference of their communication is the price of calls here, and the waiting in them. `overlap`
#   makes as many calls as `naive`, and `bucketed` few.
#
# ## The measured steps
#
# On GPUs, where NCCL and the compute kernels share a device, from the committed records.

# %%
root = Path(cs336_systems.__file__).resolve().parent.parent
book = Book(root, root / "results" / "nvidia-h200")
if not book.frame(problem).empty:
    display(Markdown(load(problem).tables["two_ranks"].build(book.frame(problem)).markdown()))
else:
    print("not measured yet: there are no records of", problem)
