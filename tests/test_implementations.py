"""The registry of attention implementations: each entry is whole and says why it does not run."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention_reference
from cs336_systems.attention.choose import BACKENDS
from cs336_systems.bench.spec import Unsupported
from cs336_systems.book.figures import COLORS
from cs336_systems.config import AttentionShape, DTypeName
from cs336_systems.inputs import attention_inputs
from cs336_systems.subjects import attention_builders, implementations, mask_builders
from cs336_systems.subjects.implementations import (
    IMPLEMENTATIONS,
    REGISTRY,
    Implementation,
    build,
    check_runs,
)


def shape_of(dtype: DTypeName) -> AttentionShape:
    return AttentionShape(
        batch=1, heads=2, seqlen_q=64, seqlen_k=64, head_dim=64, is_causal=True, dtype=dtype
    )


def lacking(name: str, entry: Implementation) -> set[str]:
    """Return the fields that the entry `name` lacks or has to no effect, and a missing colour."""
    builders = [builder for builder in (entry.plain, entry.masked) if builder is not None]
    backends = {
        backend
        for builder in builders
        if isinstance(builder, partial) and (backend := builder.keywords.get("backend")) in BACKENDS
    }
    module, _, attribute = entry.needs_package.partition(":")
    whole = {
        "plain or masked": bool(builders),
        "plain": entry.plain is not None or not (entry.is_stage or entry.is_tiny),
        "masked": entry.masked is not None or not entry.no_cpu_masks,
        "library": bool(entry.library) or not entry.needs_package,
        "is_stage": not (entry.is_stage and entry.library),
        "needs_package": not entry.needs_package or bool(module and attribute),
        "backend": backends == {entry.backend} - {""},
        "COLORS in book/figures.py": name in COLORS,
    }
    return {field for field, is_whole in whole.items() if not is_whole}


@pytest.mark.parametrize("name", REGISTRY)
def test_an_entry_lacks_nothing(name):
    assert lacking(name, REGISTRY[name]) == set(), f"entry {name!r} of REGISTRY"


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"plain": None}, "plain or masked"),
        ({"plain": None, "masked": mask_builders.sdpa_mask, "is_tiny": True}, "plain"),
        ({"no_cpu_masks": "it compiles for minutes"}, "masked"),
        ({"needs_package": "new_peer:attend"}, "library"),
        ({"library": "New", "is_stage": True}, "is_stage"),
        ({"library": "New", "needs_package": "new_peer"}, "needs_package"),
        ({"plain": partial(attention_builders.triton_or_hopper, backend="triton")}, "backend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_entry_lacks_is_named(changes, lacks):
    whole = Implementation(plain=attention_builders.eager)
    assert lacking("eager", whole) == set() and lacking("eager", replace(whole, **changes)) == {
        lacks
    }
    assert lacking("new_peer", whole) == {"COLORS in book/figures.py"}


@pytest.mark.parametrize(
    ("name", "device", "dtype", "has_mask", "reason"),
    [
        ("compiled", "cpu", "float32", False, "no C++ compiler"),
        ("tiled_compiled", "cpu", "float32", True, "no C++ compiler"),
        ("flex", "cpu", "float32", False, "no C++ compiler"),
        (
            "flex",
            "cpu",
            "float32",
            True,
            "compiled FlexAttention is measured on a GPU: on CPU it compiles anew for each mask",
        ),
        ("sdpa_cudnn", "cpu", "bfloat16", False, "sdpa_cudnn needs CUDA"),
        ("sdpa_efficient", "cpu", "float32", False, "sdpa_efficient needs CUDA"),
        ("sdpa_flash", "cuda", "float32", False, "sdpa_flash takes float16 and bfloat16 only"),
        ("sdpa_cudnn", "cuda", "float32", False, "sdpa_cudnn takes float16 and bfloat16 only"),
        (
            "torch_varlen",
            "cpu",
            "bfloat16",
            True,
            "torch.nn.attention.varlen needs CUDA and 16 bits",
        ),
        (
            "torch_varlen",
            "cuda",
            "float32",
            True,
            "torch.nn.attention.varlen needs CUDA and 16 bits",
        ),
        *(
            (name, *call, reason)
            for name in ("flex_flash", "fa4")
            for call, reason in (
                (("cpu", "bfloat16", False), "FlashAttention-4 needs CUDA"),
                (("cuda", "float32", True), "FlashAttention-4 takes float16 and bfloat16 only"),
                (
                    ("cuda", "bfloat16", False),
                    "FlashAttention-4 is not installed: pip install 'cs336-systems[peers]'",
                ),
            )
        ),
    ],
)
def test_an_unmet_requirement_is_the_reason(name, device, dtype, has_mask, reason, monkeypatch):
    monkeypatch.setattr(implementations, "has_cxx_compiler", lambda: False)
    if "not installed" in reason:
        absent = replace(REGISTRY[name], needs_package="no_such_module:attend")
        monkeypatch.setitem(REGISTRY, name, absent)
    with pytest.raises(Unsupported) as raised:
        check_runs(name, shape_of(dtype), device, has_mask)
    assert str(raised.value) == reason


@pytest.mark.parametrize("name", ["triton_first", "triton", "hopper", "hopper_lists"])
def test_a_back_end_of_ours_gives_its_own_reason(name):
    """No kernel of ours takes heads of 4,096, and each says so by its back end's name."""
    backend = name.removesuffix("_lists")
    shape = replace(shape_of("float32"), head_dim=4096)
    with pytest.raises(Unsupported, match=f"^backend '{backend}' "):
        check_runs(name, shape, "cpu")


@pytest.mark.parametrize("package", ["no_such_module:loads", "json:no_such_name"])
def test_a_package_is_installed_if_it_has_the_name(package, monkeypatch):
    there = replace(REGISTRY["eager"], library="New", needs_package="json:loads")
    monkeypatch.setitem(REGISTRY, "eager", there)
    check_runs("eager", shape_of("float32"), "cpu")
    monkeypatch.setitem(REGISTRY, "eager", replace(there, needs_package=package))
    with pytest.raises(Unsupported, match="^New is not installed: pip install"):
        check_runs("eager", shape_of("float32"), "cpu")


@pytest.mark.parametrize(
    "name", [name for name in IMPLEMENTATIONS if not REGISTRY[name].needs_compiler]
)
def test_what_the_requirements_allow_here_attends(name):
    shape = shape_of("float32")
    try:
        check_runs(name, shape, "cpu")
    except Unsupported:
        with pytest.raises(Unsupported):
            build(name, shape, "cpu")
        return
    q, k, v, _ = attention_inputs(shape, device="cpu")
    built = build(name, shape, "cpu")
    with built.context():
        output = built.unpack(built.attend(*(built.pack(x) for x in (q, k, v))))
    expected = attention_reference(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-4)
