"""A hash of the PTX of each shipped attention kernel, made without a GPU by the GPU machines'
Triton.

It is kept in tests/ptx.json.

    make ptx                                      # compiles them, in minutes, and writes the file
    .venv-sm90/bin/python -m tests.ptx --check    # fails where the file says otherwise, and names the kernels

A GPU test holds as long as the kernels that it runs compile to the PTX with which it passed: names,
comments and the code around a kernel may change. `COVERS` of a module of GPU tests names them as
`ptx:triton` and `ptx:hopper`. What the file says is of the sources whose hash it holds; of others
nothing is known until it is written again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = "tests/ptx.json"
PREFIX = "ptx:"  # of what COVERS names
# What decides of the kernels and of how they are launched, and the list of those that are compiled.
SOURCES = tuple(f"cs336_systems/attention/{folder}" for folder in ("triton", "hopper", "tiles"))
UNKNOWN = "unknown"
DEBUGGING = (
    (re.compile(r"^\s*\.(loc|file)\b.*\n", re.MULTILINE), ""),
    (re.compile(r"\s*//.*"), ""),
    (re.compile(r"\.section\s+\.debug[\s\S]*"), ""),
)
ENTRY = re.compile(r"\.entry (\w+)")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A call whose kernels are compiled: of the Triton kernels, in one of their layouts."""

    layout: str  # dense, lists, packed, split or first
    head_dim: int
    dtype: str = "bfloat16"
    is_causal: bool = True
    tma: bool = False

    @property
    def name(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"{self.layout} d{self.head_dim} {self.dtype} {mask}{' tma' * self.tma}"


def digest_of(root: Path, family: str) -> str:
    """A hash of the PTX of the kernels of `family` (triton or hopper), `UNKNOWN` where the sources
    are others' now.
    """
    path = root / FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if known.get("sources") != sources_digest(root):
        return UNKNOWN
    compiled = {call: list(kernels.values()) for call, kernels in known["kernels"][family].items()}
    # not of their names
    return hashlib.sha256(json.dumps(compiled, sort_keys=True).encode()).hexdigest()


@cache
def sources_digest(root: Path) -> str:
    """Of the code of SOURCES: comments and docstrings change no PTX."""
    from cs336_systems.bench.sources import code_of

    digest = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (root / folder).rglob("*.py")):
        digest.update(
            f"{file.relative_to(root)}\0{code_of(file.read_text(encoding='utf-8'), file.suffix)}\0".encode()
        )
    return digest.hexdigest()[:16]


def plain(ptx: str) -> str:
    """PTX without what only debuggers read, and without the kernel's name."""
    name = ENTRY.search(ptx)
    for pattern, text in DEBUGGING:
        ptx = pattern.sub(text, ptx)
    return ptx.replace(name[1], "KERNEL") if name else ptx


# Compiling


def triton_calls() -> Iterator[Launched]:
    """As `select_config` chooses for 4,096 tokens on an H100: full and cut columns, with TMA and
    without.
    """
    for head_dim, is_causal in product((64, 128), (True, False)):
        for layout, tma in product(("dense", "packed"), (True, False)):
            yield Launched(layout=layout, head_dim=head_dim, is_causal=is_causal, tma=tma)
        yield Launched(layout="split", head_dim=head_dim, is_causal=is_causal)
    for head_dim, tma in product((64, 128), (True, False)):
        yield Launched(layout="lists", head_dim=head_dim, is_causal=False, tma=tma)
    for layout, head_dim in product(("dense", "packed", "lists"), (40, 256)):
        yield Launched(layout=layout, head_dim=head_dim, is_causal=layout != "lists")
    for layout in ("dense", "packed", "lists", "split"):
        yield Launched(layout=layout, head_dim=64, dtype="float32", is_causal=layout != "lists")
    yield Launched(layout="first", head_dim=64, dtype="float32")


def hashes_of(call: Any) -> dict[str, str]:
    """By kernel the hash of its PTX and of what else the compiler decided of its launch."""
    from cs336_systems.compiler.offline import compiled_launches

    found: dict[str, str] = {}
    for kernel in compiled_launches("sm90", "", partial(launch, call)):
        name = ENTRY.search(kernel.asm["ptx"])[1]  # type: ignore[index]
        launched = [
            getattr(kernel.metadata, key)
            for key in ("num_warps", "num_ctas", "shared", "launch_pdl")
        ]
        text = f"{plain(kernel.asm['ptx'])}\0{launched}"
        # of launches of a kernel in a call
        number = sum(one.partition(" ")[0] == name for one in found)
        found[f"{name} {number}" if number else name] = hashlib.sha256(text.encode()).hexdigest()[
            :16
        ]
    return found


def launch(call: Any) -> None:
    """Call the launchers on tensors without storage."""
    import torch

    from cs336_systems.attention.call import Saved
    from cs336_systems.attention.tiles import select_config
    from cs336_systems.attention.triton import backward, first, forward, lists, split
    from cs336_systems.attention.triton import documents as varlen
    from cs336_systems.compiler import hopper_reports as reports
    from tests import compiled_kernels

    if isinstance(call, reports.HopperRequest):
        reports._launch(call)
        return
    batch, heads, seqlen = 2, 16, 4096
    x = torch.empty(
        batch, heads, seqlen, call.head_dim, dtype=getattr(torch, call.dtype), device="meta"
    )
    if call.layout == "first":
        first.flash_forward_first(x, x, x, call.is_causal, 0.125)
        return
    shape: dict[str, Any] = {"batch": batch, "heads": heads, "seqlen_q": seqlen, "seqlen_k": seqlen}
    choose = partial(
        select_config,
        capability=(9, 0),
        head_dim=call.head_dim,
        dtype=call.dtype,
        tma=call.tma,
        **shape,
    )
    chosen = {
        kernel: choose(kernel, is_causal=call.is_causal) for kernel in ("forward", "dkdv", "dq")
    }
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": 0.125}
    lse = torch.empty(batch, heads, seqlen, device="meta")
    if call.layout == "split":
        for rows in (0, 2**31):  # both ways to merge
            split.SINGLE_ROWS = rows
            split.launch_split_forward(x, x, x, **options, config=chosen["forward"], part_size=1024)
    elif call.layout == "dense":
        forward.launch_forward(x, x, x, **options, config=chosen["forward"])
        backward.launch_backward(
            Saved(x, x, x, x, lse, x, None),
            **options,
            dkdv_config=chosen["dkdv"],
            dq_config=chosen["dq"],
        )
    elif call.layout == "packed":
        rows_of, ends = (
            x[0].transpose(0, 1).contiguous(),
            torch.empty(9, dtype=torch.int32, device="meta"),
        )
        varlen.launch_varlen_forward(
            rows_of, rows_of, rows_of, ends, ends, **options, config=chosen["forward"]
        )
        varlen.launch_varlen_backward(
            Saved(rows_of, rows_of, rows_of, rows_of, lse[0], rows_of, None),
            ends,
            ends,
            **options,
            dkdv_config=chosen["dkdv"],
            dq_config=chosen["dq"],
        )
    else:
        mask = compiled_kernels.empty_lists(batch, heads, seqlen)
        fit = partial(
            lists.fit_to_blocks, block_size=(compiled_kernels.BLOCK, compiled_kernels.BLOCK)
        )
        configs = {kernel: fit(config) for kernel, config in chosen.items()}
        forward.launch_forward(x, x, x, mask, **options, config=configs["forward"])
        backward.launch_backward(
            Saved(x, x, x, x, lse, x, None),
            mask,
            **options,
            dkdv_config=configs["dkdv"],
            dq_config=configs["dq"],
        )


def compile_kernels(jobs: int | None = None) -> dict[str, dict[str, dict[str, str]]]:
    """By family, call and kernel the hash of its PTX."""
    from cs336_systems.compiler.hopper_reports import shipped_hopper_kernels
    from cs336_systems.compiler.offline import compile_all

    calls: dict[Any, tuple[str, str]] = {call: ("triton", call.name) for call in triton_calls()}
    for request in shipped_hopper_kernels():
        words = [
            f"{key}={value}" for key, value in vars(request).items() if value not in ("", None)
        ]
        calls[request] = "hopper", " ".join(words)
    found: dict[str, dict[str, dict[str, str]]] = {"triton": {}, "hopper": {}}
    for number, (call, hashes) in enumerate(
        compile_all(list(calls), hashes_of, jobs=jobs), start=1
    ):
        family, name = calls[call]
        if hashes is None:
            raise SystemExit(f"the compiler crashed on {name}")
        found[family][name] = hashes  # the kernels in the order of their launches
        print(f"\r{number} of {len(calls)} calls", end="", flush=True)
    print()
    return {family: dict(sorted(calls.items())) for family, calls in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Hash the PTX of the shipped kernels and write tests/ptx.json."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the file says otherwise"
    )
    parser.add_argument("--jobs", type=int, help="processes (default: one a core)")
    arguments = parser.parse_args()
    from cs336_systems.compiler.offline import triton_version

    path = ROOT / FILE
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"kernels": {}}
    kernels = compile_kernels(arguments.jobs)
    for family, calls in kernels.items():
        before = old["kernels"].get(family, {})
        changed = sorted(
            name for name in calls.keys() | before.keys() if calls.get(name) != before.get(name)
        )
        print(f"{family}: {len(calls)} calls, {len(changed)} changed")
        for name in changed:
            print(f"  {name}")
    new = {"triton": triton_version(), "sources": sources_digest(ROOT), "kernels": kernels}
    if arguments.check:
        raise SystemExit(new != old)
    path.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    main()
