"""Compiles every attention kernel, with no GPU, and prints a JSON line for each.

    python -m tests.compiled_kernels        # without TRITON_INTERPRET; --all: their other ways to read as well
    python -m tests.compiled_kernels --registers      # what the block-sparse and the varlen kernels take on sm_90

A line of the first says whether the kernel is launched early and the order of what matters in its
PTX: "start" of the next kernel, "await" of the one before, "read" of what an earlier kernel of the
call has written, "end"; and its parameters, as a replay lays them out. A process of its own, since
Triton decides between compiler and interpreter when kernels are loaded.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch

from cs336_systems.attention.call import Saved
from cs336_systems.attention.hopper.schedule import SCHEDULES
from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.replay import parameters_of, recorded
from cs336_systems.attention.tiles import KernelConfig, select_config
from cs336_systems.attention.tiles.kernel_config import KERNELS
from cs336_systems.attention.triton import backward, forward, split
from cs336_systems.attention.triton import documents as varlen
from cs336_systems.attention.triton.lists import fit_to_blocks
from cs336_systems.compiler import hopper_reports as reports
from cs336_systems.compiler import offline as compilation
from cs336_systems.compiler.offline import CompileRequest, compile_here, compiled_launches

BLOCK = 128
HEADS, SEQLEN = 16, 2048
FILE = re.compile(r'^\.file\s+(\d+)\s+"([^"]+)"')
PLACE = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s")
EVENTS = (
    ("start", re.compile(r"\bgriddepcontrol\.launch_dependents;")),
    ("await", re.compile(r"\bgriddepcontrol\.wait;")),
    ("end", re.compile(r"^ret;")),
)
READ = re.compile(r"\bld\.global|\bcp\.async\.c[ag]\b")
# Where the sources load what the kernel before writes: L and delta, the parts of a forward that
# splits keys, dQ's sums.
WRITTEN_BEFORE = re.compile(
    r"l\.load\((?:(?:L|delta)_(?:base|head|ptr \+ row_base)|all_[ml] \+|rows_of_head|accumulator|first \+)|\bO_parts \+"
)


def events_of(ptx: str) -> list[str]:
    """Kinds of events in the text's order; what repeats is named once."""
    files = {match[1]: match[2] for line in ptx.splitlines() if (match := FILE.match(line.strip()))}
    events: list[str] = []
    source = ""
    for line in map(str.strip, ptx.splitlines()):
        if match := PLACE.match(line):
            line_before, source = (
                linecache.getline(files[match[1]], int(match[2]) - back).strip() for back in (1, 0)
            )
            if line_before.endswith("("):  # a call whose arguments stand on their own line
                source = line_before + source
        kind = next((kind for kind, pattern in EVENTS if pattern.search(line)), "")
        if READ.search(line) and WRITTEN_BEFORE.search(source):
            kind = "read"
        if kind and events[-1:] != [kind]:
            events.append(kind)
    return events


def show(arch: str, kind: str, launch: Callable[[], Any]) -> None:
    with recorded() as recording:
        compiled_launches(arch, "", launch)
    for launched in filter(None, recording.launches):
        compiled = launched.compiled
        parameters = [name for name, _ in parameters_of(launched) or ()]
        line = {"arch": arch, "kind": kind, "kernel": compiled.metadata.name, "early": compiled.metadata.launch_pdl,
                "events": events_of(compiled.asm["ptx"]), "parameters": parameters}  # fmt: skip
        print(json.dumps(line), flush=True)


def empty_lists(batch: int, heads: int, seqlen: int) -> TileLists:
    """Of a mask in square tiles, without storage."""
    blocks = seqlen // BLOCK
    number, listed = (batch, heads, blocks), (batch, heads, blocks, blocks)
    shapes = [number, listed, listed, number, listed] * 2 + [(4, BLOCK, BLOCK // 32)]
    return TileLists(*(torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes))


def launch_lists(request: CompileRequest) -> None:
    lists = empty_lists(1, HEADS, SEQLEN)
    config = fit_to_blocks(request.config, (BLOCK, BLOCK))
    x = torch.empty(1, HEADS, SEQLEN, request.head_dim, dtype=torch.bfloat16, device="meta")
    if config.kernel == "forward":
        forward.launch_forward(x, x, x, lists, is_causal=False, scale=0.125, config=config)
        return
    lse = torch.empty(1, HEADS, SEQLEN, device="meta")
    backward.launch_backward(
        Saved(x, x, x, x, lse, x, None),
        lists,
        is_causal=False,
        scale=0.125,
        dkdv_config=config,
        dq_config=config,
    )


def launch_varlen(request: CompileRequest) -> None:
    cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta")
    x = torch.empty(SEQLEN, HEADS, request.head_dim, dtype=torch.bfloat16, device="meta")
    options = {"is_causal": request.is_causal, "scale": 0.125}
    if request.config.kernel == "forward":
        varlen.launch_varlen_forward(
            x, x, x, cu_seqlens, cu_seqlens, **options, config=request.config
        )
        return
    lse = torch.empty(HEADS, SEQLEN, device="meta")
    varlen.launch_varlen_backward(
        Saved(x, x, x, x, lse, x, None),
        cu_seqlens,
        cu_seqlens,
        **options,
        dkdv_config=request.config,
        dq_config=request.config,
    )


LAUNCHES = {"varlen": launch_varlen, "lists": launch_lists}


def show_registers() -> None:
    """Of the table's configurations for bfloat16: one shape, by pointers and by TMA."""
    shape = {
        "batch": 1,
        "heads": HEADS,
        "seqlen_q": SEQLEN,
        "seqlen_k": SEQLEN,
        "dtype": "bfloat16",
    }
    for kind, launch in LAUNCHES.items():
        compilation._launch = launch  # compile_here compiles what this launches
        for tma, kernel, head_dim in product((False, True), KERNELS, (64, 128)):
            config = select_config(kernel, capability=(9, 0), head_dim=head_dim, tma=tma, **shape)
            request = CompileRequest(
                config=config, arch="sm90", head_dim=head_dim, dtype="bfloat16", is_causal=True
            )
            report = asdict(compile_here(request)) | {
                "request": (kind + "_tma" * tma, kernel, head_dim)
            }
            print(json.dumps(report), flush=True)


def main() -> None:
    if "--registers" in sys.argv:
        show_registers()
        return
    once = [
        ("sm90", "dense", "forward", "64x64_w4_s2"),
        ("sm90", "dense", "dkdv", "64x64_w4_s2"),
        ("sm90", "split", "forward", "64x64_w4_s2"),
        ("sm90", "varlen", "forward", "64x64_w4_s2_tma"),
        ("sm90", "varlen", "dkdv", "64x64_w4_s2_tma"),
        ("sm90", "lists", "forward", "64x64_w4_s2_tma"),
        ("sm90", "lists", "dkdv", "64x64_w4_s2_tma"),
        ("sm80", "dense", "dkdv", "64x64_w4_s2"),
    ]
    others = [
        ("sm90", "dense", "dkdv", "64x64_w4_s2_tma"),
        ("sm90", "varlen", "dkdv", "64x64_w4_s2"),
        ("sm90", "lists", "dkdv", "64x64_w4_s2"),
        ("sm80", "split", "forward", "64x64_w4_s2"),
    ]
    for arch, kind, kernel, tiles in once + others * ("--all" in sys.argv):
        launch = LAUNCHES.get(kind, compilation._launch)
        request = CompileRequest(
            config=KernelConfig.from_name(f"{arch}_{kernel}_{tiles}"), arch=arch, head_dim=64, dtype="bfloat16",
            is_causal=True, is_split=kind == "split",
        )  # fmt: skip
        for single_rows in (0, 2**31) if request.is_split else (0,):  # both ways to merge
            split.SINGLE_ROWS = single_rows
            show(arch, kind, partial(launch, request))
    hopper = partial(reports.HopperRequest, head_dim=64, dtype="bfloat16")
    for request in (
        hopper(kernel="forward", is_causal=True, config=SCHEDULES[64][0].name("dynamic")),
        hopper(kernel="forward", is_causal=True, walk="split"),
        hopper(kernel="forward", is_causal=False, walk="listed", query_block=64),
        hopper(kernel="forward", is_causal=True, walk="packed"),
        hopper(kernel="wide_dkdv", is_causal=True, head_dim=256),
        hopper(kernel="backward", is_causal=True),
        # few tiles: all in parts
        hopper(kernel="backward", is_causal=False, walk="split", group=16),
        hopper(kernel="backward", is_causal=False, walk="listed"),
        hopper(kernel="backward", is_causal=True, walk="packed"),
    ):
        show("sm90", "hopper", partial(reports._launch, request))


if __name__ == "__main__":
    main()
