"""Configurations: the sizes the handout gives, what is refused and with which words."""

import pytest

from cs336_systems.config import (
    MODEL_SIZES,
    AttentionShape,
    ModelCase,
    ModelConfig,
    Precision,
    RunConfig,
    proxy_model,
)

MODEL = {"name": "test", "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4}
SHAPE = {
    "batch": 1, "heads": 4, "seqlen_q": 8, "seqlen_k": 16, "head_dim": 32, "is_causal": True, "dtype": "float32",
}  # fmt: skip


def test_model_sizes_are_the_handouts():
    fields = ("name", "d_model", "d_ff", "num_layers", "num_heads")
    assert {
        size: tuple(getattr(config, name) for name in fields)
        for size, config in MODEL_SIZES.items()
    } == {
        name: (name, *shape)
        for name, *shape in (
            ("small", 768, 3072, 12, 12),
            ("medium", 1024, 4096, 24, 16),
            ("large", 1280, 5120, 36, 20),
            ("xl", 2560, 10240, 32, 32),
            ("10b", 4608, 12288, 50, 36),
            ("xl-2025", 1600, 6400, 48, 25),
            ("2.7b-2025", 2560, 10240, 32, 32),
            ("8b", 4096, 11008, 34, 32),
        )
    }


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_proxy_keeps_proportions(size):
    full, proxy = MODEL_SIZES[size], proxy_model(size)
    assert proxy.name == f"{size}-proxy"
    assert (proxy.d_model, proxy.head_dim) == (256, 64)
    assert proxy.num_layers == max(2, round(full.num_layers * 256 / full.d_model))
    # d_ff is rounded to multiples of 64
    assert abs(proxy.d_ff / proxy.d_model - full.d_ff / full.d_model) <= 32 / 256
    assert proxy.vocab_size == full.vocab_size


CASE = {"model": ModelConfig(**MODEL), "batch": 1, "attention": "reference"}
RUN = {"scale": "tiny", "device": "cpu"}
REFUSED = [  # what is made of which fields with which change, and the message
    *(
        (
            made,
            fields,
            {field: value},
            rf"{made.__name__}\.{field} must be a positive int, got {value!r}",
        )
        for made, fields, names in (
            (
                ModelConfig,
                MODEL,
                ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length"),
            ),
            (
                AttentionShape,
                SHAPE,
                ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "kv_heads"),
            ),
            (ModelCase, CASE, ("batch",)),
            (RunConfig, RUN, ("cell_timeout_s",)),
        )
        for field in names
        for value in (0, 1.5, True)
    ),
    (
        ModelConfig,
        MODEL,
        {"num_heads": 3},
        "num_heads must divide d_model into even head dims, got d_model=64, num_he",
    ),
    (
        ModelConfig,
        MODEL,
        {"d_model": 12},
        "num_heads must divide d_model into even head dims, got d_model=12, num_he",
    ),
    (ModelConfig, MODEL, {"rope_theta": 0.0}, r"ModelConfig\.rope_theta must be positive, got "),
    (
        ModelConfig,
        MODEL,
        {"rope_theta": float("nan")},
        r"ModelConfig\.rope_theta must be positive, got ",
    ),
    (
        AttentionShape,
        SHAPE,
        {"dtype": "fp8"},
        r"AttentionShape\.dtype must be one of float64, .*, got .fp8.",
    ),
    (
        AttentionShape,
        SHAPE,
        {"kv_heads": 3},
        r"AttentionShape\.kv_heads must divide heads=4, got 3",
    ),
    (
        Precision,
        {},
        {"parameters": "half"},
        r"Precision\.parameters must be one of float64, .*, got 'half'",
    ),
    (
        Precision,
        {},
        {"autocast": "float32"},
        r"Precision\.autocast must be one of float16, bfloat16, got 'float32'",
    ),
    (ModelCase, CASE, {"warmup": -1}, r"ModelCase\.warmup must not be negative, got -1"),
    (
        RunConfig,
        RUN,
        {"scale": "large"},
        r"RunConfig\.scale must be one of tiny, smoke, handout, got 'large'",
    ),
    (RunConfig, RUN, {"device": "tpu"}, r"RunConfig\.device must be one of cpu, cuda, got 'tpu'"),
    (
        RunConfig,
        RUN,
        {"cell_timeout_s": 86_401},
        r"cell_timeout_s must be at most 86400 \(a day\), got 86401",
    ),
    (
        RunConfig,
        RUN,
        {"seed": 2**63},
        r"RunConfig\.seed must be from 0 to 9223372036854775807, got 92233720368547758",
    ),
    (
        RunConfig,
        RUN,
        {"seed": -1},
        r"RunConfig\.seed must be from 0 to 9223372036854775807, got -1",
    ),
]


def test_what_is_refused_is_named():
    for made, fields, change, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            made(**{**fields, **change})


def test_edges_are_taken():
    assert ModelCase(**CASE, warmup=0).warmup == 0
    assert AttentionShape(**SHAPE, kv_heads=2).kv_heads == 2
