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
# # Attention on Hopper: who works while who waits
#
# A FlashAttention kernel alternates between two units of a multiprocessor: the tensor cores, which multiply tiles, and
# the units that take exponentials. This notebook is about keeping both busy: what each costs, how warps of one program
# divide the work, which program computes which tiles, and how a protocol between warps is tested on a machine that
# cannot run it.
#
# It needs no GPU. The schedule is the kernel's own, from `cs336_systems.attention.hopper.schedule`; what is timed here
# is a model with three units, and says so. The measured speeds at the end are committed records of one H200.
#
# Each exercise has our answer, between `yours` and `to here`. Put yours in its place: the next cell says what is wrong.

# %%
import heapq
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

import cs336_systems
from cs336_systems.attention.hopper import schedule
from cs336_systems.attention.hopper.schedule import SCHEDULES, ForwardPlan, plan_forward
from cs336_systems.book.lookups import Page
from cs336_systems.book.pages import Book
from cs336_systems.notebook import check, show, show_published

sys.path.append(str(Path(cs336_systems.__file__).resolve().parent.parent))  # the model of the protocol is a test's
from tests.hopper_protocol import (  # noqa: E402
    forward_arrivals,
    forward_partitions,
    items_of_program,
    key_tiles,
    run_at_random,
    run_forward,
)

plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "axes.axisbelow": True})

# %% [markdown]
# ## 1. What a tile of scores costs
#
# A multiprocessor of an H100 or H200 does 4,096 dense 16-bit floating-point operations a cycle on its tensor cores and
# 16 exponentials a cycle. A tile of 64 queries by 128 keys takes two products, $S = QK^\top$ and $PV$, of
# $2 \cdot 64 \cdot 128 \cdot d$ operations each, one exponential a score, and about five instructions a score on the
# 128 lanes of ordinary arithmetic: scale, mask, maximum, sum, conversion to 16 bits.

# %%
TENSOR_CORE_FLOPS_PER_CYCLE, EXPONENTIALS_PER_CYCLE, LANES, INSTRUCTIONS_PER_SCORE = 4096, 16, 128, 5
ROWS = schedule.CONSUMER_ROWS


def product_cycles(head_dim: int, key_tile: int) -> int:
    """Both products of a consumer's step."""
    return 2 * 2 * ROWS * key_tile * head_dim // TENSOR_CORE_FLOPS_PER_CYCLE


def exponential_cycles(key_tile: int) -> int:
    return ROWS * key_tile // EXPONENTIALS_PER_CYCLE


def arithmetic_cycles(key_tile: int) -> int:
    return ROWS * key_tile * INSTRUCTIONS_PER_SCORE // LANES


for head_dim, (plan, _) in SCHEDULES.items():  # the schedule of large grids; the other is for small ones
    products, exponentials = product_cycles(head_dim, plan.key_tile), exponential_cycles(plan.key_tile)
    alone = products / (products + exponentials)
    print(
        f"head dim {head_dim:3}: {products} cycles of products, {exponentials} of exponentials; "
        f"one after the other the tensor cores work {100 * alone:.0f} % of the time"
    )

# %% [markdown]
# At head dim 64 both units are needed equally long: the best a kernel can do is to hide one behind the other, and one
# that does not reaches half. At head dim 128 exponentials are the smaller part, and hiding them is worth a third.
#
# ## 2. Warps that copy, warp groups that multiply
#
# A program of the kernel has one warp that only copies, through the copy engine, into a ring of shared memory, and two
# or three *consumers*, groups of four warps that own 64 queries each. While one consumer takes exponentials, another's
# products run. (With few queries in all, programs have one consumer, so that there are more of them; at head dim 64 two
# such programs share a multiprocessor and cover each other.) Below, a model of it with three units that serve one
# consumer at a time, in the order of arrival.

# %%
PRODUCTS, ARITHMETIC, EXPONENTIALS, IDLE = "#0072B2", "#DDAA33", "#D55E00", "#EEEEEE"
Span = tuple[str, int, int, str]  # lane, start, end, colour


def run_model(head_dim: int, consumers: int, key_tile: int, steps: int, overlapped: bool) -> list[Span]:
    """Spans of `steps` key tiles on `consumers` consumers. Overlapped: PV of the last tile runs under the softmax."""
    product = product_cycles(head_dim, key_tile) // 2
    free = {PRODUCTS: 0, ARITHMETIC: 0, EXPONENTIALS: 0}
    spans: list[Span] = []

    def use(unit: str, consumer: int, ready: int, cycles: int) -> int:
        start = max(ready, free[unit])
        free[unit] = start + cycles
        spans.append((f"consumer {consumer}", start, start + cycles, unit))
        return start + cycles

    def consume(consumer: int) -> Iterator[int]:
        now = 0
        for step in range(steps):
            scores = use(PRODUCTS, consumer, now, product)
            values = use(PRODUCTS, consumer, scores, product) if step else scores
            now = scores if overlapped else values
            yield now
            now = use(ARITHMETIC, consumer, now, arithmetic_cycles(key_tile))
            yield now
            now = max(values, use(EXPONENTIALS, consumer, now, exponential_cycles(key_tile)))
            yield now

    waiting = []
    for consumer in range(consumers):
        process = consume(consumer)
        waiting.append((next(process), consumer, process))
    heapq.heapify(waiting)
    while waiting:
        _, consumer, process = heapq.heappop(waiting)
        later = next(process, None)
        if later is not None:
            heapq.heappush(waiting, (later, consumer, process))
    return spans


def draw_spans(axes: plt.Axes, spans: list[Span], title: str) -> None:
    lanes = sorted({lane for lane, *_ in spans})
    for lane, start, end, unit in spans:
        half = -0.18 if unit == PRODUCTS else 0.18
        axes.barh(lanes.index(lane) + half, end - start, 0.34, left=start, color=unit, edgecolor="white", linewidth=0.6)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_title(title, fontsize=10, loc="left")


def busy(spans: list[Span]) -> float:
    """Share of the time in which the tensor cores work."""
    return sum(end - start for _, start, end, colour in spans if colour == PRODUCTS) / max(
        end for _, _, end, _ in spans
    )


cases = [
    (64, 1, False, "head dim 64, one consumer"),
    (64, 2, False, "head dim 64, two consumers"),
    (64, 3, False, "head dim 64, three consumers: the kernel's choice"),
    (128, 1, False, "head dim 128, one consumer"),
    (128, 1, True, "head dim 128, one consumer, softmax under the second product"),
    (128, 2, True, "head dim 128, two such consumers: the kernel's choice"),
]
figure, grid = plt.subplots(len(cases), 1, figsize=(8.6, 7.6), sharex=True)
for axes, (head_dim, consumers, overlapped, title) in zip(grid, cases):
    spans = run_model(head_dim, consumers, 128, 6, overlapped)
    long_run = busy(run_model(head_dim, consumers, 128, 200, overlapped))
    draw_spans(axes, spans, f"{title}: products {100 * long_run:.0f} % of the time")
grid[-1].set_xlabel("cycles, in the model; blue: products, yellow: arithmetic, orange: exponentials")
show(figure, "Model timelines of one to three consumers at head dims 64 and 128, and the share of time in products")

# %% [markdown]
# One consumer leaves the tensor cores idle while it takes its softmax; two still do at head dim 64, where the softmax
# is the longer part of a step. A third consumer fills the gap. At head dim 128 a consumer can also issue the last
# tile's second product and take the softmax of this tile meanwhile; a third consumer would not find registers there.
# The model knows nothing of barriers, issue slots, registers or power. What the kernels do was decided by measuring,
# and the GPU's own counters (`kernel_counters` in the writeup) find less overlap at head dim 64 than the model.
#
# One step of the kernel's ring in its own terms: slot after slot, what the copier brings and what each step multiplies.

# %%


def call(
    head_dim: int, length: int, *, heads: int = 1, multiprocessors: int = 132, is_causal: bool = True, config: str = ""
) -> ForwardPlan:
    """What a call launches, or what `config` names."""
    return plan_forward(
        head_dim=head_dim, is_causal=is_causal, num_queries=length, num_keys=length, batch_heads=heads, group=1,
        num_multiprocessors=multiprocessors, config=config,
    )  # fmt: skip


def large(head_dim: int) -> str:
    """The schedule of large grids, a program a tile."""
    return SCHEDULES[head_dim][0].name("tiles")


launch = call(128, 1024, config=large(128))
tile = launch.num_tiles - 1
keys = key_tiles(launch, tile)
lines = ["| step | slot | copied | multiplied |", "| --: | --: | :-- | :-- |"]
for step in range(len(keys) + 1):
    copied = [f"K of keys {keys[step]}…"] if step < len(keys) else []
    copied += [f"V of keys {keys[step - 1]}…"] if step else []
    multiplied = ["S = QKᵀ"] if step < len(keys) else []
    multiplied += ["O += PV"] if step else []
    lines.append(f"| {step} | {step % launch.schedule.slots} | {', '.join(copied)} | {', '.join(multiplied)} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# ### Exercise 1: how many steps?
#
# The table has one step more than there are key tiles: $PV$ of a tile comes a step after its $QK^\top$. Return the
# number of steps of the tile of queries that begins with `first_query`, under the causal mask (as many keys as
# queries).


# %%
def num_steps(first_query: int, query_tile: int, key_tile: int, num_keys: int) -> int:
    # yours: key tiles up to the last query's key, but none beyond the last key; and one step more
    end = min(first_query + query_tile, num_keys)
    return -(-end // key_tile) + 1
    # to here


# %%
whole = call(128, 1024, config=large(128))
by_schedule = [len(key_tiles(whole, tile)) + 1 for tile in range(whole.num_tiles)]
ours = [num_steps(whole.first_query(tile), 128, 128, 1024) for tile in range(whole.num_tiles)]
check(
    (num_steps(0, 128, 128, 1024), 2, "The first tile of queries sees one tile of keys: two steps."),
    (num_steps(128, 192, 128, 1024), 4, "Queries up to 319 see a part of the third tile of keys: round up."),
    (num_steps(896, 192, 128, 1000), 9, "There is no key beyond the last."),
    (ours, by_schedule, "The kernel's own schedule counts otherwise."),
)

# %% [markdown]
# ## 3. Which program computes which tiles
#
# Under a causal mask the last tile of queries sees all keys and the first sees one tile of them. Programs start in the
# order of their numbers as multiprocessors become free, so the order of the numbers is the schedule. Long tiles first
# leave short ones for the end, where they fill the gaps.

# %%
MULTIPROCESSORS = 12  # few, so that the picture can be read; an H200 has 132


def finish(costs: list[int]) -> list[list[tuple[int, int]]]:
    """(start, length) of what each multiprocessor runs when programs of these costs are handed out in order."""
    ends = [(0, number) for number in range(MULTIPROCESSORS)]
    lanes: list[list[tuple[int, int]]] = [[] for _ in range(MULTIPROCESSORS)]
    for cost in costs:
        end, number = heapq.heappop(ends)
        lanes[number].append((end, cost))
        heapq.heappush(ends, (end + cost, number))
    return lanes


launch = call(128, 3072, heads=4, config=large(128))
costs = [
    sum(len(key_tiles(launch, tile)) for _, tile in items_of_program(launch, program))
    for program in range(launch.num_programs)
]
orders = {"shortest first": sorted(costs), "longest first, as the kernel numbers them": costs}
figure, grid = plt.subplots(1, 2, figsize=(8.6, 3.4), sharex=True, sharey=True)
for axes, (title, ordered_costs) in zip(grid, orders.items()):
    lanes = finish(ordered_costs)
    end = max(start + cost for lane in lanes for start, cost in lane)
    for number, lane in enumerate(lanes):
        axes.barh(number, end, 0.8, color=IDLE)
        for start, cost in lane:
            axes.barh(number, cost, 0.8, left=start, color=PRODUCTS, edgecolor="white", linewidth=0.6)
    share = sum(costs) / (MULTIPROCESSORS * end)
    axes.set_title(f"{title}: {end} key tiles, {100 * share:.0f} % busy", fontsize=10)
    axes.set_xlabel("time (key tiles)")
grid[0].set_ylabel("multiprocessor")
show(figure, "Causal tiles on twelve multiprocessors, handed out shortest first and longest first")

# %% [markdown]
# ## 4. A protocol that nobody can watch
#
# Copies and warps meet at barriers in shared memory: a consumer waits until a slot is full, the copier until it is
# empty. One arrival too few and the GPU hangs, without a message. So the protocol also exists in Python, where whoever
# is able to advance does so in random order, reads check what they find, and waiting for ever is an exception. The
# tests run it for every length up to 300; here are some.

# %%
rng = random.Random(0)
programs = 0
for head_dim in SCHEDULES:
    for length in (*range(1, 40), 64, 127, 128, 129, 192, 193, 255, 256, 257, 300):
        for is_causal in (False, True):
            for config in (large(head_dim), ""):
                launch = call(head_dim, length, multiprocessors=2, is_causal=is_causal, config=config)
                run_forward(launch, rng)
                programs += launch.num_programs
print(f"{programs} programs ended, every tile read was the one wanted")

# %% [markdown]
# ### Exercise 2: slots and phases
#
# Step `step` uses a slot of the ring, the first again after the last. A barrier flips its phase (0, then 1, then 0 …)
# each time it completes, and a wait for parity $p$ passes once the phase is no longer $p$. A slot's first filling
# therefore ends parity 0, its second parity 1. Return the slot, the parity with which a consumer waits for *full*, and
# the one with which the copier waits for *empty*: it must pass at once on a fresh slot, where phase 0 has not ended.


# %%
def waits(step: int, slots: int) -> tuple[int, int, int]:
    # yours: slot, consumer's parity, copier's parity
    phase = step // slots % 2
    return step % slots, phase, 1 - phase
    # to here


# %%
two, three = ([waits(step, slots) for step in range(7)] for slots in (2, 3))
check(
    ([slot for slot, *_ in three], [0, 1, 2, 0, 1, 2, 0], "The slots are taken in turn."),
    ([full for _, full, _ in two], [0, 0, 1, 1, 0, 0, 1], "All slots have been filled once before the parity changes."),
    (two[0][2], 1, "Nobody empties a fresh slot: a wait for the end of phase 0 would hang, one for parity 1 passes."),
    ([empty for *_, empty in three], [1, 1, 1, 0, 0, 0, 1], "The copier is one use of a slot ahead of its consumers."),
)

# %% [markdown]
# And the bug that the first prototype of this kernel had. The masked steps at the diagonal are unrolled; at 128 keys
# fewer tiles are there than the unrolled steps want. Consumers that count the unrolled steps, with a copier that counts
# the tiles that exist, multiply what an earlier step left and then wait for a copy that nobody makes:

# %%
launch = call(64, 128, config=large(64))
unrolled = forward_partitions(launch, [0], lambda head, tile: key_tiles(launch, tile))
existing = forward_partitions(launch, [0], lambda head, tile: [0])
consumers = launch.schedule.consumers  # which come last
try:
    run_at_random([*existing[:-consumers], *unrolled[-consumers:]], forward_arrivals(launch), random.Random(0))
    print("ended")
except AssertionError as error:
    print(f"AssertionError: {error}")

# %% [markdown]
# ## 5. What was measured
#
# Committed records: the ladder from Triton with pointers to these kernels, and their place beside the libraries on
# shapes of real models. Where there are none yet, the cell says so.

# %%
root = Path(cs336_systems.__file__).resolve().parent.parent
book = Book(root, root / "results" / "nvidia-h200")
for problem in ("hopper_ladder", "attention_shapes"):
    if not (book.folder_of(problem) / "records" / f"{problem}.jsonl").is_file():
        display(Markdown(f"*`{problem}` is not measured yet.*"))
        continue
    page = Page(book, problem)
    display(Markdown(f"`{problem}` on an {page.device()}:"))
    show_published(book.figure_path(problem, "forward_backward"), f"{problem}: TFLOP/s, forward and backward")
    display(Markdown(page.table("forward_backward", age=False)))

# %% [markdown]
# Further: the kernels read from top to bottom, with their steps drawn in the docstring:
# `cs336_systems/attention/hopper/forward.py` and `backward.py`. `cs336-systems doctor --kernels --arch sm90` compiles
# them, on any machine, and prints registers, spills and the order of products, exponentials and waits in their loops.
