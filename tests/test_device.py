"""Device facts, peaks, compilers and the interpreter, with the GPUs replaced by what torch would
say of them.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems import device
from cs336_systems.device import DeviceInfo

UUID = "7e1d4c2a-0000-1111-2222-333344445555"


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Makes torch report one H200 and nvidia-smi give an answer; returns the list of the commands
    it was asked.
    """

    def install(
        answer: str | Exception | None = "570.86.15, 1980 MHz\n", hip: str | None = None
    ) -> list[list[str]]:
        properties = SimpleNamespace(
            name="NVIDIA H200",
            major=9,
            minor=0,
            total_memory=150_000_000_000,
            multi_processor_count=132,
            uuid=UUID,
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
        monkeypatch.setattr(
            device.shutil, "which", lambda name: None if answer is None else f"/usr/bin/{name}"
        )
        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


# Facts


def test_facts_of_a_gpu_come_from_torch_and_nvidia_smi(
    fake_gpu: Callable[..., list[list[str]]],
) -> None:
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
    fake_gpu: Callable[..., list[list[str]]],
    answer: str | Exception | None,
    driver: str | None,
    clock: int | None,
) -> None:
    fake_gpu(answer)
    info = device.get_device_info("cuda")
    assert (info.name, info.driver, info.max_sm_clock_mhz) == ("NVIDIA H200", driver, clock)


def test_facts_of_this_cpu() -> None:
    info = device.get_device_info("cpu")
    assert info.kind == "cpu" and info.name
    assert info.num_cores is not None and 1 <= info.num_cores <= (os.cpu_count() or 1)
    assert info.memory_bytes > 2**28
    assert (
        info.compute_capability
        is info.driver
        is info.max_sm_clock_mhz
        is info.num_multiprocessors
        is None
    )
    json.dumps(info.to_dict())
    assert platform.node() not in info.to_dict().values()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert device.get_device_info("cpu").num_cores == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert device.get_device_info("cpu").num_cores == 64


def test_resolve_device(
    fake_gpu: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu()
    assert [device.resolve_device(name) for name in ("auto", "cuda", "cpu")] == [
        "cuda",
        "cuda",
        "cpu",
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device.resolve_device(name) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ValueError,
        match=r"^--device cuda: no CUDA device is available \(torch .*, built for CPU\)$",
    ):
        device.resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(
        ValueError, match=r"^--device cuda: .*built for CUDA 12.8, no driver or device\)$"
    ):
        device.get_device_info("cuda")
    for name in ("mps", "cuda:0", ""):
        with pytest.raises(ValueError, match=f"^--device must be auto, cpu or cuda, got '{name}'$"):
            device.resolve_device(name)


# Peaks


def test_peaks_are_plausible_and_say_where_from() -> None:
    for name, peak in device.PEAKS.items():
        assert "NVIDIA" in peak.source, name
        # Tensor cores are faster than the rest by no more than 40; no sheet's sparse rate slipped
        # in.
        assert 1.5 < peak.bf16_tflops / peak.fp32_tflops < 40, name
        assert 100 < peak.memory_gb_per_s < 10_000, name


@pytest.mark.parametrize(
    ("kind", "name", "bf16"),
    [
        ("cuda", "NVIDIA H200", 989.5),
        ("cuda", "NVIDIA H100 80GB HBM3", 989.5),
        ("cuda", "NVIDIA H100 PCIe", 756.5),
        ("cuda", "NVIDIA A100-SXM4-80GB", 312),
        ("cuda", "A100-SXM4-40GB", 312),  # as older drivers report it
        ("cuda", "NVIDIA GeForce RTX 3090", 71),
        ("cuda", "NVIDIA H200 MIG 1g.18gb", None),
        ("cuda", "NVIDIA H200 NVL", None),
        ("cuda", "NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cuda", "AMD Instinct MI300X", None),
        ("cpu", "L4", None),
    ],
)
def test_known_gpus_have_their_peak_and_other_devices_none(
    kind: Any, name: str, bf16: float | None
) -> None:
    peak = device.device_peak(DeviceInfo(name=name, kind=kind, memory_bytes=2**30))
    assert (peak and peak.bf16_tflops) == bf16


# Compilers and the interpreter


def test_g9_the_recommended_dtype_is_the_fastest_to_trust() -> None:
    by_capability = {
        (6, 1): "float32",
        (7, 0): "float16",
        (7, 5): "float16",
        (8, 0): "bfloat16",
        (9, 0): "bfloat16",
    }
    for capability, dtype in by_capability.items():
        assert device.recommended_dtype(capability) == dtype
    assert device.recommended_dtype(None) == "float32"


def test_compilers_are_looked_for_and_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(
        device.shutil, "which", lambda name: name if name in ("g++", "icpx", "clang") else None
    )
    monkeypatch.setattr(sys, "platform", "linux")
    assert device.has_cxx_compiler() and device.has_c_compiler()
    monkeypatch.setenv("CXX", "icpx")
    assert device.has_cxx_compiler()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert not device.has_cxx_compiler() and not device.has_c_compiler()


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)]
)
def test_the_interpreter_s_variable_decides_until_triton_is_imported(
    value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "triton.knobs", raising=False)
        assert device.interpreter_is_on() is on
    for interpret in (False, True):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
        assert device.interpreter_is_on() is interpret
