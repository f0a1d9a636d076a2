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
# # Masks as tiles: what can be skipped
#
# A mask says which keys each query attends. A kernel works in tiles, so what it can save is not the pairs that a mask
# leaves out but the *tiles* that it leaves empty. This notebook draws masks and their tiles, shows that a skipped tile
# is never read, and ends at the masks that save nothing, and at one that needs no mask at all.
#
# It needs no GPU and defines no kernels: what it runs is imported from `cs336_systems`.
#
# Each exercise has our answer, between `yours` and `to here`. Put yours in its place: the next cell says what is wrong.

# %%
import os

import torch

# Without a GPU the Triton kernels run in Triton's interpreter. The switch is read when Triton is imported, so it is set
# before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown, display
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

import cs336_systems
from cs336_systems.attention import BlockMask, attention_reference, flash_attention
from cs336_systems.attention.dilated import dilated_attention
from cs336_systems.attention.dynamic import shared_keys_attention
from cs336_systems.attention.masks import parse_mask
from cs336_systems.book.figures import COLORS
from cs336_systems.book.pages import Book
from cs336_systems.notebook import check, show, show_published

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "axes.axisbelow": True})

# %% [markdown]
# ## 1. Dead, full, partial
#
# Cut the (queries, keys) plane into tiles. A **dead** tile attends no pair: it is in no list, and no byte of its keys
# is loaded. In a **full** tile every pair is attended: no mask is read. Only in a **partial** tile does the kernel look
# at tokens, packed 32 to a word. Below, attended pairs are dark; live tiles are framed.


# %%
PARTIAL, FULL = COLORS["flex"], COLORS["triton"]


def draw(axes, mask: BlockMask, title: str, head: int = 0) -> None:
    """Pairs of one head as pixels, its live tiles as frames."""
    axes.imshow(mask.to_dense()[0, head], cmap=ListedColormap(["white", "#444444"]), vmin=0, vmax=1)
    rows, columns = mask.block_size
    for counts, indices, shade in (
        (mask.kv_num_blocks, mask.kv_indices, PARTIAL),
        (mask.full_kv_num_blocks, mask.full_kv_indices, FULL),
    ):
        for row in range(counts.shape[2]):
            for column in indices[0, head, row, : counts[0, head, row]].tolist():
                corner = (column * columns - 0.5, row * rows - 0.5)
                axes.add_patch(Rectangle(corner, columns, rows, fill=True, facecolor=shade, alpha=0.25))
                axes.add_patch(Rectangle(corner, columns, rows, fill=False, edgecolor=shade, linewidth=1.2))
    axes.set_title(f"{title}\n{mask.density:.0%} of pairs, {mask.block_density:.0%} of tiles", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])


def gallery(patterns: dict[str, str], seqlen: int, block: int, description: str) -> None:
    figure, grid = plt.subplots(1, len(patterns), figsize=(2.6 * len(patterns), 3.1), squeeze=False)
    for axes, (title, pattern) in zip(grid.flat, patterns.items()):
        draw(axes, parse_mask(pattern, seqlen=seqlen, block_size=block), title)
    kinds = {"full tile": FULL, "partial tile": PARTIAL}
    handles = [Patch(color=shade, alpha=0.5, label=kind) for kind, shade in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    show(figure, description)


gallery(
    {
        "causal": "causal",
        "window of 48": "window:48",
        "documents, causal": "document:70,0,30,92+causal",
        "random tiles": "random:0.25",
    },
    192, 16, "Four masks of 192 tokens with their tiles of 16: causal, sliding window, documents, random tiles",
)  # fmt: skip

# %% [markdown]
# ### Exercise 1: a mask as a function
#
# A mask in FlexAttention's form is a function of indices that says whether a query attends a key. Complete one with an
# attention sink: a query sees itself, the 31 keys before it, and besides them the first 16 keys of all, never a later
# one. The indices are tensors: combine comparisons with `&` and `|`, in parentheses.


# %%
def sink_window(batch, head, query, key):
    # yours: a window of 32 keys that ends with the query, and 16 keys at the beginning
    return (key <= query) & ((query - key < 32) | (key < 16))
    # to here


# %%
sink = BlockMask.from_mask_mod(sink_window, 192, block_size=16)
seen = sink.to_dense()[0, 0]
check(
    (int(seen.triu(1).sum()), 0, "A query sees no later key, not even one of the first 16."),
    (int(seen[100, 16:].sum()), 32, "Query 100 sees 32 keys of its window, itself among them."),
    (int(seen[100, :16].sum()), 16, "Query 100 sees all 16 keys of the sink."),
    (int(seen.sum(dim=1).min()), 1, "Query 0 sees itself."),
    (sink.num_full + sink.num_partial, 42, "Each row of tiles has those of the window and one of the sink."),
)

# %% [markdown]
# The same numbers are on the command line: `cs336-systems doctor --mask document:70,0,30,92+causal --seqlen 192
# --block-size 16`.
#
# ## 2. The lists
#
# The kernel does not see the picture. It sees, for each row of tiles, how many tiles to visit and which. For $dK$ and
# $dV$, whose programs own a column, there are the transposed lists.

# %%
mask = parse_mask("document:40,24+causal", seqlen=64, block_size=16)
columns = {
    "full tiles": (mask.full_kv_num_blocks, mask.full_kv_indices),
    "partial tiles": (mask.kv_num_blocks, mask.kv_indices),
    "their token patterns": (mask.kv_num_blocks, mask.kv_tokens),
}
lists = {
    name: [entries[0, 0, row, :count].tolist() for row, count in enumerate(counts[0, 0])]
    for name, (counts, entries) in columns.items()
}
display(pd.DataFrame(lists).rename_axis("row of tiles"))
visited = mask.num_full + mask.num_partial
assert visited == int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
assert visited == int(mask.q_num_blocks.sum() + mask.full_q_num_blocks.sum())
Markdown(f"{visited} of {mask.num_tiles} tiles are visited, {mask.num_bytes} bytes in all.")

# %% [markdown]
# Nothing here grows with the square of the tokens but by tiles. A causal mask even stores one triangle for all its
# diagonal tiles:

# %%
sizes = []
for seqlen in (4096, 16384, 65536):
    mask = BlockMask.causal(seqlen)
    sizes.append(
        {"tokens": seqlen, "token mask (MiB)": seqlen**2 / 2**20, "lists (MiB)": round(mask.num_bytes / 2**20, 3),
         "patterns": len(mask.token_bits)}
    )  # fmt: skip
display(pd.DataFrame(sizes).set_index("tokens"))

# %% [markdown]
# ### Exercise 2: the kinds of a union's tiles
#
# Masks combine with `&` and `|`. Two masks are given as maps of their tiles: 0 dead, 1 partial, 2 full. Return the map
# of the union, as far as the maps can tell: where two partial tiles meet, only the tokens know, and the union is called
# partial.


# %%
def union_of_tiles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # yours: what becomes of dead | partial, partial | full, partial | partial?
    return torch.maximum(first, second)
    # to here


# %%
def tile_map(mask: BlockMask) -> torch.Tensor:
    tiles = mask.to_dense()[0, 0].unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
    return tiles.any(dim=3).any(dim=1).int() + tiles.all(dim=3).all(dim=1).int()


one, other = (parse_mask(pattern, seqlen=64, block_size=16) for pattern in ("document:40,24+causal", "window:20"))
union = union_of_tiles(tile_map(one), tile_map(other))
check(
    (union[0].tolist(), [1, 0, 0, 0], "Partial with partial is partial, dead with dead is dead."),
    (int((union > 0).sum()), (one | other).num_full + (one | other).num_partial, "A tile lives if it lives in either."),
    (union.tolist(), tile_map(one | other).tolist(), "A full tile stays full, whatever the other mask has there."),
)

# %% [markdown]
# ## 3. A dead tile is never read
#
# Put NaN into the keys and values of tiles that no query attends. A kernel that computes every pair and drops the
# masked ones multiplies those NaN by zero, and gets NaN. One that walks the lists gives, bit for bit, what it gave
# before.

# %%
seqlen, block = 256, 64
live = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)  # column 2 is dead
mask = BlockMask.from_blocks(live.to(DEVICE), block)
q, k, v = torch.randn(3, 1, 1, seqlen, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
dead = slice(2 * block, 3 * block)
poisoned_k, poisoned_v = k.clone(), v.clone()
poisoned_k[:, :, dead] = poisoned_v[:, :, dead] = float("nan")

rows = {}
for name, attend in {
    "triton, by lists": lambda q, k, v: flash_attention(q, k, v, block_mask=mask, backend="triton"),
    "every pair, then the mask": lambda q, k, v: attention_reference(q, k, v, mask=mask.to_dense()),
}.items():
    before, after = attend(q, k, v), attend(q, poisoned_k, poisoned_v)
    rows[name] = {"NaN in the output": int(after.isnan().sum()), "bit-identical": torch.equal(before, after)}
assert rows["triton, by lists"]["bit-identical"] and not rows["every pair, then the mask"]["bit-identical"]
display(pd.DataFrame(rows).T)

# %% [markdown]
# ## 4. Density is not speed
#
# Ten percent of the pairs, in four arrangements. How much faster can a kernel be that skips dead tiles?

# %%
gallery(
    {
        "random tiles": "random:0.1",
        "window": "window:26",
        "best keys of each query": "topk:27",
        "random tokens": "tokens:0.1",
    },
    256, 16, "Four masks of about ten percent density; only random tiles and the window leave tiles dead",
)  # fmt: skip
ideals = {}
for pattern in ("random:0.1", "window:410", "topk:430", "tokens:0.1", "tokens:0.01"):
    mask = parse_mask(pattern, seqlen=4096)
    ideals[pattern] = {
        "density": f"{mask.density:.1%}", "live tiles": f"{mask.block_density:.1%}",
        "ideal speed-up": f"{mask.ideal_speed_up:.2f}×",
    }  # fmt: skip
display(pd.DataFrame(ideals).T)

# %% [markdown]
# Random tokens leave no tile of 128 × 128 dead: that takes 16,384 misses in a row, a chance of $0.9^{16384}$. Even one
# percent is far too dense. The best keys of each query (`topk`, causal) leave hardly more dead than the causal mask
# does, whose ideal is 1.94× here too. Who promises a speed-up from density alone has blocks in mind, or has not
# counted.
#
# ## 5. Choosing keys: gather instead of skip
#
# The best keys of a bias lie anywhere, so their mask has few pairs and nearly all tiles. Where all queries share them,
# the way out is to gather: $W$ keys side by side are $W / 128$ tiles. Under the causal rule each query sees the first
# so many of the gathered keys, a staircase.

# %%
seqlen, num_keys = 192, 32
bias = torch.rand(1, 1, seqlen, generator=torch.Generator().manual_seed(1))
best = bias.topk(num_keys).indices.sort().values
scattered = BlockMask.dynamic_topk(bias[:, :, None], num_keys, 16, is_causal=False) & BlockMask.causal(
    seqlen, block_size=16
)
seen = torch.searchsorted(best[0, 0], torch.arange(seqlen), right=True)
gathered = BlockMask.prefix(seen, num_keys, block_size=16)
figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.4), width_ratios=(seqlen, 2 * num_keys))
draw(left, scattered, f"{num_keys} keys where they lie")
draw(right, gathered, "gathered")
show(figure, "The same attended pairs with the chosen keys scattered over all keys, and gathered")

q, k, v = torch.randn(3, 1, 2, seqlen, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
expected = attention_reference(q, k, v, mask=scattered.to_dense())
result = shared_keys_attention(q, k, v, bias, num_keys, is_causal=True, backend="tiled")
error = (result - expected).abs().max().item()
assert error < 1e-12
counts = [mask.num_full + mask.num_partial for mask in (scattered, gathered)]
Markdown(f"{counts[0]} live tiles become {counts[1]}, and the outputs differ by at most {error:.1e}.")

# %% [markdown]
# ## 6. Dilated attention: the best mask is none
#
# At rate $r$ token $i$ attends $j$ where $i \equiv j$ modulo $r$. One pair in $r$, and not one dead tile. Sort the
# tokens by their phase and the same pairs become $r$ dense blocks. That sorting is a reshape to $(w / r, r)$ and a
# transpose.

# %%
seqlen, rate = 128, 4
mask = BlockMask.dilated(seqlen, segment_length=seqlen, dilation_rate=rate, block_size=16)
order = torch.arange(seqlen).view(-1, rate).T.flatten()
dense = mask.to_dense()[0, 0]
sorted_mask = BlockMask.from_dense(dense[order][:, order], 16)
figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.5))
draw(left, mask, f"rate {rate}, tokens in order")
draw(right, sorted_mask, "tokens by phase")
show(figure, "A dilated mask with tokens in their order, where no tile is dead, and by phase, where it is dense blocks")

q, k, v = torch.randn(3, 1, 2, seqlen, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
result = dilated_attention(q, k, v, seqlen, rate, backend="tiled")
error = (result - attention_reference(q, k, v, mask=mask.to_dense())).abs().max().item()
assert error < 1e-12
ideals = [f"{some.ideal_speed_up:.2f}×" for some in (mask, sorted_mask)]
Markdown(f"Ideal by tiles: {ideals[0]} in order, {ideals[1]} by phase. Largest error {error:.1e}.")

# %% [markdown]
# ## 7. Measured on an H200
#
# The interpreter says nothing about speed. These figures are those of the pages
# [block_sparse](../writeup/block_sparse.md) and [dilated_attention](../writeup/dilated_attention.md): the speed over
# dense attention, with what the number of live tiles allows.

# %%
folders = (Path.cwd(), *Path.cwd().parents, Path(cs336_systems.__file__).resolve().parents[1])
root = next((folder for folder in folders if (folder / "pyproject.toml").is_file()), Path.cwd())
book = Book(root, root / "results" / "nvidia-h200")
for problem, name in (("block_sparse", "forward"), ("dilated_attention", "forward_backward")):
    path = book.figure_path(problem, name)
    if path.is_file():
        show_published(path, f"{problem}: speed over dense attention")
    else:
        display(Markdown(f"This checkout holds no figure of `{problem}` on the H200: there is nothing to show here."))

# %% [markdown]
# ## 8. To think about
#
# **1.** A causal mask of $n$ tiles a side has $n (n + 1) / 2$ live ones. What is its ideal speed-up for
# $n = 1, 8, 128$, and why is the measured one of a short sequence smaller still?
#
# <details>
# <summary>Answer</summary>
#
# $2n / (n + 1)$: 1, 1.78, 1.98. Besides, the diagonal tiles do the work of whole ones and read a mask, and the rows are
# of different lengths, so that at the end of the grid some multiprocessors wait for the longest rows.
#
# Check: `[BlockMask.causal(n * 128).ideal_speed_up for n in (1, 8, 128)]`
# </details>
#
# **2.** The lists of the forward and their transposes hold the same tiles. Why can the backward not use the first
# alone?
#
# <details>
# <summary>Answer</summary>
#
# $dQ$ can: its programs own rows. A program of $dK$ and $dV$ owns a column and sums over the queries that see it. With
# row lists it would have to look at every row for its column, or all programs would add into $dK$ and $dV$ by atomics,
# in an order that changes from run to run.
# </details>
#
# **3.** Halve the tile of a sliding window of $w$ keys, far from the ends. What happens to the share of computed pairs
# that are masked?
#
# <details>
# <summary>Answer</summary>
#
# A row of tiles of size $b$ visits about $w / b + 1$ tiles, $b\,(w + b)$ pairs of which $b\,w$ are attended. The wasted
# share is $b / (w + b)$: nearly halved while $b \ll w$. Smaller tiles waste less, and use the tensor cores less well.
#
# Check: `[(m := BlockMask.sliding_window(8192, window=512, block_size=b)).density / m.block_density
# for b in (32, 64, 128)]`
# </details>
