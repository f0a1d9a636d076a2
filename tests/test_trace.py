"""Profiles: kernels by name, ranges on models, traces read back, on what a GPU prints and on what
this CPU does.
"""

# ruff: noqa: E501 - kernel names are as long as they are
from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.attention import flash_attention
from cs336_systems.config import ModelCase, RunConfig, proxy_model
from cs336_systems.measure.capture import capture
from cs336_systems.measure.kernel_names import CATEGORIES, categorize, short_name
from cs336_systems.measure.ranges import ATTENTION_PARTS, annotate, module_ranges, named_range
from cs336_systems.measure.trace import Trace, read_events, trace_of
from cs336_systems.subjects.model_steps import TrainingStep

COVERS = ("cs336_systems/measure",)

# Kernel names

NATIVE = "void at::native::"
COPY = (
    f"{NATIVE}elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::"
    "TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)"
    "#1}>(at::TensorIteratorBase&, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::"
    "operator()() const)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast)"
)
MULTIPLY = (
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, at::native::binary_internal"
    "::MulFunctor<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<float, float, float, at::native::"
    "binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)"
)
ADD = (
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
MEAN = (
    f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, "
    "unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>>)"
)
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*, int)"
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm_256x128_8x4_nn_align1::Params)"
FOREACH = (
    f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<1>, "
    "at::native::(anonymous namespace)::BinaryOpScalarFunctor<float, 1, 1, 0>, std::multiplies<float>, float>(...)"
)

KERNELS = {
    "gemm": (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "ampere_sgemm_128x64_tn", SIMT, "triton_tem_fused_mm_3", "aten::mm",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(Params, float, float)",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>(Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "triton_tem_fused_flex_attention_0", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "flash_forward_kernel", "flash_merge_kernel", "flash_backward_preprocess_kernel", "varlen_forward_kernel",
        "hopper_forward_kernel", "hopper_backward_kernel",
    ),
    "softmax": (  # the loss's too
        SOFTMAX, "triton_red_fused__log_softmax_nll_loss_forward_7", "aten::_softmax",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float, float, float, at::native::(anonymous namespace)::SoftMaxForwardEpilogue>(float*)",
    ),
    "elementwise": (
        MULTIPLY, ADD, "triton_poi_fused_mul_silu_5", "aten::mul", "aten::masked_fill_", "aten::silu_backward",
        f"{NATIVE}vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{{lambda()#1}}>(int)",
    ),
    "reduction": (
        MEAN, "triton_red_fused_mean_mul_pow_rsqrt_1", "aten::mean",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float, float const*)",
    ),
    "copy": (
        COPY, "Memcpy DtoD (Device -> Device)", "Memset (Device)", "aten::copy_", "aten::embedding_dense_backward",
        f"{NATIVE}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        f"{NATIVE}(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::OpaqueType<4u>, 4>(...)",
        f"{NATIVE}(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long const*, float const*)",
        f"{NATIVE}triu_tril_kernel<bool, int, false, 8, false>(at::cuda::detail::TensorInfo<bool, int>)",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gloo:all_reduce",
    ),
    "optimizer": (
        FOREACH, "aten::_foreach_lerp_",
        f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(...)",
    ),
    "other": (
        "aten::expand", "aten::transpose", "aten::permute", "autograd::engine::evaluate_function: MmBackward0",
        "a_kernel_of_tomorrow",
    ),
}  # fmt: skip


def test_kernels_are_told_apart_by_name() -> None:
    for category, names in KERNELS.items():
        assert {name: categorize(name) for name in names} == dict.fromkeys(names, category)
    assert set(KERNELS) == set(CATEGORIES)


SHORT_NAMES = {
    MULTIPLY: "vectorized_elementwise MulFunctor", ADD: "vectorized_elementwise add", COPY: "elementwise direct_copy",
    MEAN: "reduce MeanOps", SOFTMAX: "softmax_warp_forward", SIMT: "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
    FOREACH: "multi_tensor_apply BinaryOpScalarFunctor", "Memcpy DtoD (Device -> Device)": "Memcpy DtoD",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)":
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "x" * 72: "x" * 72, "x" * 73: "x" * 71 + "…",
} | {name: name for name in (
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "aten::_softmax", "autograd::engine::evaluate_function: MmBackward0",
)}  # fmt: skip


def test_short_names_fit_a_table_and_still_tell_kernels_apart() -> None:
    assert {name: short_name(name) for name in SHORT_NAMES} == SHORT_NAMES


# Ranges


class TheirAttention(nn.Module):
    """Attention as somebody else writes it: einsum, a softmax by hand, weights used as 2-D views or
    in 3-D.
    """

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.weight, self.stacked = nn.Parameter(torch.eye(8)), nn.Parameter(torch.eye(8)[None])
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x @ self.weight.T, x @ self.weight.T, x @ self.stacked
        scores = torch.einsum("bqd,bkd->bqk", q, k)
        if self.fails:
            raise torch.OutOfMemoryError("planted")
        probabilities = scores.exp() / scores.exp().sum(-1, keepdim=True)
        return torch.einsum("bqk,bkd->bqd", probabilities, v)


class FusedAttention(nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x, x, x)


class TheirModel(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"self_attn": attention, "mlp": nn.Linear(8, 8)})]
        )
        self.lm_head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["mlp"](block["self_attn"](x))  # type: ignore[index]
        return self.lm_head(x)


RANGES = [
    "attention:blocks.0.self_attn", "attention.scores", "attention.softmax", "attention.values",
    "feed_forward:blocks.0.mlp", "head:lm_head",
]  # fmt: skip


def range_names(model: nn.Module, x: torch.Tensor) -> list[str]:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        model(x)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    known = ("block:", "attention", "feed_forward:", "head:")
    return [event.name for event in events if event.name.startswith(known)]


def test_any_model_is_annotated_by_its_modules_names() -> None:
    model = TheirModel(TheirAttention())
    assert set(module_ranges(model).values()) == {
        "block:blocks.0", "attention:blocks.0.self_attn", "feed_forward:blocks.0.mlp", "head:lm_head",
    }  # fmt: skip
    x = torch.randn(2, 5, 8)
    with annotate(model):
        assert range_names(model, x) == RANGES
    assert range_names(model, x) == [], "the context takes everything off"


@pytest.mark.parametrize(
    "attend",
    [partial(flash_attention, backend="tiled"), nn.functional.scaled_dot_product_attention],
    ids=["own", "sdpa"],
)
def test_a_fused_attention_is_one_part(attend: Callable[..., Any]) -> None:
    with annotate(model := TheirModel(FusedAttention(attend))):
        assert range_names(model, torch.randn(1, 2, 5, 8)).count("attention.fused") == 1


def test_ranges_are_closed_and_taken_off_when_a_forward_raises() -> None:
    attention = TheirAttention(fails=True)
    model, x = TheirModel(attention), torch.randn(2, 5, 8)
    with pytest.raises(torch.OutOfMemoryError, match="planted"), annotate(model):
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            model(x)
        attention.fails = False
        assert range_names(model, x) == RANGES, "the next forward starts anew"
        attention.fails = True
        model(x)
    attention.fails = False
    assert range_names(model, x) == []


def test_what_cannot_be_annotated_is_refused() -> None:
    with pytest.raises(ValueError, match="model must have modules to annotate: none of Linear"):
        annotate(nn.Linear(2, 2)).__enter__()


# Traces of a GPU, as torch 2.11 writes them


@pytest.mark.parametrize("name", ['a"b', "a\\b", 'a\\"b', "é×", "a\tb\nc", "%22"])
def test_any_module_path_stays_readable_in_the_trace(name: str, tmp_path: Path) -> None:
    """torch.profiler writes a double quote as it is: the trace was no JSON. Names beyond ASCII
    became "unknown".
    """
    model = nn.Module()
    model.blocks = nn.ModuleDict({name: nn.ModuleDict({"ffn": nn.Linear(2, 2)})})
    with annotate(model) as ranges:
        module = model.blocks[name]["ffn"]
        trace = capture(
            lambda: module(torch.ones(2)), device="cpu", warmup=0, path=tmp_path / "x.trace.json.gz"
        )
    (wanted,) = ranges.values()
    assert trace.select(within=wanted), "the range is found by the name that `annotate` gives"


def written(path: Path, content: Any) -> Path:
    """A file with `content` as bytes, or as JSON."""
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"", "no chrome trace: Expecting value"),
        (
            "x.json",
            b'{"traceEvents": [{"name": "a"b"}]}',
            "torch.profiler escapes no double quote in the name of a",
        ),
        ("x.json", b"[" * 100_000, "no chrome trace: "),
        ("x.json", {}, "it has no list of objects under 'traceEvents'"),
        ("x.json", {"traceEvents": {"a": 1}}, "it has no list of objects"),
        ("x.json", [1], "it has no list of objects"),
        ("x.json", 3, "it has no list of objects"),
        ("x.json.gz", b"no gzip", "no chrome trace: Not a gzipped file"),
        (
            "x.json.gz",
            gzip.compress(b"[]", mtime=0)[:-4],
            "no chrome trace: Compressed file ended before",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    """They were a bare KeyError, TypeError or BadGzipFile."""
    with pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
        read_events(written(tmp_path / name, content))


def test_a_list_of_events_alone_is_a_trace_and_a_pipe_is_none(tmp_path: Path) -> None:
    assert trace_of(read_events(written(tmp_path / "x.json", gpu_events()))) == trace_of(
        gpu_events()
    )
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="^pipe.json: not a regular file"):
        read_events(tmp_path / "pipe.json")


@pytest.mark.parametrize("place", [1, 4, 6, 7])
@pytest.mark.parametrize(
    "field", ["name", "ts", "dur", "pid", "tid", "args", "Sequence number", "correlation"]
)
@pytest.mark.parametrize("value", [None, [], "x", math.nan])
def test_an_event_of_a_foreign_trace_is_read_or_refused_by_name(
    place: int, field: str, value: Any
) -> None:
    events = gpu_events()
    inner = events[place] if field in events[place] else events[place]["args"]
    inner[field] = value
    if (field, value) in (("name", "x"), ("pid", "x"), ("tid", "x"), ("correlation", "x")):
        trace_of(events)
        return
    with pytest.raises(ValueError, match=f"an event's '{field}' must be "):
        trace_of(events)
    if field in ("name", "ts", "dur", "pid", "tid"):
        del inner[field]
        with pytest.raises(ValueError, match=f"an event's '{field}' must be a .*, got None of"):
            trace_of(events)


def event(
    name: str, category: str, ts: float, dur: float, tid: Any = 1, **args: Any
) -> dict[str, Any]:
    names = {"seq": "Sequence number", "forward_thread": "Fwd thread id", "origin": "External id"}
    args = {names.get(key, key): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def gpu_events() -> list[dict[str, Any]]:
    """One step: a scores product and a softmax forward, the product's backward on autograd's
    thread, an update.
    """
    return [
        {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
        event("profiled_step", "user_annotation", 0, 1000),
        event("attention:layers.0.attn", "user_annotation", 10, 200),
        event("attention.scores", "user_annotation", 20, 50),
        event("aten::matmul", "cpu_op", 25, 40, seq=7),
        event("aten::bmm", "cpu_op", 30, 30, seq=8),
        event("cudaLaunchKernelExC", "cuda_runtime", 35, 5, correlation=100),
        event("nvjet_hsh_256x128_64x4_2x1_v_bz_NNT", "kernel", 1100, 300, 7, correlation=100, stream=7),
        event("attention.softmax", "user_annotation", 80, 40),
        event("aten::_softmax", "cpu_op", 85, 20, seq=9),
        event("cudaLaunchKernel", "cuda_runtime", 90, 5, correlation=101),
        event(SOFTMAX, "kernel", 1400, 100, 7, correlation=101, stream=7),
        # autograd's thread knows no range, only the forward's number
        event("autograd::engine::evaluate_function: BmmBackward0", "cpu_op", 300, 100, 2, seq=8, forward_thread=1),
        event("BmmBackward0", "cpu_op", 310, 80, 2, seq=8, forward_thread=1),
        event("aten::bmm", "cpu_op", 320, 30, 2),
        event("cuLaunchKernelEx", "cuda_driver", 330, 5, 2, correlation=102),
        event("nvjet_hsh_256x128_64x4_2x1_v_bz_NTT", "kernel", 1500, 400, 7, correlation=102, stream=7),
        event("Optimizer.step#AdamW.step", "user_annotation", 500, 200),
        event("aten::_foreach_mul_", "cpu_op", 510, 50),
        event("cudaLaunchKernel", "cuda_runtime", 520, 5, correlation=103),
        event(MULTIPLY, "kernel", 1900, 50, 7, correlation=103, stream=7),
        # a collective beside the product of the backward, from no launch that was recorded
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", 1600, 500, 20, stream=20),
        event("cudaDeviceSynchronize", "cuda_runtime", 900, 90, correlation=104),
    ]  # fmt: skip


def test_kernels_belong_to_the_ranges_that_launched_them() -> None:
    trace = trace_of(gpu_events())
    assert trace.on_gpu and trace.step_ms == (1.0,)
    forward, softmax, backward, collective, update = trace.kernels
    assert forward.ranges == ("profiled_step", "attention:layers.0.attn", "attention.scores")
    assert (forward.category, forward.phase, forward.step) == ("gemm", "forward", 0)
    assert softmax.ranges[-1] == "attention.softmax"
    assert backward.phase == "backward" and "attention.scores" in backward.ranges
    assert (update.category, update.phase) == ("optimizer", "optimizer"), (
        "an update is one whatever its kernel"
    )
    assert (collective.category, collective.ranges, collective.step) == ("communication", (), -1)


def test_a_kernel_without_a_launch_belongs_to_the_operator_it_names() -> None:
    operator = event("aten::add", "cpu_op", 130, 10, seq=10, origin=77)
    kernel = event(ADD, "kernel", 2000, 10, 7, correlation=999, stream=7, origin=77)
    found = trace_of([*gpu_events(), operator, kernel]).kernels[-1]
    assert (
        found.name == ADD
        and found.ranges == ("profiled_step", "attention:layers.0.attn")
        and found.step == 0
    )


def test_sums_selections_and_tops() -> None:
    trace = trace_of(gpu_events())
    assert [kernel.step for kernel in trace.select(category="gemm")] == [0, 0], (
        "run after the step that launched them"
    )
    assert trace.kernel_ms(category="gemm") == pytest.approx(0.7)
    assert trace.kernel_ms(phase="forward", within="attention.") == pytest.approx(0.4)
    assert trace.kernel_ms(step=0) == pytest.approx(0.85)
    assert trace.busy_ms() == pytest.approx(1.0), (
        "the collective runs beside others and counts once"
    )
    assert trace.kernel_ms() == pytest.approx(1.35)
    top = trace.top_kernels(2, step=0)
    assert [(row.category, row.calls, row.ms) for row in top] == [
        ("gemm", 1, 0.4),
        ("gemm", 1, 0.3),
    ]


# Profiles of this machine's device


def profiled(device: str, **options: Any) -> Trace:
    model = replace(proxy_model("small", 64), context_length=32, vocab_size=256)
    run = RunConfig(scale="tiny", device=device)  # type: ignore[arg-type]
    step = TrainingStep(ModelCase(model=model, batch=2, attention="reference"), run)
    with annotate(step.model):
        return capture(step.train_step, device=device, before=step.reset, **options)


def check_training_step(trace: Trace, num_steps: int) -> None:
    """What must hold of a training step of the model with two layers, whatever the device."""
    assert len(trace.step_ms) == num_steps
    for step in range(num_steps):
        assert trace.busy_ms(step=step) > 0
        for phase in ("forward", "backward"):
            inside = [
                trace.kernel_ms(step=step, phase=phase, within=part) for part in ATTENTION_PARTS[:3]
            ]
            assert all(ms > 0 for ms in inside), "scores, softmax and values, forward and backward"
            assert sum(inside) < trace.kernel_ms(step=step, phase=phase, within="attention:")
        assert (
            trace.kernel_ms(step=step, category="optimizer")
            == trace.kernel_ms(step=step, phase="optimizer")
            > 0
        )
    products = trace.select(step=0, category="gemm", phase="forward", within="attention.scores")
    assert len({product.ranges for product in products}) == 2, "one for each layer"


def outermost_operators_ms(path: Path) -> float:
    """Summed duration of the operators that lie in no other operator of their thread, by comparing
    all pairs.
    """
    operators = [e for e in read_events(path) if e.get("cat") == "cpu_op" and e["ph"] == "X"]
    spans = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in operators]

    def inside_another(index: int) -> bool:
        thread, start, end = spans[index]
        return any(
            t == thread and s <= start and end <= f
            for i, (t, s, f) in enumerate(spans)
            if i != index
        )

    # Durations as the file has them: the difference of two timestamps has lost their last digits.
    return sum(e["dur"] for i, e in enumerate(operators) if not inside_another(i)) / 1e3


def test_a_training_step_on_this_cpu_is_taken_apart(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "step.trace.json.gz"
    trace = profiled("cpu", num_steps=2, path=path)
    check_training_step(trace, 2)
    assert not trace.on_gpu and trace_of(read_events(path)) == trace
    # own times add up to the operators that nobody called, and never to more than the step
    for step in range(2):
        assert trace.kernel_ms(step=step) <= trace.step_ms[step] * 1.01
    assert trace.kernel_ms() == pytest.approx(outermost_operators_ms(path))
    bmm = [row for row in trace.top_kernels(step=0, phase="forward") if row.name == "aten::bmm"]
    assert [row.calls for row in bmm] == [4], "two products in each of two layers"


def test_the_trace_of_a_call_that_raises_is_kept(tmp_path: Path) -> None:
    def call() -> None:
        with named_range("before the end"):
            torch.ones(10).exp()
        raise torch.OutOfMemoryError("planted")

    path = tmp_path / "oom.trace.json"
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        capture(call, device="cpu", warmup=0, path=path)
    assert "before the end" in path.read_text()


@pytest.mark.gpu
def test_a_training_step_on_this_gpu_is_taken_apart() -> None:
    trace = profiled("cuda", num_steps=2)
    assert trace.on_gpu
    check_training_step(trace, 2)
    unknown = [row.name for row in trace.top_kernels(category="other")]
    assert trace.kernel_ms(category="other") < 0.1 * trace.kernel_ms(), (
        f"kernels of no known category: {unknown}"
    )
    for step in range(2):
        assert trace.busy_ms(step=step) <= trace.step_ms[step] * 1.05


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"])
def test_library_attention_is_known_by_its_kernels(backend: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call() -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(
                q, q, q, is_causal=True
            ).sum().backward()

    trace = capture(call, device="cuda", warmup=2)
    names = [row.name for row in trace.top_kernels()]
    assert trace.top_kernels(1)[0].category == "attention", names
    assert trace.kernel_ms(category="attention") > 0.5 * trace.kernel_ms(), names
    assert {kernel.phase for kernel in trace.select(category="attention")} == {
        "forward",
        "backward",
    }
