"""Instructions that Gluon has no function for, and the axes of an accumulator's threads.

warp_fence        keeps what follows behind the arithmetic on its operand
mma_layout        the layout in which a warp group's wgmma leaves a tile
as_block          a tile of shared memory in the shape that TMA moves
by_threads        an accumulator with an axis for the threads that share a row, and two for the
                  numbers of each
raise_maxima      the rows' maxima, joined between threads only if one of the warp has to rise
rescale_rows      an accumulator times its rows' factors, if any of the warp's differs from 1
hide_columns      -inf in the columns past a row's last one
keep_attended     -inf in the columns whose bit is 0
zero_unattended   0 in the columns whose bit is 0
tma_add           adds a tile into memory
meet_consumers    a barrier of two warp groups
wait_at           one side of a barrier: go on once all its threads are here or have passed
                  `arrive_at`
arrive_at         the other side: be counted, and go on at once
wait_for_turn     go on once a counter in memory has come to a number
pass_turn         count it up, once what TMA was asked to add is in memory
meet_warps        a barrier of the warps of one partition
"""

from __future__ import annotations

import struct

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@gluon.constexpr_function
def mma_layout(columns):
    """Return the register layout in which a warp group's wgmma leaves a (64, columns) tile."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def as_block(tile, desc):
    """Return a (rows, columns) tile of shared memory in the shape of `desc`'s blocks."""
    return tile._reinterpret(desc.dtype, desc.block_shape, desc.layout)


# Each thread of a warp group holds two rows of a 64-row tile, g and g + 8 of its warp's 16, so sums
# come in pairs. The mask is 0xffffffff whatever the sums are, as no population count reaches 64;
# but ptxas does not deduce that.
_WARP_FENCE = gl.constexpr("""{
.reg .b32 mask;
or.b32 mask, $2, $3;
popc.b32 mask, mask;
shr.u32 mask, mask, 6;
sub.u32 mask, mask, 1;
bar.warp.sync mask;
mov.b32 $0, $2;
mov.b32 $1, $3;
}""")


@gluon.jit
def warp_fence(row_sums):
    """Return `row_sums` unchanged, after a barrier of the warp that depends on the sums.

    Waiting for wgmma is no memory access, so ptxas moves it up past exponentials that do not depend
    on it, and the overlap of the two is lost. ptxas does not move the wait past a barrier, nor this
    barrier past what its mask is computed from.
    """
    return gl.inline_asm_elementwise(
        _WARP_FENCE, "=r,=r,r,r", [row_sums], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def by_threads(x):
    """Return an accumulator (64, n) of wgmma, or a tensor in its layout, as (64, n / 8, 4, 2).

    The third axis has the four threads that share a row; along the second and the fourth all
    numbers are one thread's.
    """
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def along_rows(x, accumulator):
    """Return x (64, 4), a number for each row and thread, broadcast to `by_threads(accumulator)`.

    The result has the shape and layout of that `accumulator`.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, accumulator.type.layout))
    return gl.broadcast(
        accumulator, gl.expand_dims(gl.expand_dims(gl.convert_layout(x, LAYOUT), 1), 3)
    )[1]


def _raise_asm(lag: float) -> str:
    """Return the assembly of `raise_maxima`, with `lag` as a constant.

    $0 and $1 are the results for a thread's two rows: their maxima so far, $4 and $5, or the
    largest scores of the rows, of which the thread has $2 and $3 itself.
    """
    limit = "0f" + struct.pack(">f", lag).hex()
    join = "\n".join(
        f"shfl.sync.bfly.b32 other, {row}, {distance}, 0x1f, 0xffffffff; "
        f"max.f32 {row}, {row}, other;"
        for distance in (1, 2)
        for row in ("first", "second")
    )
    return f"""{{
.reg .pred rises;
.reg .f32 first, second, first_limit, second_limit, other;
mov.f32 first, $2;
mov.f32 second, $3;
add.f32 first_limit, $4, {limit};
add.f32 second_limit, $5, {limit};
mov.f32 $0, $4;
mov.f32 $1, $5;
setp.gt.f32 rises, first, first_limit;
setp.gt.or.f32 rises, second, second_limit, rises;
vote.sync.any.pred rises, rises, 0xffffffff;
@!rises bra.uni UNCHANGED;
{join}
setp.gt.f32 rises, first, first_limit;
selp.f32 $0, first, $4, rises;
setp.gt.f32 rises, second, second_limit;
selp.f32 $1, second, $5, rises;
UNCHANGED:
}}"""


# How far, in base 2, a score may exceed the running maximum before the maximum is raised. P is then
# up to 2^8, which float16 holds with the same relative rounding as any number, and its sums are
# float32.
LAG = 8.0
_RAISE = gl.constexpr(_raise_asm(LAG))


@gluon.jit
def raise_maxima(own, m):
    """Return the running maxima m (64, 4), raised to the largest scores that exceed them by LAG.

    `own` (64, 4) is the largest score that each thread has of a row. m and the result are the same
    for the four threads of a row. The warp votes whether any maximum rises. If none does, which is
    mostly so, all of it branches over the shuffles that join the four threads.
    """
    return gl.inline_asm_elementwise(
        _RAISE, "=&f,=&f,f,f,f,f", [own, gl.convert_layout(m, own.type.layout)],
        dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _rescale_asm(n):
    """Return the assembly that multiplies a thread's `n` accumulators by its two rows' factors.

    The factors come with each accumulator, and the first and the third are one of each row.
    Operands are numbered outputs first, then all inputs, those tied to an output too: the factors
    start at 2n.
    """
    multiply = "\n".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"""{{
.reg .pred any;
setp.neu.f32 any, ${2 * n}, 0f3F800000;
setp.neu.or.f32 any, ${2 * n + 2}, 0f3F800000, any;
vote.sync.any.pred any, any, 0xffffffff;
@!any bra.uni UNCHANGED;
{multiply}
UNCHANGED:
}}"""


@gluon.constexpr_function
def _constraints_in_place(n, kind):
    """Return the constraints of `n` float32 operands changed in place, and `n` inputs more.

    The further inputs are of a `kind`: `f` float32, `r` int32.
    """
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + [kind] * n)


@gluon.constexpr_function
def _numbers_of_a_thread(columns):
    """Return how many numbers of a warp group's accumulator one instruction takes of a thread.

    These are all that the thread has, columns / 2, but at most 64.
    """
    return min(columns // 2, 64)


@gluon.jit
def rescale_rows(accumulator, factor):
    """Return accumulator (64, 32 to 256) times its rows' factors, unless all of a warp are 1.

    `factor` (64, 4) has a number for each row and thread. A vote and a branch that the whole warp
    takes: 3 instructions in place of 64 multiplications.
    """
    factor = gl.reshape(along_rows(factor, by_threads(accumulator)), accumulator.shape)
    factor = gl.convert_layout(factor, accumulator.type.layout)
    N: gl.constexpr = _numbers_of_a_thread(accumulator.shape[1])
    return gl.inline_asm_elementwise(
        _rescale_asm(N), _constraints_in_place(N, "f"), [accumulator, factor],
        dtype=gl.float32, is_pure=True, pack=N,
    )  # fmt: skip


@gluon.constexpr_function
def _hide_asm(n):
    """Return the assembly that sets those of a thread's `n` scores to -inf whose column is hidden.

    The columns are 0, 1, 8, 9, 16, ... past the thread's first, each pair in both rows. Each score
    comes with the number of columns that its row sees to the right of the thread's first column,
    which is taken from the first score of each row.
    """
    lines = []
    for i in range(n):
        column, right = i // 4 * 8 + i % 2, 2 * n + i % 4 // 2 * 2
        lines.append(
            f"setp.ge.s32 seen, ${right}, {column}; selp.f32 ${i}, ${i}, 0fFF800000, seen;"
        )
    return "{\n.reg .pred seen;\n" + "\n".join(lines) + "\n}"


@gluon.jit
def hide_columns(S, last_column):
    """Return scores S (64, 64 or 128) with -inf where a column comes after its row's `last_column`.

    A comparison with a constant and a selection for each score follow one another. With `gl.where`
    all comparisons come first, and for want of so many predicates ptxas packs them into bits and
    takes those apart again.
    """
    columns = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout))[None, :]
    right = (
        last_column[:, None] - columns
    )  # number of columns to the right of this one that are seen
    N: gl.constexpr = _numbers_of_a_thread(S.shape[1])
    return gl.inline_asm_elementwise(
        _hide_asm(N), _constraints_in_place(N, "r"), [S, right],
        dtype=gl.float32, is_pure=True, pack=N,
    )  # fmt: skip


@gluon.constexpr_function
def _keep_asm(n, otherwise):
    """Return the assembly that sets those of a thread's `n` numbers to `otherwise` whose bit is 0.

    A word has the bits of 32 columns of a row, of which a thread has 0, 1, 8, 9, ... past its first
    one. The word comes with each of its numbers, shifted to the thread's first column, and is taken
    from the first of them.
    """
    lines = []
    for i in range(n):
        bit, word = i // 4 % 4 * 8 + i % 2, 2 * n + i // 16 * 16 + i % 4 // 2 * 2
        lines.append(f"and.b32 bit, ${word}, {1 << bit}; setp.ne.b32 seen, bit, 0;")
        lines.append(f"selp.f32 ${i}, ${i}, {otherwise}, seen;")
    return "{\n.reg .pred seen;\n.reg .b32 bit;\n" + "\n".join(lines) + "\n}"


@gluon.jit
def by_words(S):
    """Return scores S (64, n), or a tensor in their layout, as (64, n / 32 words, 32)."""
    return gl.reshape(S, [S.shape[0], S.shape[1] // 32, 32])


@gluon.jit
def load_words(words, S):
    """Load a mask's bits (64, n / 32) from shared memory, to the threads that hold their scores.

    `words` is in shared memory. S (64, n) gives the layout of the scores.
    """
    return words.load(gl.SliceLayout(2, by_words(S).type.layout))


@gluon.jit
def _by_numbers(words, S):
    """Return the word of each number of S, shifted to its thread's first column.

    `words` (64, n / 32) are those of `load_words`; S and the result are (64, n). A thread's first
    column differs from another thread's only in bits 1 and 2.
    """
    key = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, by_words(S).type.layout)))[
        None, None, :
    ]
    words, shift = gl.broadcast(gl.expand_dims(words, 2), key & 6)
    return gl.convert_layout(gl.reshape(words >> shift, S.shape), S.type.layout)


@gluon.jit
def _where_attended(x, words, OTHERWISE: gl.constexpr):
    """Return x with OTHERWISE, a float32 constant of PTX, where its bit in `words` is 0."""
    N: gl.constexpr = _numbers_of_a_thread(x.shape[1])
    return gl.inline_asm_elementwise(
        _keep_asm(N, OTHERWISE), _constraints_in_place(N, "r"), [x, _by_numbers(words, x)],
        dtype=gl.float32, is_pure=True, pack=N,
    )  # fmt: skip


@gluon.jit
def keep_attended(S, words):
    """Return scores S (64, 128) with -inf where their bit in `words` (64, 4) is 0."""
    return _where_attended(S, words, "0fFF800000")


@gluon.jit
def zero_unattended(P, words):
    """Return P (64, 64 or 128) with 0 where their bit in `words` (64, 2 or 4) is 0."""
    return _where_attended(P, words, "0f00000000")


@builtin
def tma_add(desc, coordinates, tile, _semantic=None):
    """Start adding a tile of shared memory into memory, atomically; `tma.store_wait` waits for it.

    Addition is element by element. Apart from that, it works as `tma.async_copy_shared_to_global`
    does: Gluon has the instruction, and no name for it.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, tile.handle
    )


@gluon.jit
def meet_consumers(BARRIER: gl.constexpr):
    """Make two warp groups, 256 threads, wait for each other at a named barrier of the hardware."""
    gl.inline_asm_elementwise(
        f"bar.sync {BARRIER}, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_at(barrier, THREADS: gl.constexpr):
    """Wait until THREADS threads, these included, are at the named barrier or have arrived there.

    A thread arrives without waiting by `arrive_at`.
    """
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(barrier)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive_at(barrier, THREADS: gl.constexpr):
    """Count these threads at the named barrier of THREADS threads, and go on at once."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(barrier)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


_WAIT_FOR_TURN = gl.constexpr("""{
.reg .pred early;
.reg .b32 now;
AGAIN:
ld.acquire.gpu.global.u32 now, [$1];
setp.ne.u32 early, now, $2;
@early bra AGAIN;
fence.proxy.async.global;
mov.u32 $0, now;
}""")
_PASS_TURN = gl.constexpr("""{
.reg .pred first;
.reg .b32 lane;
cp.async.bulk.wait_group 0;
fence.proxy.async.global;
bar.warp.sync 0xffffffff;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
@first red.release.gpu.global.add.u32 [$1], 1;
mov.u32 $0, 0;
}""")


@gluon.jit
def wait_for_turn(turns, turn):
    """Make a warp wait until the counter at `turns` is `turn`, and see what was added before."""
    gl.inline_asm_elementwise(
        _WAIT_FOR_TURN, "=r,l,r", [turns, gl.to_tensor(turn)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def pass_turn(turns):
    """Make a warp add 1 to the counter at `turns`, once all its TMA additions are in memory."""
    gl.inline_asm_elementwise(_PASS_TURN, "=r,l", [turns], dtype=gl.int32, is_pure=False, pack=1)


@builtin
def meet_warps(_semantic=None):
    """Make the warps of a partition wait for each other, at the barrier that the compiler uses too.

    Gluon has renamed this from `thread_barrier` in 3.6 to `barrier` in 3.7.
    """
    return _semantic.debug_barrier()
