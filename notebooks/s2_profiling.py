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
# # Reading a profile, and the pitfalls of low precision
#
# A profile is a list of events: when each operator was called, when each kernel ran, and which ranges were open.
# Looking at it as a timeline shows one step at a time; the questions one has (which kernel, how often, what share,
# which part of the model) are sums over the list. The first half of this notebook takes a training step apart that
# way. The second half looks at the numbers inside: what rounding does to sums, norms and gradients in float16 and
# bfloat16.
#
# It needs no GPU. On a CPU the "kernels" are PyTorch's operators, each counted with its own time; on a GPU the same
# cells show the device's kernels.
#
# Each exercise has our answer, between `yours` and `to here`. Put yours in its place: the next cell says what is wrong.

# %%
import os
from dataclasses import replace
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import pandas as pd
import torch
import vl_convert
from IPython.display import Image, Markdown, display
from matplotlib.patches import Patch

import cs336_systems
from cs336_systems.accounting import eager_attention_part_flops
from cs336_systems.bench.records import read_records
from cs336_systems.bench.spec import load
from cs336_systems.book.figures import spec_of
from cs336_systems.book.frames import load_frame
from cs336_systems.config import ModelCase, RunConfig, proxy_model
from cs336_systems.measure.capture import capture
from cs336_systems.measure.kernel_names import CATEGORIES
from cs336_systems.measure.ranges import SCORES, SOFTMAX, VALUES, annotate
from cs336_systems.measure.timing import time_calls
from cs336_systems.measure.trace import Kernel
from cs336_systems.model import build_model
from cs336_systems.notebook import check, show
from cs336_systems.subjects.model_steps import TrainingStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler's library prints its start and stop
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "axes.axisbelow": True})

# %% [markdown]
# ## 1. Wall clock first
#
# The model is the handout's small one scaled down: the same architecture, two layers of width 128. `TrainingStep` has
# the three things that a benchmark times as methods. A profiler costs time for every event, so the wall clock is
# measured without it, before anything else.

# %%
model = replace(proxy_model("small", 128), vocab_size=1000, context_length=256)
case = ModelCase(model=model, batch=2, attention="reference")
step = TrainingStep(case, RunConfig(scale="smoke", device=DEVICE))

wall_ms = {}
for mode in ("forward", "forward_backward", "train_step"):
    samples = time_calls(getattr(step, mode), device=DEVICE, warmup=2, num_samples=10, before=step.reset)
    wall_ms[mode] = median(samples)
pd.DataFrame(
    {"median (ms)": wall_ms, "relative to forward": {m: t / wall_ms["forward"] for m, t in wall_ms.items()}}
).round(2)

# %% [markdown]
# ## 2. A profile as a list
#
# `capture` runs the call under `torch.profiler`, with the repetitions in ranges of their own, and reads the trace
# back. `annotate` puts a named range on every block, attention, feed-forward layer and norm, found by module name,
# and on the parts of attention, and takes them off again: the model's code is as it was.

# %%
with annotate(step.model) as names:
    trace = capture(step.train_step, device=DEVICE, num_steps=2, warmup=1, before=step.reset).in_steps()

print(f"{len(names)} modules have a range, among them", ", ".join(list(names.values())[1:4]))
print(f"{len(trace.kernels)} {'kernels' if trace.on_gpu else 'operators'} in {len(trace.step_ms)} steps")
for kernel in trace.select(step=0, within=SCORES, category="gemm")[:2]:
    print(f"{kernel.name}: {kernel.duration_us:.0f} µs, {kernel.phase}, in {' > '.join(kernel.ranges)}")

# %% [markdown]
# Each kernel knows the ranges that were open where it was launched. Now the questions are sums:

# %%
steps = len(trace.step_ms)
rows = {
    category: {
        phase: trace.kernel_ms(category=category, phase=phase) / steps for phase in ("forward", "backward", "optimizer")
    }
    for category in CATEGORIES
}
table = pd.DataFrame(rows).T
table["all"] = table.sum(axis=1)
table["share (%)"] = 100 * table["all"] / table["all"].sum()
table[table["all"] > 0].round(2)

# %% [markdown]
# Three things to read off:
#
# - The **backward** takes about twice the forward in matmuls: the gradient of a product is two products.
# - The **optimizer** has no matmul. Its time depends on the number of parameters, not on the number of tokens: its
#   share is large for small batches and falls as they grow.
# - `other` on a CPU is the cost of the framework itself: views, allocations, autograd's bookkeeping. On a GPU it runs
#   on the host while kernels run on the device, and is invisible unless the kernels are too short to hide it.

# %%
top = trace.top_kernels(8)
pd.DataFrame(
    [(row.name, row.category, row.calls / steps, row.ms / steps) for row in top],
    columns=["kernel or operator", "category", "calls a step", "ms a step"],
).round(3)

# %% [markdown]
# ### Exercise 1: sum kernels by range
#
# Return the milliseconds of the kernels that were launched in the range `name`, in the phase `phase`. A kernel has
# `duration_us`, `phase` and `ranges`, the names that were open where it was launched, the outermost first.


# %%
def time_within(kernels: list, name: str, phase: str) -> float:
    # yours: a sum over the kernels of that phase, wherever in `ranges` the name stands
    return sum(kernel.duration_us for kernel in kernels if name in kernel.ranges and kernel.phase == phase) / 1e3
    # to here


# %%
BLOCK = "block:layers.0"
by_trace = {part: trace.kernel_ms(within=part, phase="forward") for part in (SCORES, BLOCK)}
backward = trace.kernel_ms(within=SOFTMAX, phase="backward")
check(
    (time_within([], SCORES, "forward"), 0.0, "No kernel, no time."),
    (
        time_within(trace.kernels, SCORES, "forward"),
        by_trace[SCORES],
        "Durations are in µs; the name may stand anywhere.",
    ),
    (time_within(trace.kernels, BLOCK, "forward"), by_trace[BLOCK], "Is the name compared with all of `ranges`?"),
    (time_within(trace.kernels, SOFTMAX, "backward"), backward, "A range holds kernels of the backward, too."),
)

# %% [markdown]
# ## 3. The timeline, drawn from the same list
#
# What Perfetto or Nsight Systems shows is these events against time. The upper line is the module that launched a
# kernel, the lower one its category. The legend names the colours that occur in this step.

# %%
REST = "rest: sums of blocks, loss"
MODULE_COLOURS = {
    "embedding": "#DDCC77",
    "norm": "#44AA99",
    "attention": "#D55E00",
    "feed_forward": "#56B4E9",
    "head": "#882255",
    "optimizer": "#332288",
    REST: "#BBBBBB",
}
CATEGORY_COLOURS = dict(zip(CATEGORIES, plt.cm.tab10.colors, strict=False))


def module_of(kernel: Kernel) -> str:
    """The innermost module around the kernel that has a colour."""
    if kernel.phase == "optimizer":
        return "optimizer"
    roles = [name.partition(":")[0] for name in reversed(kernel.ranges)]
    return next((role for role in roles if role in MODULE_COLOURS), REST)


shown = trace.select(step=0)
begin = shown[0].start_us
bars = [((kernel.start_us - begin) / 1e3, kernel.duration_us / 1e3) for kernel in shown]
lanes = {
    "module": ([module_of(kernel) for kernel in shown], MODULE_COLOURS),
    "category": ([kernel.category for kernel in shown], CATEGORY_COLOURS),
}
figure, axes = plt.subplots(figsize=(9.5, 2.2))
for place, (title, (labels, colours)) in enumerate(lanes.items()):
    axes.broken_barh(bars, (0.6 - place, 0.8), facecolors=[colours[label] for label in labels])
    named = [Patch(color=colours[label], label=label) for label in colours if label in labels]
    legend = figure.legend(handles=named, title=title, loc=f"outside lower {('left', 'right')[place]}", ncols=3)
    legend.set(frame_on=False)
axes.set_yticks([1, 0], lanes)
axes.set_xlabel("time since the step began (ms)")
show(figure, "Timeline of one training step: forward, backward, optimizer, coloured by module and by category")

# %% [markdown]
# Backward kernels have the colour of their module, too, although autograd launches them after every module has
# returned. The trace gives each forward operator a sequence number, and the backward operator that differentiates it
# carries the same one. That is how the reader finds out which layer a gradient belongs to.
#
# ## 4. Softmax against matmul
#
# Per score, $QK^\top$ and $PV$ cost $2 d$ FLOPs each; a softmax costs about five. If time followed FLOPs, the softmax
# would be invisible.

# %%
flops = eager_attention_part_flops(model, case.batch)
lines = {}
for part, name in (("scores", SCORES), ("softmax", SOFTMAX), ("values", VALUES)):
    milliseconds = trace.kernel_ms(within=name, phase="forward") / steps
    lines[part] = {"MFLOP": flops[part] / 1e6, "ms": milliseconds, "GFLOP/s": flops[part] / milliseconds / 1e6}
attention = pd.DataFrame(lines).T
attention["share of FLOPs (%)"] = 100 * attention["MFLOP"] / attention["MFLOP"].sum()
attention["share of time (%)"] = 100 * attention["ms"] / attention["ms"].sum()
attention.round(2)

# %% [markdown]
# Time follows bytes here: scale, mask and softmax each read and write the whole score matrix. A kernel that keeps the
# scores in registers removes exactly this traffic, which is the idea of FlashAttention (see the notebook
# s4_attention).
#
# The same on the H200, from the repository's records:

# %%
folders = (Path.cwd(), *Path.cwd().parents, Path(cs336_systems.__file__).resolve().parents[1])
root = next((folder for folder in folders if (folder / "pyproject.toml").is_file()), Path.cwd())
experiment = load("nsys_profile")
frame = load_frame(experiment, read_records(root / "results" / "nvidia-h200" / "records" / "nsys_profile.jsonl"))
if len(frame):
    for name, measured in experiment.figures.items():
        display(Image(vl_convert.vegalite_to_png(spec_of(measured.chart(frame))), width=640, alt=name))
else:
    display(Markdown("The records of the H200 are absent from this checkout, so there is nothing to draw here."))

# %% [markdown]
# ## 5. Low precision: where rounding bites
#
# | dtype | bits of mantissa | spacing at 1 | largest | smallest normal |
# |---|---|---|---|---|
# | float32 | 23 | 1.2e-7 | 3.4e38 | 1.2e-38 |
# | float16 | 10 | 9.8e-4 | 65,504 | 6.1e-5 |
# | bfloat16 | 7 | 7.8e-3 | 3.4e38 | 1.2e-38 |
#
# float16 has digits and no range, bfloat16 has range and few digits. Both multiply well on tensor cores, which add up
# in float32. Trouble starts where results are *added up*, *squared* or *small*.
#
# **Adding up.** A thousand times 0.01, in four ways:


# %%
def accumulate(total_dtype: torch.dtype, term_dtype: torch.dtype, cast: bool = False) -> float:
    total, term = torch.tensor(0, dtype=total_dtype), torch.tensor(0.01, dtype=term_dtype)
    for _ in range(1000):
        total += term.to(torch.float32) if cast else term
    return total.item()


sums = {
    "float32 += float32": accumulate(torch.float32, torch.float32),
    "float16 += float16": accumulate(torch.float16, torch.float16),
    "float32 += float16": accumulate(torch.float32, torch.float16),
    "float32 += float16 cast to float32": accumulate(torch.float32, torch.float16, cast=True),
    "bfloat16 += bfloat16": accumulate(torch.bfloat16, torch.bfloat16),
}
pd.DataFrame({"sum": sums, "error (%)": {name: 100 * abs(value / 10 - 1) for name, value in sums.items()}}).round(4)

# %% [markdown]
# With a float32 total only the rounding of 0.01 itself is left, 0.02 %; casting the term first changes nothing, since
# the addition casts it anyway. A float16 total rounds a thousand times. A bfloat16 total stops growing altogether: at
# 4, its spacing is 0.03, and adding 0.01 rounds back to the same number. So sums, means and optimizer states stay in
# float32.

# %%
for dtype in (torch.float16, torch.bfloat16):
    total, term, counts = torch.tensor(0.0, dtype=dtype), torch.tensor(0.01, dtype=dtype), 0
    while (total + term) != total and counts < 10**6:
        total, counts = total + term, counts + 1
    print(f"{str(dtype)[6:]:9}: stuck at {total.item():g} after {counts} additions")

# %% [markdown]
# ### Exercise 2: where a sum stops
#
# A dtype with $m$ bits of mantissa has a spacing of $2^{e-m}$ between $2^e$ and $2^{e+1}$. Adding a term of at most
# half the spacing no longer changes a total (of an even number of spacings: ties go to even). Return the power of two
# at which a sum of equal terms stops at the latest.


# %%
def stops_at(term: float, mantissa_bits: int) -> float:
    # yours: the first power of two whose spacing is at least twice the term
    power = 2.0**-20
    while power * 2.0**-mantissa_bits < 2 * term:
        power *= 2
    return power
    # to here


# %%
def stays(term: float, dtype: torch.dtype, total: float) -> bool:
    return bool(torch.tensor(total, dtype=dtype) + torch.tensor(term, dtype=dtype) == total)


check(
    (stops_at(2.0**-8, 7), 1.0, "At 1 the spacing of bfloat16 is 2^-7, twice 2^-8."),
    (stops_at(0.01, 7), 4.0, "bfloat16 and 0.01: the cell above got stuck there."),
    (stops_at(0.01, 10), 32.0, "float16 has three bits more: eight times as far."),
    (stays(0.01, torch.float16, stops_at(0.01, 10)), True, "The addition itself disagrees."),
    (stays(1e-4, torch.bfloat16, stops_at(1e-4, 7)), True, "The addition itself disagrees."),
    (stays(1e-4, torch.bfloat16, stops_at(1e-4, 7) / 2), False, "An earlier power of two would do."),
)

# %% [markdown]
# **Squaring.** A norm squares its input. In float16 that overflows at 256, far from an unusual activation:

# %%
x = torch.tensor([300.0, 1.0, 2.0, 3.0])
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    low = x.to(dtype)
    rms = low.square().mean().sqrt()
    print(
        f"{str(dtype)[6:]:9}: x² up to {low.square().max().item():g}, rms {rms.item():g}, x/rms {(low / rms).tolist()}"
    )

# %% [markdown]
# The float16 row divides by infinity and everything vanishes, without an error. Autocast therefore runs norms in
# float32; with bfloat16 nothing overflows, but a mean of squares in eight bits of precision is still best left to
# float32, and this package's RMSNorm computes in float32 whatever it is given.
#
# **What autocast casts.** Parameters stay float32; each matmul casts its inputs; norms and the loss do not:

# %%
small = build_model(replace(model, context_length=16), device="cpu", seed=0)
watched = (
    "token_embeddings",
    "layers.0.ln1",
    "layers.0.attn",
    "layers.0.ffn.w1",
    "layers.0.ffn",
    "layers.0",
    "lm_head",
)
seen: dict[str, str] = {}


def note(name: str, output: torch.Tensor) -> None:
    seen[name] = str(output.dtype)[6:]


handles = [
    small.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: note(name, output))
    for name in watched
]
tokens = torch.randint(model.vocab_size, (1, 16))
with torch.autocast("cpu", dtype=torch.bfloat16):
    logits = small(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
loss.backward()
for handle in handles:
    handle.remove()
weight = small.layers[0].ffn.w1.weight
seen |= {"loss": str(loss.dtype)[6:], "w1.weight": str(weight.dtype)[6:], "w1.weight.grad": str(weight.grad.dtype)[6:]}
pd.Series(seen, name="dtype").to_frame()

# %% [markdown]
# **Small gradients.** Below 6e-8 float16 is zero. Loss scaling multiplies the loss by a power of two, so that
# gradients land in range, and divides before the step:

# %%
gradients = torch.randn(10_000).mul(1e-7)
scale = 2.0**16
lost = (gradients.half() == 0).float().mean().item()
kept = ((gradients * scale).half().float() / scale == 0).float().mean().item()
print(f"float16: {100 * lost:.1f} % of the gradients are 0; scaled by 2^16 {100 * kept:.1f} %")
print(f"bfloat16: {100 * (gradients.bfloat16() == 0).float().mean().item():.1f} %, no scaling needed")

# %% [markdown]
# **Updates that vanish.** A weight near 1 with a learning rate of 1e-4 moves by about 1e-4. In bfloat16 that is less
# than half the spacing, and the weight never moves, however many steps are taken:

# %%
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight -= 1e-4
    print(f"{str(dtype)[6:]:9}: after 1000 updates of 1e-4: {weight.item():.4f}")

# %% [markdown]
# Which is why mixed precision keeps master weights in float32 and casts a copy for each matmul.
#
# ## 6. To try
#
# 1. Profile the forward alone, and again with `attention="sdpa"` in the `ModelCase`. Which ranges are gone, and which
#    one is new? What share of the forward did attention lose?
# 2. Double the batch. Which categories double, and which stay as they are? Predict the optimizer's share first.
# 3. Put `torch.compile` around the model's forward and profile it: which operators are left, and what are they called?
# 4. At which context is the softmax part of attention as long as the feed-forward layer? Predict it from the table of
#    section 4, then measure.
