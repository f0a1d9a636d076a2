"""Compiles the block-sparse and the varlen kernels for sm_90 without a GPU, and prints a JSON line for each.

    python -m tests.compile_masked_kernels 64 128        # head dims; without TRITON_INTERPRET

A process of its own, since Triton decides between compiler and interpreter when kernels are loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from cs336_systems.attention import compilation
from cs336_systems.attention.compilation import CompileRequest, compile_here
from cs336_systems.attention.tiles import KernelConfig, select_config

BLOCK = 128
HEADS, SEQLEN = 16, 2048


def shipped(kernel: str, head_dim: int, tma: bool) -> KernelConfig:
    return select_config(
        kernel, capability=(9, 0), head_dim=head_dim, batch=1, heads=HEADS, seqlen_q=SEQLEN, seqlen_k=SEQLEN,
        dtype="bfloat16", tma=tma,
    )  # fmt: skip


def launch_block_sparse(request: CompileRequest) -> None:
    from cs336_systems.attention.triton import block_sparse

    def indices(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    blocks = SEQLEN // BLOCK
    number, listed = (1, HEADS, blocks), (1, HEADS, blocks, blocks)
    shapes = [number, listed, listed, number, listed] * 2 + [(4, BLOCK, BLOCK // 32)]
    lists = block_sparse.TileLists(*(indices(*shape) for shape in shapes))
    config = block_sparse.fit_to_blocks(request.config, (BLOCK, BLOCK))
    x = torch.empty(1, HEADS, SEQLEN, request.head_dim, dtype=torch.bfloat16, device="meta")
    if config.kernel == "forward":
        block_sparse.launch_block_sparse_forward(x, x, x, lists, scale=0.125, config=config)
        return
    lse = torch.empty(1, HEADS, SEQLEN, device="meta")
    block_sparse.launch_block_sparse_backward(
        x, x, x, x, lse, x, None, lists, scale=0.125, dkdv_config=config, dq_config=config
    )


def launch_varlen(request: CompileRequest) -> None:
    from cs336_systems.attention.triton import varlen

    cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta")
    x = torch.empty(SEQLEN, HEADS, request.head_dim, dtype=torch.bfloat16, device="meta")
    options = {"is_causal": request.is_causal, "scale": 0.125}
    if request.config.kernel == "forward":
        varlen.launch_varlen_forward(x, x, x, cu_seqlens, cu_seqlens, **options, config=request.config)
        return
    lse = torch.empty(HEADS, SEQLEN, device="meta")
    varlen.launch_varlen_backward(
        x, x, x, x, lse, x, None, cu_seqlens, cu_seqlens, **options, dkdv_config=request.config,
        dq_config=request.config,
    )  # fmt: skip


def main(head_dims: list[int]) -> None:
    launchers: dict[str, tuple[Callable[[CompileRequest], None], bool]] = {
        "block_sparse": (launch_block_sparse, False),
        "block_sparse_tma": (launch_block_sparse, True),
        "varlen": (launch_varlen, False),
        "varlen_tma": (launch_varlen, True),
    }
    for kind, (launch, tma) in launchers.items():
        compilation._launch = launch  # compile_here compiles what this launches
        for kernel in ("forward", "dkdv", "dq"):
            for head_dim in head_dims:
                request = CompileRequest(
                    config=shipped(kernel, head_dim, tma),
                    arch="sm90",
                    head_dim=head_dim,
                    dtype="bfloat16",
                    is_causal=True,
                )
                report = compile_here(request)
                line = {
                    "kind": kind, "kernel": kernel, "head_dim": head_dim, "failure": report.failure,
                    "registers": report.registers, "spill_bytes": report.spill_bytes,
                    "shared_bytes": report.shared_bytes, "serialized": report.serialized,
                }  # fmt: skip
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([int(head_dim) for head_dim in sys.argv[1:]])
