"""Tile tables: total, named, within shared memory, refusing what they do not cover."""

from __future__ import annotations

import itertools
import warnings

import pytest

from cs336_systems.attention.tiles import AttentionConfig, KernelConfig, head_tile, parse_configs, select_config
from cs336_systems.attention.tiles.config import KERNELS
from cs336_systems.attention.tiles.select import TARGET_OF_CAPABILITY, target_of
from cs336_systems.attention.tiles.tables import SHARED_MEMORY_LIMIT_BYTES, TABLES
from cs336_systems.config import BYTES_PER_ELEMENT

SHAPE = {"batch": 2, "heads": 4, "seqlen_q": 1024, "seqlen_k": 1024}
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("capability", [None, (10, 0), *TARGET_OF_CAPABILITY])
def test_every_shape_has_a_row_that_fits(capability):
    for kernel, head_dim, dtype in itertools.product(KERNELS, range(1, 257), DTYPES):
        config = select_config(kernel, capability=capability, head_dim=head_dim, dtype=dtype, **SHAPE)
        assert config.kernel == kernel
        estimate = config.shared_memory_bytes(head_dim, BYTES_PER_ELEMENT[dtype])
        assert estimate <= SHARED_MEMORY_LIMIT_BYTES[config.target], (config.name, head_dim, dtype)
        assert config == select_config(kernel, capability=capability, head_dim=head_dim, dtype=dtype, **SHAPE)


def test_16_bit_tiles_on_sm_90_stay_clear_of_the_miscompiled_sizes():
    for (_, element_bytes, _), config in TABLES["sm90"].items():
        assert element_bytes == 4 or min(config.query_tile, config.key_tile) >= 64, config.name
    assert head_tile(16) == head_tile(64) == 64 and head_tile(65) == 128


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
        ({"kernel": "sideways"}, "kernel must be one of forward, dkdv, dq, got 'sideways'"),
        ({"head_dim": 257}, "head_dim must be between 1 and 256, got 257"),
        ({"head_dim": 0}, "head_dim must be between 1 and 256, got 0"),
        ({"dtype": "float64"}, "dtype must be float32, float16 or bfloat16, got 'float64'"),
    ],
)
def test_what_no_table_covers_is_refused(change, message):
    arguments = {"kernel": "forward", "capability": (9, 0), "head_dim": 64, "dtype": "float16", **SHAPE, **change}
    with pytest.raises(ValueError, match=message):
        select_config(arguments.pop("kernel"), **arguments)


def test_names_spell_the_configuration():
    for table in TABLES.values():
        for config in table.values():
            assert KernelConfig.from_name(config.name) == config
    forward, dq = TABLES["sm90"]["forward", 2, 64], TABLES["sm90"]["dq", 2, 64]
    assert forward.name == "sm90_forward_128x64_w8_s3"
    assert parse_configs(AttentionConfig(forward=forward, dq=dq).names) == {"forward": forward, "dq": dq}
    assert parse_configs("") == {}
    for name in ("sm90", "sm90_forward_128x64", "sm90_forward_0x64_w8_s3", "sm90_forward_96x64_w8_s3"):
        with pytest.raises(ValueError, match="config|query_tile"):
            KernelConfig.from_name(name)
    with pytest.raises(ValueError, match="AttentionConfig.forward must be a forward configuration, got sm90_dq"):
        AttentionConfig(forward=dq)
    with pytest.raises(ValueError, match="num_stages must be positive"):
        KernelConfig(target="sm90", kernel="dq", query_tile=64, key_tile=64, num_warps=4, num_stages=0)
    with pytest.raises(ValueError, match="kernel must be one of"):
        KernelConfig(target="sm90", kernel="up", query_tile=64, key_tile=64, num_warps=4, num_stages=1)
