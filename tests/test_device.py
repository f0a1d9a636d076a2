"""Device facts, peaks and the choice of a back end, with the GPUs replaced by what torch would say of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems import device
from cs336_systems.device import DeviceInfo, hopper_refusal

ALL_OK = dict.fromkeys(device.BACKENDS, "ok")
NO_TRITON = ALL_OK | {"triton": "triton is not installed", "hopper": "triton is not installed"}
UUID = "7e1d4c2a-0000-1111-2222-333344445555"


def gpu(name: str = "NVIDIA H200", capability: tuple[int, int] | None = (9, 0)) -> DeviceInfo:
    return DeviceInfo(name=name, kind="cuda", compute_capability=capability, memory_bytes=141 * 10**9)


def cpu(name: str = "AMD EPYC", num_cores: int | None = 2) -> DeviceInfo:
    return DeviceInfo(name=name, kind="cpu", memory_bytes=8 * 2**30, num_cores=num_cores)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Makes torch report one H200 and nvidia-smi give an answer; returns the list of the commands it was asked."""

    def install(answer: str | Exception | None = "570.86.15, 1980 MHz\n", hip: str | None = None) -> list[list[str]]:
        properties = SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, total_memory=150_000_000_000, multi_processor_count=132, uuid=UUID
        )
        commands: list[list[str]] = []

        def run(command: list[str], **options: Any) -> SimpleNamespace:
            assert options["timeout"] > 0 and options["check"] and not options.get("shell")
            commands.append(command)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(stdout=answer)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(device.shutil, "which", lambda name: None if answer is None else f"/usr/bin/{name}")
        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# Facts


def test_facts_of_a_gpu_come_from_torch_and_nvidia_smi(fake_gpu: Callable[..., list[list[str]]]) -> None:
    commands = fake_gpu()
    info = device.get_device_info()
    assert info == DeviceInfo(
        name="NVIDIA H200", kind="cuda", compute_capability=(9, 0), memory_bytes=150_000_000_000,
        num_multiprocessors=132, driver="570.86.15", max_sm_clock_mhz=1980,
    )  # fmt: skip
    assert info.slug == "nvidia-h200"
    assert json.loads(json.dumps(info.to_dict())) == {
        "name": "NVIDIA H200", "kind": "cuda", "compute_capability": "9.0", "memory_bytes": 150_000_000_000,
        "num_multiprocessors": 132, "driver": "570.86.15", "max_sm_clock_mhz": 1980, "num_cores": None,
    }  # fmt: skip
    # By UUID: under CUDA_VISIBLE_DEVICES torch's index is not nvidia-smi's.
    (command,) = commands
    assert command[0] == "/usr/bin/nvidia-smi"
    assert command[-2:] == ["-i", f"GPU-{UUID}"]


@pytest.mark.parametrize(
    ("answer", "driver", "clock"),
    [
        pytest.param(None, None, None, id="no nvidia-smi"),
        pytest.param(subprocess.TimeoutExpired("nvidia-smi", 10), None, None, id="hangs"),
        pytest.param(subprocess.CalledProcessError(9, "nvidia-smi"), None, None, id="fails"),
        pytest.param(PermissionError("nvidia-smi"), None, None, id="may not run"),
        pytest.param("No devices were found\n", None, None, id="no table"),
        pytest.param("570.86.15, [N/A]\n", "570.86.15", None, id="no clock"),
    ],
)
def test_what_nvidia_smi_does_not_tell_is_none(
    fake_gpu: Callable[..., list[list[str]]], answer: str | Exception | None, driver: str | None, clock: int | None
) -> None:
    fake_gpu(answer)
    info = device.get_device_info("cuda")
    assert (info.name, info.driver, info.max_sm_clock_mhz) == ("NVIDIA H200", driver, clock)


def test_an_amd_gpu_has_no_compute_capability(fake_gpu: Callable[..., list[list[str]]]) -> None:
    fake_gpu(answer=None, hip="6.4")
    info = device.get_device_info()
    assert info.compute_capability is None
    assert info.to_dict()["compute_capability"] is None


def test_facts_of_this_cpu() -> None:
    info = device.get_device_info("cpu")
    assert info.kind == "cpu" and info.name
    assert info.num_cores is not None and 1 <= info.num_cores <= (os.cpu_count() or 1)
    assert info.memory_bytes > 2**28
    assert info.compute_capability is info.driver is info.max_sm_clock_mhz is info.num_multiprocessors is None
    json.dumps(info.to_dict())
    assert platform.node() not in info.to_dict().values()


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        pytest.param("model\t\t: 17\nmodel name\t: AMD EPYC 9654 \nmodel name\t: X\n", "AMD EPYC 9654", id="x86"),
        pytest.param("processor\t: 0\nCPU part\t: 0xd4f\n", "aarch64", id="arm: no model name"),
        pytest.param("model name\t:\nstepping\t: 1\n", "aarch64", id="empty model name"),
        pytest.param(None, "aarch64", id="no /proc"),
    ],
)
def test_cpu_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuinfo: str | None, expected: str) -> None:
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert device._cpu_name() == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert device._usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert device._usable_cores() == 64


@pytest.mark.parametrize(
    ("info", "slug"),
    [
        (gpu("NVIDIA GeForce RTX 4090"), "nvidia-geforce-rtx-4090"),
        (gpu("NVIDIA A100-SXM4-80GB"), "nvidia-a100-sxm4-80gb"),
        (cpu(), "cpu-amd-epyc-2-cores"),
        (cpu("Intel(R) Xeon(R) Platinum 8480C", 112), "cpu-intel-xeon-platinum-8480c-112-cores"),
        (cpu("arm", None), "cpu-arm"),
        (cpu("../../etc", 1), "cpu-etc-1-cores"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_slugs_are_folder_names(info: DeviceInfo, slug: str) -> None:
    assert info.slug == slug


def test_device_info_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpu().name = "other"  # type: ignore[misc]


def test_resolve_device_with_a_gpu(fake_gpu: Callable[..., list[list[str]]]) -> None:
    fake_gpu()
    assert [device.resolve_device(name) for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_resolve_device_without_a_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device.resolve_device(name) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match=r"^--device cuda: no CUDA device is available \(torch .*, built for CPU\)$"):
        device.resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ValueError, match=r"^--device cuda: .*built for CUDA 12.8, no driver or device\)$"):
        device.get_device_info("cuda")


@pytest.mark.parametrize("name", ["mps", "cuda:0", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^--device must be auto, cpu or cuda, got '{name}'$"):
        device.resolve_device(name)


# Peaks


def test_peaks_are_plausible_and_say_where_from() -> None:
    for name, peak in device.PEAKS.items():
        assert "NVIDIA" in peak.source, name
        # Tensor cores are faster than the rest by no more than 40; no sheet's sparse rate slipped in.
        assert 1.5 < peak.bf16_tflops / peak.fp32_tflops < 40, name
        assert 100 < peak.memory_gb_per_s < 10_000, name


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),  # as older drivers report it
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_known_gpus_have_their_peak(name: str, bf16: float) -> None:
    peak = device.device_peak(gpu(name))
    assert peak is not None and peak.bf16_tflops == bf16


@pytest.mark.parametrize(
    "info",
    [
        gpu("NVIDIA H200 MIG 1g.18gb"),
        gpu("NVIDIA H200 NVL"),
        gpu("NVIDIA GeForce RTX 4090 Laptop GPU"),
        gpu("AMD Instinct MI300X"),
        cpu(),
        cpu("L4"),
    ],
    ids=lambda info: info.name,
)
def test_an_unknown_device_has_no_peak(info: DeviceInfo) -> None:
    assert device.device_peak(info) is None
    assert device.model_flops_utilization(1e12, 1.0, device.device_peak(info), "bfloat16") is None


def test_model_flops_utilization() -> None:
    peak = device.PEAKS["A100-SXM4-80GB"]
    assert device.model_flops_utilization(156e12, 1.0, peak, "bfloat16") == pytest.approx(0.5)
    assert device.model_flops_utilization(156e12, 2.0, peak, "float16") == pytest.approx(0.25)
    assert device.model_flops_utilization(19.5e12, 1.0, peak, "float32") == pytest.approx(1.0)
    assert device.model_flops_utilization(1e12, 1.0, peak, "float64") is None
    with pytest.raises(ValueError, match="seconds must be positive, got 0"):
        device.model_flops_utilization(1e12, 0, peak, "bfloat16")
    with pytest.raises(ValueError, match="dtype must be one of float64, .* got 'fp8'"):
        device.model_flops_utilization(1e12, 1.0, peak, "fp8")


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (None, "float32"), ((6, 1), "float32"), ((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"),
        ((8, 9), "bfloat16"), ((9, 0), "bfloat16"), ((10, 0), "bfloat16"), ((12, 0), "bfloat16"),
    ],
)  # fmt: skip
def test_recommended_dtype(capability: tuple[int, int] | None, dtype: str) -> None:
    assert device.recommended_dtype(capability) == dtype


# Which back ends run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process look like a machine with these tools."""

    def install(
        *, tools: tuple[str, ...] = ("g++", "gcc"), triton: bool = True, interpreter: bool = False,
        system: str = "linux", gluon: str | None = None,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(device, "_gluon_reason", lambda: gluon)
        for variable in ("CC", "CXX", "TRITON_INTERPRET"):
            monkeypatch.delenv(variable, raising=False)
        real_find_spec = importlib.util.find_spec
        monkeypatch.setattr(device.shutil, "which", lambda name: name if name in tools else None)
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: (object() if triton else None) if name == "triton" else real_find_spec(name),
        )
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
        if interpreter:
            monkeypatch.setenv("TRITON_INTERPRET", "1")

    return install


def test_a_full_gpu_machine_runs_everything(machine: Callable[..., None]) -> None:
    machine(tools=("gcc",))  # the GPU's code needs no C++ compiler
    assert device.available_backends(gpu()) == ALL_OK


def test_a_full_cpu_machine_runs_all_but_the_kernels(machine: Callable[..., None]) -> None:
    machine()
    backends = device.available_backends(cpu())
    assert backends.pop("triton") == (
        "triton kernels need a CUDA device of compute capability 8.0 or higher, AMD EPYC is no NVIDIA GPU; "
        "set TRITON_INTERPRET=1 before the first import of triton kernels to run them on the CPU interpreter"
    )
    needs_hopper = "hopper kernels need a GPU of compute capability 9.0 (H100, H200), AMD EPYC is no NVIDIA GPU"
    assert backends.pop("hopper") == needs_hopper
    assert backends == {"reference": "ok", "compiled": "ok", "tiled": "ok"}
    machine(interpreter=True)
    assert device.available_backends(cpu()) == ALL_OK | {"hopper": needs_hopper}


def test_the_default_is_this_machine(no_gpu: None, machine: Callable[..., None]) -> None:
    machine()
    assert device.available_backends() == device.available_backends(device.get_device_info("cpu"))


@pytest.mark.parametrize(
    ("setup", "info", "name", "reason"),
    [
        ({"tools": ()}, cpu(), "compiled", "no C++ compiler"),
        ({"tools": ("gcc",)}, cpu(), "compiled", "no C++ compiler"),
        ({"tools": ()}, gpu(), "compiled", "no C compiler, which triton needs to build its launchers"),
        ({"tools": ()}, gpu(), "triton", "no C compiler, which triton needs to build its launchers"),
        ({"triton": False}, gpu(), "compiled", "torch.compile needs triton on a GPU, and it is not installed"),
        ({"triton": False}, gpu(), "triton", "triton is not installed"),
        ({"triton": False, "interpreter": True}, cpu(), "triton", "triton is not installed"),
        ({"system": "darwin"}, cpu(), "triton", "triton kernels run on Linux, and this is darwin"),
        ({"system": "darwin"}, cpu(), "compiled", "no C++ compiler"),  # clang++ there, and only g++ is found
        ({}, gpu("Tesla P100", (6, 0)), "compiled",
         "torch.compile needs compute capability 7.0 or higher, Tesla P100 has 6.0"),
        ({}, gpu("Tesla T4", (7, 5)), "triton",
         "triton kernels need a CUDA device of compute capability 8.0 or higher, Tesla T4 has 7.5; "
         + device.INTERPRETER_HINT),
        ({}, gpu("AMD Instinct MI300X", None), "triton",
         "triton kernels need a CUDA device of compute capability 8.0 or higher, AMD Instinct MI300X is no NVIDIA GPU; "
         + device.INTERPRETER_HINT),
        ({}, gpu("NVIDIA A100-SXM4-80GB", (8, 0)), "hopper",
         "hopper kernels need a GPU of compute capability 9.0 (H100, H200), NVIDIA A100-SXM4-80GB has 8.0"),
        ({}, gpu("NVIDIA B200", (10, 0)), "hopper",
         "hopper kernels need a GPU of compute capability 9.0 (H100, H200), NVIDIA B200 has 10.0"),
        ({"interpreter": True}, gpu(), "hopper", "hopper kernels have no interpreter; run without TRITON_INTERPRET"),
        ({"triton": False}, gpu(), "hopper", "triton is not installed"),
        ({"tools": ()}, gpu(), "hopper", "no C compiler, which triton needs to build its launchers"),
        ({"gluon": "no Gluon"}, gpu(), "hopper", "no Gluon"),
    ],
)  # fmt: skip
def test_reasons(machine: Callable[..., None], setup: dict[str, Any], info: DeviceInfo, name: str, reason: str) -> None:
    machine(**setup)
    backends = device.available_backends(info)
    assert backends[name] == reason
    assert backends["reference"] == backends["tiled"] == "ok"


@pytest.fixture
def triton_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A triton of this version whose Gluon has these names; None: it has no Gluon."""

    def install(version: str, names: tuple[str, ...] | None) -> None:
        def import_module(name: str) -> SimpleNamespace:
            if name == "triton":
                return SimpleNamespace(__version__=version)
            if names is None:
                raise ModuleNotFoundError("No module named 'triton.experimental.gluon'")
            return SimpleNamespace(**dict.fromkeys(names))

        monkeypatch.setattr(device.importlib, "import_module", import_module)

    return install


@pytest.mark.parametrize(
    ("version", "names", "reason"),
    [
        ("3.6.0", device.GLUON_PIECES, None),
        ("3.7.1+git0123", device.GLUON_PIECES, None),
        ("3.5.1", device.GLUON_PIECES, "hopper kernels need triton 3.6 or later, this is 3.5.1"),
        ("3.6.0", ("mbarrier", "tma"),
         "the Gluon of triton 3.6.0 lacks fence_async_shared, warpgroup_mma, warpgroup_mma_wait"),
        ("3.2.0", None, "this triton has no Gluon for Hopper (No module named 'triton.experimental.gluon')"),
    ],
)  # fmt: skip
def test_gluon_is_looked_at_before_it_is_promised(
    triton_of: Callable[..., None], version: str, names: tuple[str, ...] | None, reason: str | None
) -> None:
    triton_of(version, names)
    assert device._gluon_reason() == reason


def test_the_installed_triton_has_what_the_hopper_kernels_import() -> None:
    pytest.importorskip("triton")
    assert device._gluon_reason() is None


def test_compilers_named_by_the_environment(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tools=("g++", "icpx", "clang"))
    assert device.has_cxx_compiler() and device._has_c_compiler()
    monkeypatch.setenv("CXX", "icpx")
    assert device.has_cxx_compiler()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert not device.has_cxx_compiler() and not device._has_c_compiler()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_the_interpreters_variable(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool
) -> None:
    machine()
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert device.interpreter_is_on() is on


def test_an_imported_tritons_switch_decides(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(interpreter=True)
    for interpret in (False, True):
        knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=interpret))
        monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
        assert device.interpreter_is_on() is interpret


@pytest.mark.skipif(sys.platform != "linux", reason="triton is installed on Linux only")
def test_the_real_tritons_switch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    for interpret in (False, True):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
        assert device.interpreter_is_on() is interpret


def test_importing_and_asking_imports_no_triton() -> None:
    code = (
        "import sys; from cs336_systems import device; device.available_backends(device.get_device_info('cpu'));"
        "print('triton' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"


# Which back end is taken


def select(**overrides: Any) -> tuple[str, str]:
    fields: dict[str, Any] = {
        "device_kind": "cuda", "compute_capability": (9, 0), "dtype": "bfloat16", "head_dim": 64, "batch_heads": 8,
        "seqlen_q": 1024, "seqlen_k": 1024, "available": ALL_OK,
    }  # fmt: skip
    return device.select_backend(**(fields | overrides))


CPU = {"device_kind": "cpu", "compute_capability": None, "dtype": "float32", "available": NO_TRITON}
LONG = {"seqlen_q": 16384, "seqlen_k": 16384}


@pytest.mark.parametrize(
    ("inputs", "name", "reason"),
    [
        # hopper on its GPU
        ({"batch_heads": 24}, "hopper", "ours at head_dim 64 from 512 tokens and 24576 queries in all heads on"),
        ({"batch_heads": 48, "seqlen_q": 512, "seqlen_k": 512}, "hopper", "from 512 tokens and 24576 queries"),
        ({"dtype": "float16", "head_dim": 128, "batch_heads": 24}, "hopper", "128 from 512 tokens and 24576 queries"),
        # triton on CUDA
        ({"seqlen_q": 511, "batch_heads": 64}, "triton", "triton serves bfloat16 with head_dim 64 on this GPU"),
        ({"seqlen_k": 511, "batch_heads": 64, "dtype": "float16"}, "triton", "serves float16"),
        ({"batch_heads": 23}, "triton", "triton serves"),
        ({"head_dim": 128, "batch_heads": 23}, "triton", "triton serves"),
        ({"dtype": "float32"}, "triton", "serves float32"),
        ({"head_dim": 256}, "triton", "head_dim 256"),
        ({"head_dim": 59}, "triton", "head_dim 59"),
        ({"seqlen_q": 1, "seqlen_k": 131_072}, "triton", "triton serves"),
        ({"seqlen_q": 0, "seqlen_k": 0}, "triton", "triton serves"),
        ({"compute_capability": (8, 0)}, "triton", "triton serves"),
        ({"compute_capability": (12, 0)} | LONG, "triton", "triton serves"),
        # CUDA, but not for triton
        ({"dtype": "float64"}, "reference", "triton takes float32, float16, bfloat16, not float64"),
        ({"dtype": "float64"} | LONG, "tiled", "not float64"),
        ({"head_dim": 257}, "reference", "triton takes a head_dim of at most 256, not 257"),
        ({"head_dim": 512} | LONG, "tiled", "not 512"),
        ({"available": NO_TRITON}, "reference", r"\(triton is not installed\)"),
        ({"available": NO_TRITON} | LONG, "tiled", r"\(triton is not installed\)"),
        ({"compute_capability": (7, 5), "dtype": "float16"}, "reference", "the inputs' GPU has 7.5"),
        ({"compute_capability": None} | LONG, "tiled", "the inputs' GPU has unknown"),
        # elsewhere
        (CPU, "reference", "the inputs are on cpu.*takes 4.0 MiB, at most 64 MiB"),
        (CPU | LONG, "tiled", "the inputs are on cpu.*takes 1024.0 MiB, more than 64 MiB"),
        (CPU | {"available": ALL_OK}, "reference", "the inputs are on cpu"),  # the interpreter is for tests
        (CPU | {"dtype": "bfloat16"}, "reference", "the inputs are on cpu"),
        (CPU | {"device_kind": "mps"}, "reference", "the inputs are on mps"),
        (CPU | {"seqlen_q": 0}, "reference", "takes 0.0 MiB"),
        # the threshold, in bytes of one head's scores
        (CPU | {"seqlen_q": 4096, "seqlen_k": 4096}, "reference", "takes 64.0 MiB, at most"),
        (CPU | {"seqlen_q": 4096, "seqlen_k": 4097}, "tiled", "more than 64 MiB"),
        (CPU | {"seqlen_q": 4096, "seqlen_k": 4096, "dtype": "float64"}, "tiled", "takes 128.0 MiB"),
        (CPU | {"seqlen_q": 4096, "seqlen_k": 8192, "dtype": "float16"}, "reference", "takes 64.0 MiB, at most"),
        (CPU | {"seqlen_q": 1, "seqlen_k": 10**6}, "reference", "at most"),
        # by name
        ({"requested": "reference"} | LONG, "reference", "reference was asked for"),
        ({"requested": "compiled"}, "compiled", "compiled was asked for"),
        ({"requested": "tiled", "dtype": "float64", "head_dim": 512}, "tiled", "tiled was asked for"),
        ({"requested": "triton"}, "triton", "triton was asked for"),
        (CPU | {"requested": "triton", "available": ALL_OK}, "triton", "triton was asked for"),
        (CPU | {"requested": "triton", "available": ALL_OK, "dtype": "float16"}, "triton", "triton was asked for"),
        ({"requested": "hopper"}, "hopper", "hopper was asked for"),
        ({"requested": "hopper", "dtype": "float16", "head_dim": 1, "seqlen_q": 0}, "hopper", "hopper was asked for"),
    ],
)  # fmt: skip
def test_select_backend(inputs: dict[str, Any], name: str, reason: str) -> None:
    chosen, why = select(**inputs)
    assert chosen == name
    assert re.search(reason, why), why


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"requested": "flash"},
         "^backend must be one of auto, reference, compiled, tiled, triton, hopper, got 'flash'$"),
        ({"dtype": "int8"}, "^dtype must be one of float64, float32, float16, bfloat16, got 'int8'$"),
        ({"requested": "triton", "available": NO_TRITON}, "^backend 'triton' cannot be used: triton is not installed$"),
        ({"requested": "compiled", "available": ALL_OK | {"compiled": "no C++ compiler"}},
         r"^backend 'compiled' cannot be used: no C\+\+ compiler$"),
        ({"requested": "tiled", "available": {}},
         "^backend 'tiled' cannot be used: it is not among the available back ends$"),
        ({"requested": "triton", "dtype": "float64"},
         "^backend 'triton' cannot be used: triton takes float32, float16, bfloat16, not float64$"),
        ({"requested": "triton", "head_dim": 320},
         "^backend 'triton' cannot be used: triton takes a head_dim of at most 256, not 320$"),
        ({"requested": "triton", "compute_capability": (7, 0)},
         "^backend 'triton' cannot be used: triton needs compute capability 8.0 or higher, .* has 7.0$"),
        (CPU | {"requested": "triton", "available": ALL_OK, "dtype": "bfloat16"},
         "^backend 'triton' cannot be used: Triton's CPU interpreter computes wrong bfloat16 products; use float32"),
        (CPU | {"requested": "triton", "available": ALL_OK | {"triton": device.INTERPRETER_HINT}},
         "^backend 'triton' cannot be used: set TRITON_INTERPRET=1 before"),
        ({"requested": "hopper", "available": ALL_OK | {"hopper": "no Gluon"}},
         "^backend 'hopper' cannot be used: no Gluon$"),
        ({"requested": "hopper", "dtype": "float32"},
         "^backend 'hopper' cannot be used: hopper takes float16 and bfloat16, not float32$"),
        ({"requested": "hopper", "head_dim": 129},
         f"^backend 'hopper' cannot .*: hopper takes a head_dim of at most {device.MAX_HOPPER_HEAD_DIM}, not 129$"),
        ({"requested": "hopper", "compute_capability": (10, 0)},
         "^backend 'hopper' cannot be used: hopper needs compute capability 9.0, and the inputs' GPU has 10.0$"),
        ({"requested": "hopper", "compute_capability": None}, "9.0, and the inputs' GPU has unknown$"),
        (CPU | {"requested": "hopper", "available": ALL_OK},
         "^backend 'hopper' cannot be used: hopper kernels run on CUDA devices, and the inputs are on cpu$"),
        ({"requested": "hopper", "layout": "block_mask"},
         "^backend 'hopper' cannot be used: hopper kernels walk no lists of tiles; backend 'triton' runs a block mask"),
        ({"requested": "hopper", "layout": "packed"},
         "^backend 'hopper' cannot be used: hopper kernels take no packed documents; backend 'triton' does$"),
    ],
)  # fmt: skip
def test_select_backend_refuses_with_the_reason(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(**inputs)


# Where auto takes the Hopper kernels: a table, here one of the test's own


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ({"head_dim": 64}, "hopper"),
        ({"head_dim": 64, "dtype": "float16"}, "hopper"),
        ({"head_dim": 64, "seqlen_q": 1023}, "triton"),
        ({"head_dim": 64, "seqlen_k": 1023}, "triton"),
        ({"head_dim": 128}, "triton"),  # from 4096 tokens on
        ({"head_dim": 128, **LONG}, "hopper"),
        ({"head_dim": 128, "batch_heads": 3, **LONG}, "triton"),
        ({"head_dim": 80, **LONG}, "triton"),  # not in the table
        ({"head_dim": 64, "dtype": "float32"}, "triton"),
        ({"head_dim": 64, "compute_capability": (8, 0)}, "triton"),
        ({"head_dim": 64, "available": ALL_OK | {"hopper": "no Gluon"}}, "triton"),
        ({"head_dim": 64, "layout": "block_mask"}, "triton"),
        ({"head_dim": 64, "layout": "packed"}, "triton"),
        ({"head_dim": 64, "requested": "triton"}, "triton"),
        (CPU | {"head_dim": 64, "available": ALL_OK}, "reference"),
    ],
)
def test_auto_takes_hopper_where_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr(device, "HOPPER_WHERE_FASTEST", {64: (1024, 0), 128: (4096, 65536)})
    chosen, why = select(**inputs)
    assert chosen == name
    if name == "hopper":
        limits = "64 from 1024 tokens|128 from 4096 tokens and 65536 queries in all heads"
        assert re.fullmatch(rf"hopper is the fastest of ours at head_dim ({limits}) on", why)


def test_the_hopper_refusal_can_be_traced() -> None:
    """The capability reaches a compiled function as a constant; PyTorch 2.11 cannot compare such tuples by !=."""

    @torch.compiler.assume_constant_result
    def capability() -> tuple[int, int]:
        return 9, 0

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if hopper_refusal("cuda", capability(), "bfloat16", 64, "dense") is None else x

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
