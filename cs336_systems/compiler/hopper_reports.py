"""What the compiler makes of the Hopper kernels, with no GPU: registers, spills and main loops.

    for report in compile_hopper_kernels(shipped_hopper_kernels()):
        print(report.request.name, report.registers, report.spill_bytes, *report.loops, sep="\n  ")

Registers and spills do not tell a fast kernel from a slow one. What does is whether the tensor
cores have work while a warp group takes exponentials, and that is decided by the order of the
machine's instructions: the assembler may wait for matmuls earlier than the source asks, and then
the kernel is right and half as fast. So a report holds each main loop, that is each innermost loop
with matmuls, as the instructions that matter, runs of one kind counted:

    matmul x16, wait to 1, exp2 x32, matmul x4, wait to 1, matmul x4, barrier, ...
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

import torch

from cs336_systems.attention.call import Documents, Saved
from cs336_systems.attention.hopper.schedule import LATE_FROM, ORDERS, SCHEDULES
from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.tiles.kernel_config import head_tile
from cs336_systems.compiler.offline import (
    CRASH,
    SERIALIZED,
    assemble,
    compile_all,
    compiled_launches,
    compiler_errors,
    first_line,
    spilled_bytes,
)
from cs336_systems.config import DTypeName

ARCH = "sm90"
BATCH, HEADS, SEQLEN = 2, 16, 1024
# Names of the machine's instructions that matter to a main loop. A matmul that ends a group has
# "gsb0".
INSTRUCTIONS = (
    (re.compile(r"\bHGMMA"), "matmul"),
    (re.compile(r"\bMUFU\.EX2"), "exp2"),
    (re.compile(r"\bWARPGROUP\.DEPBAR.*0x([0-9a-f]+)\s*$"), "wait to {}"),
    (re.compile(r"\bBAR\."), "barrier"),
    (re.compile(r"\bSYNCS\.PHASECHK"), "wait for slot"),
    (re.compile(r"\bSYNCS\.ARRIVE"), "arrive"),
    (re.compile(r"\bUTMALDG"), "tma load"),
    (re.compile(r"\bUTMASTG"), "tma store"),
    (re.compile(r"\bUTMAREDG"), "tma add"),
    (re.compile(r"\b(?:STL|LDL)\b"), "spill"),
)
END_OF_GROUP = re.compile(r"\bgsb0\b")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
BACKWARD_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
COLUMNS = (64, 96, 128, 256)  # columns of a head that are multiplied
REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True, kw_only=True)
class HopperRequest:
    """One specialisation of one Hopper kernel, on contiguous inputs."""

    # the wide ones are the backward of head dims above 128
    kernel: Literal["forward", "backward", "wide_dkdv", "wide_dq"]
    head_dim: int
    is_causal: bool
    dtype: DTypeName = "bfloat16"
    group: int = 1  # query heads that share a key head
    # as many keys as queries, a multiple of a key tile; else one key less
    whole_key_tiles: bool = True
    config: str = ""
    seqlen: int = SEQLEN
    deterministic: bool = False
    # "split" has the divided walks of a call that leaves multiprocessors idle
    walk: Literal["dense", "split", "listed", "packed"] = "dense"
    query_block: int = 128  # rows of the mask's tiles, for walk="listed"

    @property
    def function(self) -> str:
        """Return the name of the kernel's function, such as "hopper_split_forward_kernel"."""
        return f"hopper_{'' if self.walk == 'dense' else f'{self.walk}_'}{self.kernel}_kernel"

    @property
    def name(self) -> str:
        """Return a description such as "hopper_backward, head dim 64, causal, group 2"."""
        mask = "causal" if self.is_causal else "full"
        rest = [f"group {self.group}"] * (self.group > 1) + ["ragged"] * (not self.whole_key_tiles)
        rest += [f"length {self.seqlen}"] * (self.seqlen != SEQLEN) + [
            "deterministic"
        ] * self.deterministic
        rest += [f"lists of {self.query_block} rows"] * (self.walk == "listed") + ["packed"] * (
            self.walk == "packed"
        )
        rest += ["in parts"] * (self.walk == "split")
        return ", ".join(
            [self.config or f"hopper_{self.kernel}", f"head dim {self.head_dim}", mask, *rest]
        )


@dataclass(frozen=True)
class Loop:
    """A main loop's instructions in order, as in `INSTRUCTIONS`; "matmul." ends a group."""

    instructions: tuple[str, ...]

    def __str__(self) -> str:
        """Return the loop from its first matmul around, runs of one kind counted, without spills.

        Loops that differ only in spills and in where they begin have equal strings.
        """
        kinds = [
            instruction.rstrip(".") for instruction in self.instructions if instruction != "spill"
        ]
        first = kinds.index("matmul")
        runs = ((kind, len(list(run))) for kind, run in groupby(kinds[first:] + kinds[:first]))
        return ", ".join(kind if length == 1 else f"{kind} x{length}" for kind, length in runs)

    @property
    def overlap(self) -> float:
        """Return the share of the exponentials that are issued while matmuls are in flight."""
        # groups in flight, exponentials under them and in all; an open group is not counted yet
        in_flight, under, total = 0, 0, 0
        is_open = False

        # twice, as an iteration starts with what the one before it leaves in flight
        for instruction in self.instructions * 2:
            if instruction.startswith("matmul"):
                is_open = instruction == "matmul"
                in_flight += not is_open
            elif instruction.startswith("wait to "):
                in_flight = min(in_flight, int(instruction.removeprefix("wait to ")))
            elif instruction == "exp2":
                total += 1
                under += is_open or in_flight > 0
        return under / total if total else 0.0

    @property
    def spills(self) -> int:
        """Return how many loads and stores of an iteration there are for want of registers."""
        return self.instructions.count("spill")


@dataclass(frozen=True, kw_only=True)
class HopperReport:
    """What the compiler made of a request; `failure` says why there are no numbers."""

    request: HopperRequest
    registers: int = 0  # the most that a thread uses, which is one of a consumer
    spill_bytes: int = 0  # of a thread
    shared_bytes: int = 0  # of a program
    serialized: int = 0  # places where ptxas made the tensor cores wait
    loops: tuple[Loop, ...] = ()  # of each consumer; masked steps have their own where they loop
    failure: str = ""


def shipped_hopper_kernels() -> list[HopperRequest]:
    """Return a request for every Hopper kernel of calls without grouped heads, in bfloat16.

    float16 compiles alike. Requests for causal parts of the backward have a group. Masks and packed
    documents have one order each, and packed documents only the causal kernels, which have masked
    steps and plain ones.
    """
    requests = []
    for columns in COLUMNS:
        forward = partial(HopperRequest, kernel="forward", head_dim=columns)
        backward = partial(HopperRequest, kernel="backward", head_dim=columns)

        # the forward: schedules and orders, packed documents
        for schedule in SCHEDULES[head_tile(columns)]:
            for order, is_causal in product(ORDERS, (True, False)):
                requests.append(forward(is_causal=is_causal, config=schedule.name(order)))
            requests.append(forward(is_causal=True, config=schedule.name("tiles"), walk="packed"))

        # the forward of divided walks; `many` queries of one head have more large tiles than
        # multiprocessors, so that only the last round has parts
        if columns in (64, 128):
            few = partial(forward, walk="split")
            many = 131_072
            requests += [
                few(is_causal=mask, seqlen=n)
                for mask, n in ((True, 1024), (True, 2048), (False, 2048))
            ]
            requests.append(few(is_causal=False, seqlen=many))

        # the backward
        if columns > 128:
            requests += [
                HopperRequest(kernel=kernel, head_dim=columns, is_causal=is_causal)
                for kernel in ("wide_dkdv", "wide_dq")
                for is_causal in (True, False)
            ]
            continue
        for whole, is_causal, deterministic in product((True, False), repeat=3):
            backward_of = partial(
                backward, is_causal=is_causal, whole_key_tiles=whole, deterministic=deterministic
            )
            requests.append(backward_of())
            if columns == 128 and is_causal and not deterministic:
                requests.append(backward_of(seqlen=LATE_FROM))
        requests += [
            backward(is_causal=walk == "packed", walk=walk) for walk in ("listed", "packed")
        ]

        # the backward of divided walks
        if columns == head_tile(columns):
            split = partial(backward, walk="split")
            requests += [
                split(is_causal=False, seqlen=8192, whole_key_tiles=whole)
                for whole in (True, False)
            ]
            few = partial(split, is_causal=True, group=HEADS)  # few tiles of keys: one key head
            requests += [few(), few(seqlen=LATE_FROM)]

    # the forward along lists
    for schedule, is_causal in product(SCHEDULES[64], (True, False)):  # of half a tile's columns
        requests.append(
            HopperRequest(
                kernel="forward", head_dim=32, is_causal=is_causal, config=schedule.name("tiles")
            )
        )
    small, large = SCHEDULES[64][1], SCHEDULES[128]
    for columns, rows, schedule in (
        (64, 128, small),
        (96, 128, large[0]),
        (128, 128, large[0]),
        (128, 64, large[1]),
    ):
        listed = partial(
            HopperRequest, kernel="forward", head_dim=columns, is_causal=False, walk="listed"
        )
        requests.append(listed(config=schedule.name("tiles"), query_block=rows))
    return requests


def compile_hopper_kernels(
    requests: Sequence[HopperRequest], *, jobs: int | None = None
) -> Iterator[HopperReport]:
    """Yield a report for each of `requests` as it is ready, compiled in `jobs` processes.

    By default there is a process for each usable core.
    """
    for request, report in compile_all(requests, compile_hopper_kernel, jobs=jobs):
        yield HopperReport(request=request, failure=CRASH) if report is None else report


def compile_hopper_kernel(request: HopperRequest) -> HopperReport:
    """Compile `request` in this process and return its report."""
    try:
        (kernel,) = compiled_launches(ARCH, request.function, lambda: _launch(request))
        text = assemble(kernel, ARCH)
        lines = disassemble(kernel)
        return HopperReport(
            request=request,
            registers=1
            + max(int(number) for _, line in lines for number in REGISTER.findall(line)),
            spill_bytes=spilled_bytes(text),
            shared_bytes=kernel.metadata.shared,
            serialized=len(SERIALIZED.findall(text)),
            loops=tuple(main_loops(lines)),
        )
    except compiler_errors() as error:
        return HopperReport(request=request, failure=first_line(error))


def _launch(request: HopperRequest) -> None:
    """Call the launcher of a request's kernel, on tensors without storage."""
    from cs336_systems.attention.hopper.backward import hopper_backward, hopper_packed_backward
    from cs336_systems.attention.hopper.forward import hopper_forward, hopper_packed_forward

    def empty(heads: int, rows: int) -> torch.Tensor:
        """Return a contiguous tensor (BATCH, heads, rows, head_dim) without storage."""
        return torch.empty(
            (BATCH, heads, rows, request.head_dim),
            dtype=getattr(torch, request.dtype),
            device="meta",
        )

    heads = 1 if request.function == "hopper_split_forward_kernel" else HEADS
    q = empty(heads, request.seqlen)
    k = empty(
        heads // request.group, request.seqlen if request.whole_key_tiles else request.seqlen - 1
    )
    options: dict[str, Any] = {
        "is_causal": request.is_causal,
        "scale": 1 / math.sqrt(request.head_dim),
    }

    # packed documents
    if request.walk == "packed":
        packed_q, packed_k = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k))
        ends = torch.empty(BATCH + 1, dtype=torch.int32, device="meta")
        documents = Documents(ends, ends, request.seqlen, request.seqlen)
        if request.kernel == "forward":
            hopper_packed_forward(
                packed_q, packed_k, packed_k, documents, **options, config=request.config
            )
        else:
            lse = torch.empty(packed_q.shape[1::-1], device="meta")
            saved = Saved(packed_q, packed_k, packed_k, packed_q, lse, packed_q)
            hopper_packed_backward(saved, documents, **options)
        return

    # the other walks
    lists = None
    if request.walk == "listed":
        size = (request.query_block, 128)
        mask = BlockMask.sliding_window(request.seqlen, window=300, block_size=size).to("meta")
        lists = mask.lists
    if request.kernel == "forward":
        hopper_forward(q, k, k, **options, config=request.config, lists=lists)
    else:
        lse = torch.empty(q.shape[:-1], device="meta")
        saved = Saved(q, k, k, q, lse, q)
        hopper_backward(saved, **options, deterministic=request.deterministic, lists=lists)


def disassemble(kernel: Any) -> list[tuple[int, str]]:
    """Return the (address, instruction) pairs of a compiled kernel's machine code."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [(int(address, 16), line) for address, line in LINE.findall(text)]


def main_loops(lines: Iterable[tuple[int, str]]) -> list[Loop]:
    """Return the innermost loops with matmuls of a disassembly, in the order of their addresses."""
    lines = list(lines)

    # the instructions between each backward branch and its target, by both addresses
    bodies = {}
    for address, line in lines:
        branch = BACKWARD_BRANCH.search(line)
        if branch and int(branch[1], 16) < address:
            span = int(branch[1], 16), address
            bodies[span] = [other for place, other in lines if span[0] <= place <= span[1]]

    # Loops nest. A span that starts in a loop and ends behind it is no loop, but the way back from
    # where a wait spins, out of line.
    spans = [
        span
        for span, body in bodies.items()
        if any("HGMMA" in line for line in body)
        and not any(other[0] < span[0] <= other[1] < span[1] for other in bodies)
    ]
    innermost = [
        span
        for span in spans
        if not any(span[0] <= x[0] and x[1] <= span[1] for x in spans if x != span)
    ]
    return [Loop(tuple(_kinds(bodies[span]))) for span in sorted(innermost)]


def _kinds(lines: Iterable[str]) -> Iterator[str]:
    """Yield the names that `INSTRUCTIONS` has for lines, with "." where a matmul ends a group."""
    for line in lines:
        for pattern, kind in INSTRUCTIONS:
            match = pattern.search(line)
            if match:
                ends = kind == "matmul" and END_OF_GROUP.search(line)
                yield kind.format(*(int(number, 16) for number in match.groups())) + "." * bool(
                    ends
                )
                break
