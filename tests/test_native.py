"""The C++ half of the attention operators: `attention/native`.

On the CPU its passes "launch" Python functions, through pointers in the place of the CUDA driver's: what it does for
autograd, and what it leaves to Python, needs no GPU. On a GPU it is compared with the Python half, kernel by kernel the
same.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from cs336_systems.attention import flash_attention, native, operator
from cs336_systems.attention.operator import AttentionOperator
from cs336_systems.attention.tiled import tiled_backward, tiled_forward
from cs336_systems.cli import app
from cs336_systems.measure.stages import time_stages
from tests.covered import ATTENTION, HOPPER
from tests.test_launcher import attributes_of

pytest.importorskip("triton")
launcher = pytest.importorskip("cs336_systems.attention.triton.launcher")
calls = pytest.importorskip("cs336_systems.attention.triton.calls")

COVERS = (*ATTENTION, HOPPER)
SHAPE = (2, 3, 20, 16)
REST = (True, 0.25, "")  # is_causal, scale, config
NODE = "AttentionOperator"  # in the name of C++'s node


def by_native(output: Tensor) -> bool:
    """Whether the node behind `output` is C++'s."""
    return NODE in output.grad_fn.name()


@pytest.fixture(scope="module")
def module():
    if shutil.which(native._compiler()[0]) is None:
        pytest.skip(f"needs a C++ compiler: there is no {native._compiler()[0]}")
    native.build()
    loaded = native.load()
    assert loaded is not None
    return loaded


# --- on the CPU ------------------------------------------------------------------------------------------------------

ADDRESS = ctypes.c_void_p
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ADDRESS, ADDRESS, ctypes.POINTER(ADDRESS), ADDRESS)
REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, ADDRESS, ADDRESS)
MAP_META = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 64], "fp4_padded": False}


class Kernel(SimpleNamespace):
    """A "compiled kernel": the first of its operands is passed in a tensor map, the others as addresses, then 7."""

    __hash__ = object.__hash__

    def __init__(self, function: int, operands: int, overlaps: bool) -> None:
        signature = {"x": "tensordesc<fp32[1, 64]>", **{f"p{i}": "*fp32" for i in range(1, operands)}, "n": "i32"}
        kinds = [".b8 a[128]", ".u32 a", ".u32 a", ".u64 a", ".u64 a", *[".u64 a"] * (operands - 1), ".u32 a"]
        ptx = ".visible .entry f(" + ", ".join(f".param {kind}" for kind in (*kinds, ".u64 a", ".u64 a")) + ")"
        super().__init__(
            metadata=SimpleNamespace(
                num_ctas=1, num_warps=4, shared=1024, launch_cooperative_grid=False, launch_pdl=overlaps,
                global_scratch_size=0, profile_scratch_size=0, tensordesc_meta=[MAP_META],
            ),
            src=SimpleNamespace(signature=signature), asm={"ptx": ptx}, function=function,
            _init_handles=lambda: None,
        )  # fmt: skip


class Machine:
    """A GPU of a kind: `triton` launches as Triton would, and the driver's functions do as the driver would.

    A kernel is a Python function of its operands, float32 tensors of shapes that it knows.
    """

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[Callable[..., None], list[tuple[int, ...]]]] = {}
        self.by_triton = self.by_driver = self.status = self.map_status = 0
        self.attributes: list[list[tuple[int, int]]] = []  # of the driver's launches
        self.launch, self.replace = LAUNCH(self._launch), REPLACE(self._replace)

    def triton(self, function: Callable[..., None], *operands: Tensor, overlaps: bool = False) -> object:
        self.by_triton += 1
        function(*operands)
        number = len(self.kernels) + 1
        self.kernels[number] = function, [tuple(x.shape) for x in operands]
        descriptor = SimpleNamespace(base=operands[0], shape=[3, 64], strides=[64, 1], padding="zero")
        return launcher.Launched(Kernel(number, len(operands), overlaps), (4, 2, 1), (descriptor, *operands[1:], 7))

    def _replace(self, place: int, address: int) -> int:
        assert place % 64 == 0 and ctypes.string_at(place, 8) == b"a tmap: "
        ctypes.c_uint64.from_address(place + 8).value = address
        return self.map_status

    def _launch(self, config: int, number: int, parameters: object, extra: int | None) -> int:
        given = launcher.LaunchConfig.from_address(config)
        assert (given.grid_x, given.grid_y, given.grid_z, given.block_x, given.shared_bytes) == (4, 2, 1, 128, 1024)
        assert extra is None
        if self.status:
            return self.status
        self.by_driver += 1
        self.attributes.append(attributes_of(given))
        function, shapes = self.kernels[number]
        places = [parameters[0] + 8, *parameters[5 : 4 + len(shapes)]]
        assert ctypes.c_int32.from_address(parameters[4 + len(shapes)]).value == 7
        operands = []
        for place, shape in zip(places, shapes, strict=True):
            size = 4 * torch.Size(shape).numel()
            memory = (ctypes.c_char * size).from_address(ctypes.c_uint64.from_address(place).value)
            operands.append(torch.frombuffer(memory, dtype=torch.float32).view(shape))
        with torch.no_grad():
            function(*operands)
        return 0




@pytest.fixture
def machine(module, monkeypatch):
    """Attention on the fake GPU; `machine.operator` is called as all are."""
    machine = Machine()

    def encode(place, *arguments):
        ctypes.memmove(place, b"a tmap: ", 8)
        ctypes.c_uint64.from_address(place.value + 8).value = arguments[2].value
        return 0

    monkeypatch.setattr(launcher, "cuda_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    module.set_driver(*(ctypes.cast(x, ctypes.c_void_p).value for x in (machine.launch, machine.replace)))

    def tell(given, made, launched):
        if (seen := getattr(launcher._thread, "by", None)) is not None:
            seen.append(launcher.Seen(given, made, launched))

    def forward(q, k, v, is_causal, scale, config):
        def kernel(q, k, v, *results):
            for made, result in zip(results, tiled_forward(q, k, v, is_causal, scale), strict=True):
                made.copy_(result)

        output, lse = torch.empty(q.shape), torch.empty(q.shape[:-1])
        if config == "copies":
            q = q.clone()
        tell((q, k, v), (output, lse), [machine.triton(kernel, q, k, v, output, lse)])
        return (output + 0, lse) if config == "adds" else (output, lse)

    def backward(q, k, v, output, lse, grad_output, grad_lse, is_causal, scale, config):
        grads = [torch.empty(x.shape) for x in (q, k, v)]
        scaled = torch.empty(output.shape)
        if grad_lse is not None or not grad_output.is_contiguous():
            return tiled_backward(q, k, v, output, lse, grad_output, grad_lse, is_causal, scale)

        def preprocess(grad_output, scaled):
            scaled.copy_(grad_output * 2)

        def differentiate(q, k, v, output, lse, scaled, *grads):
            for grad, result in zip(
                grads, tiled_backward(q, k, v, output, lse, scaled / 2, None, is_causal, scale), strict=True
            ):
                grad.copy_(result)

        first = machine.triton(preprocess, grad_output, scaled)
        second = machine.triton(differentiate, q, k, v, output, lse, scaled, *grads, overlaps=True)
        tell((q, k, v, output, lse, grad_output), (*grads, scaled), [first, second])
        return tuple(grads)

    name = f"operator_of_{abs(hash(machine))}"
    machine.operator = AttentionOperator(name, forward, backward)
    machine.kept = calls.KeptCalls(name, machine.operator._run_by_python, machine.operator.backward)
    machine.attend = lambda q, k, v, *arguments: machine.kept(q, k, v, arguments)
    original = calls._module
    monkeypatch.setattr(calls, "_module", lambda: module)
    yield machine
    original.cache_clear()  # it tells C++ of the real driver, the next time


def leaves(shape=SHAPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    *tensors, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in tensors], grad


def expected(tensors, grad_output, *, grad_lse=None):
    q, k, v = (x.detach() for x in tensors)
    output, lse = tiled_forward(q, k, v, *REST[:2])
    return output, lse, tiled_backward(q, k, v, output, lse, grad_output, grad_lse, *REST[:2])


def agree(results, wanted):
    for ours, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def settle(machine):
    """C++ knows the call, with its backward."""
    for _ in range(3):
        tensors, grad = leaves()
        output, _ = machine.attend(*tensors, *REST)
        torch.autograd.grad(output, tensors, grad)
    machine.by_triton = machine.by_driver = 0


def test_later_calls_launch_without_python(machine):
    counts = []
    for seed in range(5):
        tensors, grad = leaves(seed=seed)
        output, lse = machine.attend(*tensors, *REST)
        assert by_native(output) == (seed > 1) and lse.grad_fn is output.grad_fn
        wanted = expected(tensors, grad)
        agree((output, lse), wanted[:2])
        agree(torch.autograd.grad(output, tensors, grad), wanted[2])
        counts.append((machine.by_triton, machine.by_driver))
    # Twice a forward and the two launches of a backward by Triton; those of C++'s first backward; none.
    assert counts == [(3, 0), (6, 0), (8, 1), (8, 4), (8, 7)]
    # A forward; then forwards, preprocesses and the kernels that overlap with these (cuda.h says 6).
    assert machine.attributes == [[], *[[], [], [(6, 1)]] * 2]


def test_only_what_needs_gradients_has_them(machine):
    settle(machine)
    tensors, grad = leaves()
    with torch.no_grad():
        assert machine.attend(*tensors, *REST)[0].grad_fn is None
    detached = [x.detach() for x in tensors]
    assert not machine.attend(*detached, *REST)[0].requires_grad
    output, _ = machine.attend(detached[0], tensors[1], detached[2], *REST)
    agree(torch.autograd.grad(output, tensors[1], grad), expected(tensors, grad)[2][1:2])
    with torch.inference_mode():
        agree(machine.attend(*detached, *REST), expected(tensors, grad)[:2])
    assert machine.by_triton == 0


def test_other_calls_are_calls_of_their_own(machine):
    settle(machine)
    tensors, grad = leaves()
    for arguments in ((False, 0.25, ""), (True, 0.5, ""), (True, 0.25, "another")):
        for _ in range(3):
            output, _ = machine.attend(*tensors, *arguments)
            q, k, v = (x.detach() for x in tensors)
            agree([output], tiled_forward(q, k, v, *arguments[:2])[:1])
    assert machine.by_triton == 6
    longer, _ = leaves((2, 3, 21, 16))
    for _ in range(3):
        agree(machine.attend(*longer, *REST), expected(longer, torch.zeros(2, 3, 21, 16))[:2])
    assert machine.by_triton == 8


def test_one_tensor_in_two_places_does_not_stand_for_two(machine):
    """Addresses tell which operand is where: of q = k = v they cannot."""
    (x, *_), grad = leaves()
    for _ in range(3):
        output, _ = machine.attend(x, x, x, *REST)
        agree([output], expected([x, x, x], grad)[:1])
    assert machine.by_driver == 0
    settle(machine)
    output, _ = machine.attend(x, x, x, *REST)  # a known call takes it
    agree(torch.autograd.grad(output, x, grad), [sum(expected([x, x, x], grad)[2])])
    assert machine.by_triton == 0


def test_an_output_may_be_its_own_gradient(machine):
    for _ in range(3):
        tensors, _ = leaves()
        output, _ = machine.attend(*tensors, *REST)
        output.backward(output)
        agree([x.grad for x in tensors], expected(tensors, output.detach())[2])
    settle(machine)
    tensors, grad = leaves(seed=5)
    output, _ = machine.attend(*tensors, *REST)
    agree(torch.autograd.grad(output, tensors, grad), expected(tensors, grad)[2])
    assert machine.by_triton == 0


@pytest.mark.parametrize("config", ["copies", "adds"])
def test_what_is_more_than_launches_is_left_to_python(machine, config):
    tensors, grad = leaves()
    for _ in range(4):
        output, _ = machine.attend(*tensors, True, 0.25, config)
        assert not by_native(output)
        agree(torch.autograd.grad(output, tensors, grad), expected(tensors, grad)[2])
    assert machine.by_driver == 0


def test_gradients_that_python_copies_do_not_keep_others_from_cpp(machine):
    tensors, grad = leaves()
    for _ in range(100):
        machine.attend(*tensors, *REST)[0].sum().backward()
    settle(machine)
    output, _ = machine.attend(*tensors, *REST)
    torch.autograd.grad(output, tensors, grad)
    assert (machine.by_triton, machine.by_driver) == (0, 3)


def test_upstream_gradients_of_other_strides(machine):
    settle(machine)
    tensors, grad = leaves()
    transposed = grad.transpose(1, 2).contiguous().transpose(1, 2)
    for upstream in (transposed, torch.ones(()).expand(SHAPE), grad):
        output, _ = machine.attend(*tensors, *REST)
        agree(torch.autograd.grad(output, tensors, upstream), expected(tensors, upstream)[2])
    assert machine.by_triton == 0  # this operator does the first two without a launch


def test_gradients_through_the_logsumexp(machine):
    settle(machine)
    tensors, grad = leaves()
    for with_output in (True, False):
        output, lse = machine.attend(*tensors, *REST)
        upstream = torch.randn(lse.shape)
        outputs, grads = ([output, lse], [grad, upstream]) if with_output else ([lse], [upstream])
        wanted = expected(tensors, grad if with_output else torch.zeros(SHAPE), grad_lse=upstream)[2]
        agree(torch.autograd.grad(outputs, tensors, grads), wanted)


def test_misaligned_and_strange_tensors_are_left_to_python(machine):
    settle(machine)
    tensors, grad = leaves()
    storage = torch.zeros(tensors[0].numel() + 1)
    shifted = storage[1:].view(SHAPE).copy_(tensors[0].detach()).requires_grad_()
    assert shifted.data_ptr() % 16
    output, _ = machine.attend(shifted, *tensors[1:], *REST)
    assert not by_native(output)
    agree([output], expected(tensors, grad)[:1])
    call = next(iter(machine.kept._calls.values()))
    q, k, v = (x.detach() for x in tensors)
    assert call(q, k, v) is not None
    for other in (torch._neg_view(q), q.double(), q[:1], q.transpose(0, 1), q.to("meta"), q.to_sparse(),
                  torch._efficientzerotensor(SHAPE)):  # fmt: skip
        assert call(other, k, v) is None and call(q, k, other) is None
    assert call(q, k, v) is not None


def test_a_driver_that_refuses_leaves_it_to_python(machine):
    settle(machine)
    tensors, grad = leaves()
    output, _ = machine.attend(*tensors, *REST)
    for refusal in ("status", "map_status"):
        setattr(machine, refusal, 201)
        agree(torch.autograd.grad(output, tensors, grad, retain_graph=True), expected(tensors, grad)[2])
        by_python, _ = machine.attend(*tensors, *REST)
        assert not by_native(by_python)
        agree(torch.autograd.grad(by_python, tensors, grad), expected(tensors, grad)[2])
        setattr(machine, refusal, 0)
    assert by_native(machine.attend(*tensors, *REST)[0])


def test_gradients_of_gradients_are_refused(machine):
    settle(machine)
    tensors, grad = leaves()
    output, _ = machine.attend(*tensors, *REST)
    (first,) = torch.autograd.grad(output, tensors[0], grad, create_graph=True)
    agree([first], expected(tensors, grad)[2][:1])
    with pytest.raises(NotImplementedError, match="double backward is not supported here"):
        first.sum().backward()


def test_whoever_watches_a_backward_sees_it(machine):
    settle(machine)
    tensors, grad = leaves()

    class Names(TorchDispatchMode):
        seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.name())
            return func(*args, **(kwargs or {}))

    output, _ = machine.attend(*tensors, *REST)
    with Names():
        agree(torch.autograd.grad(output, tensors, grad), expected(tensors, grad)[2])
    assert any(name.endswith("_backward") and "operator_of" in name for name in Names.seen)

    def both():
        machine.attend(*tensors, *REST)[0].backward(grad)

    time_stages(both, device="cpu", num_samples=1, warmup=0)
    assert machine.by_driver == 1  # by C++ was only the forward before the mode


def test_a_tangent_of_the_gradient_is_refused(machine):
    settle(machine)
    tensors, grad = leaves()
    output, _ = machine.attend(*tensors, *REST)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD is not supported here"):
        torch.autograd.grad(output, tensors, forward_ad.make_dual(grad, grad))


def test_batched_gradients_equal_a_loop(machine):
    settle(machine)
    tensors, grad = leaves()
    stack = torch.stack([grad, 2 * grad])
    output, _ = machine.attend(*tensors, *REST)
    batched = torch.autograd.grad(output, tensors, stack, is_grads_batched=True, retain_graph=True)
    looped = [torch.autograd.grad(output, tensors, each, retain_graph=True) for each in stack]
    agree(batched, [torch.stack(each) for each in zip(*looped)])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(machine, reentrant):
    settle(machine)
    tensors, grad = leaves()
    output = checkpoint(lambda *x: machine.attend(*x, *REST)[0], *tensors, use_reentrant=reentrant)
    output.backward(grad)
    agree([x.grad for x in tensors], expected(tensors, grad)[2])
    assert machine.by_triton == 0


def test_saved_tensors_go_through_hooks(machine):
    settle(machine)
    tensors, grad = leaves()
    packed = []

    def pack(x):
        packed.append(x)
        return x.transpose(-1, -2).contiguous() if x.ndim == 4 else x

    def unpack(x):  # of other strides than were saved
        return x.transpose(-1, -2) if x.ndim == 4 else x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output, _ = machine.attend(*tensors, *REST)
    assert len(packed) == 5
    agree(torch.autograd.grad(output, tensors, grad), expected(tensors, grad)[2])


def test_saved_inputs_must_not_change(machine):
    settle(machine)
    tensors, grad = leaves()
    copies = [x * 1 for x in tensors]
    output, _ = machine.attend(*copies, *REST)
    copies[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output, tensors, grad)


def test_a_second_backward_wants_a_kept_graph(machine):
    settle(machine)
    tensors, grad = leaves()
    output, _ = machine.attend(*tensors, *REST)
    torch.autograd.grad(output, tensors, grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, tensors, grad)


def test_the_graph_dies_with_its_output(machine):
    settle(machine)
    tensors, _ = leaves()
    gc.disable()
    try:
        output, lse = machine.attend(*tensors, *REST)
        alive = weakref.ref(output)
        del output, lse
        assert alive() is None
    finally:
        gc.enable()


def test_threads_share_a_call(machine):
    settle(machine)
    results = []

    def work(seed):
        tensors, grad = leaves(seed=seed)
        for _ in range(20):
            output, _ = machine.attend(*tensors, *REST)
            results.append((torch.autograd.grad(output, tensors, grad), expected(tensors, grad)[2]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for ours, wanted in results:
        agree(ours, wanted)


def test_the_calls_that_are_kept_are_bounded(machine, monkeypatch):
    monkeypatch.setattr(calls, "MAX_CALLS", 1)
    settle(machine)
    shorter, _ = leaves((2, 3, 19, 16))
    for _ in range(3):
        assert not by_native(machine.attend(*shorter, *REST)[0])
    assert by_native(machine.attend(*leaves()[0], *REST)[0])


def test_a_shape_that_comes_once_is_launched_once_and_takes_no_place(machine, monkeypatch):
    """As in generation, where keys grow."""
    monkeypatch.setattr(calls, "MAX_CALLS", 4)
    for length in range(20, 30):
        machine.attend(*leaves((1, 1, length, 16))[0], *REST)
    assert (machine.by_triton, machine.by_driver) == (10, 0)
    settle(machine)
    assert by_native(machine.attend(*leaves()[0], *REST)[0])


def test_what_has_been_written_before_the_launches_is_no_call_for_cpp(machine):
    """Hopper's backward fills gradients of keys that no query sees: C++ would hand out what it has not filled."""
    (q, k, v), _ = leaves()
    output, lse = torch.zeros(SHAPE), torch.empty(SHAPE[:-1])
    given = q.detach(), k.detach(), v.detach()
    launched = machine.triton(lambda *_: None, *given, output, lse)
    assert calls.pass_facts([launcher.Seen(given, (output, lse), [launched])], given, (output, lse)) is not None
    assert calls.pass_facts([launcher.Seen((*given, output), (lse,), [launched])], given, (output, lse)) is None


@pytest.fixture
def new_process(monkeypatch, tmp_path):
    """As if nothing had been looked for, in an empty folder."""
    monkeypatch.setattr(native, "_looked", False)
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_a_library_is_built_once_and_can_be_switched_off(module, new_process, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(subprocess, "run", None)  # nothing is compiled
    assert native.build() == native.library_path() and native.state() == "C++"
    monkeypatch.setattr(native, "_looked", False)
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load() is None and native.state() == "Python: CS336_ATTN_NATIVE=0"
    assert native.build() == native.library_path()


def test_what_another_process_has_built_is_found_by_build(module, new_process, monkeypatch):
    assert native.load() is None and "cs336-systems build" in native.state()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(subprocess, "run", None)
    assert native.load() is None  # it is looked for once
    native.build()
    assert native.load() is not None


def test_without_a_compiler_the_reason_is_said(new_process, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler 'no-such-compiler'"):
        native.build()
    monkeypatch.setattr(native, "_compiler", lambda: [sys.executable, "-c", "raise SystemExit('error: no headers')"])
    with pytest.raises(RuntimeError, match="failed with exit code 1: error: no headers"):
        native.build()
    assert [path.name for path in native.library_path().parent.iterdir()] == ["lock"]
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    with pytest.raises(RuntimeError, match="torch.utils.cpp_extension does not import"):
        native.build()


def test_a_broken_library_is_a_warning_and_built_anew(new_process, monkeypatch):
    native.library_path().parent.mkdir(parents=True)
    native.library_path().write_bytes(b"no library")
    with pytest.warns(UserWarning, match="goes on without its C\\+\\+ half"):
        assert native.load() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load() is None  # said once
        assert native.state() == "Python: `cs336-systems build` builds anew what does not load"
    compiled = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: compiled.append(command) or stop())
    with pytest.warns(UserWarning), pytest.raises(InterruptedError):
        native.build()
    assert str(native.SOURCE) in compiled[0]


@pytest.mark.parametrize("damage", ["shorter", "zeros", "no checksum"])
def test_a_damaged_library_is_not_loaded(module, new_process, monkeypatch, damage):
    """dlopen maps what is there: a library cut short killed the process, and `build` with it."""
    damaged = native.library_path()
    with monkeypatch.context() as context:
        context.delenv("TORCH_EXTENSIONS_DIR")
        whole = native.library_path()
    content = bytearray(whole.read_bytes())
    if damage == "zeros":
        content[8192:12288] = bytes(4096)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(content[: len(content) // 2] if damage == "shorter" else content)
    if damage != "no checksum":
        shutil.copy(native.checksum_path(whole), native.checksum_path(damaged))
    with pytest.warns(UserWarning, match="is not as it was built"):
        assert native.load() is None
    compiled = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: compiled.append(command) or stop())
    with pytest.warns(UserWarning), pytest.raises(InterruptedError):
        native.build()
    assert str(native.SOURCE) in compiled[0]


def test_a_compiler_may_speak_any_encoding(new_process, monkeypatch):
    complaint = "import sys; sys.stderr.buffer.write('error: d\u00e9j\u00e0 vu'.encode('latin-1')); sys.exit(1)"
    monkeypatch.setattr(native, "_compiler", lambda: [sys.executable, "-c", complaint])
    with pytest.raises(RuntimeError, match="failed with exit code 1: error: d.j. vu"):
        native.build()


def test_a_blank_cxx_names_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", " ")
    assert native._compiler() == ["c++"]


def test_the_command_says_in_one_line_why_nothing_is_built(new_process, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 2 and result.output.splitlines() == [
        "error: there is no C++ compiler 'no-such-compiler' (CXX names another)"
    ]


def test_the_command_builds(module):
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 0 and result.output.startswith("attention calls on a GPU go through C++ from now on: ")


def stop():
    raise InterruptedError


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user who is not root")
def test_a_folder_that_is_not_ours_is_no_library(new_process):
    new_process.chmod(0)
    try:
        assert native.load() is None
    finally:
        new_process.chmod(0o700)


def test_without_a_home_there_is_no_library(new_process, monkeypatch):
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert native.load() is None and native.state().startswith("Python: there is no home folder")
    with pytest.raises(OSError, match="there is no home folder"):
        native.build()


def test_attention_imports_where_there_are_no_file_locks():
    command = "import sys; sys.modules['fcntl'] = None; import cs336_systems.attention"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=300)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_python(monkeypatch):
    """flash_attention without C++."""

    def call(*tensors, **options):
        with monkeypatch.context() as patched:
            patched.setattr(operator, "load", lambda: None)
            output = flash_attention(*tensors, **options)
            assert output.grad_fn is None or NODE not in output.grad_fn.name()
            return output

    return call


def gpu_leaves(batch, heads, kv_heads, queries, keys, head_dim, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    *tensors, grad = (torch.randn(batch, n, rows, head_dim, device="cuda", dtype=dtype) for n, rows in sizes)
    return [x.requires_grad_() for x in tensors], grad


def skip_without(backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def same_on_gpu(ours, theirs, *, exact):
    for a, b in zip(ours, theirs, strict=True):
        if exact:
            assert torch.equal(a, b)
        else:  # dQ of hopper is summed in any order
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


BACKENDS = ["triton", "hopper"]
GPU_SHAPES = {
    "short": (1, 16, 16, 512, 512, 64), "grouped, ragged": (2, 4, 2, 300, 300, 128),
    "fewer queries": (1, 2, 2, 77, 130, 64),
    "fewer keys": (1, 2, 2, 130, 77, 64), "head of 40": (1, 2, 2, 100, 100, 40), "one row": (1, 1, 1, 1, 1, 64),
    "split keys": (1, 1, 1, 2048, 2048, 64), "one row of a group": (2, 8, 2, 1, 4096, 128),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_halves_launch_the_same(backend, shape, is_causal, deterministic, by_python):
    skip_without(backend)
    sizes = GPU_SHAPES[shape]
    options = {"is_causal": is_causal, "backend": backend, "deterministic": deterministic, "enable_gqa": True}
    for seed in range(4):
        tensors, grad = gpu_leaves(*sizes, seed=seed)
        results = []
        for call in (flash_attention, by_python):
            output = call(*tensors, **options)
            results.append([output, *torch.autograd.grad(output, tensors, grad)])
            assert by_native(output) == (call is flash_attention and seed > 1)
        (output, *grads), (other, *others) = results
        assert torch.equal(output, other)
        same_on_gpu(grads[1:], others[1:], exact=True)
        same_on_gpu(grads[:1], others[:1], exact=backend == "triton" or bool(deterministic))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_gradients_of_any_strides_on_a_gpu(backend, by_python):
    skip_without(backend)
    tensors, grad = gpu_leaves(2, 4, 4, 200, 200, 64)
    transposed = grad.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.empty(grad.numel() + 1, device="cuda", dtype=grad.dtype)[1:].view(grad.shape).copy_(grad)
    summed = torch.ones_like(grad[:1, :1, :1, :1]).expand(grad.shape)
    for upstream in (grad, grad, grad, transposed, summed, shifted, grad):
        ours, theirs = (
            torch.autograd.grad(call(*tensors, backend=backend, is_causal=True), tensors, upstream)
            for call in (flash_attention, by_python)
        )
        same_on_gpu(ours, theirs, exact=backend == "triton")
    output = flash_attention(*tensors, backend=backend, is_causal=True)
    ours = torch.autograd.grad(output, tensors, output)
    other = by_python(*tensors, backend=backend, is_causal=True)
    same_on_gpu(ours, torch.autograd.grad(other, tensors, output.detach()), exact=backend == "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_in_three_places_on_a_gpu(backend, by_python):
    skip_without(backend)
    (x, k, v), grad = gpu_leaves(1, 2, 2, 96, 96, 64)
    for _ in range(4):
        assert torch.equal(flash_attention(x, x, x, backend=backend), by_python(x, x, x, backend=backend))
        assert torch.equal(flash_attention(x, k, v, backend=backend), by_python(x, k, v, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_threads_and_graphs(backend, by_python):
    skip_without(backend)
    tensors, grad = gpu_leaves(1, 4, 4, 256, 256, 64)
    wanted = by_python(*tensors, backend=backend, is_causal=True)
    torch.cuda.synchronize()
    results = [flash_attention(*tensors, backend=backend, is_causal=True) for _ in range(3)]
    assert by_native(results[2])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a launch on another stream would not wait
        late = [x.detach() * 1 for x in tensors]
        results.append(flash_attention(*late, backend=backend, is_causal=True))
    stream.synchronize()

    def work():
        # Of a thread that has no CUDA context: its first kernel would be this one.
        output = flash_attention(*tensors, backend=backend, is_causal=True)
        torch.autograd.grad(output, tensors, grad)
        return output

    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            results.append(pool.submit(work).result())
    static = [x.detach().clone() for x in tensors]
    for _ in range(3):
        flash_attention(*static, backend=backend, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attention(*static, backend=backend, is_causal=True)
    static[0].neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert len(results) == 6
    for output in results:
        assert torch.equal(output, wanted)
    assert torch.equal(captured, by_python(*static, backend=backend, is_causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_watchers_get_python(backend):
    """Stages are timed, gradients of gradients refused, deterministic algorithms obeyed: as without C++."""
    skip_without(backend)
    tensors, grad = gpu_leaves(1, 4, 4, 256, 256, 64)

    def both():
        flash_attention(*tensors, backend=backend, is_causal=True).backward(grad)

    for _ in range(3):
        both()
    assert {"forward", "preprocess", "dkv", "dq"} <= set(time_stages(both, device="cuda", num_samples=2, warmup=0))
    output = flash_attention(*tensors, backend=backend, is_causal=True)
    assert by_native(output)
    (first,) = torch.autograd.grad(output, tensors[0], grad, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported here"):
        first.sum().backward()
