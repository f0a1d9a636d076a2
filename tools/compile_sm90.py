"""Compile attention kernels for a Hopper GPU on a machine without one, and print what ptxas made of them.

    make sm90-venv && PYTHONPATH=. .venv-sm90/bin/python tools/compile_sm90.py [NAME,HEAD_DIM,DTYPE ...]

NAME is a configuration such as sm90_forward_128x64_w8_s3; without arguments every shipped sm_90 row is compiled.
Registers and spills depend on the triton version, which is printed: judge with the one that the GPU machine runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cs336_systems.attention.tiles import KernelConfig, head_tile
from cs336_systems.attention.tiles.tables import TABLES
from cs336_systems.attention.triton import backward, forward

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
TRITON_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
KERNEL = {
    "forward": forward.flash_forward_kernel,
    "dkdv": backward.flash_backward_dkdv_kernel,
    "dq": backward.flash_backward_dq_kernel,
}


def compile_kernel(config: KernelConfig, head_dim: int, dtype: str, is_causal: bool) -> dict[str, int]:
    """Registers, spilled bytes and shared-memory bytes of one specialisation: contiguous inputs, no GQA."""
    kernel = KERNEL[config.kernel]
    constants = {
        "GROUP": 1, "D": head_dim, "D_TILE": head_tile(head_dim), "Q_TILE_SIZE": config.query_tile,
        "K_TILE_SIZE": config.key_tile, "IS_CAUSAL": is_causal, "PRECISION": "ieee",
    }  # fmt: skip
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or re.fullmatch(r"stride_\w+d", name):
            constants.setdefault(name, 1)
            signature[name] = "constexpr"
            continue
        divisible = True
        if name.endswith("_ptr"):
            signature[name] = "*fp32" if name in ("L_ptr", "D_ptr") else f"*{TRITON_DTYPE[dtype]}"
        elif name.startswith("scale") or name == "ZERO":
            signature[name], divisible = "fp32", False
        else:
            signature[name] = "i32"
        if divisible and name not in ("N_HEADS", "N_KV_HEADS"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spill_bytes": int(re.findall(r"(\d+) bytes spill stores", report)[0]),
        "shared_bytes": compiled.metadata.shared,
        "serialized": len(re.findall(r"C75\d\d", report)),  # ptxas warnings: wgmma made synchronous
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
    }


def shipped() -> list[str]:
    """Requests for every row of the sm_90 table; the two 16-bit dtypes compile alike, so bfloat16 stands for both."""
    dtype = {2: "bfloat16", 4: "float32"}
    rows = TABLES["sm90"].items()
    return [f"{config.name},{tile},{dtype[element_bytes]}" for (_, element_bytes, tile), config in rows]


def main(requests: list[str]) -> None:
    print(f"triton {triton.__version__}, sm_90")
    for request in requests or shipped():
        name, head_dim, dtype = request.split(",")
        config = KernelConfig.from_name(name)
        for is_causal in (True, False):
            report = compile_kernel(config, int(head_dim), dtype, is_causal)
            estimate = config.shared_memory_bytes(int(head_dim), 4 if dtype == "float32" else 2)
            print(f"{name} d={head_dim} {dtype} causal={is_causal}: {report} estimate {estimate}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
