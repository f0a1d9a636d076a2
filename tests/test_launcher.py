"""Launches through the driver alone: `attention/triton/launcher.py`, with a driver that reads what it is given."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.measure.stages import time_stages

launcher = pytest.importorskip("cs336_systems.attention.triton.launcher")
CUDA = torch.device("cuda", 0)
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}
SIGNATURE = {
    "x": "tensordesc<bf16[1, 64]>", "y": "*fp32", "one": "constexpr", "n": "i32", "far": "i64", "scale": "fp32",
    "D": "constexpr",
}  # fmt: skip
PTX = """
.visible .entry some_kernel(
    .param .align 64 .b8 some_kernel_param_0[128],
    .param .u32 some_kernel_param_1,
    .param .u32 some_kernel_param_2,
    .param .u64 some_kernel_param_3,
    .param .u64 some_kernel_param_4,
    .param .u64 .ptr .global .align 1 some_kernel_param_5,
    .param .u32 some_kernel_param_6,
    .param .u64 some_kernel_param_7,
    .param .f32 some_kernel_param_8,
    .param .u64 .ptr .global .align 1 some_kernel_param_9,
    .param .u64 .ptr .global .align 1 some_kernel_param_10
)
.reqntid 128
{ ret; }
"""
C_TYPES = {"u32": ctypes.c_int32, "u64": ctypes.c_int64, "f32": ctypes.c_float}


def kernel(ptx=PTX, signature=SIGNATURE, **changes):
    metadata = {
        "num_ctas": 1, "num_warps": 4, "shared": 1024, "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "profile_scratch_size": 0, "tensordesc_meta": [META],
    }  # fmt: skip
    return SimpleNamespace(
        metadata=SimpleNamespace(**(metadata | changes)), src=SimpleNamespace(signature=signature),
        asm={"ptx": ptx}, function=0x1234, _init_handles=lambda: None,
    )  # fmt: skip


class Compiled(SimpleNamespace):
    __hash__ = object.__hash__


def compiled_kernel(**changes):
    return Compiled(**vars(kernel(**changes)))


def attributes_of(config):
    """(id, value) of a launch's attributes, of which cuda.h makes 72 bytes each, the value from the eighth on."""
    places = [config.attributes + 72 * number for number in range(config.num_attributes)]
    return [(ctypes.c_int.from_address(place).value, ctypes.c_int.from_address(place + 8).value) for place in places]


class Driver:
    """Reads parameter blocks as a GPU would; `status` is what it answers."""

    def __init__(self):
        self.launches, self.maps, self.attributes, self.status, self.map_status = [], [], [], 0, 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802 - the driver's name
        if self.status == 0:
            config, pointers = config._obj, parameters._obj
            kinds = ["map", "u32", "u32", "u64", "u64", "u64", "u32", "u64", "f32", "u64", "u64"]
            values = [
                ctypes.string_at(place, 4) if kind == "map" else C_TYPES[kind].from_address(place).value
                for kind, place in zip(kinds, pointers, strict=True)
            ]
            assert pointers[0] % 64 == 0 and extra is None
            self.attributes.append(attributes_of(config))
            grid = config.grid_x, config.grid_y, config.grid_z
            self.launches.append((grid, config.block_x, config.shared_bytes, config.stream, function.value, values))
        return self.status

    def cuTensorMapEncodeTiled(self, place, element, rank, address, sizes, strides, box, steps, *options):  # noqa: N802
        ctypes.memmove(place, b"tmap", 4)
        self.maps.append((element, rank, address.value, [*sizes], [*strides], [*box], [*steps], options))
        return self.map_status


@pytest.fixture
def driver(monkeypatch):
    driver, driver.stream = Driver(), 7
    monkeypatch.setattr(launcher, "cuda_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: driver.stream, raising=False)
    return driver


def arguments():
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    descriptor = SimpleNamespace(base=x, shape=[3, 64], strides=[128, 1], padding="zero")
    return descriptor, torch.zeros(5), 1, -3, 2**40, 0.125


def test_the_block_holds_what_the_kernel_declares(driver):
    given = arguments()
    bound = launcher.bind(compiled_kernel(), (4, 2, 1), given, 9)
    assert bound() == 0
    ((grid, threads, shared, stream, function, values),) = driver.launches
    assert (grid, threads, shared, stream, function) == ((4, 2, 1), 128, 1024, 9, 0x1234)
    assert values == [b"tmap", 3, 64, 128, 1, given[1].data_ptr(), -3, 2**40, 0.125, 0, 0]
    ((element, rank, address, sizes, strides, box, steps, options),) = driver.maps
    # cuda.h: bfloat16 is 9; no interleaving, 128 bytes of swizzle, promotion to 128 bytes, zeros outside
    assert (element, rank, options) == (9, 2, (0, 3, 2, 0))
    assert address == given[0].base.data_ptr()
    assert (sizes, strides[0], box, steps) == ([64, 3], 256, [64, 1], [1, 1])


def test_a_kernel_that_overlaps_is_launched_so(driver):
    """cuda.h: 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
    for overlaps in (True, False):
        assert launcher.bind(compiled_kernel(launch_pdl=overlaps), (4, 2, 1), arguments(), 9)() == 0
    assert driver.attributes == [[(6, 1)], []]
    assert ctypes.sizeof(launcher.LaunchAttribute) == 72 and ctypes.addressof(launcher.OVERLAPS) % 8 == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}, {"profile_scratch_size": 8},
        {"tensordesc_meta": None}, {"ptx": PTX.replace(".param .f32", ".param .f64")},
        {"ptx": PTX.replace("[128]", "[64]")}, {"ptx": "nothing"}, {"signature": SIGNATURE | {"n": "i8"}},
        {"signature": SIGNATURE | {"one": "i32"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_a_plain_launch_is_left_to_triton(driver, changes):
    assert launcher.bind(compiled_kernel(**changes), (4, 2, 1), arguments(), 9) is None


@pytest.mark.parametrize("change", [{"padding": "nan"}, {"round_f32_to_tf32": True}, None], ids=str)
def test_a_descriptor_of_another_kind_is_left_to_triton(driver, change):
    given = arguments()
    vars(given[0]).update(change or {})
    driver.map_status = 0 if change else 1  # or the driver does not encode it
    assert launcher.bind(compiled_kernel(), (4, 2, 1), given, 9) is None


class Calls:
    """A launcher with one kernel, which counts how often it has gone through Triton."""

    def __init__(self, *compiled):
        self.kept, self.compiled, self.given, self.count = launcher.KeptLaunches(), compiled, arguments(), 0
        self(0)  # what comes once is not kept
        self.count = 0

    def __call__(self, *addresses, device=CUDA):
        given, *made = (SimpleNamespace(data_ptr=lambda address=address: address) for address in addresses)
        self.kept(device, (given,), tuple(made), self.launch_all)
        return self.count

    def launch_all(self):
        self.count += 1
        return [launcher.Launched(compiled, (1, 1, 1), self.given) if compiled else None for compiled in self.compiled]


def test_what_comes_once_is_not_laid_out(driver):
    call = Calls(compiled_kernel())
    assert call(1) == 1 and len(driver.maps) == 1  # of the second call
    assert call(1) == 1 and call(0) == 2


def test_only_new_addresses_and_streams_go_through_triton(driver):
    call = Calls(compiled_kernel(), compiled_kernel())
    assert [call(1, 2), call(1, 2), call(1, 3), call(1, 2)] == [1, 1, 2, 2]
    assert len(driver.launches) == 4  # two kernels, twice
    driver.stream = 8
    assert [call(1, 2), call(1, 2)] == [3, 3]
    assert [stream for _, _, _, stream, _, _ in driver.launches] == [7, 7, 7, 7, 8, 8]


def test_what_cannot_be_bound_goes_through_triton_each_time(driver):
    assert [Calls(compiled_kernel(num_ctas=2), compiled_kernel())(1) for _ in range(2)] == [1, 1]
    call = Calls(compiled_kernel(), None)
    assert [call(1), call(1)] == [1, 2]
    on_cpu = Calls(compiled_kernel())
    assert [on_cpu(1, device=torch.device("cpu")) for _ in range(2)] == [1, 2]
    assert not driver.launches


def test_a_refusal_of_the_driver_goes_through_triton(driver):
    call = Calls(compiled_kernel())
    call(1)
    driver.status = 201
    assert call(1) == 2
    driver.status = 0
    assert call(1) == 2 and len(driver.launches) == 1


def test_whoever_watches_launches_sees_them(driver):
    from triton import knobs

    call = Calls(compiled_kernel())
    call(1)
    hook = knobs.runtime.launch_enter_hook
    seen = lambda metadata: None  # noqa: E731
    hook.add(seen)
    try:
        assert call(1) == 2
    finally:
        hook.remove(seen)
    assert call(1) == 2
    time_stages(lambda: call(1), device="cpu", num_samples=1, warmup=0)
    assert call.count == 3


def test_nothing_is_laid_out_while_somebody_watches(driver):
    """That takes the host longer than a launch, and counted as time that no stage has."""
    call = Calls(compiled_kernel())
    time_stages(lambda: call(1), device="cpu", num_samples=2, warmup=0)
    assert call.count == 2 and not driver.maps
    assert [call(1), call(1)] == [3, 3] and len(driver.maps) == 1


def test_who_asks_is_told_of_launches(driver):
    call = Calls(compiled_kernel())
    call(1, 2)
    with launcher.launches_seen() as outer:
        with launcher.launches_seen() as seen:
            assert call(1, 2) == 2  # though they were kept
        assert not driver.launches and not outer
        ((given, made, (launched,)),) = seen
        assert ([x.data_ptr() for x in given], [x.data_ptr() for x in made]) == ([1], [2])
        assert launched.arguments is call.given
    assert call(1, 2) == 2 and len(driver.launches) == 1


def test_what_others_launch_is_not_told(driver):
    """Autograd's thread runs beside the caller's."""
    call = Calls(compiled_kernel())
    with launcher.launches_seen() as seen:
        thread = threading.Thread(target=call, args=(1,))
        thread.start()
        thread.join()
    assert call.count == 1 and not seen


class Contexts:
    """The driver's contexts; a thread begins without."""

    def __init__(self, current=None):
        self.current, self.calls = current, []

    def cuCtxGetCurrent(self, context):  # noqa: N802 - the driver's name
        self.calls.append("get")
        context._obj.value = self.current
        return 0

    def cuDeviceGet(self, number, ordinal):  # noqa: N802
        number._obj.value = ordinal + 10
        return 0

    def cuDevicePrimaryCtxRetain(self, context, number):  # noqa: N802
        context._obj.value = number.value + 100
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.calls.append(context.value)
        return 0


@pytest.mark.parametrize("current, calls", [(None, ["get", 113]), (7, ["get"])])
def test_a_thread_without_a_context_gets_the_devices(monkeypatch, current, calls):
    driver = Contexts(current)
    monkeypatch.setattr(launcher, "cuda_driver", lambda: driver)

    def twice():
        launcher.have_context(3)
        launcher.have_context(3)

    for _ in range(2):  # each thread asks once
        thread = threading.Thread(target=twice)
        thread.start()
        thread.join()
    assert driver.calls == calls * 2


def test_the_kept_launches_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(launcher, "KEPT_CALLS", 3)
    call = Calls(compiled_kernel())
    assert [call(address) for address in range(4)] == [1, 2, 3, 4]
    assert [call(3), call(0)] == [4, 5]
