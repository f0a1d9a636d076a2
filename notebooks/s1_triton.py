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
# # Twelve Triton puzzles
#
# From one load to a tile of FlashAttention's backward. It takes about two hours and needs no GPU: the kernels run in
# Triton's interpreter, the same source executed with NumPy.
#
# A Triton kernel is a function that a **grid** of programs runs. All programs run the same lines. `tl.program_id(0)`
# says which one this is. A program computes on **tiles**: small blocks of a tensor with lengths that are powers of two.
# It reads a tile with `tl.load`, from a tile of addresses, and writes one with `tl.store`. An address is a pointer, the
# kernel's argument, plus the number of an element. Nothing checks an address: a GPU reads or overwrites whatever is
# there. A **mask** switches lanes of a load or store off.
#
# Each puzzle has a blank, `...`, between `yours` and `to here`. Put your lines there, run the cell and the one behind
# it: it answers "right", or "not yet" with a hint. The answer is folded below. A wrong kernel does no harm here:
# accesses out of bounds are refused and named, and a loop without an end is stopped.
# [The glossary](../docs/glossary.md) explains the terms.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import triton
import triton.language as tl

from cs336_systems.learning import examples
from cs336_systems.learning.puzzles import check_puzzle, show_launch, show_puzzle

# %% [markdown]
# ## The picture of a kernel
#
# The next cell runs a vector addition of 200 elements in blocks of 64. Its author has forgotten the masks. Stored
# elements have the colour of their program, loaded ones are blue, elements out of bounds red. The link opens a page
# that steps through every program, forward and back, with the arrow keys: lines, tiles, values.

# %%
show_launch(examples.add_without_masks)

# %% [markdown]
# FlashAttention's forward under a causal mask: 4 tiles of 16 queries, for each of 2 heads. The first keys are loaded by
# every program, so they are bluest; the last ones by one. Open the page and click on `K_ptr`: the map shows a
# staircase, the tiles that each program skips. In puzzle 11 you build it.

# %%
show_launch(examples.flash_forward)

# %% [markdown]
# ## 1. Load
#
# The first thing that a program does is to find its own elements. `tl.arange(0, 16)` is the tile 0, 1, …, 15. A
# pointer plus a tile of numbers is a tile of addresses.
#
# *Wanted:* `x` has 64 elements, the grid has 4 programs, `BLOCK` is 16. Program 0 takes the first 16 elements,
# program 1 the next 16, and so on: `out[i] = 10 * x[i]`.


# %%
@triton.jit
def load_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    # yours: the numbers of this program's elements, and the elements
    offsets = ...
    x = ...
    # to here
    tl.store(out_ptr + offsets, 10 * x)


# %%
check_puzzle("load", load_kernel)
show_puzzle("load", load_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
# x = tl.load(x_ptr + offsets)
# ```
# </details>

# %% [markdown]
# ## 2. Mask
#
# Lengths are seldom whole numbers of blocks. The last block then reaches past the end, and its last lanes must do
# nothing: `tl.load(addresses, mask=condition)` and `tl.store(addresses, values, mask=condition)` skip the lanes whose
# condition is false. A load that lacks the mask reads what lies behind the tensor, a store overwrites it.
#
# *Wanted:* `out[i] = x[i] * x[i]` for all `i < length`, with `length` 50 and 7.


# %%
@triton.jit
def mask_kernel(x_ptr, out_ptr, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # yours: load, square, store, and nothing behind the end
    ...
    # to here


# %%
check_puzzle("mask", mask_kernel)
show_puzzle("mask", mask_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# inside = offsets < length
# x = tl.load(x_ptr + offsets, mask=inside)
# tl.store(out_ptr + offsets, x * x, mask=inside)
# ```
# </details>

# %% [markdown]
# ## 3. Add
#
# A tile may have two dimensions. `x[:, None]` makes a column of a vector, `y[None, :]` a row, and their sum has every
# pair, as in NumPy. A matrix lies in memory row by row: element (i, j) of a matrix of n columns has the number
# `i*n+j`. A column too many is therefore no address out of bounds but the next row's first element.
#
# *Wanted:* `out[i, j] = x[i] + y[j]`, by tiles of `TILE` × `TILE`. `tl.program_id(0)` counts tiles downwards,
# `tl.program_id(1)` across; neither dimension is whole.


# %%
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, num_rows, num_columns, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + rows, mask=rows < num_rows)
    y = tl.load(y_ptr + columns, mask=columns < num_columns)
    # yours: the tile of sums, the numbers of its elements in out, and which of them exist
    sums = ...
    places = ...
    inside = ...
    # to here
    tl.store(out_ptr + places, sums, mask=inside)


# %%
check_puzzle("add", add_kernel)
show_puzzle("add", add_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# sums = x[:, None] + y[None, :]
# places = rows[:, None] * num_columns + columns[None, :]
# inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
# ```
# </details>

# %% [markdown]
# ## 4. Row sum
#
# `tl.sum(x, axis=0)` adds up a tile. Two things spoil a sum. A lane that a mask switches off holds anything, unless
# the load says what: `other=0.0`. And a sum in float16 overflows beyond 65,504 and loses small addends long before,
# so sums are taken in float32: `x.to(tl.float32)`.
#
# *Wanted:* `out[row]`, the sum of row `row` of a float16 matrix, in float32. A program has one row. Rows are `stride`
# elements apart, which may be more than `num_columns`: the matrix may be a part of a larger one.


# %%
@triton.jit
def row_sum_kernel(x_ptr, out_ptr, stride, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    # yours: the sum of the row
    total = ...
    # to here
    tl.store(out_ptr + row, total)


# %%
check_puzzle("row_sum", row_sum_kernel)
show_puzzle("row_sum", row_sum_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# x = tl.load(x_ptr + row * stride + columns, mask=columns < num_columns, other=0.0)
# total = tl.sum(x.to(tl.float32), axis=0)
# ```
# </details>

# %% [markdown]
# ## 5. Softmax
#
# softmax(x)ᵢ = exp(xᵢ) / Σⱼ exp(xⱼ). exp overflows in float32 from 89 on. A common factor changes no ratio, so the
# row's maximum is subtracted first: the largest exponent is 0. What must a lane behind the end hold, so that it
# changes neither the maximum nor the sum?
#
# *Wanted:* the softmax of each row, a program a row. Rows are `num_columns` apart.


# %%
@triton.jit
def softmax_kernel(x_ptr, out_ptr, num_columns, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    places = tl.program_id(0) * num_columns + columns
    inside = columns < num_columns
    # yours: the row, and its softmax
    x = ...
    p = ...
    # to here
    tl.store(out_ptr + places, p, mask=inside)


# %%
check_puzzle("softmax", softmax_kernel)
show_puzzle("softmax", softmax_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# x = tl.load(x_ptr + places, mask=inside, other=float("-inf"))
# e = tl.exp(x - tl.max(x, axis=0))
# p = e / tl.sum(e, axis=0)
# ```
# </details>

# %% [markdown]
# ## 6. Matmul
#
# `tl.dot(a, b)` multiplies two tiles on the tensor cores and adds up in float32, whatever dtype the tiles have.
# Without `input_precision="ieee"` float32 operands are rounded to TF32, which keeps 10 of their 23 bits.
#
# *Wanted:* C = A B by one program. A is (M, K), B is (K, N), all row by row without gaps.


# %%
@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    # yours: the tiles of A and of B, and their product
    a = ...
    b = ...
    c = ...
    # to here
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], c)


# %%
check_puzzle("matmul", matmul_kernel)
show_puzzle("matmul", matmul_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
# b = tl.load(b_ptr + inner[:, None] * N + columns[None, :])
# c = tl.dot(a, b, input_precision="ieee")
# ```
# </details>

# %% [markdown]
# ## 7. Tiled matmul
#
# A large product does not fit one program. Each program has one tile of C, and walks over the inner dimension: a tile
# of A times a tile of B, added to what it has. Each element of A is then read N / TILE times, not N times: that is
# what tiles are for.
#
# *Wanted:* C = A B, (M, K) times (K, N). M and N are whole numbers of tiles, K is not.


# %%
@triton.jit
def tiled_matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    c = tl.zeros([TILE, TILE], tl.float32)
    # yours: the loop over tiles of the inner dimension
    ...
    # to here
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], c)


# %%
check_puzzle("tiled_matmul", tiled_matmul_kernel)
show_puzzle("tiled_matmul", tiled_matmul_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# for first in range(0, K, TILE):
#     inner = first + tl.arange(0, TILE)
#     a = tl.load(a_ptr + rows[:, None] * K + inner[None, :], mask=inner[None, :] < K, other=0.0)
#     b = tl.load(b_ptr + inner[:, None] * N + columns[None, :], mask=inner[:, None] < K, other=0.0)
#     c = tl.dot(a, b, acc=c, input_precision="ieee")
# ```
#
# `acc=c` adds in the tensor cores. A mask on one of the two tiles would leave the numbers right and still read past
# the end of the other.
# </details>

# %% [markdown]
# ## 8. Online softmax
#
# A row that is longer than a tile is read in parts. The maximum of all is known at the end only, and yet one pass is
# enough: keep the running maximum m and the running sum l = Σ exp(x − m). If a part raises the maximum to m′, all
# that was added up was too large by exp(m′ − m), so l is multiplied by exp(m − m′). This is the online softmax
# (Milakov & Gimelshein 2018), the core of FlashAttention.
#
# *Wanted:* log Σ exp(x) of each row. A program has `ROWS` rows at once, so m and l are vectors.


# %%
@triton.jit
def online_softmax_kernel(x_ptr, lse_ptr, num_columns, ROWS: tl.constexpr, TILE: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for first in range(0, num_columns, TILE):
        columns = first + tl.arange(0, TILE)
        places = rows[:, None] * num_columns + columns[None, :]
        x = tl.load(x_ptr + places, mask=columns[None, :] < num_columns, other=float("-inf"))
        # yours: the new maximum, and l with this part in it
        m_new = ...
        l = ...
        # to here
        m = m_new
    tl.store(lse_ptr + rows, m + tl.log(l))


# %%
check_puzzle("online_softmax", online_softmax_kernel)
show_puzzle("online_softmax", online_softmax_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# m_new = tl.maximum(m, tl.max(x, axis=1))
# l = tl.exp(m - m_new) * l + tl.sum(tl.exp(x - m_new[:, None]), axis=1)
# ```
# </details>

# %% [markdown]
# ## 9. Attention row
#
# Attention of one query: scores s = scale · K q, probabilities p = softmax(s), output o = pᵀ V. With the online
# softmax the output is a running sum as well: o is rescaled as l is, and divided by l once, at the end.
#
# *Wanted:* o for each query, a program a query, over tiles of keys. A key behind the end must have no share.


# %%
@triton.jit
def attention_row_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, num_keys, scale, D: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, D)
    q = tl.load(q_ptr + tl.program_id(0) * D + columns)
    m = float("-inf")
    l = 0.0
    o = tl.zeros([D], tl.float32)
    for first_key in range(0, num_keys, TILE):
        keys = first_key + tl.arange(0, TILE)
        inside = keys < num_keys
        places = keys[:, None] * D + columns[None, :]
        k = tl.load(k_ptr + places, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + places, mask=inside[:, None], other=0.0)
        # yours: the scores of these keys, the new maximum, and l and o with them
        s = ...
        m_new = ...
        l = ...
        o = ...
        # to here
        m = m_new
    tl.store(o_ptr + tl.program_id(0) * D + columns, o / l)


# %%
check_puzzle("attention_row", attention_row_kernel)
show_puzzle("attention_row", attention_row_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# s = tl.where(inside, scale * tl.sum(k * q[None, :], axis=1), float("-inf"))
# m_new = tl.maximum(m, tl.max(s, axis=0))
# p = tl.exp(s - m_new)
# rescale = tl.exp(m - m_new)
# l = rescale * l + tl.sum(p, axis=0)
# o = rescale * o + tl.sum(p[:, None] * v, axis=0)
# ```
# </details>

# %% [markdown]
# ## 10. Flash forward
#
# A program has a tile of queries in place of one, so that each tile of keys is read once for all of them, and the
# sums become two `tl.dot`: S = Q Kᵀ · scale and O = P V. `tl.trans(K)` transposes a tile. The log-sum-exp L = m + log
# l is kept for the backward. This is algorithm 1 of FlashAttention-2 (Dao 2023).
#
# *Wanted:* O and L. All tiles are whole.


# %%
@triton.jit
def flash_forward_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    N_KEYS, scale,
    D: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
):  # fmt: skip
    queries = tl.program_id(0) * Q_TILE_SIZE + tl.arange(0, Q_TILE_SIZE)
    columns = tl.arange(0, D)
    Q = tl.load(Q_ptr + queries[:, None] * D + columns[None, :])  # (Q_TILE_SIZE, D)
    m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    O = tl.zeros([Q_TILE_SIZE, D], tl.float32)
    for first_key in range(0, N_KEYS, K_TILE_SIZE):
        keys = first_key + tl.arange(0, K_TILE_SIZE)
        K = tl.load(K_ptr + keys[:, None] * D + columns[None, :])  # (K_TILE_SIZE, D)
        V = tl.load(V_ptr + keys[:, None] * D + columns[None, :])  # (K_TILE_SIZE, D)
        # yours: fold this tile into m_new, l and O
        m_new = ...
        l = ...
        O = ...
        # to here
        m = m_new
    tl.store(O_ptr + queries[:, None] * D + columns[None, :], O / l[:, None])
    tl.store(L_ptr + queries, m + tl.log(l))


# %%
check_puzzle("flash_forward", flash_forward_kernel)
show_puzzle("flash_forward", flash_forward_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# S = tl.dot(Q, tl.trans(K), input_precision="ieee") * scale  # (Q_TILE_SIZE, K_TILE_SIZE)
# m_new = tl.maximum(m, tl.max(S, axis=1))
# P = tl.exp(S - m_new[:, None])
# rescale = tl.exp(m - m_new)
# l = rescale * l + tl.sum(P, axis=1)
# O = tl.dot(P, V, acc=rescale[:, None] * O, input_precision="ieee")
# ```
#
# `attention/triton/first.py` is this kernel with strides, batches and a causal mask.
# </details>

# %% [markdown]
# ## 11. Causal skip
#
# Under a causal mask query i sees the keys 0 to i. Tiles of keys behind the last query of the tile are **dead**: all
# of their scores are −∞. A mask gives the right numbers and reads them all the same; a loop that ends earlier saves
# almost half of the work. Only the tiles on the diagonal need the mask.
#
# *Wanted:* the same O and L, and no program loads a dead tile. A tile of queries may be longer than one of keys, and
# there may be fewer keys than queries.


# %%
@triton.jit
def causal_skip_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    N_KEYS, scale,
    D: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
):  # fmt: skip
    first_query = tl.program_id(0) * Q_TILE_SIZE
    queries = first_query + tl.arange(0, Q_TILE_SIZE)
    columns = tl.arange(0, D)
    Q = tl.load(Q_ptr + queries[:, None] * D + columns[None, :])
    m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    O = tl.zeros([Q_TILE_SIZE, D], tl.float32)
    # yours: the loop ends before this key
    end_keys = ...
    # to here
    for first_key in range(0, end_keys, K_TILE_SIZE):
        keys = first_key + tl.arange(0, K_TILE_SIZE)
        K = tl.load(K_ptr + keys[:, None] * D + columns[None, :])
        V = tl.load(V_ptr + keys[:, None] * D + columns[None, :])
        S = tl.dot(Q, tl.trans(K), input_precision="ieee") * scale
        S = tl.where(queries[:, None] >= keys[None, :], S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, axis=1))
        P = tl.exp(S - m_new[:, None])
        rescale = tl.exp(m - m_new)
        l = rescale * l + tl.sum(P, axis=1)
        O = tl.dot(P, V, acc=rescale[:, None] * O, input_precision="ieee")
        m = m_new
    tl.store(O_ptr + queries[:, None] * D + columns[None, :], O / l[:, None])
    tl.store(L_ptr + queries, m + tl.log(l))


# %%
check_puzzle("causal_skip", causal_skip_kernel)
show_puzzle("causal_skip", causal_skip_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# end_keys = tl.minimum(N_KEYS, first_query + Q_TILE_SIZE)
# ```
# </details>

# %% [markdown]
# ## 12. Backward of one tile
#
# The backward computes P again, from S and the saved L, in place of keeping it: P = exp(S − L) is normalised already.
# With delta = rowsum(dO ∘ O), which is given,
#
# dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − delta), dQ = dS K · scale, dK = dSᵀ Q · scale.
#
# *Wanted:* dQ, dK and dV of one tile of queries and one of keys.


# %%
@triton.jit
def backward_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, delta_ptr, dQ_ptr, dK_ptr, dV_ptr,
    scale,
    N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, N)
    places = rows[:, None] * D + tl.arange(0, D)[None, :]
    Q, K, V = tl.load(Q_ptr + places), tl.load(K_ptr + places), tl.load(V_ptr + places)
    dO = tl.load(dO_ptr + places)
    L, delta = tl.load(L_ptr + rows), tl.load(delta_ptr + rows)
    # yours: P, then the gradients
    dV = ...
    dQ = ...
    dK = ...
    # to here
    tl.store(dQ_ptr + places, dQ)
    tl.store(dK_ptr + places, dK)
    tl.store(dV_ptr + places, dV)


# %%
check_puzzle("backward", backward_kernel)
show_puzzle("backward", backward_kernel)

# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# S = tl.dot(Q, tl.trans(K), input_precision="ieee") * scale
# P = tl.exp(S - L[:, None])
# dV = tl.dot(tl.trans(P), dO, input_precision="ieee")
# dP = tl.dot(dO, tl.trans(V), input_precision="ieee")
# dS = P * (dP - delta[:, None])
# dQ = tl.dot(dS, K, input_precision="ieee") * scale
# dK = tl.dot(tl.trans(dS), Q, input_precision="ieee") * scale
# ```
#
# The whole backward adds such tiles up: dK and dV over tiles of queries, dQ over tiles of keys. See
# `attention/triton/backward.py`.
# </details>

# %% [markdown]
# ## Next
#
# - Your own kernel: write a function that launches it, in a file `mine.py`, then run
#   `cs336-systems trace mine:function`.
# - [s4_attention](s4_attention.ipynb) derives FlashAttention, its backward and what it costs.
# - `attention/triton/first.py` is puzzles 10 and 11 as a kernel of this package; `attention/triton/forward.py` has
#   what a fast one needs.
