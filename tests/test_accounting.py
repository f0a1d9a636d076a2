"""Closed forms against brute force, hand-computed numbers, torch's own FLOP counter, and bytes that
really lived.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems import accounting
from cs336_systems.attention.reference import attention_reference
from cs336_systems.bench.records import latest, read_records
from cs336_systems.config import AttentionShape, ModelConfig, Precision, RunConfig
from cs336_systems.measure.saved import saved_tensors
from cs336_systems.measure.timeline import AllocationRecorder
from cs336_systems.model.loss import cross_entropy
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.subjects.model_memory import MemoryCase, optimizer_state, prepare
from cs336_systems.subjects.model_steps import TrainingStep

TINY = ModelConfig(
    name="tiny", d_model=32, d_ff=96, num_layers=3, num_heads=4, vocab_size=120, context_length=64
)
BATCH = 2


def shape_of(**overrides: Any) -> AttentionShape:
    fields: dict[str, Any] = {
        "batch": 2, "heads": 4, "seqlen_q": 128, "seqlen_k": 128, "head_dim": 8, "is_causal": True, "dtype": "float32",
    }  # fmt: skip
    return AttentionShape(**(fields | overrides))


@contextmanager
def live_bytes(held: Iterable[Tensor]) -> Iterator[AllocationRecorder]:
    """Records the bytes of all storages alive at once, the ones in `held` included."""
    with AllocationRecorder() as recorder:
        recorder.assign(held, "parameters")
        yield recorder


# Attention


@pytest.mark.parametrize("seqlen_q", [0, 1, 2, 7, 16, 33])
@pytest.mark.parametrize("seqlen_k", [0, 1, 3, 7, 16, 40])
def test_causal_area_counts_the_lower_triangle(seqlen_q: int, seqlen_k: int) -> None:
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril()
    assert accounting.causal_area(seqlen_q, seqlen_k) == int(mask.sum())


@pytest.mark.parametrize(
    ("mode", "ms", "expected"), [("forward", 3.5861, 613.20), ("backward", 10.0102, 549.19)]
)
def test_published_times_give_the_published_rates(mode: str, ms: float, expected: float) -> None:
    shape = AttentionShape(
        batch=1,
        heads=64,
        seqlen_q=8192,
        seqlen_k=8192,
        head_dim=128,
        is_causal=False,
        dtype="bfloat16",
    )
    # Both published numbers are rounded: the time to 0.00005 ms, which is 0.009 TFLOP/s here, and
    # the rate to 0.005.
    assert accounting.tflops_per_s(accounting.attention_flops(shape, mode), ms) == pytest.approx(
        expected, abs=0.014
    )


def test_attention_flops_equal_torchs_count_of_the_matmuls() -> None:
    shape = shape_of(is_causal=False, seqlen_q=24, seqlen_k=40)
    q, k, v = (
        torch.zeros(shape.batch, shape.heads, seqlen, shape.head_dim, requires_grad=True)
        for seqlen in (24, 40, 40)
    )
    with FlopCounterMode(display=False) as counter:
        output = attention_reference(q, k, v)
    assert accounting.attention_flops(shape, "forward") == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    # Plain attention keeps the probabilities: four matmuls, where the convention counts a fifth to
    # compute them again.
    assert accounting.attention_flops(shape, "backward") == counter.get_total_flops() * 5 // 4
    total = accounting.attention_flops(shape, "forward") + accounting.attention_flops(
        shape, "backward"
    )
    assert accounting.attention_flops(shape, "forward_backward") == total


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(128, 128), (96, 160)])
def test_eager_bytes_are_those_that_plain_attention_holds(
    is_causal: bool, dtype: str, seqlen_q: int, seqlen_k: int
) -> None:
    shape = shape_of(is_causal=is_causal, dtype=dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    def inputs(requires_grad: bool) -> list[Tensor]:
        return [
            torch.randn(
                shape.batch, shape.heads, seqlen, shape.head_dim, dtype=getattr(torch, dtype),
                requires_grad=requires_grad,
            )
            for seqlen in (seqlen_q, seqlen_k, seqlen_k)
        ]  # fmt: skip

    # The linear terms are an upper bound: not all of q, k, v, O, dQ, dK, dV need live when the
    # scores peak.
    query, key = accounting._query_bytes(shape), accounting._key_bytes(shape)
    qkv = inputs(requires_grad=False)
    with live_bytes(qkv) as memory:
        attention_reference(*qkv, is_causal=is_causal)
    assert (
        0
        <= accounting.eager_attention_bytes(shape, "forward") - memory.trace().peak_bytes()
        <= query
    )

    qkv = inputs(requires_grad=True)
    grad_output = torch.randn(
        shape.batch, shape.heads, seqlen_q, shape.head_dim, dtype=getattr(torch, dtype)
    )
    with live_bytes([*qkv, grad_output]) as memory:
        output = attention_reference(*qkv, is_causal=is_causal)
        forward = memory.trace()
        forward_peak, graph = (
            forward.peak_bytes() - grad_output.nbytes,
            int(forward.active_bytes()[-1]),
        )
        output.backward(grad_output)
    assert 0 <= accounting.eager_attention_bytes(shape, "forward") - forward_peak <= query
    held = accounting.attention_input_bytes(shape) + 2 * query
    assert graph - held == accounting.eager_graph_bytes(shape)
    slack = accounting.eager_attention_bytes(shape, "backward") - memory.trace().peak_bytes()
    mask = seqlen_q * seqlen_k if is_causal else 0
    assert 0 <= slack <= query + key + mask
    forward_backward = accounting.eager_attention_bytes(shape, "forward_backward")
    assert forward_backward == accounting.eager_attention_bytes(shape, "backward")


def test_eager_bytes_on_cuda_are_those_that_an_h200_measured() -> None:
    """The closed form counted three score matrices in backward, as on CPU; CUDA's softmax backward
    writes a fourth.
    """
    records = Path(__file__).resolve().parents[1] / "results" / "nvidia-h200" / "records"
    checked = 0
    for problem in ("pytorch_attention", "flash_benchmarking"):
        for record in latest(read_records(records / f"{problem}.jsonl")):
            if (record.implementation, record.quantity, record.status) != (
                "eager",
                "peak_memory",
                "ok",
            ):
                continue
            shape = AttentionShape(
                **{key: value for key, value in record.case.items() if key != "type"}
            )
            if shape.seqlen_q < 4096:
                continue  # the allocator's rounding is a share of so little
            alive_before = accounting.attention_input_bytes(shape) + accounting._query_bytes(shape)
            predicted = (
                accounting.eager_attention_bytes(shape, "forward_backward", device_kind="cuda")
                - alive_before
            )
            assert record.samples[0] * 2**20 == pytest.approx(predicted, rel=0.02), shape
            checked += 1
    assert checked >= 20


def test_eager_bytes_count_repeated_keys_of_grouped_queries() -> None:
    plain, grouped = shape_of(kv_heads=4), shape_of(kv_heads=2)
    key = accounting._key_bytes(plain)
    # K and V shrink by half and are repeated to their full size: 2·key/2 less, 2·key more.
    eager = accounting.eager_attention_bytes
    assert eager(grouped, "forward") - eager(plain, "forward") == key
    assert accounting.eager_graph_bytes(grouped) - accounting.eager_graph_bytes(plain) == 2 * key


def test_flash_bytes_by_hand_and_linear() -> None:
    shape = shape_of(batch=1, heads=1, seqlen_q=16, seqlen_k=32, head_dim=8, dtype="float16")
    tensors, lse = 2 * (16 * 8 + 2 * 32 * 8 + 16 * 8), 4 * 16
    assert accounting.flash_attention_bytes(shape, "forward") == tensors + lse
    assert accounting.flash_attention_bytes(shape, "backward") == 2 * (tensors + lse)
    assert accounting.flash_attention_bytes(
        shape_of(dtype="float64"), "forward"
    ) == 2 * 4 * 128 * 8 * (4 * 8 + 1)
    long, short = shape_of(seqlen_q=4096, seqlen_k=4096), shape_of(seqlen_q=2048, seqlen_k=2048)
    for mode in ("forward", "backward", "forward_backward"):
        assert accounting.flash_attention_bytes(long, mode) == 2 * accounting.flash_attention_bytes(
            short, mode
        )
        assert accounting.eager_attention_bytes(long, mode) > 3 * accounting.eager_attention_bytes(
            short, mode
        )


# Models: counted on the real one


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM.from_config(TINY)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(
        TINY.vocab_size, (BATCH, TINY.context_length), generator=torch.Generator().manual_seed(1)
    )


def loss_of(model: TransformerLM, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens), tokens)


def test_parameters_equal_a_real_models(model: TransformerLM) -> None:
    assert accounting.num_parameters(TINY) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_model_flops_equal_torchs_count_but_for_the_masked_half(
    model: TransformerLM, tokens: Tensor
) -> None:
    with FlopCounterMode(display=False) as counter:
        loss = loss_of(model, tokens)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    backward = counter.get_total_flops()
    length = TINY.context_length
    masked_pairs = length**2 - length * (length + 1) // 2
    wasted = 4 * masked_pairs * TINY.d_model * BATCH * TINY.num_layers
    assert accounting.model_flops(TINY, BATCH, "forward") == forward - wasted
    assert accounting.model_flops(TINY, BATCH, "backward") == backward - 2 * wasted
    assert accounting.model_flops(TINY, BATCH, "train_step") == forward + backward - 3 * wasted


@pytest.mark.parametrize("attention", ["reference", "tiled", "sdpa"])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_activation_bytes_equal_what_autograd_saves(
    tokens: Tensor, attention: str, autocast: str | None
) -> None:
    torch.manual_seed(0)
    model = TransformerLM.from_config(TINY, attention=attention)
    precision = Precision(autocast=autocast)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
            return loss_of(model, tokens)

    fixed = [*model.parameters(), *model.buffers(), tokens]
    saved = sum(one.num_bytes for one in saved_tensors(run, parameters=fixed))
    predicted = accounting.activation_bytes(TINY, BATCH, attention=attention, precision=precision)
    if autocast is not None and attention == "reference":
        # The prediction is for CUDA, whose autocast keeps a float32 softmax too; the CPU's does
        # not.
        predicted -= 4 * TINY.num_layers * BATCH * TINY.num_heads * TINY.context_length**2
    log_sum_exp = 4 * BATCH * TINY.context_length  # of the loss: one number a token, not counted
    assert predicted == saved - log_sum_exp


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
@pytest.mark.parametrize("vocab_size", [120, 4000])
@pytest.mark.parametrize("context_length", [16, 128])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_peak_bytes_are_near_those_that_really_live(
    mode: str, vocab_size: int, context_length: int, attention: str
) -> None:
    config = ModelConfig(
        name="tiny", d_model=64, d_ff=192, num_layers=3, num_heads=4, vocab_size=vocab_size,
        context_length=context_length,
    )  # fmt: skip
    case = MemoryCase(model=config, batch=BATCH, attention=attention)
    step = TrainingStep(case, RunConfig(scale="tiny", device="cpu"))
    prepare(step, case, mode)  # the optimizer's state exists from the second step on
    with live_bytes([*step.parameters, *optimizer_state(step)]) as memory:
        getattr(step, mode)()
    assert 0.95 <= accounting.model_peak_bytes(case, mode) / memory.trace().peak_bytes() <= 1.15
