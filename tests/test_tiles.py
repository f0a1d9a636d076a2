"""Tile tables: total, named, within shared memory, refusing what they do not cover."""

from __future__ import annotations

import itertools
import warnings

import pytest

from cs336_systems.attention.tiles import (
    AttentionConfig,
    KernelConfig,
    head_tile,
    parse_configs,
    select_config,
    smaller_config,
    target_of,
    tuning_grid,
)
from cs336_systems.attention.tiles.choice import (
    SHARED_MEMORY_LIMIT_BYTES,
    TABLES,
    TARGET_OF_CAPABILITY,
    Only,
    make_table,
)
from cs336_systems.attention.tiles.kernel_config import KERNELS
from cs336_systems.attention.tiles.search import smallest_tile
from cs336_systems.config import BYTES_PER_ELEMENT
from tests.test_s4_attention import assert_refused

SHAPE = {"batch": 2, "heads": 4, "seqlen_q": 1024, "seqlen_k": 1024}
DQ = KernelConfig.from_name("sm90_dq_128x64_w8_s3")
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("capability", [None, (10, 0), *TARGET_OF_CAPABILITY])
def test_every_shape_has_a_row_that_fits(capability):
    lengths = [(1, 1), (97, 131072), *((2**power, 2**power) for power in range(7, 18))]
    for kernel, dtype, is_causal, head_dim, heads, (seqlen_q, seqlen_k) in itertools.product(
        KERNELS, DTYPES, (True, False), (1, 16, 40, 64, 65, 96, 128, 129, 256), (1, 64), lengths
    ):
        config = select_config(
            kernel, capability=capability, dtype=dtype, is_causal=is_causal, head_dim=head_dim, batch=1, heads=heads,
            seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        )  # fmt: skip
        assert config.kernel == kernel and config.target == target_of(capability)
        estimate = config.shared_memory_bytes(head_dim, BYTES_PER_ELEMENT[dtype])
        assert estimate <= SHARED_MEMORY_LIMIT_BYTES[config.target], (config.name, head_dim, dtype)


@pytest.mark.parametrize("target", TABLES)
def test_rows_of_a_table(target):
    """The kernels of a call round their scores alike: the backward makes those again whose
    log-sum-exp the forward saved, and of 1e5 the last bit is 0.008. Tiles stay clear of the sizes
    that Triton miscompiles.
    """
    table = TABLES[target]
    assert table.keys() == TABLES["sm90"].keys()
    precisions = {}
    for (kernel, element_bytes, columns), row in table.items():
        for config in row.configs:
            assert (config.target, config.kernel) == (target, kernel)
            assert min(config.query_tile, config.key_tile) >= smallest_tile(
                target, element_bytes
            ), config.name
            assert element_bytes == 4 or config.precision == "ieee", config.name
            assert (
                precisions.setdefault((element_bytes, columns), config.precision)
                == config.precision
            ), config.name
            assert KernelConfig.from_name(config.name) == config


def test_sizes_of_tiles():
    assert (
        smallest_tile("sm90", 2) == 64
        and smallest_tile("sm90", 4) == smallest_tile("sm80", 2) == 16
    )
    assert head_tile(16) == head_tile(64) == 64 and head_tile(65) == 128


# Rows that depend on the shape


def test_the_first_exception_that_holds_is_taken():
    table = make_table(
        "sm90",
        {
            ("forward", 2, 64): (
                Only("64x64_w4_s1", is_causal=True, max_queries=512),
                Only("64x64_w8_s1", is_causal=False, max_queries=64),
                Only("64x64_w4_s2", max_programs=131),
                "128x64_w8_s3",
            ),
            ("dkdv", 2, 64): (Only("64x64_w4_s2", is_causal=False), "64x128_w8_s2"),
            ("dq", 2, 64): (
                Only("64x64_w4_s2_tma", tma=True),
                Only("64x64_w4_s3", tma=False),
                "64x64_w4_s4",
            ),
        },
    )

    def chosen(kernel: str, **shape: int | bool) -> str:
        defaults = {
            "batch": 1,
            "heads": 1,
            "seqlen_q": 1,
            "seqlen_k": 1,
            "is_causal": False,
            "tma": False,
        }
        return table[kernel, 2, 64].choose(**(defaults | shape)).spelling

    assert (
        chosen("forward", seqlen_q=512, seqlen_k=512, is_causal=True, heads=1000) == "64x64_w4_s1"
    )
    assert chosen("forward", seqlen_q=513, seqlen_k=512, is_causal=True) == "64x64_w4_s2"
    assert chosen("forward", seqlen_q=512, seqlen_k=512, heads=1000) == "128x64_w8_s3"
    assert chosen("forward", seqlen_q=64, seqlen_k=512, heads=1000) == "64x64_w8_s1"
    assert chosen("forward", seqlen_q=65, seqlen_k=512, heads=1000) == "128x64_w8_s3"
    # 131 and 132 programs of 128 queries, over batch and heads
    assert chosen("forward", seqlen_q=131 * 128) == "64x64_w4_s2"
    assert chosen("forward", seqlen_q=131 * 128 + 1) == "128x64_w8_s3"
    assert chosen("forward", seqlen_q=128, heads=11, batch=12) == "128x64_w8_s3"
    assert chosen("dkdv") == "64x64_w4_s2" and chosen("dkdv", is_causal=True) == "64x128_w8_s2"
    assert chosen("dq", tma=True) == "64x64_w4_s2_tma" and chosen("dq") == "64x64_w4_s3"
    assert [config.spelling for config in table["dkdv", 2, 64].configs] == [
        "64x64_w4_s2",
        "64x128_w8_s2",
    ]


@pytest.mark.parametrize(
    "row", [(Only("64x64_w4_s2", max_queries=1),), ("64x64_w4_s2", "128x64_w4_s2")], ids=str
)
def test_a_row_is_exceptions_and_an_entry_for_all_else(row):
    with pytest.raises(AssertionError, match="exceptions, then all else"):
        make_table("sm90", {("dq", 2, 64): row})


# Around the tables: the grid, and the way down


ARCHITECTURES = ("sm80", "sm86", "sm89", "sm90", "sm100", "portable")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_grid_holds_the_table_and_only_what_fits(arch):
    for kernel, head_dim, dtype in itertools.product(KERNELS, (40, 64, 128, 256), DTYPES):
        grid = tuning_grid(kernel, arch=arch, head_dim=head_dim, dtype=dtype)
        width = BYTES_PER_ELEMENT[dtype]
        assert len(grid) == len(set(grid))
        assert set(TABLES[arch][kernel, width, head_tile(head_dim)].configs) <= set(grid)
        assert {(config.target, config.kernel) for config in grid} == {(arch, kernel)}
        for config in grid:
            assert min(config.query_tile, config.key_tile) >= smallest_tile(arch, width)
            assert config.shared_memory_bytes(head_dim, width) <= SHARED_MEMORY_LIMIT_BYTES[arch], (
                config.name
            )
        precisions = {config.precision for config in grid}
        assert precisions <= ({"ieee"} if width == 2 else {"ieee", "tf32x3"})
        # tiles of 256 columns leave no room for tf32x3 on sm_86
        assert head_dim > 128 or len(precisions) == width // 2


def test_the_grid_reads_by_tma_where_there_is_an_engine_and_it_can():
    def engines(arch: str, head_dim: int, dtype: str) -> set[bool]:
        return {
            config.tma for config in tuning_grid("dq", arch=arch, head_dim=head_dim, dtype=dtype)
        }

    assert engines("sm90", 128, "float16") == engines("sm100", 64, "bfloat16") == {False, True}
    assert engines("sm90", 59, "float16") == {False}  # rows of 118 bytes
    assert engines("sm90", 64, "float32") == engines("sm80", 64, "float16") == {False}


def test_the_row_depends_on_what_tma_can_read():
    shape = {"capability": (9, 0), "head_dim": 64, "dtype": "bfloat16", **SHAPE}
    for kernel in KERNELS:
        with_engine, without = (select_config(kernel, tma=tma, **shape) for tma in (True, False))
        assert with_engine.tma and not without.tma
        assert select_config(kernel, **shape) == without
        for unaware in ({"dtype": "float32"}, {"capability": (8, 0)}, {"capability": None}):
            assert not select_config(kernel, tma=True, **(shape | unaware)).tma


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_configuration_has_smaller_ones_down_to_the_smallest(arch):
    for kernel, (width, dtype) in itertools.product(KERNELS, ((2, "bfloat16"), (4, "float32"))):
        for config in tuning_grid(kernel, arch=arch, head_dim=128, dtype=dtype):
            while (smaller := smaller_config(config, width)) is not None:
                assert smaller.shared_memory_bytes(128, width) < config.shared_memory_bytes(
                    128, width
                )
                for name in ("kernel", "target", "precision", "tma"):
                    assert getattr(smaller, name) == getattr(config, name), name
                config = smaller
            smallest = smallest_tile(arch, width)
            assert (config.query_tile, config.key_tile, config.num_stages) == (
                smallest,
                smallest,
                1,
            )


def test_the_way_down_keeps_what_matters_longest():
    config, steps = KernelConfig.from_name("sm80_dkdv_64x128_w8_s4"), []
    while (smaller := smaller_config(config, 2)) is not None:
        config = smaller
        steps.append(config.spelling.replace("_w8", ""))
    assert steps == [
        "64x128_s3",
        "64x128_s2",
        "64x64_s2",
        "64x64_s1",
        "64x32_s1",
        "32x32_s1",
        "32x16_s1",
        "16x16_s1",
    ]


def test_an_unknown_gpu_gets_the_portable_table_and_one_warning():
    target_of.cache_clear()
    with pytest.warns(UserWarning, match=r"no tile table for compute capability 12\.0"):
        config = select_config("forward", capability=(12, 0), head_dim=64, dtype="float16", **SHAPE)
    assert config.target == "portable"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select_config("dq", capability=(12, 0), head_dim=64, dtype="float16", **SHAPE)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"kernel": "sideways"},
            "ValueError: kernel must be one of forward, dkdv, dq, got 'sideways'",
        ),
        ({"head_dim": 257}, "ValueError: head_dim must be between 1 and 256, got 257"),
        (
            {"dtype": "float64"},
            "ValueError: dtype must be float32, float16 or bfloat16, got 'float64'",
        ),
        ({"seqlen_q": -1}, "ValueError: seqlen_q must not be negative, got -1"),
        (
            {"capability": "sm90"},
            r"TypeError: capability must be a tuple of two ints .* got 'sm90'",
        ),
    ],
)
def test_what_no_table_covers_is_refused(change, message):
    good = {"kernel": "forward", "capability": (9, 0), "head_dim": 64, "dtype": "float16", **SHAPE}
    assert_refused(message, select_config, **good | change)


def test_names_spell_the_configuration():
    forward = KernelConfig.from_name("sm90_forward_128x64_w8_s3")
    assert forward == KernelConfig(
        target="sm90",
        kernel="forward",
        query_tile=128,
        key_tile=64,
        num_warps=8,
        num_stages=3,
        precision="ieee",
    )
    by_tma = KernelConfig.from_name("sm90_forward_64x32_w4_s1_tma_tf32x3")
    assert (
        by_tma.tma and by_tma.precision == "tf32x3" and by_tma.spelling == "64x32_w4_s1_tma_tf32x3"
    )
    assert parse_configs(AttentionConfig(forward=forward, dq=DQ).names) == {
        "forward": forward,
        "dq": DQ,
    }
    assert parse_configs("") == {}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: AttentionConfig(forward=DQ), "ValueError: AttentionConfig.forward must be a forward .*, got sm90_dq"),
    (lambda: AttentionConfig(dq=DQ.name), "TypeError: AttentionConfig.dq must be a KernelConfig or None, got 'sm90_dq"),
    ("sm90_forward_64x64_w8_s3_tf32x3_tma", "ValueError: config must be named like"),
    ("sm90_forward_96x64_w8_s3", "ValueError: .*query_tile must be one of 16, 32, .*, 4096, got 96"),
    ("sm90_dq_64x64_w1024_s1", "ValueError: .*num_warps must be one of 1, 2, 4, 8, 16, 32, got 1024"),
    ("sm90_dq_64x64_w4_s0", "ValueError: .*num_stages must be one of 1, 2, .*, 8, got 0"),
    ("sm90_forward_64x64_w8_s3_tf32", "ValueError: .*precision must be one of ieee, tf32x3"),
])  # fmt: skip
def test_what_is_no_configuration_is_refused(make, message):
    assert_refused(message, make if callable(make) else lambda: KernelConfig.from_name(make))
