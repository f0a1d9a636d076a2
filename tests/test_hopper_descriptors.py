"""What the Hopper kernels' launcher tells the copy engine, without a GPU: `attention/hopper/descriptors.py`."""

import re

import pytest
import torch

from cs336_systems.attention.compilation import compile_all, compiled_launches
from cs336_systems.measure.stages import TOTAL, time_stages

descriptors = pytest.importorskip("cs336_systems.attention.hopper.descriptors")
forward = pytest.importorskip("cs336_systems.attention.hopper.forward")

SHAPE = (2, 3, 40, 64)


def rows(*shape):
    return torch.randn(shape).bfloat16()


READABLE = {
    "contiguous": lambda: rows(*SHAPE),
    "heads inside": lambda: rows(2, 40, 3, 64).transpose(1, 2),
    "fused": lambda: rows(2, 40, 3, 192)[..., 64:128].transpose(1, 2),
    "every other row": lambda: rows(4, 6, 80, 64)[::2, ::2, ::2],
}
COPIED = {
    "expanded": lambda: rows(2, 1, 40, 64).expand(SHAPE),
    "constant": lambda: torch.ones((), dtype=torch.bfloat16).expand(SHAPE),
    "transposed": lambda: rows(2, 3, 64, 40).mT,
    "off alignment": lambda: rows(2 * 3 * 40 * 64 + 1)[1:].view(SHAPE),
    "rows off alignment": lambda: rows(2, 3, 40, 67)[..., :64],
}


@pytest.mark.parametrize("make", READABLE.values(), ids=READABLE)
def test_what_tma_can_read_is_not_copied(make):
    x = make()
    assert descriptors.readable(x) is x
    descriptor = descriptors.tile_descriptor(x, 64)
    assert (descriptor.shape, descriptor.strides) == (list(x.shape), list(x.stride()))
    assert descriptor.block_shape == [1, 1, 64, 64]
    assert descriptor.base.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_what_tma_cannot_read_is_copied(make):
    x = make()
    copy = descriptors.readable(x)
    assert copy.is_contiguous() and copy.data_ptr() != x.data_ptr()
    assert torch.equal(copy, x)
    assert descriptors.readable(copy) is copy


def test_a_slice_of_aligned_rows_is_padded_too():
    """Read as it lies, a head dim of 70 had contiguous results of 70 columns, which TMA cannot write."""
    x = rows(2, 3, 40, 72)[..., :70]
    assert torch.equal(descriptors.readable(x), torch.nn.functional.pad(x, (0, 2)))


@pytest.mark.parametrize("head_dim, width", [(1, 8), (40, 40), (59, 64), (111, 112), (128, 128)])
def test_rows_are_padded_to_whole_16_bytes(head_dim, width):
    x = rows(2, 3, 5, head_dim)
    padded = descriptors.readable(x)
    assert padded.shape == (2, 3, 5, width) and descriptors.padded_width(x) == width
    assert torch.equal(padded[..., :head_dim], x)
    assert not padded[..., head_dim:].any()
    assert (padded is x) == (width == head_dim)


def test_a_dimension_of_one_element_has_an_aligned_stride():
    x = rows(3, 7, 64)[:, None].transpose(0, 1)[:, :1]  # (1, 1, 7, 64)
    odd = x.as_strided((1, 1, 7, 64), (3, 5, 64, 1))
    assert descriptors.readable(odd) is odd
    assert descriptors.tile_descriptor(odd, 64).strides == [8, 8, 64, 1]


@pytest.fixture
def launched(monkeypatch):
    calls = []
    monkeypatch.setattr(forward, "launch", lambda *call: calls.append(call))
    return calls


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [59, 64, 128])
def test_the_launcher_hands_over_the_call(launched, head_dim, is_causal):
    q, k, v = rows(2, 6, 300, head_dim), rows(2, 3, 200, head_dim), rows(2, 3, 200, head_dim)
    output, lse = forward.hopper_forward(q, k, v, is_causal, 0.5)
    assert output.shape == q.shape and output.is_contiguous() and output.dtype == q.dtype
    assert lse.shape == (2, 6, 300) and lse.dtype == torch.float32
    *_, (kernel, grid, (q_tiles, k_tiles, v_tiles, o_tiles, lse_out, _), numbers, options) = launched
    num_queries, num_keys, heads, group, batch_heads, together, scale_log2 = numbers
    assert (num_queries, num_keys, heads, group, batch_heads) == (300, 200, 6, 2, 12)
    assert 1 <= together <= 12
    assert scale_log2 == pytest.approx(0.5 * 1.4426950408889634)
    assert lse_out is lse
    tile = 64 if head_dim == 59 else head_dim
    assert [x.block_shape for x in (q_tiles, k_tiles, v_tiles, o_tiles)] == [
        [1, 1, n, tile] for n in (64, 128, 128, 64)
    ]
    assert [x.shape[:3] for x in (q_tiles, k_tiles, v_tiles, o_tiles)] == [
        [2, 6, 300], [2, 3, 200], [2, 3, 200], [2, 6, 300]
    ]  # fmt: skip
    plan = options["PLAN"]
    assert (plan.head_tile, plan.is_causal) == (tile, is_causal)
    assert kernel is forward.hopper_forward_kernel and grid[0] >= 1 and options["num_warps"] == 4


def test_a_dynamic_order_counts_from_a_zero(launched):
    q = rows(1, 2, 300, 64)
    forward.hopper_forward(q, q, q, True, 0.5, "hopper_forward_64x128_dynamic")
    (first, _, (zeroed,), *_), (_, _, (*_, counter), _, options) = launched
    assert first is forward.hopper_counter_kernel and counter is zeroed and options["PLAN"].dynamic


def test_the_launch_is_a_stage(launched):
    q = rows(1, 2, 100, 64)
    samples = time_stages(lambda: forward.hopper_forward(q, q, q, True, 0.5), device="cpu", num_samples=1, warmup=0)
    assert list(samples) == ["forward", TOTAL] and len(launched) == 1


def test_the_launcher_copies_what_tma_cannot_read(launched):
    q = rows(1, 2, 100, 64)
    k = rows(1, 1, 100, 64).expand(1, 2, 100, 64)
    forward.hopper_forward(q, k, k, True, 0.5)
    ((_, _, (q_tiles, k_tiles, *_), *_),) = launched
    assert q_tiles.base.data_ptr() == q.data_ptr()
    assert k_tiles.base.data_ptr() != k.data_ptr() and k_tiles.strides[1:] == [100 * 64, 64, 1]


@pytest.mark.parametrize(
    ("name", "limits"), [("hopper_forward_64x128_tiles", [128]), ("hopper_forward_192x128_tiles", []), ("", [128])]
)
def test_programs_that_share_a_multiprocessor_start_with_a_share_of_its_registers(launched, name, limits):
    q = rows(1, 2, 100, 64)
    forward.hopper_forward(q, q, q, True, 0.5, name)
    ((*_, options),) = launched
    assert [value for option, value in options.items() if option == "maxnreg"] == limits


def compile_rescaling(_):
    from tests.hopper_instructions import rescale_kernel

    pointer = torch.empty(8192 + 64, device="meta")
    (kernel,) = compiled_launches("sm90", "rescale_kernel", lambda: rescale_kernel[(1,)](pointer, num_warps=4))
    return kernel.asm["ptx"]


def test_rescaling_multiplies_by_the_rows_factors():
    """The accumulator's operands were counted once, as outputs: it was multiplied by itself."""
    ((_, ptx),) = compile_all(["sm90"], compile_rescaling, jobs=1)
    lines = list(map(str.strip, ptx.splitlines()))
    start = next(i for i, line in enumerate(lines) if line.startswith("@!any bra.uni UNCHANGED"))
    tests = [re.match(r"setp\.neu\.(?:or\.)?f32 any, (%r\d+),", line) for line in lines[start - 3 : start - 1]]
    factors = [match[1] for match in tests]
    products = [re.match(r"mul\.f32 (%r\d+), (%r\d+), (%r\d+);", line) for line in lines[start + 1 : start + 65]]
    assert [match[1] for match in products] == [match[2] for match in products]
    assert len({match[1] for match in products}) == 64
    # A thread holds two elements of its first row, two of its second, and so on.
    assert [match[3] for match in products] == [factors[0], factors[0], factors[1], factors[1]] * 16
    assert factors[0] != factors[1] and not set(factors) & {match[1] for match in products}
