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
# # Where the memory goes
#
# A training step of a 3.4-billion-parameter model at context 2048 does not fit on an H200, and this notebook watches
# it not fit, on a laptop. The step's own code runs on tensors that have shapes and no storage; every allocation
# and release is recorded as the CUDA allocator would see it. Then the step is made to fit.
#
# Each exercise has our answer, between `yours` and `to here`. Put yours in its place: the next cell says what is wrong.

# %%
from dataclasses import replace

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.accounting import block_saved_bytes, model_peak_bytes, num_parameters
from cs336_systems.config import MODEL_SIZES, Precision
from cs336_systems.experiments.benchmarking_mixed_precision import autocast_dtypes, norm_in
from cs336_systems.experiments.mixed_precision_accumulation import accumulate
from cs336_systems.measure.predict import fake_module
from cs336_systems.measure.saved import by_operation, compiled_saved_tensors, saved_tensors
from cs336_systems.measure.timeline import CATEGORIES
from cs336_systems.model import TransformerLM
from cs336_systems.model.checkpointing import best_blocks_per_group, grouped_bytes, recursive_bytes
from cs336_systems.notebook import check, show
from cs336_systems.subjects.model_memory import MemoryCase, simulated_trace

GIB, MIB = 2**30, 2**20
XL = replace(MODEL_SIZES["xl"], context_length=2048)
PLAIN = MemoryCase(model=XL, batch=4, attention="reference")

# %% [markdown]
# ## Reading a memory timeline
#
# Time is counted in allocations and releases. Four phases: what is there at the start (parameters, AdamW's moments),
# the forward, where activations pile up, the backward, where they go and gradients come, and the optimizer step.


# %%
def timeline(trace, title):
    """The categories of `trace` stacked over its events."""
    events, lines = trace.sampled(400)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    layers = [lines[name] / GIB for name in CATEGORIES]
    axes.stackplot(events, layers, labels=CATEGORIES, linewidth=0)
    for phase in trace.phases[1:]:
        axes.axvline(phase.start, color="#444444", linestyle="--", linewidth=0.8)
        axes.annotate(phase.name, (phase.start, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -12),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.axhline(80e9 / GIB, color="black", linewidth=0.8)
    axes.set(title=title, xlabel="allocations and releases", ylabel="allocated (GiB)", xlim=(0, trace.num_events))
    axes.legend(loc="upper right", fontsize=8)
    show(figure, title)


plain = simulated_trace(PLAIN, "train_step")
timeline(plain, f"xl, context 2048, batch 4: peak {plain.peak_bytes() / GIB:.0f} GiB; the line is an 80-GB GPU")

# %% [markdown]
# The peak stands at the beginning of the backward. What is it made of, and which allocations are the largest?

# %%
parts = {name: num_bytes / GIB for name, num_bytes in plain.breakdown(plain.peak_event()).items()}
print({name: round(gib, 1) for name, gib in parts.items()}, "GiB")
pd.DataFrame(
    [(one.num_bytes / MIB, one.count, one.category, one.where) for one in plain.largest(8)],
    columns=["MiB", "count", "category", "origin"],
)

# %% [markdown]
# Nothing here was allocated, so how much is it worth? At small sizes the same recorder is compared with what PyTorch's
# allocator gave out, to within one per cent (`tests/test_s3_memory.py`), and a closed form that knows nothing of the
# code comes to the same number.

# %%
closed = model_peak_bytes(PLAIN, "train_step")
print(f"closed form {closed / GIB:.1f} GiB, simulation {plain.peak_bytes() / GIB:.1f} GiB")
assert abs(closed / plain.peak_bytes() - 1) < 0.05

# %% [markdown]
# ## What one block keeps
#
# `saved_tensors_hooks` shows each tensor that autograd keeps. By operation, for one block of xl:

# %%
with FakeTensorMode():
    model = fake_module(lambda: TransformerLM.from_config(replace(XL, num_layers=1)))
    block, x = model.layers[0], torch.empty(4, 2048, XL.d_model, requires_grad=True)
    saved = saved_tensors(lambda: block(x), parameters=[*block.parameters(), *block.buffers()])
    compiled = compiled_saved_tensors(block, x)
eager_bytes, compiled_bytes = (sum(one.num_bytes for one in found) for found in (saved, compiled))
print(f"eager {eager_bytes / MIB:.0f} MiB, compiled {compiled_bytes / MIB:.0f} MiB, its input {x.nbytes / MIB:.0f} MiB")
assert eager_bytes == sum(block_saved_bytes(XL, 4, attention="reference").values())
pd.DataFrame([(num_bytes / MIB, operation) for operation, num_bytes in by_operation(saved)[:5]], columns=["MiB", "by"])

# %% [markdown]
# ### Exercise 1: the peak on the back of an envelope
#
# At the peak of a float32 step with AdamW the forward is over and no gradient of a weight has been made yet. Return its
# bytes, from the number of parameters, the number of blocks and what one block saves.


# %%
def peak_bytes(num_parameters: int, num_blocks: int, block_bytes: int) -> int:
    # yours: weights, what AdamW keeps of each, and what all blocks have saved
    weights = 4 * num_parameters
    moments = 2 * 4 * num_parameters
    return weights + moments + num_blocks * block_bytes
    # to here


# %%
estimate = peak_bytes(num_parameters(XL), XL.num_layers, eager_bytes)
check(
    (peak_bytes(0, 2, 100), 200, "Without parameters the blocks' activations are left, all of them."),
    (peak_bytes(1, 0, 0), 12, "Of a float32 parameter: itself and two moments. Its gradient comes later."),
    (abs(estimate / plain.peak_bytes() - 1) < 0.05, True, f"{estimate / GIB:.0f} GiB is not near the simulation."),
)

# %% [markdown]
# ## The trade: storing inputs, computing again
#
# A block saves fifty times its input. With groups of $g$ blocks, $N/g$ inputs and $g$ blocks' activations are stored,
# least at $g = \sqrt{N r / a}$; for a Transformer that is below one, so single blocks are the best groups.

# %%
stream = x.nbytes
sizes = [1, 2, 4, 8, 16, 32]
print("best group:", best_blocks_per_group(32, stream, eager_bytes), "block;", "best where a = r:",
      best_blocks_per_group(1024, 1, 1), "of 1024 blocks")  # fmt: skip
pd.DataFrame(
    {
        "blocks a group": [*map(str, sizes), "recursive"],
        "stored (GiB)": [
            *(round(grouped_bytes(32, size, stream, eager_bytes) / GIB, 2) for size in sizes),
            round(recursive_bytes(32, stream, eager_bytes) / GIB, 2),
        ],
    }
)

# %% [markdown]
# ### Exercise 2: checkpoints by groups
#
# `num_blocks` blocks are checkpointed in groups of `size`, which divides them. Return the bytes that are stored when
# the backward of the last group begins, from the bytes of a block's input and of what a block saves.


# %%
def stored_bytes(num_blocks: int, size: int, input_bytes: int, block_bytes: int) -> int:
    # yours: inputs of the groups, and the activations of the one group that was computed again
    return num_blocks // size * input_bytes + size * block_bytes
    # to here


# %%
cases = [(size, stored_bytes(32, size, stream, eager_bytes)) for size in sizes]
check(
    (stored_bytes(32, 32, 1, 10), 321, "One group: a single input, and the activations of every block."),
    (stored_bytes(32, 1, 1, 10), 42, "Groups of one block: every input, and one block's activations."),
    (cases, [(size, grouped_bytes(32, size, stream, eager_bytes)) for size in sizes], "Compare with `grouped_bytes`."),
    (min(cases, key=lambda case: case[1])[0], 1, "Single blocks are the best groups of a Transformer."),
)

# %% [markdown]
# Now the whole step again, with every block checkpointed, and with attention that never stores its scores:

# %%
checkpointed = simulated_trace(replace(PLAIN, checkpointing="1"), "train_step")
timeline(checkpointed, f"every block checkpointed: peak {checkpointed.peak_bytes() / GIB:.0f} GiB")

# %%
rows = []
for attention in ("reference", "sdpa"):
    for checkpointing in ("none", "4", "1"):
        case = replace(PLAIN, attention=attention, checkpointing=checkpointing)
        peak = simulated_trace(case, "train_step").peak_bytes()
        rows.append((attention, checkpointing, round(peak / GIB, 1), "yes" if peak <= 80e9 else "no"))
assert {fits for *_, fits in rows} == {"yes", "no"}
pd.DataFrame(rows, columns=["attention", "blocks a group", "peak (GiB)", "fits in 80 GB"])

# %% [markdown]
# ### To try
#
# Which of `batch=1`, bfloat16 autocast, and `checkpointing="recursive"` saves most here? Guess, then simulate.
# (Autocast alone may surprise: it adds copies of the weights, and plain attention keeps its probabilities twice.)

# %%
autocast = simulated_trace(replace(PLAIN, precision=Precision(autocast="bfloat16")), "train_step")
print(f"float32 {plain.peak_bytes() / GIB:.0f} GiB, bfloat16 autocast {autocast.peak_bytes() / GIB:.0f} GiB")

# %% [markdown]
# ## Low precision, in three small runs
#
# A sum forgets, autocast chooses, a norm overflows.

# %%
print("float16 += float16:", accumulate("float16", "float16"))
print("float32 += float16:", accumulate("float32", "float16"))
print(autocast_dtypes("cpu", "bfloat16"))
for dtype in ("float32", "bfloat16", "float16"):
    print(dtype, norm_in(dtype, 300.0))
