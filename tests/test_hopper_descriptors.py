"""What the Hopper kernels' launcher tells the copy engine, without a GPU:
`attention/hopper/descriptors.py`.
"""

import math
import re

import pytest
import torch

pytest.importorskip("hypothesis")  # a GPU machine may lack it
pytest.importorskip(
    "cs336_systems.attention.hopper.forward", reason="this triton has no Gluon for Hopper"
)

from hypothesis import example, given
from hypothesis import strategies as st

from cs336_systems.attention.hopper import descriptors, forward
from cs336_systems.compiler.offline import compile_all, compiled_launches
from cs336_systems.measure.stages import TOTAL, time_stages


def rows(*shape):
    return torch.randn(shape).bfloat16()


def each_dimension(*values):
    return st.tuples(*[st.sampled_from(values)] * 4)


@given(
    shape=st.tuples(
        *[st.integers(1, 3)] * 2, st.integers(1, 9), st.sampled_from((1, 40, 59, 64, 70, 111, 128))
    ),
    spare=each_dimension(0, 0, 2, 8),
    steps=each_dimension(1, 1, 2),
    order=st.permutations(range(4)) | st.just([0, 1, 2, 3]),
    offset=st.sampled_from((0, 0, 1, 8)),
    expanded=st.sets(st.integers(0, 3), max_size=1),
)
# aligned rows of 70, 72 apart
@example((2, 3, 9, 70), (0, 0, 0, 2), (1, 1, 1, 1), [0, 1, 2, 3], 0, set())
# aligned at first, rows 66 apart
@example((2, 3, 9, 64), (0, 0, 0, 2), (1, 1, 1, 1), [0, 1, 2, 3], 0, set())
@example((2, 3, 9, 64), (0, 0, 0, 8), (2, 2, 2, 1), [0, 2, 1, 3], 8, set())  # read as it lies
# odd strides of dimensions of one
@example((1, 1, 7, 64), (0, 0, 0, 0), (1, 1, 1, 1), [0, 1, 2, 3], 0, set())
def test_tma_reads_a_tensor_of_any_strides_and_what_it_cannot_read_is_copied(
    shape, spare, steps, order, offset, expanded
):
    """Rows are padded to whole 16 bytes, slices of aligned rows too: read as it lies, a head dim of
    70 had contiguous results of 70 columns, which TMA cannot write.
    """
    sizes = [(size + more) * step for size, more, step in zip(shape, spare, steps)]
    stored = rows(math.prod(sizes) + offset)[offset:].view(
        [sizes[dimension] for dimension in order]
    )
    x = stored.permute([order.index(dimension) for dimension in range(4)])
    x = x[tuple(slice(0, size * step, step) for size, step in zip(shape, steps))]
    for dimension in expanded:
        x = x.narrow(dimension, 0, 1).expand(shape)
    # of one element any will do
    odd = [stride if size > 1 else 5 for size, stride in zip(shape[:3], x.stride())]
    x = x.as_strided(shape, [*odd, x.stride(3)])
    strides = [stride for size, stride in zip(shape[:3], x.stride()) if size > 1]
    is_aligned = x.data_ptr() % 16 == 0 and all(
        stride > 0 and stride % 8 == 0 for stride in strides
    )

    found = descriptors.readable(x)
    assert (found is x) == (is_aligned and x.stride(3) == 1 and shape[3] % 8 == 0)
    width = -(-shape[3] // 8) * 8
    assert found.shape == (*shape[:3], width) and descriptors.padded_width(x) == width
    assert torch.equal(found[..., : shape[3]], x) and not found[..., shape[3] :].any()
    descriptor = descriptors.tile_descriptor(found, 64)
    assert descriptor.base.data_ptr() == found.data_ptr() and descriptor.base.data_ptr() % 16 == 0
    assert descriptor.shape == list(found.shape) and descriptor.block_shape == [
        1,
        1,
        64,
        128 if width > 64 else 64,
    ]
    assert descriptor.strides[3] == 1 and all(
        stride > 0 and stride % 8 == 0 for stride in descriptor.strides[:3]
    )
    for size, stride, told in zip(shape[:3], found.stride(), descriptor.strides):
        assert told == stride or size == 1


@pytest.fixture
def launched(monkeypatch):
    calls = []
    monkeypatch.setattr(forward, "launch", lambda *call: calls.append(call))
    return calls


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("head_dim", "config"), [(59, ""), (64, ""), (128, ""), (64, "hopper_forward_192x128_tiles"),
                             (64, "hopper_forward_64x128_tiles"), (64, "hopper_forward_64x128_dynamic")],
)  # fmt: skip
def test_the_launcher_hands_over_the_call(launched, head_dim, config, is_causal):
    """What TMA cannot read is copied; programs that share a multiprocessor start with a share of
    its registers, and a dynamic order counts from a zero.
    """
    q, k, results = (
        rows(2, 6, 300, head_dim),
        rows(2, 1, 200, head_dim).expand(2, 3, 200, head_dim),
        [],
    )
    samples = time_stages(
        lambda: results.extend(forward.hopper_forward(q, k, k, is_causal, 0.5, config)),
        device="cpu", num_samples=1, warmup=0,
    )  # fmt: skip
    assert list(samples) == ["forward", TOTAL]
    output, lse = results
    assert output.shape == q.shape and output.is_contiguous() and output.dtype == q.dtype
    assert lse.shape == (2, 6, 300) and lse.dtype == torch.float32
    *counted, (kernel, grid, (*tiles, lse_out, counter), numbers, options) = launched
    num_queries, num_keys, heads, group, batch_heads, together, scale_log2 = numbers
    assert (num_queries, num_keys, heads, group, batch_heads) == (300, 200, 6, 2, 12)
    assert 1 <= together <= 12 and scale_log2 == pytest.approx(0.5 * 1.4426950408889634)
    assert lse_out is lse
    tile = 64 if head_dim == 59 else head_dim
    assert [x.block_shape for x in tiles] == [[1, 1, rows, tile] for rows in (64, 128, 128, 64)]
    for told, x in zip(tiles, (q, k, k)):
        assert torch.equal(told.base[..., :head_dim], x) and told.shape == list(told.base.shape)
        assert (told.base is x) == (x is q and head_dim != 59) and 0 not in told.strides
    assert tiles[3].shape[:3] == [2, 6, 300]
    plan = options["PLAN"]
    assert (plan.head_tile, plan.is_causal) == (tile, is_causal) and (
        plan.dynamic == ("dynamic" in config) or not config
    )
    assert kernel is forward.hopper_forward_kernel and grid[0] >= 1 and options["num_warps"] == 4
    assert options.get("maxnreg") == (None if "192" in config or head_dim == 128 else 128)
    if counted:
        ((first, _, (zeroed,), *_),) = counted
        assert first is forward.hopper_counter_kernel and counter is zeroed
    assert bool(counted) == plan.dynamic


def compile_rescaling(_):
    from tests.hopper_instructions import rescale_kernel

    pointer = torch.empty(8192 + 64, device="meta")
    (kernel,) = compiled_launches(
        "sm90", "rescale_kernel", lambda: rescale_kernel[(1,)](pointer, num_warps=4)
    )
    return kernel.asm["ptx"]


def test_rescaling_multiplies_by_the_rows_factors():
    """The accumulator's operands were counted once, as outputs: it was multiplied by itself."""
    ((_, ptx),) = compile_all(["sm90"], compile_rescaling, jobs=1)
    lines = list(map(str.strip, ptx.splitlines()))
    start = next(i for i, line in enumerate(lines) if line.startswith("@!any bra.uni UNCHANGED"))
    tests = [
        re.match(r"setp\.neu\.(?:or\.)?f32 any, (%r\d+),", line)
        for line in lines[start - 3 : start - 1]
    ]
    factors = [match[1] for match in tests]
    products = [
        re.match(r"mul\.f32 (%r\d+), (%r\d+), (%r\d+);", line)
        for line in lines[start + 1 : start + 65]
    ]
    assert [match[1] for match in products] == [match[2] for match in products]
    assert len({match[1] for match in products}) == 64
    # A thread holds two elements of its first row, two of its second, and so on.
    assert [match[3] for match in products] == [factors[0], factors[0], factors[1], factors[1]] * 16
    assert factors[0] != factors[1] and not set(factors) & {match[1] for match in products}
