"""Compiles attention kernels for a GPU that need not be there, and reports what the compiler made.

    request = CompileRequest(
        config=config, arch="sm90", head_dim=64, dtype="bfloat16", is_causal=True
    )
    for report in compile_configs([request]):
        print(report.registers, report.spill_bytes, report.shared_bytes, report.failure)

What is compiled is what the launcher launches: the launcher itself runs, in a child process whose
Triton driver claims the wanted architecture and whose launches stop after compilation. So there is
no second list of kernel arguments that could fall behind. Registers and spills are ptxas's own and
depend on the Triton version (`triton_version()`): judge a configuration with the version that the
GPU machine runs.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from cs336_systems.attention.call import Saved
from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.tiles.choice import SHARED_MEMORY_LIMIT_BYTES
from cs336_systems.config import DTypeName, FieldError
from cs336_systems.processes import STDERR, silence

# By name, the number of the architecture in Triton's target.
ARCHITECTURES = {"sm80": 80, "sm86": 86, "sm89": 89, "sm90": 90, "sm100": 100}
# 16 divides the length, on which Triton specialises, as in most calls that matter.
BATCH, HEADS, SEQLEN = 2, 16, 1024
SPLIT_PARTS = 4  # parts of the keys; the kernel is compiled for any number of them
SERIALIZED = re.compile(r"C75\d\d")  # ptxas's warnings that wgmma is made synchronous
CRASH = "the compiler crashed"
INTERPRETER_SWITCH = "TRITON_INTERPRET"
Request = TypeVar("Request")
Report = TypeVar("Report")


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """One specialisation of one kernel: contiguous inputs, as many key heads as query heads.

    ValueError for an unknown `arch`, and for `is_split` without a forward.
    """

    config: KernelConfig
    arch: str  # sm80, sm86, sm89, sm90 or sm100
    head_dim: int
    dtype: DTypeName
    is_causal: bool
    is_split: bool = False  # a forward that splits the keys

    def __post_init__(self) -> None:
        check_arch(self.arch)
        if self.is_split and self.config.kernel != "forward":
            raise ValueError(f"is_split is for a forward, got {self.config.name}")

    @property
    def name(self) -> str:
        """Return the configuration's name, with the number of parts if the keys are split."""
        return f"{self.config.name}/{SPLIT_PARTS}" if self.is_split else self.config.name


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What the compiler made of a request; `failure` says why there are no numbers."""

    request: CompileRequest
    registers: int = 0  # of a thread, at most 255
    spill_bytes: int = 0  # of a thread, stored to local memory for want of registers
    shared_bytes: int = 0  # of a program
    serialized: int = 0  # places where ptxas made the tensor cores wait (Hopper)
    failure: str = ""

    def obstacle(self, max_spill_bytes: int) -> str:
        """Return why the configuration is not worth a GPU's time, or "" if it is."""
        limit = SHARED_MEMORY_LIMIT_BYTES[self.request.arch]
        if self.failure:
            return f"does not compile: {self.failure}"
        if self.shared_bytes > limit:
            return (
                f"needs {self.shared_bytes:,} bytes of shared memory, "
                f"{self.request.arch} has {limit:,}"
            )
        if self.spill_bytes > max_spill_bytes:
            return f"spills {self.spill_bytes:,} bytes, more than {max_spill_bytes:,}"
        return ""


def check_arch(arch: str) -> None:
    """Raise FieldError unless `arch` is an architecture that configurations are compiled for."""
    if arch not in ARCHITECTURES:
        raise FieldError("arch", f"must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")


def arch_of_capability(capability: tuple[int, int] | None) -> str | None:
    """Return the name of the architecture of a GPU of this compute capability, such as "sm90".

    None where there is no GPU, or none that configurations are compiled for.
    """
    name = "" if capability is None else f"sm{capability[0]}{capability[1]}"
    return name if name in ARCHITECTURES else None


def triton_version() -> str:
    """Return the installed Triton's version; ValueError if Triton is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ValueError("triton is not installed, and it is the compiler") from None


def check_jobs(jobs: int | None) -> None:
    """Raise ValueError unless `jobs` is a number of processes, at least 1, or None."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")


def compile_configs(
    requests: Sequence[CompileRequest], *, jobs: int | None = None
) -> Iterator[CompileReport]:
    """Yield a report for each of `requests` as it is ready, compiled in `jobs` processes.

    By default there is a process for each usable core. A request on which the compiler raises, or
    which takes its process down, has a report with a `failure`.
    """
    for request, report in compile_all(requests, compile_here, jobs=jobs):
        yield CompileReport(request=request, failure=CRASH) if report is None else report


def compile_all(
    requests: Sequence[Request],
    compile_one: Callable[[Request], Report],
    *,
    jobs: int | None = None,
) -> Iterator[tuple[Request, Report | None]]:
    """Yield (request, what `compile_one` returns for it) as each is ready; None after a crash.

    `compile_one` runs in `jobs` processes, by default one for each usable core. ValueError for a
    bad `jobs` or without Triton.
    """
    check_jobs(jobs)
    triton_version()  # raises without Triton

    jobs = min(jobs or len(os.sched_getaffinity(0)), max(1, len(requests)))
    left = dict.fromkeys(requests)
    for request, report in _compile_in_pool(list(left), compile_one, jobs):
        del left[request]
        yield request, report

    # A crash ends the whole pool. Alone, each of the rest shows whether it was the cause.
    for request in left:
        alone: list[tuple[Request, Report | None]] = [*_compile_in_pool([request], compile_one, 1)]
        yield from alone or [(request, None)]


def _compile_in_pool(
    requests: list[Request], compile_one: Callable[[Request], Report], jobs: int
) -> Iterator[tuple[Request, Report]]:
    """Yield (request, report) as each is ready, until a process dies."""
    context = multiprocessing.get_context("spawn")
    # the compiler's dumps go nowhere: what matters of them is in the reports
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=silence, initargs=((STDERR,),))
    try:
        with _without_interpreter():
            futures = {pool.submit(compile_one, request): request for request in requests}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        return
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _without_interpreter() -> Iterator[None]:
    """Within this context, new processes compile kernels even where this one interprets them.

    Processes inherit the environment, and have imported Triton before any of our code runs in them.
    """
    switch = os.environ.pop(INTERPRETER_SWITCH, None)
    try:
        yield
    finally:
        if switch is not None:
            os.environ[INTERPRETER_SWITCH] = switch


def compile_here(request: CompileRequest) -> CompileReport:
    """Compile `request` in this process and return its report.

    The process must not have loaded the kernels for the interpreter.
    """
    try:
        (kernel,) = compiled_launches(
            request.arch, f"_{request.config.kernel}_", lambda: _launch(request)
        )
        text = assemble(kernel, request.arch)
    except compiler_errors() as error:
        return CompileReport(request=request, failure=first_line(error))
    return CompileReport(
        request=request,
        registers=int(re.findall(r"Used (\d+) registers", text)[0]),
        spill_bytes=spilled_bytes(text),
        shared_bytes=kernel.metadata.shared,
        serialized=len(SERIALIZED.findall(text)),
    )


def compiled_launches(arch: str, wanted: str, launch: Callable[[], object]) -> list[Any]:
    """Return the kernels, compiled and not run, that `launch` would run on a GPU of `arch`.

    Only kernels whose name contains `wanted` are compiled; others are not launched either.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run, compiled = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """Compile a launched kernel if it is wanted, in place of `JITFunction.run`."""
        if wanted not in self.fn.__name__:
            return None
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    driver.set_active(_OfflineDriver(ARCHITECTURES[arch]))
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return compiled


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that a kernel which does not compile may raise."""
    from triton.errors import TritonError

    return TritonError, RuntimeError, ValueError, subprocess.CalledProcessError


def first_line(error: BaseException) -> str:
    """Return the type and the first line, up to 200 characters, of an error's innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class _OfflineDriver:
    """The part of a Triton driver that compilation asks for.

    The device number doubles as the key of Triton's cache.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def _launch(request: CompileRequest) -> None:
    """Call a kernel's launcher as `flash_attention` does, on tensors without storage."""
    from cs336_systems.attention.triton.backward import launch_backward
    from cs336_systems.attention.triton.forward import launch_forward
    from cs336_systems.attention.triton.split import launch_split_forward

    shape = (BATCH, HEADS, SEQLEN, request.head_dim)
    x = torch.empty(shape, dtype=getattr(torch, request.dtype), device="meta")
    config, is_causal, scale = request.config, request.is_causal, 1 / math.sqrt(request.head_dim)
    if request.is_split:
        launch_split_forward(
            x,
            x,
            x,
            is_causal=is_causal,
            scale=scale,
            config=config,
            part_size=SEQLEN // SPLIT_PARTS,
        )
    elif config.kernel == "forward":
        launch_forward(x, x, x, is_causal=is_causal, scale=scale, config=config)
    else:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device="meta")
        launch_backward(
            Saved(x, x, x, x, lse, x, None),
            is_causal=is_causal,
            scale=scale,
            dkdv_config=config,
            dq_config=config,
        )


def assemble(kernel: Any, arch: str) -> str:
    """Return what ptxas prints when it assembles a kernel's PTX, with `-v`.

    Triton itself counts spilled bytes only when it loads a kernel.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    capability = ARCHITECTURES[arch]
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(kernel.asm["ptx"])
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(capability)}",
            str(ptx),
        ]
        command += ["-o", str(ptx.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def spilled_bytes(text: str) -> int:
    """Return the bytes of spill stores a thread, from the `text` that ptxas prints."""
    return int(re.findall(r"(\d+) bytes spill stores", text)[0])
