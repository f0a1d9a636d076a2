"""Launches attention kernels twice on a GPU that is not there, and prints a JSON line for each launch.

    python -m tests.launch_twice        # without TRITON_INTERPRET

Kernels are compiled for sm_90 and their launches recorded. A line says which kernel, whether Triton classified its
arguments (the first time) or it was found by numbers (later), and the arguments. A process of its own, since Triton
decides between compiler and interpreter when kernels are loaded.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from cs336_systems.attention.compilation import _OfflineDriver
from cs336_systems.attention.hopper.backward import hopper_backward
from cs336_systems.attention.hopper.forward import hopper_forward
from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.triton.backward import launch_backward
from cs336_systems.attention.triton.forward import launch_forward
from cs336_systems.attention.triton.launcher import layout_of
from cs336_systems.attention.triton.split import launch_split_forward
from cs336_systems.attention.triton.varlen import launch_varlen_backward, launch_varlen_forward

SCALE = 0.125
classified: list[str] = []


def show(argument: Any) -> Any:
    if hasattr(argument, "base"):
        return ["descriptor", show(argument.base), argument.block_shape]
    return ["tensor", argument.data_ptr(), str(argument.dtype)] if hasattr(argument, "data_ptr") else argument


def record_launches() -> None:
    from triton.runtime.driver import driver

    driver.set_active(_OfflineDriver(90))
    run = JITFunction.run

    def classify(self: Any, *arguments: Any, **options: Any) -> Any:
        classified.append(self.fn.__name__)
        return run(self, *arguments, **options)

    def launcher(compiled: Any) -> Any:
        def launch(*arguments: Any) -> None:
            name, (*grid, _), kernel_arguments = compiled.metadata.name, arguments[:4], arguments[9:]
            line = {"kernel": name, "grid": grid, "classified": bool(classified), "hash": compiled.hash}
            line["bindable"] = layout_of(compiled) is not None
            classified.clear()
            print(json.dumps(line | {"arguments": [show(argument) for argument in kernel_arguments]}), flush=True)

        return launch

    JITFunction.run = classify
    CompiledKernel._init_handles = lambda self: None
    CompiledKernel.function = None
    CompiledKernel.run = property(launcher)


def main() -> None:
    record_launches()
    configs = [KernelConfig.from_name(f"sm90_{name}_64x64_w4_s2") for name in ("forward", "dkdv", "dq")]
    tiles = KernelConfig.from_name("sm90_forward_64x64_w4_s2_tma")
    storage = torch.zeros(1 + 2 * 80 * 64, dtype=torch.bfloat16)
    aligned, shifted = (storage[start : start + 2 * 80 * 64].view(1, 2, 80, 64) for start in (0, 1))
    output, lse = launch_forward(aligned, aligned, aligned, is_causal=True, scale=SCALE, config=configs[0])
    for q in (aligned, shifted, aligned, shifted, aligned[:, :, :79]):
        launch_forward(q, aligned, aligned, is_causal=True, scale=SCALE, config=configs[0])
    for scale in (SCALE, 2 * SCALE):
        launch_forward(aligned, aligned, aligned, is_causal=True, scale=scale, config=tiles)
        launch_backward(
            aligned, aligned, aligned, output, lse, aligned, None, is_causal=True, scale=scale,
            dkdv_config=configs[1], dq_config=configs[2],
        )  # fmt: skip
        launch_split_forward(aligned, aligned, aligned, is_causal=True, scale=scale, config=tiles, part_size=64)
        output, lse = hopper_forward(aligned, aligned, aligned, True, scale)
        hopper_backward(aligned, aligned, aligned, output, lse, aligned, None, True, scale)
    packed, ends = aligned[0].transpose(0, 1), torch.tensor([0, 30, 80], dtype=torch.int32)
    dkdv, dq = (KernelConfig.from_name(f"sm90_{name}_64x64_w4_s2_tma") for name in ("dkdv", "dq"))
    for scale in (SCALE, 2 * SCALE):
        output, lse = launch_varlen_forward(
            packed, packed, packed, ends, ends, is_causal=True, scale=scale, config=tiles
        )  # fmt: skip
        launch_varlen_backward(
            packed, packed, packed, output, lse, packed, None, ends, ends, is_causal=True, scale=scale,
            dkdv_config=dkdv, dq_config=dq,
        )  # fmt: skip


if __name__ == "__main__":
    main()
