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
# # Attention as tiled computation
#
# Plain attention writes a matrix of scores that grows with the square of the sequence. FlashAttention computes the same
# numbers tile by tile and never writes it. This notebook takes that apart: the memory, the online softmax, the tiles,
# the backward, the numerical contract, and the speed that was measured on an H200.
#
# It needs no GPU. What it runs is imported from `cs336_systems`, but for the kernel that you complete at the end. The
# names are those of the FlashAttention-2 paper (Dao 2023): $Q, K, V, O, L, D, m, \ell$.
#
# Each exercise has our answer, between `yours` and `to here`. Put yours in its place: the next cell says what is wrong.

# %%
import os

import torch

# Without a GPU the Triton kernels run in Triton's interpreter: the same source, executed with NumPy, slow but exact
# enough to study. The switch is read when Triton is imported, so it is set before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import heapq
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt
import pandas as pd
import triton
import triton.language as tl
from IPython.display import Markdown, display
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import cs336_systems
from cs336_systems.accounting import causal_area, eager_attention_bytes, eager_graph_bytes, flash_attention_bytes
from cs336_systems.attention import FlashAttentionPyTorch, attention_reference, flash_attention, select_config
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.reference import causal_mask
from cs336_systems.attention.triton import first
from cs336_systems.book.figures import COLORS
from cs336_systems.book.lookups import Page
from cs336_systems.book.pages import Book
from cs336_systems.config import AttentionShape
from cs336_systems.inputs import attention_inputs
from cs336_systems.notebook import check, show, show_published

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EAGER, FLASH = COLORS["eager"], COLORS["triton"]
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "axes.axisbelow": True})

# %% [markdown]
# ## 1. Plain attention is a memory problem
#
# For one head with $N$ queries and keys of dimension $d$,
#
# $$S = \tfrac{1}{\sqrt d}\, Q K^\top, \qquad P = \operatorname{softmax}(S), \qquad O = P V .$$
#
# $Q, K, V, O$ have $N d$ elements each; $S$ and $P$ have $N^2$. At its peak the plain forward holds two matrices of
# that size, and the backward, on a GPU, four: $P$, its gradient $dP$, their product, $dS$. FlashAttention holds none
# of them. It keeps $O$ and one number a query, the log-sum-exp $L_i = \log \sum_j e^{S_{ij}}$.
# `cs336_systems.accounting` has both as closed forms.

# %%
lengths = [2**power for power in range(10, 18)]
shapes = [
    AttentionShape(batch=1, heads=16, seqlen_q=n, seqlen_k=n, head_dim=64, is_causal=True, dtype="bfloat16")
    for n in lengths
]
eager_gib = [eager_attention_bytes(shape, "forward_backward", device_kind="cuda") / 2**30 for shape in shapes]
flash_gib = [flash_attention_bytes(shape, "forward_backward") / 2**30 for shape in shapes]

figure, axes = plt.subplots(figsize=(6.4, 3.8))
axes.loglog(lengths, eager_gib, "o-", color=EAGER, label=r"eager: grows as $N^2$")
axes.loglog(lengths, flash_gib, "D-", color=FLASH, label=r"FlashAttention: grows as $N$")
axes.axhline(80, color="#888888", linestyle=":")
axes.annotate("all of an 80 GiB GPU", (lengths[0], 80), (0, 4), textcoords="offset points", color="#666666")
axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
axes.minorticks_off()
axes.set_xlabel("sequence length N (tokens)")
axes.set_ylabel("peak memory (GiB)")
axes.set_title("Forward + backward, 16 heads, d = 64, bfloat16, causal")
axes.grid(True, color="#DDDDDD")
axes.legend(frameon=False)
show(figure, "Peak memory of eager attention and FlashAttention by sequence length, both axes logarithmic")

# %% [markdown]
# A formula is worth what its check is worth. PyTorch lets us see every tensor that the forward saves for the backward;
# counted by storage, beyond $Q, K, V$ and $O$, they are what the formulas say, to the byte.


# %%
def saved_bytes(attention, inputs) -> int:
    """Bytes of the storages that `attention(q, k, v)` keeps for its backward, other than those of q, k, v and O."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = attention(*leaves)
    own = {x.untyped_storage().data_ptr() for x in (*leaves, output)}
    return sum(size for pointer, size in kept.items() if pointer not in own)


rows = []
for n in (128, 256, 512):
    shape = AttentionShape(batch=1, heads=2, seqlen_q=n, seqlen_k=n, head_dim=64, is_causal=True, dtype="float32")
    inputs = attention_inputs(shape, device=DEVICE)
    rows.append(
        {
            "N": n,
            "eager, saved": saved_bytes(lambda q, k, v: attention_reference(q, k, v, is_causal=True), inputs),
            "eager, P and the mask": eager_graph_bytes(shape),
            "tiled, saved": saved_bytes(lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, True), inputs),
            "tiled, L": shape.heads * n * 4,
        }
    )
counted = pd.DataFrame(rows).set_index("N")
assert (counted["eager, saved"] == counted["eager, P and the mask"]).all()
assert (counted["tiled, saved"] == counted["tiled, L"]).all()
display(counted)

# %% [markdown]
# Memory is half of the cost. Each of those $N^2$ elements is also written to and read from the GPU's memory several
# times, and on long sequences plain attention spends most of its time waiting for that, not multiplying. So not storing
# $S$ makes attention faster too, even though the backward computes it a second time.

# %% [markdown]
# ## 2. Online softmax, by hand
#
# To produce one row of $O$ without its whole row of $S$, see the scores $S_j$ a few at a time and carry three things:
# the running maximum $m$, the running sum $\ell = \sum_j e^{S_j - m}$ and the accumulator
# $\tilde O = \sum_j e^{S_j-m} V_j$. A new tile may raise the maximum to $m'$; everything summed so far was relative to
# $m$, so it is rescaled by $e^{m-m'}$:
#
# $$m' = \max(m, \max_j S_j), \quad
# \ell \leftarrow e^{m-m'} \ell + \sum_j e^{S_j-m'}, \quad
# \tilde O \leftarrow e^{m-m'} \tilde O + \sum_j e^{S_j-m'} V_j .$$
#
# At the start $m = -\infty$ and the sums are 0; after the last tile $O = \tilde O / \ell$ and $L = m + \log \ell$. Here
# is a row of 32 scores, 4 at a time.

# %%
TILE = 4
generator = torch.Generator().manual_seed(3)
scores = 2 * torch.randn(32, dtype=torch.float64, generator=generator)
values = torch.randn(32, 3, dtype=torch.float64, generator=generator)


def online_softmax(scores, values, tile):
    """The running (m, l, accumulator) after each tile of `scores`, and the factor that rescaled the earlier sums."""
    m, l = torch.tensor(-torch.inf, dtype=scores.dtype), torch.zeros((), dtype=scores.dtype)
    accumulator = torch.zeros_like(values[0])
    history = []
    for score_tile, value_tile in zip(scores.split(tile), values.split(tile)):
        new_m = torch.maximum(m, score_tile.max())
        rescale = torch.exp(m - new_m)
        p = torch.exp(score_tile - new_m)
        l = rescale * l + p.sum()
        accumulator = rescale * accumulator + p @ value_tile
        m = new_m
        history.append({"m": m, "rescale": rescale, "l": l, "accumulator": accumulator})
    return history


history = online_softmax(scores, values, TILE)
steps = pd.DataFrame(
    {
        "largest score of the tile": [tile.max().item() for tile in scores.split(TILE)],
        "m": [step["m"].item() for step in history],
        "rescale earlier sum by": [step["rescale"].item() for step in history],
        "l": [step["l"].item() for step in history],
        "L = m + log l": [(step["m"] + step["l"].log()).item() for step in history],
    },
    index=pd.Index(range(1, len(history) + 1), name="tile"),
)
display(steps.round(4))

# %% [markdown]
# The last row is the answer. Against softmax over the whole row at once, in float64:

# %%
last = history[-1]
m, l = last["m"], last["l"]
differences = {
    "P = exp(S - m) / l": (torch.exp(scores - m) / l - torch.softmax(scores, dim=0)).abs().max(),
    "O = accumulator / l": (last["accumulator"] / l - torch.softmax(scores, dim=0) @ values).abs().max(),
    "L = m + log l": (m + l.log() - torch.logsumexp(scores, dim=0)).abs(),
}
for name, difference in differences.items():
    assert difference < 1e-12
    print(f"{name:20s} differs by less than 1e-12")

# %%
tiles = range(1, len(history) + 1)
figure, (level_axes, sum_axes) = plt.subplots(1, 2, figsize=(9.4, 3.4))
tile_of_score = [1 + index // TILE for index in range(len(scores))]
level_axes.plot(tile_of_score, scores, ".", color="#999999", label="scores of the tile")
level_axes.step(tiles, steps["m"], where="mid", color=FLASH, linewidth=2, label="running maximum m")
level_axes.plot(tiles, steps["L = m + log l"], "s--", color="#0072B2", markersize=4, label=r"$m + \log \ell$")
level_axes.axhline(torch.logsumexp(scores, dim=0), color="#0072B2", linewidth=0.8, label="L of the whole row")
level_axes.set_ylim(bottom=scores.min() - 4)
level_axes.set_ylabel("score (natural log units)")
level_axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower center")
rescaled = steps["rescale earlier sum by"] != 1
sum_axes.bar(tiles, steps["l"], color=rescaled.map({True: FLASH, False: "#BBBBBB"}))
sum_axes.legend(
    handles=[Patch(color=FLASH, label="m rose: earlier sum rescaled"), Patch(color="#BBBBBB", label="m stayed")],
    frameon=False,
    fontsize=9,
    loc="upper left",
)
sum_axes.set_ylim(0, 1.35 * steps["l"].max())
sum_axes.set_ylabel(r"running sum $\ell$ (relative to $e^m$)")
for axes in (level_axes, sum_axes):
    axes.set_xlabel("tiles of 4 keys seen")
show(figure, "Left: scores, running maximum and log-sum-exp by tile. Right: running sum by tile")

# %% [markdown]
# $\ell$ may fall when $m$ rises, since it is relative to $e^m$. The quantity that only grows is $m + \log \ell$, the
# log-sum-exp of what has been seen; it ends at $L$.
#
# The maximum is there for range, not for the result: subtracting any number from all scores leaves softmax as it was.
# Without it, large scores overflow. With it no exponential exceeds 1.

# %%
shifted = scores + 1000
naive = torch.exp(shifted) / torch.exp(shifted).sum()
end = online_softmax(shifted, values, TILE)[-1]
online = torch.exp(shifted - end["m"]) / end["l"]
print("naive softmax of scores near 1000:  finite:", naive.isfinite().all().item())
print(
    "online softmax of scores near 1000: finite:", online.isfinite().all().item(),
    "and equal to softmax:", torch.allclose(online, torch.softmax(scores, dim=0), rtol=1e-10),
)  # fmt: skip

# %% [markdown]
# ### Exercise 1: merge two halves
#
# Two programs have seen different keys of the same query, and each has finished: it has its own $O$ and $L$. Return $O$
# and $L$ over all keys. Each $O$ was divided by its own sum of exponentials, which is $e^L$.


# %%
def merge(output_1, lse_1, output_2, lse_2):
    # yours: L of all keys; then weigh each O by the share of its keys, without an exponential that overflows
    lse = torch.logaddexp(lse_1, lse_2)
    return torch.exp(lse_1 - lse) * output_1 + torch.exp(lse_2 - lse) * output_2, lse
    # to here


# %%
def merged_halves(scores, values):
    """O and L of a row, merged from its first 20 keys and its last 12, as lists."""
    halves = zip(scores.split([20, 12]), values.split([20, 12]))
    parts = [(torch.softmax(s, dim=0) @ v, torch.logsumexp(s, dim=0)) for s, v in halves]
    output, lse = merge(*parts[0], *parts[1])
    return output.tolist(), lse.item()


whole_row = (torch.softmax(scores, dim=0) @ values).tolist()
check(
    (merged_halves(scores, values)[1], torch.logsumexp(scores, dim=0).item(), "L is the log of the sum of both sums."),
    (merged_halves(scores, values)[0], whole_row, "The weights of the two outputs are shares: they add up to 1."),
    (
        merged_halves(scores + 1000, values)[0],
        whole_row,
        "e^L overflows; take differences of L before the exponential.",
    ),
)

# %% [markdown]
# A kernel does this for a tile of queries at once, with $m$ and $\ell$ as vectors. The ones in
# `attention/triton/forward.py` take exponentials to base 2, with $\frac{1}{\sqrt d} \log_2 e$ folded into one
# multiply-add, because that is what the hardware has an instruction for; $L$ goes back to the natural log at the end.

# %% [markdown]
# ## 3. Tiles, and the ones nobody visits
#
# The forward gives each tile of queries to one program, which walks over tiles of keys. Under a causal mask (query $i$
# sees keys $j \le i$) a tile of scores is one of three kinds:
#
# - **unmasked**: every query sees every key. Computed with no mask arithmetic;
# - **diagonal**: the mask cuts it. Computed, then masked;
# - **never visited**: no query sees any key. Not loaded, not computed.
#
# The tile sizes below are the row of the Hopper table for $d = 64$ in bfloat16. The kinds are counted from the mask
# itself, and then compared with the two bounds that the kernel computes from its tile's first query.


# %%
def tile_kinds(seqlen: int, query_tile: int, key_tile: int):
    """(query tiles, key tiles): 0 never visited, 1 unmasked, 2 diagonal, by looking at the whole causal mask."""
    mask = causal_mask(seqlen, seqlen, "cpu").unflatten(1, (-1, key_tile)).unflatten(0, (-1, query_tile))
    some, every = mask.any(dim=3).any(dim=1), mask.all(dim=3).all(dim=1)
    return some.int() + (some & ~every).int()


def kernel_bounds(query_index: int, query_tile: int, key_tile: int) -> tuple[int, int]:
    """How many key tiles the kernel's unmasked loop covers for this query tile, and where its masked loop ends."""
    first_query = query_index * query_tile
    return (first_query + 1) // key_tile, -(-(first_query + query_tile) // key_tile)


config = select_config(
    "forward", capability=(9, 0), head_dim=64, batch=1, heads=1, seqlen_q=1024, seqlen_k=1024, dtype="bfloat16"
)
query_tile, key_tile = config.query_tile, config.key_tile
num_query_tiles = 8
seqlen = num_query_tiles * query_tile
kinds = tile_kinds(seqlen, query_tile, key_tile)
for index, row in enumerate(kinds):
    assert kernel_bounds(index, query_tile, key_tile) == ((row == 1).sum(), (row > 0).sum())

total = kinds.numel()
counts = {name: int((kinds == kind).sum()) for kind, name in enumerate(("never visited", "unmasked", "diagonal"))}
palette = {"never visited": "#F2F2F2", "unmasked": "#66A9D8", "diagonal": "#D55E00"}

figure, axes = plt.subplots(figsize=(7.6, 4.4))
axes.imshow(kinds, cmap=ListedColormap(list(palette.values())), extent=(0, seqlen, seqlen, 0), aspect="auto")
axes.set_xticks(range(0, seqlen + 1, 2 * key_tile))
axes.set_yticks(range(0, seqlen + 1, query_tile))
axes.set_xticks(range(0, seqlen, key_tile), minor=True)
axes.grid(True, which="both", color="white", linewidth=1.5)
axes.tick_params(which="minor", length=0)
for index in range(num_query_tiles):
    launched = num_query_tiles - 1 - index  # forward.py: causal query tiles are numbered from the last
    axes.text(seqlen * 1.02, (index + 0.5) * query_tile, f"program {launched}", va="center", fontsize=9)
axes.set_xlabel("key (token)")
axes.set_ylabel("query (token)")
axes.set_title(f"Causal scores in tiles of {query_tile} queries by {key_tile} keys")
figure.legend(
    handles=[Patch(color=palette[kind], label=f"{kind}: {count} of {total}") for kind, count in counts.items()],
    loc="outside lower center",
    ncols=3,
    frameon=False,
)
show(figure, "A causal score matrix in tiles coloured unmasked, diagonal or never visited")
print(f"{counts['never visited'] / total:.1%} of the tiles are never visited;", end=" ")
print(f"{counts['diagonal'] / (total - counts['never visited']):.1%} of the visited ones need the mask")

# %% [markdown]
# Longer sequences come closer to the ideal. The *density* of a mask is the fraction of scores that are attended; what
# the visited tiles compute beyond it is the part of the diagonal tiles that lies above the diagonal.

# %%
rows = []
for n in (1024, 2048, 4096, 8192, 16384, 32768):
    bounds = [kernel_bounds(index, query_tile, key_tile) for index in range(n // query_tile)]
    visited, unmasked = sum(stop for _, stop in bounds), sum(full for full, _ in bounds)
    all_tiles = n // query_tile * (n // key_tile)
    rows.append(
        {
            "N": n,
            "never visited": f"{1 - visited / all_tiles:.2%}",
            "diagonal, of the visited": f"{(visited - unmasked) / visited:.2%}",
            "density": f"{causal_area(n, n) / n**2:.2%}",
            "scores computed / attended": f"{visited * query_tile * key_tile / causal_area(n, n):.3f}",
        }
    )
display(pd.DataFrame(rows).set_index("N"))

# %% [markdown]
# ### Exercise 2: the loop's bounds under a window
#
# With a sliding window, query $i$ sees keys $i - w < j \le i$. Return the first key tile that a tile of queries visits,
# and the one at which its loop stops (not visited any more).


# %%
def window_bounds(query_index: int, query_tile: int, key_tile: int, window: int) -> tuple[int, int]:
    # yours: the first key of the tile's first query, and the last key of its last query
    first_query = query_index * query_tile
    first_key = max(0, first_query - window + 1)
    return first_key // key_tile, -(-(first_query + query_tile) // key_tile)
    # to here


# %%
def looked_up(query_index: int, query_tile: int, key_tile: int, window: int) -> tuple[int, int]:
    """The same, by looking at the whole mask of 1024 tokens."""
    mask = causal_mask(1024, 1024, "cpu") & ~causal_mask(1024, 1024, "cpu").tril(-window)
    rows = mask[query_index * query_tile : (query_index + 1) * query_tile].any(dim=0)
    visited = rows.unflatten(0, (-1, key_tile)).any(dim=1).nonzero().flatten().tolist()
    return visited[0], visited[-1] + 1


cases = [(index, 128, 64, window) for window in (1, 64, 65, 200) for index in range(8)]
check(
    (window_bounds(0, 128, 64, 200), (0, 2), "There is no key before key 0."),
    (window_bounds(2, 128, 64, 64), (3, 6), "Query 256 sees keys 193 to 256: the window includes the query itself."),
    (window_bounds(2, 128, 64, 65), (3, 6), "Query 256 sees key 192 too, the first of tile 3: no tile more."),
    (
        [window_bounds(*case) for case in cases],
        [looked_up(*case) for case in cases],
        "Not so for every tile and window.",
    ),
)

# %% [markdown]
# **Launch order.** The last query tile visits many times as many key tiles as the first. In practice a GPU
# starts programs in the order of their numbers as multiprocessors become free, so the kernel numbers the longest first:
# short programs then fill the gaps at the end, where a long one would run alone. The bars are the programs of the
# figure above on three imaginary multiprocessors, with time counted in key tiles.


# %%
def schedule(costs, num_processors: int):
    """(processor, start, cost) of each program, each given in turn to the processor that is free first."""
    free = [(0, processor) for processor in range(num_processors)]
    placed = []
    for cost in costs:
        start, processor = heapq.heappop(free)
        placed.append((processor, start, cost))
        heapq.heappush(free, (start + cost, processor))
    return placed


costs = [int((row > 0).sum()) for row in kinds]
orders = {"shortest first": range(num_query_tiles), "longest first": range(num_query_tiles - 1, -1, -1)}
figure, all_axes = plt.subplots(1, 2, figsize=(9.4, 2.4), sharex=True, sharey=True)
for axes, (name, order) in zip(all_axes, orders.items()):
    placed = schedule([costs[index] for index in order], 3)
    finish = max(start + cost for _, start, cost in placed)
    for index, (processor, start, cost) in zip(order, placed):
        axes.barh(processor, cost, left=start, color=plt.cm.Blues(0.15 + 0.08 * index), edgecolor="white")
        axes.text(start + cost / 2, processor, str(index), ha="center", va="center", fontsize=9)
    axes.axvline(finish, color=FLASH)
    axes.set_title(f"{name}: done after {finish} (even split: {sum(costs) / 3:.0f})", fontsize=10)
    axes.set_xlabel("time (key tiles); numbers: query tile")
all_axes[0].set_yticks(range(3))
all_axes[0].set_ylabel("multiprocessor")
show(figure, "Programs on three multiprocessors, shortest first and longest first")

# %% [markdown]
# ## 4. The backward: recompute, do not store
#
# From $dO$ the chain rule gives
#
# $$dV = P^\top dO, \quad dP = dO\, V^\top, \quad
# dS_{ij} = P_{ij} \Big(dP_{ij} - \sum_k P_{ik}\, dP_{ik}\Big), \quad
# dQ = \tfrac{1}{\sqrt d}\, dS\, K, \quad dK = \tfrac{1}{\sqrt d}\, dS^\top Q .$$
#
# Two things seem to need whole rows of $P$. Neither does.
#
# 1. **$P$ itself.** $P_{ij} = e^{S_{ij}} / \sum_k e^{S_{ik}} = e^{S_{ij} - L_i}$: any tile of $P$ follows from the same
#    tile of $S$ and one number a query. No maximum and no second pass are needed, and no exponential exceeds 1.
# 2. **The row sum in $dS$.** Since $dP_{ik} = \sum_c dO_{ic} V_{kc}$ and $O_{ic} = \sum_k P_{ik} V_{kc}$,
#    $$\sum_k P_{ik}\, dP_{ik} = \sum_c dO_{ic} \sum_k P_{ik} V_{kc} = \sum_c dO_{ic}\, O_{ic} = D_i,$$
#    so $D = \operatorname{rowsum}(dO \circ O)$ is computed once from two $N \times d$ tensors.

# %%
shape = AttentionShape(batch=1, heads=1, seqlen_q=256, seqlen_k=256, head_dim=64, is_causal=True, dtype="float64")
q, k, v, grad_output = attention_inputs(shape, device="cpu", seed=1)
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
output, lse = attention_reference(*leaves, is_causal=True, return_lse=True)
expected = torch.autograd.grad(output, leaves, grad_output)  # what PyTorch derives by itself
output, lse = output.detach(), lse.detach()

scale = shape.head_dim**-0.5
S = (q @ k.mT * scale).masked_fill(~causal_mask(256, 256, "cpu"), -torch.inf)
P = torch.exp(S - lse[..., None])
dP = grad_output @ v.mT
D = (grad_output * output).sum(dim=-1)
dS = P * (dP - D[..., None])
checks = {
    "exp(S - L) = softmax(S)": (P, torch.softmax(S, dim=-1)),
    "rowsum(dO ∘ O) = rowsum(P ∘ dP)": (D, (P * dP).sum(dim=-1)),
    "dQ, by hand = autograd": (scale * dS @ k, expected[0]),
    "dK, by hand = autograd": (scale * dS.mT @ q, expected[1]),
    "dV, by hand = autograd": (P.mT @ grad_output, expected[2]),
}
for name, (ours, theirs) in checks.items():
    assert (ours - theirs).abs().max() < 1e-12
    print(f"{name:32s} to within 1e-12")

# %% [markdown]
# **Why two passes.** $dK$ and $dV$ are sums over queries, $dQ$ is a sum over keys. One program for each tile of keys
# can keep its $dK, dV$ in registers, but then every program adds to every $dQ$ tile, in whatever order they finish:
# that takes atomic additions. Floating-point addition is not associative, so each order gives other bits. Here are the
# contributions of the key tiles to one tile of $dQ$, in float32, added in random orders:

# %%
tile = slice(192, 256)
dS_tiles, K_tiles = dS[0, 0, tile].split(16, dim=1), k[0, 0].split(16)
contributions = [(scale * dS_tile @ K_tile).float() for dS_tile, K_tile in zip(dS_tiles, K_tiles)]
generator = torch.Generator().manual_seed(0)
results = []
for _ in range(50):
    total_gradient = torch.zeros_like(contributions[0])
    for index in torch.randperm(len(contributions), generator=generator):
        total_gradient += contributions[index]
    results.append(total_gradient)
distinct = len({result.numpy().tobytes() for result in results})
spread = (torch.stack(results) - results[0]).abs().max().item()
print(f"{distinct} different results from {len(results)} orders; they differ by up to {spread:.1e}")

# %% [markdown]
# The differences are harmless as errors and a nuisance in practice: a run cannot be repeated bit for bit, and a bug
# cannot be told from noise. So `attention/triton/backward.py` makes two passes, each over its own kind of tile, and
# every output tile has exactly one writer, which adds in a fixed order. The price: $S$ and $dP$ are computed in both,
# which makes seven matmuls a tile where one pass has five ($S$, $dP$, $dV$, $dK$, $dQ$).

# %%
small = tile_kinds(8, 1, 1)
figure, all_axes = plt.subplots(1, 2, figsize=(7.2, 3.2), sharex=True, sharey=True)
passes = {
    "pass 1: dK, dV\none program a key tile": torch.arange(8).expand(8, 8),
    "pass 2: dQ\none program a query tile": torch.arange(8)[:, None].expand(8, 8),
}
for axes, (name, program) in zip(all_axes, passes.items()):
    axes.imshow(program.float().masked_fill(small == 0, torch.nan), cmap="viridis", aspect="auto")
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("key tile")
    axes.set_xticks(range(8))
    axes.set_yticks(range(8))
all_axes[0].set_ylabel("query tile")
figure.suptitle("One colour, one program, one writer", fontsize=10, fontweight="bold")
show(figure, "Tiles coloured by the program that writes from them: columns in pass 1, rows in pass 2")


# %%
def run_stage(backend: str, q, k, v, grad_output, *, is_causal: bool) -> dict[str, torch.Tensor]:
    """O, L, dQ, dK and dV of one back end of `flash_attention`, by the names of the contract."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output, lse = flash_attention(*leaves, is_causal=is_causal, return_lse=True, backend=backend)
    gradients = torch.autograd.grad(output, leaves, grad_output)
    return {"output": output.detach(), "lse": lse.detach()} | dict(zip(("grad_q", "grad_k", "grad_v"), gradients))


shape = AttentionShape(batch=1, heads=2, seqlen_q=200, seqlen_k=200, head_dim=64, is_causal=True, dtype="float16")
inputs = attention_inputs(shape, device=DEVICE, seed=2)
runs = [run_stage("triton", *inputs, is_causal=True) for _ in range(3)]
identical = all(torch.equal(run[name], runs[0][name]) for run in runs for name in run)
assert identical
print("three runs of the Triton forward and backward are bit-identical:", identical)

# %% [markdown]
# In the interpreter programs run one after another, so this cell could not show a race. What rules one out is the
# structure: there is no atomic addition in the kernels, and no two programs store to the same address.

# %% [markdown]
# ## 5. The stages against the oracle
#
# How close is close enough? Any fixed tolerance is too loose for some lengths and dtypes and too tight for others. The
# contract of this repository asks the inputs themselves: with the float64 reference as the oracle, and *eager* the same
# formula in the inputs' dtype,
#
# $$\max |\text{ours} - \text{oracle}| \;\le\; 2 \max |\text{eager} - \text{oracle}| + 10^{-5}$$
#
# for $O, dQ, dK, dV$, and a bound of its own for $L$. The table shows error divided by bound: at most 1 passes. The
# length is not a multiple of any tile, so the tail tiles are in it. (`compiled` is the reference under `torch.compile`
# and would only add the time to compile it.)

# %%
NAMES = {"output": "O", "lse": "L", "grad_q": "dQ", "grad_k": "dK", "grad_v": "dV"}
rows = []
for dtype in ("float32", "float16"):
    shape = AttentionShape(batch=1, heads=2, seqlen_q=200, seqlen_k=200, head_dim=64, is_causal=True, dtype=dtype)
    inputs = attention_inputs(shape, device=DEVICE, seed=2)
    oracle = compute_oracle(*inputs, is_causal=True)
    for backend in ("reference", "tiled", "triton"):
        errors = contract_errors(oracle, run_stage(backend, *inputs, is_causal=True))
        assert max(errors.values()) <= 1, (dtype, backend, errors)
        rows.append({"dtype": dtype, "stage": backend} | {NAMES[name]: error for name, error in errors.items()})
display(pd.DataFrame(rows).set_index(["dtype", "stage"]).map("{:.4f}".format))

# %% [markdown]
# The reference in float16 sits near one half, as it must: its own error sets the bound. The forward of the tiled stages
# is closer to the oracle, since it keeps $S$ and the sums in float32 where plain attention rounds every step to
# float16. In float32 the errors are so small that the slack of $10^{-5}$ dominates.
#
# **A wrong kernel must fail.** The classic bug drops the last tile of keys. Its output has the right shape and no NaN,
# and most of its rows are right. We get exactly that result from the correct kernel by not showing it the last keys.

# %%
shape = AttentionShape(batch=1, heads=2, seqlen_q=256, seqlen_k=256, head_dim=64, is_causal=True, dtype="float16")
q, k, v, grad_output = attention_inputs(shape, device=DEVICE, seed=2)
oracle = compute_oracle(q, k, v, grad_output, is_causal=True)
dropped = 32  # keys


def pad(gradient):
    """Zeros for the keys that were dropped: a kernel that never reads them computes no gradient for them."""
    return torch.nn.functional.pad(gradient, (0, 0, 0, dropped))


right = run_stage("triton", q, k, v, grad_output, is_causal=True)
wrong = run_stage("triton", q, k[..., :-dropped, :], v[..., :-dropped, :], grad_output, is_causal=True)
wrong |= {name: pad(wrong[name]) for name in ("grad_k", "grad_v")}
errors = {"correct": contract_errors(oracle, right), "last tile dropped": contract_errors(oracle, wrong)}
verdicts = {name: "agrees" if max(error.values()) <= 1 else "REJECTED" for name, error in errors.items()}
assert verdicts == {"correct": "agrees", "last tile dropped": "REJECTED"}
table = pd.DataFrame(errors).T.rename(columns=NAMES).map("{:.3g}".format)
table["verdict"] = pd.Series(verdicts)
display(table)

# %%
figure, axes = plt.subplots(figsize=(6.8, 3.2))
curves = {"last tile dropped": (wrong, "#CC6677"), "correct": (right, FLASH)}
for name, (result, line_colour) in curves.items():
    error = (result["output"].double() - oracle.expected["output"]).abs().amax(dim=(0, 1, 3)).cpu()
    axes.semilogy(error, color=line_colour, label=name)
axes.axhline(oracle.bounds["output"], color="#444444", linestyle=":", label="bound")
axes.set_xlabel("query (token)")
axes.set_ylabel("largest error of O")
axes.legend(frameon=False, loc="upper left")
show(figure, "Largest error of O by query for the correct kernel and for one that drops the last tile")

# %% [markdown]
# Only the queries that should have seen the dropped keys are wrong. (Query 0 sees one key, so its $O$ is exactly $V_0$
# and its error is 0.) A test that compares a few rows, or an average over
# all of them, could miss it; the contract takes the maximum over everything.

# %% [markdown]
# ## 6. Measured on an H200
#
# The interpreter says nothing about speed. The repository keeps the records of a GPU run in `results/nvidia-h200`: one
# JSON line for each quantity of each implementation and shape, written only after the implementation has agreed with
# the oracle on the same inputs. The figure and the table below are those of the page
# [flash_benchmarking](../writeup/flash_benchmarking.md).

# %%
# This notebook runs in notebooks/, from the root, or elsewhere with the package installed in place.
folders = (Path.cwd(), *Path.cwd().parents, Path(cs336_systems.__file__).resolve().parents[1])
root = next((folder for folder in folders if (folder / "pyproject.toml").is_file()), Path.cwd())
if (root / "results" / "nvidia-h200" / "records" / "flash_benchmarking.jsonl").is_file():
    book = Book(root, root / "results" / "nvidia-h200")
    show_published(book.figure_path("flash_benchmarking", "forward_backward"), "Speed over plain PyTorch by length")
    display(Markdown(Page(book, "flash_benchmarking").table("plain_and_triton")))
else:
    display(Markdown("The records of the H200 are absent from this checkout, so there is nothing to draw here."))

# %% [markdown]
# ## 7. To think about
#
# Work them out before opening the answers.
#
# **1.** In section 2, sort the 32 scores in ascending order, then in descending order. In how many tiles after the
# first are the earlier sums rescaled by a factor other than 1? What could a kernel gain from knowing?
#
# <details>
# <summary>Answer</summary>
#
# Ascending: in all seven, since every tile raises $m$. Descending: in none, since the first tile holds the maximum.
# With scores in random order $m$ rises less and less often, so most rescalings of $\ell$ and $\tilde O$ multiply by 1.
# A kernel may skip them when no row of its tile needs one. It may even let $m$ lag behind the true maximum by a bounded
# amount: any $m$ gives the same $O$ and $L$, as long as no exponential overflows.
#
# Check: `[step["rescale"].item() for step in online_softmax(scores.sort().values, values, 4)]`, with `scores`
# and `values` of section 2.
# </details>
#
# **2.** Let $N$ be $n$ query tiles, each as long as $r$ key tiles. Derive the fraction of causal tiles that are never
# visited, and check it against the table in section 3. What does halving the query tile change, and why not go on?
#
# <details>
# <summary>Answer</summary>
#
# Query tile $i = 0, \dots, n-1$ visits $r(i+1)$ of its $rn$ key tiles. In all $r\,n(n+1)/2$ of $r n^2$ are visited, so
#
# $$\frac{n-1}{2n} = \frac12 - \frac1{2n}$$
#
# are not. $r$ cancels. Half the query tile doubles $n$ and comes closer to one half. But every query tile reads all the
# keys and values it sees: half the tile, twice the reads of $K$ and $V$, and smaller matmuls that use the tensor cores
# less well.
# </details>
#
# **3.** Suppose the loss depends on $L$ as well as on $O$, as when partial results of attention over different keys are
# merged. With $dL_i$ the gradient that reaches $L_i$, how does $dS$ change? Which kernels must change?
#
# <details>
# <summary>Answer</summary>
#
# $\partial L_i / \partial S_{ij} = P_{ij}$, so
#
# $$dS_{ij} = P_{ij}\,(dP_{ij} - D_i) + P_{ij}\, dL_i = P_{ij}\,\big(dP_{ij} - (D_i - dL_i)\big).$$
#
# The gradient of $L$ enters as if $D$ were smaller by it. Only the preprocess that computes $D$ changes, which is why
# `flash_attention(..., return_lse=True)` is differentiable in both results at no cost in the two passes.
#
# Check: `torch.autograd.gradcheck(lambda q: flash_attention(q, q, q, backend="tiled", return_lse=True),
# torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True))`
# </details>

# %% [markdown]
# ## 8. Complete a kernel
#
# Now the loop of section 2 for a tile of queries at once, as a Triton kernel. The handout's interface is given: one
# program computes `Q_TILE_SIZE` rows of $O$ for one batch element, finds them by `tl.program_id` and strides, and walks
# over tiles of keys and values. What happens to a tile is yours: the four marked lines know no scale, no mask under
# `IS_CAUSAL` and no running maximum `m`, so large scores overflow and $L$ is wrong.
#
# - `tl.dot(a, b, acc=c, input_precision="ieee")` is `a @ b + c` in float32; `tl.trans(x)` transposes.
# - `tl.max(x, axis=1)` and `tl.sum(x, axis=1)` reduce rows; `m[:, None]` is a column.
# - `tl.where(condition, x, float("-inf"))` masks. Query `queries[i]` sees key `first_key + keys[j]` if it is not later.
# - Both operands of a `tl.dot` have one dtype: probabilities are float32, and $V$ may be float16.
#
# Change them, run the cell and the one after it: it answers at once, without a mask and with one.


# %%
@triton.jit
def my_flash_fwd_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qq, stride_qd,
    stride_kb, stride_kk, stride_kd,
    stride_vb, stride_vk, stride_vd,
    stride_ob, stride_oq, stride_od,
    stride_lb, stride_lq,
    N_KEYS, scale,
    D: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    batch_index = tl.program_id(1)
    queries = tl.program_id(0) * Q_TILE_SIZE + tl.arange(0, Q_TILE_SIZE)
    keys, columns = tl.arange(0, K_TILE_SIZE), tl.arange(0, D)
    Q_ptrs = Q_ptr + batch_index * stride_qb + queries[:, None] * stride_qq + columns[None, :] * stride_qd
    K_ptrs = K_ptr + batch_index * stride_kb + keys[:, None] * stride_kk + columns[None, :] * stride_kd
    V_ptrs = V_ptr + batch_index * stride_vb + keys[:, None] * stride_vk + columns[None, :] * stride_vd
    Q = tl.load(Q_ptrs)  # (Q_TILE_SIZE, D)
    m = tl.full([Q_TILE_SIZE], -1e30, tl.float32)
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    O = tl.zeros([Q_TILE_SIZE, D], tl.float32)
    for first_key in range(0, N_KEYS, K_TILE_SIZE):  # noqa: B007
        K = tl.load(K_ptrs)  # (K_TILE_SIZE, D)
        V = tl.load(V_ptrs)  # (K_TILE_SIZE, D)
        # Yours, from here:
        S = tl.dot(Q, tl.trans(K), input_precision="ieee")
        P = tl.exp(S)
        l = l + tl.sum(P, axis=1)
        O = tl.dot(P.to(V.dtype), V, acc=O, input_precision="ieee")
        # to here.
        K_ptrs += K_TILE_SIZE * stride_kk
        V_ptrs += K_TILE_SIZE * stride_vk
    O_ptrs = O_ptr + batch_index * stride_ob + queries[:, None] * stride_oq + columns[None, :] * stride_od
    tl.store(O_ptrs, (O / l[:, None]).to(O_ptr.dtype.element_ty))
    tl.store(L_ptr + batch_index * stride_lb + queries * stride_lq, m + tl.log(l))


# %%
def check_kernel(kernel) -> bool:
    """Whether O and L of `kernel`, launched as the package launches its own, agree with the oracle; says what does."""
    agrees = True
    for dtype, is_causal in (("float32", False), ("float32", True), ("float16", True)):
        shape = AttentionShape(
            batch=2, heads=1, seqlen_q=192, seqlen_k=192, head_dim=32, is_causal=is_causal, dtype=dtype
        )
        q, k, v, _ = attention_inputs(shape, device=DEVICE, seed=4)
        with patch.object(first, "flash_fwd_kernel", kernel):
            output, lse = first.flash_forward_first(q, k, v, is_causal, scale=shape.head_dim**-0.5)
        oracle = compute_oracle(q, k, v, is_causal=is_causal)
        errors = contract_errors(oracle, {"output": output, "lse": lse})
        verdicts = [
            f"{NAMES[name]} {'agrees' if error <= 1 else f'is {error:.3g} times too far off'}"
            for name, error in errors.items()
        ]
        print(f"{dtype}, {'causal' if is_causal else 'no mask'}:", ", ".join(verdicts))
        agrees = agrees and max(errors.values()) <= 1
    print("All agree: this is FlashAttention-2's forward." if agrees else "Not yet.")
    return agrees


check_kernel(my_flash_fwd_kernel)

# %% [markdown]
# The package's own kernel, `attention/triton/first.py`, through the same check. It has one thing more: under the causal
# mask it stops at the last key tile that its queries see.

# %%
assert check_kernel(first.flash_fwd_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# S = tl.dot(Q, tl.trans(K), input_precision="ieee") * scale
# if IS_CAUSAL:
#     S = tl.where(queries[:, None] >= first_key + keys[None, :], S, float("-inf"))
# m_new = tl.maximum(m, tl.max(S, axis=1))
# P = tl.exp(S - m_new[:, None])
# rescale = tl.exp(m - m_new)
# l = rescale * l + tl.sum(P, axis=1)
# O = tl.dot(P.to(V.dtype), V, acc=rescale[:, None] * O, input_precision="ieee")
# m = m_new
# ```
#
# A wrong $L$ beside a right $O$ means that $m$ stayed behind; both wrong under the mask alone, that the comparison
# looks the wrong way or forgets `first_key`. The backward is next: its tile step is `_backward_step` of
# `attention/tiled.py`.
# </details>
