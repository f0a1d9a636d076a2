"""The Hopper back end: how it is chosen and refused, on every machine; its kernels, on a GPU of
sm_90.

Its kernels have no interpreter. What a CPU can test of them is in `test_hopper_schedule` and in
what is compiled offline; here the dispatch runs with the tiled stage in the kernels' place.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import (
    BlockMask,
    api,
    attention_reference,
    flash_attention,
    flash_attention_varlen,
    replay,
)
from cs336_systems.attention import choose as backends
from cs336_systems.attention.call import Call, Documents, Saved
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.hopper import entry as function
from cs336_systems.attention.hopper.backward import QUERY_TILES
from cs336_systems.attention.hopper.division import divide_walks
from cs336_systems.attention.hopper.schedule import ORDERS, SCHEDULES, plan_forward
from cs336_systems.attention.tiled import tiled_backward, tiled_forward
from cs336_systems.attention.tiles import head_tile
from cs336_systems.config import ModelConfig
from cs336_systems.model.checkpointing import apply_checkpointing
from cs336_systems.model.transformer import TransformerLM
from tests import test_varlen as varlen
from tests.covered import HOPPER_ATTENTION
from tests.hopper_lengths import errors_over_bounds
from tests.test_attention_paths import LAYOUTS, laid_out
from tests.test_block_sparse import poisoned, worst_error  # noqa: F401
from tests.test_s4_attention import (
    DTYPES,
    HARD_VALUES,
    all_results,
    assert_contract,
    assert_within,
    draw,
    hard_inputs,
    inputs,
    run,
    with_gradients,
)

MASKED = ("cs336_systems/attention/masks", "cs336_systems/attention/varlen.py")
COVERS = (*HOPPER_ATTENTION, *MASKED, "tests/hopper_instructions.py", "tests/hopper_lengths.py")

ROOT = Path(__file__).resolve().parent.parent
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
LOW = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
WIDTHS = pytest.mark.parametrize("head_dim", (64, 96, 128, 256))  # columns that kernels multiply


def on_hopper(test: Any) -> Any:
    """A GPU test, of sm_90 alone."""
    return pytest.mark.gpu(
        pytest.mark.skipif(not HAS_HOPPER, reason="hopper kernels need an sm_90 GPU")(test)
    )


# Chosen, refused: on every machine


@pytest.fixture
def replaced(monkeypatch) -> list[str]:
    """`flash_attention(backend="hopper")` on this machine's CPU, the tiled stage in the place of
    all kernels; which of them were launched, in order.
    """
    calls = []

    def forward(q, k, v, *, is_causal, scale, config):
        calls.append(f"hopper forward {config}".strip())
        return tiled_forward(q, k, v, is_causal, scale)

    def backward(saved, *, is_causal, scale, deterministic):
        calls.append("deterministic backward" if deterministic else "hopper backward")
        return tiled_backward(saved, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(function, "hopper_forward", forward)
    monkeypatch.setattr(function, "hopper_backward", backward)
    monkeypatch.setattr(function, "refuse_hopper", lambda q: None)
    monkeypatch.setattr(api, "explain_backend", lambda *_, **__: ("hopper", "asked for"))
    return calls


def cpu_inputs(heads: int = 2, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs(2, heads, kv_heads, 20, 30, 16, torch.float32, "cpu")


@pytest.mark.parametrize("globally", [False, True])
@pytest.mark.parametrize("deterministic", [None, False, True])
def test_gradients_are_deterministic_if_asked_or_torch_is(replaced, deterministic, globally):
    """As their forward was told, whatever another call was since."""
    q, k, v, grad_output = cpu_inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = globally if deterministic is None else deterministic
    torch.use_deterministic_algorithms(globally)
    try:
        output = flash_attention(*leaves, is_causal=True, deterministic=deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    flash_attention(*leaves, deterministic=not expected)
    grads = torch.autograd.grad(output, leaves, grad_output)
    results = dict(zip(("output", "grad_q", "grad_k", "grad_v"), (output, *grads)))
    assert_within(compute_oracle(q, k, v, grad_output, is_causal=True), results)
    assert replaced[2:] == ["deterministic backward" if expected else "hopper backward"]


def test_key_heads_are_not_repeated_and_leading_dimensions_come_back(replaced, monkeypatch):
    q, k, v, _ = cpu_inputs(4, 2)
    monkeypatch.setattr(
        function,
        "hopper_forward",
        lambda q, k, *_, **__: (torch.full_like(q, k.shape[1]), q.sum(-1)),
    )
    output, lse = flash_attention(*(x[None] for x in (q, k, v)), enable_gqa=True, return_lse=True)
    assert output.shape == (1, 2, 4, 20, 16) and lse.shape == (1, 2, 4, 20) and (output == 2).all()


def test_keys_behind_all_queries_are_not_handed_to_the_kernels(replaced):
    """A causal query sees no later key; multiplied by a probability of zero, a NaN there was a NaN."""
    q, k, v, grad_output = cpu_inputs()  # 20 queries, 30 keys
    clean = run(q, k, v, grad_output, is_causal=True)
    for x in (k, v):
        x[:, :, 20:] = math.nan
    dirty = run(q, k, v, grad_output, is_causal=True)
    for name, result in clean.items():
        assert torch.equal(result, dirty[name]), name
    assert dirty["grad_k"].shape == k.shape and not dirty["grad_v"][:, :, 20:].any()
    assert run(q, k, v, grad_output)["output"].isnan().all(), "without the mask they are seen"


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_empty_inputs_launch_nothing(replaced, empty):
    batch, seqlen_q, seqlen_k = (0 if empty == name else 5 for name in ("batch", "queries", "keys"))
    results = run(*inputs(batch, 2, 2, seqlen_q, seqlen_k, 16, torch.float32, "cpu"))
    assert replaced == []
    assert (results["lse"] == -math.inf).all() and not any(
        results[f"grad_{name}"].any() for name in "qkv"
    )


def test_compile_takes_it_whole(replaced):
    """And what PyTorch checks of an operator: its schema, and that it is never launched with fake
    tensors.
    """
    *tensors, grad_output = cpu_inputs()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(torch.sin(q), k, v, is_causal=True) * 2

    eager, compiled = (
        with_gradients(call, tensors, grad_output)
        for call in (block, torch.compile(block, fullgraph=True, backend="aot_eager"))
    )
    torch.testing.assert_close(compiled, eager)
    assert replaced == ["hopper forward", "hopper backward"] * 2
    arguments = (*tensors, True, 0.25, False, "")
    operator = torch.ops.cs336_systems.hopper_attention.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_only_the_reference_has_is_refused(replaced):
    q, k, v, _ = cpu_inputs()
    with pytest.raises(NotImplementedError, match="forward-mode AD is not supported here"):
        torch.func.jvp(lambda q: flash_attention(q, k, v), (q,), (q,))
    (grad_q,) = torch.autograd.grad(
        flash_attention(q.requires_grad_(), k, v).sum(), q, create_graph=True
    )
    with pytest.raises(
        NotImplementedError,
        match="double backward is not supported here; backend='reference' has it",
    ):
        grad_q.sum().backward()


def test_calls_that_hopper_does_not_serve_are_refused():
    """Also on a machine that has a Hopper GPU."""
    q, k, v, _ = inputs(1, 2, 2, 64, 64, 16, torch.float32, "cpu")
    ends = torch.tensor([0, 64], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    model, tokens = tiny_model("hopper")
    for call in (
        lambda: flash_attention(q, k, v, backend="hopper"),
        lambda: flash_attention_varlen(*packed, ends, ends, 64, 64, backend="hopper"),
        lambda: model(tokens),
        lambda: function.OPERATORS["dense"](q, k, v, Call(True, 0.25)),
    ):
        with pytest.raises(
            ValueError, match="(cannot be used|by the Hopper kernels): hopper kernels need a GPU"
        ):
            call()


@pytest.mark.parametrize(
    ("lengths", "head_dim", "deterministic", "kernel"),
    [
        ([600, 300], 64, False, "hopper"), ([600, 300], 64, True, "triton"), ([600] + [1] * 300, 64, False, "triton"),
        ([600, 300], 136, False, "triton"),
    ],
)  # fmt: skip
def test_documents_that_are_short_on_average_are_not_padded(
    monkeypatch, lengths, head_dim, deterministic, kernel
):
    """To blocks of 128 rows of a float32 dQ: a thousand documents of one token would take the
    memory of 128,000.
    """
    monkeypatch.setattr(function, "refuse_hopper", lambda q: None)
    monkeypatch.setattr(function, "hopper_packed_backward", lambda *_, **__: "hopper")
    monkeypatch.setattr(function, "triton_backward", lambda *_: "triton")
    q, ends = torch.empty(sum(lengths), 1, head_dim), torch.tensor([0, *lengths]).cumsum(0).int()
    call = Call(
        True, 0.125, deterministic, documents=Documents(ends, ends, max(lengths), max(lengths))
    )
    assert function._backward(Saved(q, q, q, q, torch.empty(1, len(q)), q), call) == kernel


def test_the_operator_asks_for_what_the_inputs_are(monkeypatch):
    found = {"hopper": "ok"}
    monkeypatch.setattr(backends, "available_here", lambda *_: found)

    def refusal(dtype: torch.dtype, head_dim: int) -> str | None:
        q: Any = SimpleNamespace(
            device=torch.device("cuda", 0), dtype=dtype, shape=(2, 3, 20, head_dim)
        )
        return backends.hopper_refusal(q)

    assert refusal(torch.bfloat16, 256) is refusal(torch.float16, 1) is None
    assert refusal(torch.float32, 64) == "hopper takes float16, bfloat16, not float32"
    assert refusal(torch.bfloat16, 264) == "hopper takes a head_dim of at most 256, not 264"
    found["hopper"] = "no Gluon"
    assert refusal(torch.bfloat16, 64) == "no Gluon"


def test_records_name_the_tiles(monkeypatch):
    monkeypatch.setattr(function, "num_multiprocessors", lambda device: 132)
    q = torch.empty(1, 16, 16384, 64, dtype=torch.bfloat16, device="meta")
    forward, backward = function.kernel_names(q, q, is_causal=True).split()
    assert forward == "hopper_forward_192x128_dynamic" and backward == "hopper_backward_128x128"
    q = torch.empty(1, 16, 8192, 160, dtype=torch.bfloat16, device="meta")
    assert (
        function.kernel_names(q, q, is_causal=True)
        == "hopper_forward_128x64_tiles hopper_wide_backward_128x64"
    )


# Inside the model


MODEL = ModelConfig(
    name="tiny", d_model=32, d_ff=48, num_layers=2, num_heads=2, vocab_size=31, context_length=20
)


def tiny_model(attention: str) -> tuple[TransformerLM, Tensor]:
    """The same weights and tokens whatever the attention."""
    torch.manual_seed(0)
    model = TransformerLM.from_config(MODEL, attention=attention)
    return model, torch.randint(MODEL.vocab_size, (2, MODEL.context_length))


@pytest.mark.parametrize(("checkpointing", "forwards"), [("none", 2), ("1", 4), ("selective", 2)])
def test_the_model_attends_with_it(replaced, checkpointing, forwards):
    """A selective checkpoint keeps its output, and does not compute it again."""
    model, tokens = tiny_model("hopper")
    expected, _ = tiny_model("sdpa")
    apply_checkpointing(model, checkpointing)
    logits = model(tokens)
    torch.testing.assert_close(logits, expected(tokens), atol=1e-5, rtol=1e-5)
    logits.sum().backward()
    assert sorted(replaced) == ["hopper backward"] * 2 + ["hopper forward"] * forwards


# The numerical contract: on the GPU

SHAPES = [  # batch, heads, key heads, queries, keys, head dim
    (2, 1, 1, 1, 1, 16), (1, 2, 2, 16, 16, 32), (2, 2, 2, 97, 97, 64), (1, 2, 2, 128, 128, 128),
    (1, 2, 2, 257, 257, 64), (2, 3, 3, 1024, 1024, 64), (1, 2, 2, 1025, 1025, 64), (1, 2, 2, 1025, 1025, 128),
    (2, 4, 4, 2048, 2048, 128), (1, 2, 2, 64, 64, 256), (2, 2, 2, 517, 517, 256), (8, 16, 16, 200, 200, 64),
    # head dims that are not whole tiles
    (1, 1, 1, 70, 70, 40), (1, 1, 1, 130, 130, 59), (1, 2, 2, 465, 465, 80), (2, 1, 1, 129, 129, 96),
    (1, 2, 2, 300, 300, 111), (1, 2, 2, 130, 130, 136), (1, 2, 2, 300, 300, 145), (1, 4, 4, 1025, 1025, 192),
    # more keys than queries, and fewer
    (1, 2, 2, 37, 1203, 64), (1, 2, 2, 137, 403, 128), (1, 3, 3, 137, 403, 256), (1, 2, 2, 1203, 37, 64),
    (1, 2, 2, 403, 137, 128), (1, 2, 2, 403, 137, 256), (2, 2, 2, 1, 300, 64), (2, 2, 2, 1, 300, 256),
    (2, 2, 2, 450, 1, 128), (2, 2, 2, 450, 1, 256),
    # heads that share keys
    (2, 6, 2, 530, 500, 64), (1, 8, 2, 530, 530, 128), (1, 8, 2, 530, 500, 256), (3, 4, 1, 165, 165, 64),
    (2, 6, 1, 165, 165, 160),
]  # fmt: skip


@pytest.fixture
def each_schedule(monkeypatch) -> Callable[[int], Iterator[str]]:
    """`for name in each_schedule(head_dim)`: the calls of the loop run as they choose, then with
    each schedule by name.

    Calls as small as those here would choose one for small grids.
    """
    kernels = {
        name: getattr(function, name) for name in ("hopper_forward", "hopper_packed_forward")
    }

    def each(head_dim: int) -> Iterator[str]:
        for name in ("", *(schedule.name("tiles") for schedule in SCHEDULES[head_tile(head_dim)])):
            for kernel, forward in kernels.items():
                monkeypatch.setattr(function, kernel, partial(run_named, forward, name))
            replay.forget()  # calls with the schedule before would be replayed
            yield name

    def run_named(
        forward: Callable[..., Any], name: str, *tensors: Any, config: str, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert not config
        return forward(*tensors, **options, config=name)

    return each


@on_hopper
@MASKS
@LOW
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_contract(shape, dtype, is_causal):
    errors = errors_over_bounds(*inputs(*shape, DTYPES[dtype], "cuda"), is_causal=is_causal)
    assert max(errors.values()) <= 1, f"error over bound: {errors}"


@on_hopper
@MASKS
@WIDTHS
def test_contract_of_a_long_sequence(head_dim, is_causal, each_schedule):
    """Many tiles a program and several waves of programs; the order of tiles and both phases of
    each barrier.
    """
    tensors = inputs(1, 4, 4, 8192 + 77, 8192 + 77, head_dim, torch.bfloat16, "cuda")
    for _ in each_schedule(head_dim):
        assert_contract(*tensors, is_causal=is_causal, backend="hopper")


@on_hopper
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize(
    "is_causal, kv_heads, length", [(False, 0, 1101), (True, 1, 9000), (True, 3, 1101)]
)
def test_divided_walks(is_causal, kv_heads, length, head_dim):
    """Without a mask those of a few tiles more than multiprocessors, beside whole ones. Sums have
    one order.
    """
    places = torch.cuda.get_device_properties(0).multi_processor_count
    key_tiles, kv_heads = -(-length // 128), kv_heads or places // 9 + 1
    division = divide_walks(
        key_tiles=key_tiles, batch_heads=kv_heads, steps=key_tiles * 128 // QUERY_TILES[head_tile(head_dim)], group=2,
        head_tile=head_tile(head_dim), is_causal=is_causal, num_multiprocessors=places,
    )  # fmt: skip
    assert division.programs and division.whole == places * (not is_causal)
    tensors = inputs(1, 2 * kv_heads, kv_heads, length, length, head_dim, torch.bfloat16, "cuda")
    options = {"is_causal": is_causal, "backend": "hopper", "enable_gqa": True}
    assert_contract(*tensors, **options)
    first, second = (run(*tensors, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in ("grad_k", "grad_v"))


@on_hopper
@pytest.mark.parametrize("head_dim, is_causal, heads, length", [
    *((width, *call) for width in (64, 128) for call in ((True, 1, 1024), (True, 2, 3001), (False, 1, 3001))),
    # the last: behind whole heads
    (64, False, 9, 2700), (128, False, 17, 1000), (64, False, 37, 2000),
])  # fmt: skip
def test_divided_walks_of_the_forward(head_dim, is_causal, heads, length):
    """Small and large tiles, all in parts; or those of the last round, beside whole ones. Sums have
    one order.
    """
    places = torch.cuda.get_device_properties(0).multi_processor_count
    launch = plan_forward(
        head_dim=head_dim, is_causal=is_causal, num_queries=length, num_keys=length, batch_heads=heads, group=1,
        num_multiprocessors=places,
    )  # fmt: skip
    assert launch.part_tiles and bool(launch.whole) == (heads >= 7)
    tensors = inputs(1, heads, heads, length, length, head_dim, torch.bfloat16, "cuda")
    options = {"is_causal": is_causal, "backend": "hopper"}
    assert_contract(*tensors, **options)
    first, second = (run(*tensors, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in ("output", "lse"))


@on_hopper
@MASKS
@pytest.mark.parametrize("number", [0, 1], ids=["large-grids", "small-grids"])
@WIDTHS
def test_the_order_of_tiles_changes_no_bit(head_dim, number, is_causal):
    """Two and a half rounds of programs; every order by name, where a call would choose one."""
    q, k, v, _ = inputs(2, 12, 4, 2500, 2600, head_dim, torch.bfloat16, "cuda")
    schedule = SCHEDULES[head_tile(head_dim)][number]
    assert 24 * -(-2500 // schedule.query_tile) > 2.5 * 132 * schedule.resident
    with torch.no_grad():
        tiles, *others = (
            function.OPERATORS["dense"](
                q, k, v, Call(is_causal, head_dim**-0.5, config=schedule.name(order))
            )
            for order in ORDERS
        )
    for other in others:
        assert all(torch.equal(of_tiles, its) for of_tiles, its in zip(tiles, other, strict=True))


@on_hopper
@pytest.mark.parametrize("kind", ["equal", "unequal"])
@WIDTHS
def test_no_length_hangs(head_dim, kind):
    """In a process of its own: a barrier that nobody arrives at would wait for ever."""
    command = [sys.executable, "-m", "tests.hopper_lengths", kind, str(head_dim)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout
        pytest.fail(f"no end within 300 s; so far: {said}")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert result.stdout.splitlines()[-1].startswith("ok ")


@on_hopper
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
@WIDTHS
def test_scale(head_dim, scale, each_schedule):
    tensors = inputs(1, 2, 2, 280, 280, head_dim, torch.bfloat16, "cuda")
    for _ in each_schedule(head_dim):
        assert_contract(*tensors, scale=scale, is_causal=True, backend="hopper")


@on_hopper
@MASKS
@LOW
@WIDTHS
def test_the_deterministic_backward(head_dim, dtype, is_causal, each_schedule):
    """Additions to dQ in turn: of programs that fit on the GPU together, and of more."""
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "backend": "hopper",
        "enable_gqa": True,
        "deterministic": True,
    }
    many = inputs(1, 2, 1, 18000 if is_causal else 1000, 18000, head_dim, DTYPES[dtype], "cuda")
    first = run(*many, **options)
    assert_same(run(*many, **options), first, deterministic=True)
    for name, result in run(*many, **(options | {"deterministic": False})).items():
        assert (result.float() - first[name].float()).norm() <= 1e-3 * first[name].float().norm(), (
            name
        )
    tensors = inputs(1, 4, 2, 450, 420, head_dim, DTYPES[dtype], "cuda")
    for _ in each_schedule(head_dim):
        assert_contract(*tensors, **options)
        first = run(*tensors, **options)
        for _ in range(20):
            assert_same(run(*tensors, **options), first, deterministic=True)


@on_hopper
@MASKS
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_deterministic_backward_ends_on_the_multiprocessors_that_are_free(head_dim, is_causal):
    """64 programs a head; without a mask they waited for others that had not started, as long as
    something else held one multiprocessor of the 64 that they need at once.
    """
    from tests.spin_kernel import hold_multiprocessors

    q, k, v, grad = inputs(1, 2, 1, 8192, 8192, head_dim, torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "backend": "hopper",
        "enable_gqa": True,
        "deterministic": True,
    }
    output = flash_attention(*leaves, **options)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    expected = gradients()
    # so that there is memory for others, which could not be had while multiprocessors are held
    gradients()
    hold_multiprocessors(1, 0.001)
    torch.cuda.synchronize()
    for free in (63, 1):
        holder, held = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(holder):
            hold_multiprocessors(
                torch.cuda.get_device_properties(0).multi_processor_count - free, 2000
            )
            held.record()
        time.sleep(0.1)
        ours = gradients()
        torch.cuda.current_stream().synchronize()
        assert not held.query(), f"waits for more than {free} free multiprocessors"
        assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))
        torch.cuda.synchronize()


# Along the lists of a mask, and within packed documents


def of_blocks(
    num_queries: int, num_keys: int, block_size: tuple[int, int], batch: int = 2, heads: int = 4
):
    """Random tiles, with rows and columns of tiles that are all dead."""
    sizes = (batch, heads, -(-num_queries // block_size[0]), -(-num_keys // block_size[1]))
    blocks = torch.rand(*sizes, generator=torch.Generator().manual_seed(0)) < 0.4
    blocks[:, :, ::3], blocks[..., 1::4] = False, False
    return BlockMask.from_blocks(blocks.cuda(), block_size, seq_lengths=(num_queries, num_keys))


TILE_MASKS: dict[str, Callable[[], BlockMask]] = {
    "window": partial(BlockMask.sliding_window, 1000, window=100, device="cuda"),
    "window-both-sides": partial(BlockMask.sliding_window, 300, 700, window=200, is_causal=False, device="cuda"),
    "window-bottom-right": partial(BlockMask.sliding_window, 257, 1111, window=150, bottom_right=True, device="cuda"),
    "rows-without-keys": partial(BlockMask.causal, 1000, 700, bottom_right=True, device="cuda"),
    **{
        f"blocks-{size[0]}x{size[1]}": partial(of_blocks, 1500, 1300, size)
        for size in ((64, 128), (128, 128), (256, 128), (128, 256), (512, 512))
    },
    "blocks-for-all-heads": partial(of_blocks, 257, 1111, (128, 128), 1, 1),
    "tokens-.3": partial(BlockMask.random_tokens, 300, 300, density=0.3, heads=4, device="cuda"),
    "tokens-.01": partial(BlockMask.random_tokens, 641, 700, density=0.01, device="cuda"),
    "documents": partial(BlockMask.document, (100, 0, 500, 30, 129), is_causal=True, device="cuda"),
    "dilated": partial(BlockMask.dilated, 700, segment_length=200, dilation_rate=4, heads=4, is_causal=True,
                       device="cuda"),
    "nothing": lambda: BlockMask.from_dense(torch.zeros(300, 500, dtype=torch.bool, device="cuda")),
}  # fmt: skip
LISTED = [*((head_dim, dtype) for head_dim in (64, 128) for dtype in ("bfloat16", "float16")), (40, "float16"),
          (96, "bfloat16")]  # fmt: skip


# whose sums have one order; dQ's have it if deterministic
IN_ORDER = ("output", "lse", "grad_k", "grad_v")


def assert_same(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], deterministic: bool = False
) -> None:
    """Bit for bit, but dQ up to the last bits of sums in another order."""
    for name, result in ours.items():
        if name in IN_ORDER or deterministic:
            assert torch.equal(result, theirs[name]), name
        else:
            torch.testing.assert_close(result, theirs[name], rtol=2**-7, atol=1e-3, msg=name)


@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(("head_dim", "dtype"), LISTED)
@pytest.mark.parametrize("make", TILE_MASKS.values(), ids=TILE_MASKS.keys())
def test_masks(make, head_dim, dtype, deterministic):
    """Both passes, the same in 20 repeats, and keys of dead tiles that are not numbers reach
    nothing.
    """
    mask, options = (
        make(),
        {"backend": "hopper", "enable_gqa": True, "deterministic": deterministic},
    )
    q, k, v, grad_output = inputs(2, 4, 2, *mask.seq_lengths, head_dim, DTYPES[dtype], "cuda")
    assert worst_error(q, k, v, grad_output, mask, **options) <= 1
    call = partial(run, q, k, v, grad_output, block_mask=mask, **options)
    clean = call()
    for _ in range(20):
        assert_same(call(), clean, deterministic)
    columns = mask.block_size[1]
    seen = mask.to_dense().flatten(0, 2).any(0)
    dead = ~torch.stack([part.any() for part in seen.split(columns)]).repeat_interleave(columns)[
        : len(seen)
    ]
    k[:, :, dead], v[:, :, dead] = math.nan, math.nan
    assert_same(call(), clean, deterministic)
    assert not clean["grad_k"][:, :, dead].any() and not clean["grad_v"][:, :, dead].any()
    empty = ~mask.to_dense().any(-1).expand(2, 4, -1)
    assert not clean["output"][empty].any() and not clean["grad_q"][empty].any()


PACKED = {
    "ragged": ([70, 128, 0, 17, 193], None, 5),
    "long": ([1000, 0, 17, 333, 2049, 64], None, 3),
    "unequal": ([200, 64, 30, 129], [64, 300, 0, 70], 0),
}


@on_hopper
@MASKS
@LOW
@WIDTHS
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED.keys())
def test_packed_documents(case, deterministic, head_dim, dtype, is_causal, each_schedule):
    """Both passes, the same in 20 repeats, and a document that is not numbers reaches no other."""
    for schedule in each_schedule(head_dim):
        tensors, documents = varlen.packed(*case, 4, 2, head_dim, DTYPES[dtype], "cuda")
        call = partial(
            varlen.run_packed, tensors, documents, is_causal=is_causal, backend="hopper", enable_gqa=True,
            deterministic=deterministic,
        )  # fmt: skip
        clean = call()
        assert varlen.worst_error(tensors, documents, clean, is_causal) <= 1, schedule
        for _ in range(20):
            assert_same(call(), clean, deterministic)
        (first_q, end_q), (first_k, end_k) = (ends[1:3].tolist() for ends in documents[:2])
        for x, rows in zip(
            tensors, (slice(first_q, end_q), *[slice(first_k, end_k)] * 2, slice(first_q, end_q))
        ):
            x[rows] = math.nan
        dirty = call()
        for others in ((slice(first_q), slice(first_k)), (slice(end_q, None), slice(end_k, None))):
            assert_same(
                varlen.document_of(dirty, *others),
                varlen.document_of(clean, *others),
                deterministic,
            )


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_documents_of_many_tiles(head_dim):
    """Enough for programs to take several, where schedule, order and way of dQ are left to the
    launcher.
    """
    tensors, documents = varlen.packed(
        [2048, 1999], None, 0, 16, 16, head_dim, torch.bfloat16, "cuda"
    )
    for longest in (2048, 8192):
        said = (*documents[:2], longest, longest)
        results = varlen.run_packed(tensors, said, is_causal=True, backend="hopper")
        assert varlen.worst_error(tensors, said, results, True) <= 1


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [128, 256, 1024])
def test_a_head_that_is_not_numbers_reaches_no_other(rows, head_dim):
    """Near the end of its queries, in a mask's tile that goes past it."""
    mask = BlockMask.sliding_window(300, window=40, block_size=(rows, 128), device="cuda")
    q, k, v, grad_output = inputs(2, 2, 2, 300, 300, head_dim, torch.bfloat16, "cuda")
    clean = run(q, k, v, grad_output, backend="hopper", block_mask=mask)
    v[:, 0, 280] = math.nan
    dirty = run(q, k, v, grad_output, backend="hopper", block_mask=mask)
    assert_same(
        *({name: x[:, 1] for name, x in results.items()} for results in (dirty, clean)), False
    )


@on_hopper
def test_the_log_says_which_walk_was_launched(capfd, monkeypatch):
    from cs336_systems.attention.triton import launch

    monkeypatch.setattr(launch, "_log_is_on", lambda: True)
    launch._print_once.cache_clear()
    q, k, v, _ = inputs(1, 2, 2, 300, 300, 128, torch.bfloat16, "cuda")
    flash_attention(
        q,
        k,
        v,
        block_mask=BlockMask.sliding_window(300, window=99, device="cuda"),
        backend="hopper",
    )
    tensors, documents = varlen.packed([171, 129], None, 0, 2, 2, 128, torch.bfloat16, "cuda")
    flash_attention_varlen(*tensors[:3], *documents, backend="hopper")
    listed, of_documents = capfd.readouterr().err.splitlines()
    assert "kernel=listed_forward" in listed and listed.endswith(
        "config=hopper_forward_128x128_tiles"
    )
    assert "kernel=packed_forward" in of_documents and "config=hopper_forward_" in of_documents


# Inputs as they come


@on_hopper
@WIDTHS
@pytest.mark.parametrize("layout", [*LAYOUTS, "three-dims"])
def test_any_strides_equal_contiguous(layout, head_dim, each_schedule):
    batch, kind = (1, "transposed") if layout == "three-dims" else (2, layout)
    tensors = laid_out(kind, batch, 3, 297, head_dim, torch.bfloat16, "cuda")
    given = [x[0] for x in tensors] if layout == "three-dims" else tensors
    for _ in each_schedule(head_dim):
        ours = run(*given, backend="hopper", is_causal=True)
        assert_same(ours, run(*(x.contiguous() for x in given), backend="hopper", is_causal=True))
    errors = contract_errors(
        compute_oracle(*tensors, is_causal=True), {"grad_q": ours["grad_q"].view_as(tensors[0])}
    )
    assert errors["grad_q"] <= 1


@on_hopper
@MASKS
@LOW
@pytest.mark.parametrize("kind", [*HARD_VALUES, "some-huge-logits"])
@WIDTHS
def test_hard_values(head_dim, kind, dtype, is_causal, each_schedule):
    """Huge logits in the median of five draws: of one draw in ten, attention in float64 with only
    the scores in float32 and P, O and dS in bfloat16 has a dQ that is over its bound, by up to a
    half.
    """
    draws = [
        hard_inputs(kind, dtype, "cuda", seqlen=430, head_dim=head_dim, seed=seed)
        for seed in range(5 if "logits" in kind else 1)
    ]
    oracles = [compute_oracle(*tensors, is_causal=is_causal) for tensors in draws]
    for schedule in each_schedule(head_dim):
        errors = [
            contract_errors(oracle, run(*tensors, backend="hopper", is_causal=is_causal))
            for oracle, tensors in zip(oracles, draws)
        ]
        for name in errors[0]:
            found = sorted(one[name] for one in errors)
            assert found[len(found) // 2] <= 1 and found[-1] <= 2, (schedule, name, found)


@on_hopper
@pytest.mark.parametrize(
    ("head_dim", "offset"),
    [(64, 0.0), (64, 64.0), (64, 180.0), (64, 900.0), (128, 0.0), (256, 0.0)],
)
def test_a_query_that_sees_one_key_has_its_value(head_dim, offset, each_schedule):
    """Its probability is 1. A maximum that was scaled, and rounded, before it was subtracted made
    it another number where scores were huge, which bfloat16 rounded again: O was off by up to 2^-9,
    and so was delta of its gradient.
    """
    q, k, v, _ = inputs(2, 16, 16, 200, 200, head_dim, torch.bfloat16, "cuda")
    q[..., 0] += offset
    k[..., 0] += offset
    for schedule in each_schedule(head_dim):
        output = flash_attention(q, k, v, is_causal=True, backend="hopper")
        assert torch.equal(output[:, :, 0], v[:, :, 0]), schedule


@on_hopper
@WIDTHS
def test_a_first_key_tile_of_scores_of_minus_infinity(head_dim, each_schedule):
    q, k, v, _ = inputs(1, 2, 2, 130, 400, head_dim, torch.bfloat16, "cuda")
    q[..., 0] = q[..., 0].abs() + 0.1
    k[:, :, :256, 0] = -math.inf
    for schedule in each_schedule(head_dim):
        output, lse = flash_attention(q, k, v, backend="hopper", return_lse=True)
        errors = contract_errors(
            compute_oracle(q, k[:, :, 256:], v[:, :, 256:]), {"output": output, "lse": lse}
        )
        assert max(errors.values()) <= 1, (schedule, errors)


@on_hopper
@WIDTHS
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("operand", ["query", "key"])
def test_a_bad_row_spoils_no_more_than_it_must(operand, value, head_dim, each_schedule):
    """A query its own row, a key its head."""
    for schedule in each_schedule(head_dim):
        q, k, v, grad_output = inputs(2, 2, 2, 330, 330, head_dim, torch.bfloat16, "cuda")
        clean = run(q, k, v, grad_output, backend="hopper", is_causal=True)
        (q if operand == "query" else k)[0, 1, 200 if operand == "query" else 5] = value
        dirty = run(q, k, v, grad_output, backend="hopper", is_causal=True)
        others = torch.ones(q.shape[:3], dtype=torch.bool, device="cuda")
        others[0, 1, 200 if operand == "query" else slice(None)] = False
        for name in IN_ORDER[:2] if operand == "query" else IN_ORDER:
            assert torch.equal(dirty[name][others], clean[name][others]), (schedule, name)
        if operand == "query":
            assert dirty["output"][~others].isnan().all()
        else:
            assert dirty["grad_q"][others].isfinite().all()


@on_hopper
@WIDTHS
def test_gradients_flow_through_the_lse(head_dim):
    q, k, v, grad_output = inputs(1, 4, 2, 290, 310, head_dim, torch.bfloat16, "cuda")
    grad_lse = draw(1, 4, 290, dtype=torch.float32, device="cuda", seed=7)

    def gradients(attention: Any, dtype: torch.dtype) -> list[Tensor]:
        def attend(q: Tensor, *keys: Tensor) -> tuple[Tensor, Tensor]:
            return attention(
                q, *(x.repeat_interleave(2, dim=1) for x in keys), is_causal=True, return_lse=True
            )

        upstream = grad_output.to(dtype), grad_lse.to(torch.promote_types(dtype, torch.float32))
        results = all_results(attend, [x.to(dtype) for x in (q, k, v)], *upstream)
        return [results[name].double() for name in ("grad_q", "grad_k", "grad_v")]

    exact, eager = (
        gradients(attention_reference, dtype) for dtype in (torch.float64, torch.bfloat16)
    )
    ours = gradients(
        lambda *x, **options: flash_attention(*x, backend="hopper", **options), torch.bfloat16
    )
    for mine, theirs, true in zip(ours, eager, exact):
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max() + 1e-5


@on_hopper
@pytest.mark.alone
def test_offsets_beyond_32_bits(each_schedule):
    storage = torch.empty(130 * 2**25, dtype=torch.bfloat16, device="cuda")  # 8.1 GiB
    dense = inputs(1, 1, 1, 129, 129, 64, torch.bfloat16, "cuda")
    spread = [
        storage.as_strided((1, 1, 129, 64), (1, 1, 2**25, 1), 64 * index) for index in range(4)
    ]
    for x, y in zip(spread, dense):
        x.copy_(y)
    for _ in each_schedule(64):
        assert_contract(*spread, backend="hopper", is_causal=True)


@on_hopper
@pytest.mark.alone
def test_more_than_2_to_the_31_elements(each_schedule):
    """The last head lies behind 2^31 elements of q, k, v, O and, in float32, of the accumulator of
    dQ. Alone it would choose another schedule than among the others, and with it other last bits.
    """
    heads, seqlen = 1026, 32768
    tensors = [
        torch.randn(1, heads, seqlen, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)
    ]
    # A sample of the last head's queries against the oracle: dQ has another order of sums each
    # time.
    rows = slice(seqlen - 512, seqlen)
    q, k, v, grad_output = (x[:, -1:] for x in tensors)
    visible = torch.arange(seqlen - 512, seqlen, device="cuda")[:, None] >= torch.arange(
        seqlen, device="cuda"
    )
    oracle = compute_oracle(q[:, :, rows], k, v, grad_output[:, :, rows], mask=visible)
    for schedule in each_schedule(64):
        results = run(*tensors, backend="hopper", is_causal=True)
        sample = {name: results[name][:, -1:, rows] for name in ("output", "lse", "grad_q")}
        assert max(contract_errors(oracle, sample).values()) <= 1, schedule
        last = run(q, k, v, grad_output, backend="hopper", is_causal=True)
        for name in IN_ORDER if schedule else ():
            assert torch.equal(results[name][:, -1:], last[name]), (schedule, name)


@on_hopper
@pytest.mark.alone
def test_more_batches_than_a_grid_dimension_of_65535():
    assert_contract(
        *inputs(70_000, 1, 1, 3, 5, 16, torch.bfloat16, "cuda"), backend="hopper", is_causal=True
    )


# The same bits, wherever it runs


@on_hopper
def test_maxima_rise_by_more_than_the_lag_or_not_at_all():
    """Row by row, though a warp of sixteen rows decides together whether to look, and any thread's
    score counts.
    """
    from cs336_systems.attention.hopper.builtins import LAG
    from tests.hopper_instructions import COLUMNS, ROWS, raised_maxima

    torch.manual_seed(0)
    maxima = torch.randn(ROWS, device="cuda")
    scores = maxima[:, None] - torch.rand(ROWS, COLUMNS, device="cuda")
    excesses = {
        (3, 0): 9.0,
        (5, 127): 100.0,
        (6, 64): 7.5,
        (20, 2): 7.5,
        (40, 33): 8.5,
        (47, 70): 1e30,
    }
    for (row, column), excess in excesses.items():
        scores[row, column] = maxima[row] + excess
    scores[10], scores[41, 4], scores[63] = -torch.inf, torch.inf, torch.nan
    raised, own = raised_maxima(scores, maxima)
    largest = scores.amax(1)
    expected = torch.where(largest > maxima + LAG, largest, maxima)
    assert (expected != maxima).sum() == 5 and torch.equal(raised, expected[:, None].expand(-1, 4))
    assert torch.equal(own[:63], scores.view(ROWS, COLUMNS // 8, 4, 2).amax((1, 3))[:63])


@on_hopper
@MASKS
@LOW
@WIDTHS
@pytest.mark.parametrize("seqlen", [450, 1024])
def test_repeats_are_bit_equal(seqlen, head_dim, dtype, is_causal, each_schedule):
    """All but dQ of at most 128 columns, whose sums have no order: it stays within the contract."""
    tensors = inputs(2, 4, 2, seqlen, seqlen, head_dim, DTYPES[dtype], "cuda")
    oracle = compute_oracle(*tensors, is_causal=is_causal)
    options: dict[str, Any] = {"backend": "hopper", "is_causal": is_causal, "enable_gqa": True}
    for schedule in each_schedule(head_dim):
        first = run(*tensors, **options)
        for _ in range(200):
            again = run(*tensors, **options)
            for name in (*IN_ORDER, *(["grad_q"] if head_dim > 128 else [])):
                assert torch.equal(first[name], again[name]), (schedule, name)
            assert contract_errors(oracle, {"grad_q": again["grad_q"]})["grad_q"] <= 1


@on_hopper
@WIDTHS
def test_on_a_stream_of_its_own(head_dim):
    tensors = inputs(2, 4, 4, 777, 777, head_dim, torch.bfloat16, "cuda")
    expected = run(*tensors, backend="hopper", is_causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    late = [torch.empty_like(x) for x in tensors]
    with torch.cuda.stream(stream):
        # 10 ms: kernels on another stream would read what is not yet there
        torch.cuda._sleep(20_000_000)
        for x, y in zip(late, tensors):
            x.copy_(y)
        results = run(*late, backend="hopper", is_causal=True)
    stream.synchronize()
    assert_same(results, expected)


@on_hopper
@pytest.mark.several_gpus
def test_every_gpu_of_the_process():
    """From the first GPU as the current one, which is not where the tensors are."""
    tensors = inputs(1, 2, 2, 300, 300, 64, torch.bfloat16, "cuda:0")
    expected = run(*tensors, backend="hopper", is_causal=True)
    for index in range(torch.cuda.device_count()):
        there = tuple(x.to(f"cuda:{index}") for x in tensors)
        results = run(*there, backend="hopper", is_causal=True)
        assert {result.device.index for result in results.values()} == {index}
        assert_same({name: result.to("cuda:0") for name, result in results.items()}, expected)


@on_hopper
@WIDTHS
def test_a_cuda_graph_replays_it(head_dim, each_schedule):
    q, k, v, grad_output = inputs(1, 4, 2, 530, 530, head_dim, torch.bfloat16, "cuda")
    static = [x.clone() for x in (q, k, v, grad_output)]
    options: dict[str, Any] = {"backend": "hopper", "is_causal": True, "enable_gqa": True}
    for _ in each_schedule(head_dim):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*static, **options)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(*static, **options)
        for seed in (20, 30):
            fresh = [
                draw(*x.shape, dtype=x.dtype, device="cuda", seed=seed + index)
                for index, x in enumerate(static)
            ]
            for x, y in zip(static, fresh):
                x.copy_(y)
            graph.replay()
            torch.cuda.synchronize()
            errors = contract_errors(compute_oracle(*fresh, is_causal=True), captured)
            assert max(errors.values()) <= 1, errors


@on_hopper
@pytest.mark.parametrize("deterministic", [False, True])
def test_compile_fullgraph(deterministic):
    q, k, v, grad_output = inputs(1, 2, 2, 270, 270, 64, torch.bfloat16, "cuda")

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (
            flash_attention(
                q * 0.5, k, v, is_causal=True, backend="hopper", deterministic=deterministic
            )
            * 2
        )

    compiled = torch.compile(block, fullgraph=True)
    output, grad_q, grad_k, grad_v = with_gradients(compiled, (q, k, v), grad_output)
    results = {"output": output / 2, "grad_q": grad_q * 2, "grad_k": grad_k, "grad_v": grad_v}
    assert_within(compute_oracle(q * 0.5, k, v, grad_output * 2, is_causal=True), results)


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_nan_gradient_of_a_row_without_keys_goes_nowhere(head_dim):
    tokens = torch.ones(300, 200, dtype=torch.bool, device="cuda")
    tokens[[0, 3, 64, 150, 299]] = False
    mask = BlockMask.from_dense(tokens)
    q, k, v, grad_output = inputs(1, 2, 2, 300, 200, head_dim, torch.bfloat16, "cuda")
    grads = []
    for dead in (math.nan, 1.0):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        output, lse = flash_attention(*leaves, block_mask=mask, return_lse=True, backend="hopper")
        grad_lse = torch.ones_like(lse).masked_fill(~tokens.any(-1), dead)
        grads.append(torch.autograd.grad((output, lse), leaves, (grad_output, grad_lse)))
    for ours, expected in list(zip(*grads))[1:]:
        assert expected.isfinite().all() and torch.equal(ours, expected)
    torch.testing.assert_close(grads[0][0], grads[1][0])  # whose sums come in any order
