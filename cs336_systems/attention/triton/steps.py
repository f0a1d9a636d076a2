"""The steps that every attention kernel is made of; each is written once and inlined where it is
called.

  tile_of_program   which tile, batch element and head a program works on
  Tiles, Head, Problem                what kernels are told, under the names of the paper
  head_of, load_rows, store_rows      memory: by pointers, or by Hopper's copy engine (TMA) through a descriptor
  key_bounds, visible_pairs           which keys a query tile sees whole, in part and not at all; the mask of a cut tile
  accumulate        matmul, with float32 sums taken care of
  online_softmax    the running maximum and sum of a query tile          (FlashAttention-2, algorithm 1, line 9)
  store_queries     O = accumulator / l and L = m + log l                (lines 12 to 15)
  load_lse_and_delta                  of a query tile                    (algorithm 2, line 9)
  recompute_probabilities             P = exp(S - L) in the backward     (algorithm 2, line 11)
  fold_keys         one key tile into dQ                                 (algorithm 2, lines 14 and 15)
  fold_queries      one query tile into dK and dV                        (algorithm 2, lines 12, 14 and 16)
  start_next, await_previous          kernels of one call that overlap

Kernels differ only in which tiles they visit: a range (`forward`, `backward`), the lists of a block
mask
(`lists`), a document's range (`documents`). Exponentials are base 2 with scale · log₂e folded into
one
multiply-add; L is stored in natural log. In the backward a kernel multiplies dO Vᵀ before it
exponentiates: the tensor cores then work while the exponentials run.

Accumulators take most of a thread's 255 registers. In 16 bit, loops without room for more have
`disable_licm`: what the compiler would hoist out of them, it would spill. Where tiles come by
pointers, L and delta are loaded behind the first two matmuls for the same reason.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Tiles(NamedTuple):
    """What a kernel's tiles are, known when it is compiled."""

    D: int  # the head dim
    D_TILE: int  # its columns in a tile, a power of two
    Q_TILE_SIZE: int
    K_TILE_SIZE: int
    PRECISION: str  # of dots of float32
    Q_BLOCK: int = 0  # of a block mask's tiles
    K_BLOCK: int = 0


class Head(NamedTuple):
    """Where `load_rows` finds the rows of one head."""

    X: tl.tensor  # a pointer to row 0, or under TMA a descriptor of (batch, heads, rows, D)
    batch: tl.tensor
    head: tl.tensor
    strides: tl.tuple  # to the next batch element, head, row and column


class Problem(NamedTuple):
    """The numbers of one sequence; ZERO is a zero that the compiler cannot see, see `accumulate`."""

    N_QUERIES: tl.tensor
    N_KEYS: tl.tensor
    scale_log2: tl.tensor  # what multiplies scores, times log₂e
    ZERO: tl.tensor


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Of both the first 12 bits, whose product with 12 other bits float32 holds exactly, and the rest.
LOG2_E_FIRST, LOG2_E_REST = tl.constexpr(1.4423828125), tl.constexpr(0.00031222838896340736)
LN_2_FIRST, LN_2_REST = tl.constexpr(0.693115234375), tl.constexpr(3.1946184945309417e-05)
# The backward's numbers of a query row, L in base 2 and delta, are padded to a multiple of so many
# rows, at least a tile. Rows past the end have L = +inf, hence P = 0, and the loads need no bounds,
# which Triton would not pipeline.
ROW_PADDING = tl.constexpr(256)
# Where running maxima start. Finite, so that a tile whose scores are all -inf gives exp2(-inf - m)
# = 0 and not exp2(-inf + inf) = NaN; any finite score replaces it.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next kernel start once all programs of this one are here or have ended, if it is
    launched to overlap.
    """
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel before this one has ended and its results are visible. No load is moved
    up past it.
    """
    if OVERLAP:
        gdc_wait()


@triton.jit
def tile_of_program(num_tiles, N_HEADS, HEADS_TOGETHER, LAST_TILE_FIRST: tl.constexpr):
    """(tile, batch_head, batch, head) of this program; batch_head counts the heads of all batch
    elements.

    HEADS_TOGETHER heads at a time, whose rows the L2 cache holds; among them one tile index after
    the other, so that the longest causal tiles start first and the short ones fill the tail.
    """
    num_batch_heads = tl.num_programs(0) // num_tiles
    first_head = tl.program_id(0) // (HEADS_TOGETHER * num_tiles) * HEADS_TOGETHER
    width = tl.minimum(HEADS_TOGETHER, num_batch_heads - first_head)
    position = tl.program_id(0) - first_head * num_tiles
    batch_head = first_head + position % width
    tile = position // width
    if LAST_TILE_FIRST:
        tile = num_tiles - 1 - tile
    batch, head = batch_head // N_HEADS, batch_head % N_HEADS
    return tile, batch_head.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)


@triton.jit
def padded_rows(N_QUERIES):
    """Rows of L and delta that a head of N_QUERIES queries has in memory."""
    return tl.cdiv(N_QUERIES, ROW_PADDING) * ROW_PADDING


@triton.jit
def head_of(X, strides, batch, head):
    """The rows of one head of a tensor, or of its descriptor, which is told the head by each load."""
    if isinstance(X, tl.tensor_descriptor):
        return Head(X, batch, head, strides)
    else:
        return Head(X + batch * strides[0] + head * strides[1], batch, head, strides)


@triton.jit
def head_from(first, head):
    """The head `head` of the batch element of which `first` is head 0."""
    if isinstance(first.X, tl.tensor_descriptor):
        return Head(first.X, first.batch, head, first.strides)
    else:
        return Head(first.X + head * first.strides[1], first.batch, head, first.strides)


@triton.jit
def load_rows(
    rows_of, first_row, num_rows, ROWS: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The (ROWS, D_TILE) tile of a head from `first_row` on; columns past D, and with MASKED rows
    past num_rows, are zero. Under TMA the copy engine computes addresses and fills with zeros.
    """
    if isinstance(rows_of.X, tl.tensor_descriptor):
        tile = rows_of.X.load([rows_of.batch.to(tl.int32), rows_of.head.to(tl.int32), first_row, 0])
        return tile.reshape(ROWS, TILES.D_TILE)
    else:
        rows = first_row + tl.arange(0, ROWS)
        columns = tl.arange(0, TILES.D_TILE)
        stride_s, stride_d = rows_of.strides[2], rows_of.strides[3]
        pointers = rows_of.X + rows.to(tl.int64)[:, None] * stride_s + columns[None, :] * stride_d
        if MASKED and TILES.D != TILES.D_TILE:
            return tl.load(
                pointers, mask=(rows < num_rows)[:, None] & (columns < TILES.D)[None, :], other=0.0
            )
        elif MASKED:
            return tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
        elif TILES.D != TILES.D_TILE:
            return tl.load(pointers, mask=(columns < TILES.D)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def load_lse_and_delta(L_head, delta_head, query_rows, problem, BOUNDED: tl.constexpr):
    """L, in base 2, and delta of query rows; BOUNDED: they do not have the last tile's rows in
    memory.
    """
    if BOUNDED:
        L_log2 = tl.load(
            L_head + query_rows, mask=query_rows < problem.N_QUERIES, other=float("inf")
        )
        delta = tl.load(delta_head + query_rows, mask=query_rows < problem.N_QUERIES, other=0.0)
    else:
        L_log2 = tl.load(L_head + query_rows)
        delta = tl.load(delta_head + query_rows)
    return L_log2, delta


@triton.jit
def store_rows(base_ptr, tile, rows, num_rows, stride_s, TILES: tl.constexpr):
    """Store `tile` (ROWS, D_TILE) at `rows`, in the memory's dtype, without what lies past num_rows
    and D.
    """
    columns = tl.arange(0, TILES.D_TILE)
    pointers = base_ptr + rows.to(tl.int64)[:, None] * stride_s + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < TILES.D)[None, :]
    tl.store(pointers, tile.to(base_ptr.dtype.element_ty), mask=inside)


@triton.jit
def key_bounds(first_query, N_KEYS, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """(full_keys, end_keys) of a query tile: keys before the first are seen by all of it, those
    from the second on by none. The first is a multiple of K_TILE_SIZE.
    """
    full_keys = N_KEYS // TILES.K_TILE_SIZE * TILES.K_TILE_SIZE
    end_keys = N_KEYS
    if IS_CAUSAL:
        full_keys = tl.minimum(
            full_keys, (first_query + 1) // TILES.K_TILE_SIZE * TILES.K_TILE_SIZE
        )
        end_keys = tl.minimum(N_KEYS, first_query + TILES.Q_TILE_SIZE)
    return full_keys, end_keys


@triton.jit
def visible_pairs(query_rows, key_rows, N_KEYS, IS_CAUSAL: tl.constexpr):
    """Which query sees which key of a tile, (Q_TILE_SIZE, K_TILE_SIZE), or (1, K_TILE_SIZE) where
    all see the same.
    """
    visible = (key_rows < N_KEYS)[None, :]
    if IS_CAUSAL:
        visible = visible & (query_rows[:, None] >= key_rows[None, :])
    return visible


@triton.jit
def accumulate(accumulator, left, right, ZERO, TILES: tl.constexpr):
    """accumulator + left @ right.

    Tensor cores take the accumulator as an operand. A float32 dot on the FMA units would chain
    every product of the whole sequence onto it, whose rounding grows with the length; so there each
    tile's product is summed on its own. ZERO is a zero that the compiler cannot see: a literal one
    is fused back into that chain.
    """
    if left.dtype == tl.float32:
        product = tl.dot(
            left, right, tl.zeros_like(accumulator) + ZERO, input_precision=TILES.PRECISION
        )
        return accumulator + product
    else:
        return tl.dot(left, right, accumulator)


@triton.jit
def online_softmax(S, m, l, scale_log2):
    """Take a tile of raw scores (Q_TILE_SIZE, K_TILE_SIZE) into the running maximum m, in base 2,
    and sum l.

    Returns the tile's unnormalised probabilities, the factor that rescales what was accumulated
    before, m and l.
    """
    m_new = tl.maximum(m, tl.max(S, axis=1) * scale_log2)
    P = tl.math.exp2(S * scale_log2 - m_new[:, None])
    rescale = tl.math.exp2(m - m_new)
    return P, rescale, m_new, l * rescale + tl.sum(P, axis=1)


@triton.jit
def recompute_probabilities(S, L, scale_log2, SINGLE: tl.constexpr):
    """The probabilities of raw scores S whose rows' log-sum-exps are L, as the preprocess leaves
    it; both broadcast.

    L is in base 2. SINGLE, for float32 inputs: it is not, since it would be rounded once more, and
    with large scores that is more than the contract allows. Then its first bits are subtracted in
    base 2 without an error, and the rest after them. Probabilities are kept at 1: of scores as
    large as those may be, L is rounded by more than 1.
    """
    if SINGLE:
        first, rest = split_bits(L)
        exponents = (S * scale_log2 - first * LOG2_E_FIRST) - (first * LOG2_E_REST + rest * LOG2_E)
        exponents = tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        exponents = S * scale_log2 - L
    return tl.math.exp2(exponents)


@triton.jit
def natural_lse(m, l, SINGLE: tl.constexpr):
    """The natural log-sum-exp of a maximum m, in base 2, and a sum l.

    SINGLE, for float32 inputs: rounded once. With large scores each rounding is as large as the
    contract's bounds.
    """
    if SINGLE:
        first, rest = split_bits(m)
        return first * LN_2_FIRST + (first * LN_2_REST + (rest + tl.math.log2(l)) * LN_2)
    else:
        return (m + tl.math.log2(l)) * LN_2


@triton.jit
def split_bits(x):
    """(first, rest) of float32 numbers: the first 12 bits and what is left; nothing is left of an
    infinity.
    """
    first = (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    return first, tl.where(x == first, 0.0, x - first)


@triton.jit
def store_queries(
    accumulator, m, l, O_base, L_base, query_rows, N_QUERIES, stride_os, TILES: tl.constexpr,
    ROWS_WITHOUT_KEYS: tl.constexpr,
):  # fmt: skip
    """Normalise once and store O and L; a row that saw no key has l = 0, hence O = 0 and L = -inf."""
    normaliser = tl.where(l == 0.0, 1.0, l) if ROWS_WITHOUT_KEYS else l
    store_rows(O_base, accumulator / normaliser[:, None], query_rows, N_QUERIES, stride_os, TILES)
    L = natural_lse(m, normaliser, O_base.dtype.element_ty == tl.float32)
    if ROWS_WITHOUT_KEYS:
        L = tl.where(l == 0.0, float("-inf"), L)
    tl.store(L_base + query_rows, L, mask=query_rows < N_QUERIES)


@triton.jit
def fold_keys(dQ, P, dP, K, delta, ZERO, TILES: tl.constexpr):
    """Add one key tile, of probabilities P (Q_TILE_SIZE, K_TILE_SIZE) and dP = dO Vᵀ, to dQ, which
    lacks its scale.
    """
    dS = P * (dP - delta[:, None])
    return accumulate(dQ, dS.to(K.dtype), K, ZERO, TILES)


@triton.jit
def fold_queries(dK, dV, P_T, dP_T, Q, dO, delta, ZERO, TILES: tl.constexpr):
    """Add one query tile to dK, which lacks its scale, and dV.

    Probabilities are transposed, (K_TILE_SIZE, Q_TILE_SIZE), so that Pᵀ and dSᵀ are left operands
    as they come.
    """
    dS_T = P_T * (dP_T - delta[None, :])
    dV = accumulate(dV, P_T.to(dO.dtype), dO, ZERO, TILES)
    dK = accumulate(dK, dS_T.to(Q.dtype), Q, ZERO, TILES)
    return dK, dV
