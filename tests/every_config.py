"""Runs every shipped configuration of every attention kernel once, forward and backward, on small
ragged shapes.

    python -m tests.every_config                                  # each result is compared with the oracle
    python -m tests.every_config --shard 0/8 --no-oracle          # every eighth call, kernels alone: for a sanitizer
    python -m tests.every_config --device cpu --dtypes float32    # interpreted: the portable table's configurations

`tools/sanitize.py` runs it under compute-sanitizer. Every tensor is an allocation of its own
(PyTorch's cache is off), so that a read behind one is seen. Exit code 1 if a result is outside the
numerical contract.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cs336_systems.attention.hopper.division import Division, parts_before
from cs336_systems.attention.hopper.schedule import ForwardPlan, plan_forward

HEADS, KV_HEADS = 2, 1
QUERIES, KEYS = 197, 203  # cut by every tile, and no multiple of 16
DOCUMENTS = (0, 1, 17, 130, 49)
HOPPER_DOCUMENTS = (0, 1, 17, 1400, 130)  # shorter ones have Triton's backward
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
FEW_QUERIES = 29  # of both heads in one tile, where nothing is masked
FAMILIES = (
    "dense", "causal", "blocks64", "blocks128", "varlen", "varlen_causal", "split", "split_causal", "hopper",
    "hopper_causal", "hopper_blocks64", "hopper_blocks128", "hopper_varlen", "hopper_varlen_causal",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str  # one of FAMILIES
    dtype: str
    head_dim: int
    # Names, of forward, dkdv and dq; of a forward that splits keys, its own; of the hopper back
    # end, the forward's and, where nothing is masked or packed, which backward.
    configs: tuple[str, ...]


def cases(target: str, families: list[str], dtypes: list[str]) -> Iterator[Case]:
    """The i-th configurations of a table's three rows together; each with full and with ragged
    columns.
    """
    from cs336_systems.attention.tiles.choice import TABLES

    for family in families:
        for dtype in dtypes:
            if family.startswith("hopper"):  # it takes 16 bits, and chooses tiles by the head dim
                head_dims = (
                    (64, 56, 128, 104) if "blocks" in family else (64, 56, 128, 104, 256, 136)
                )
                for head_dim in head_dims if DTYPES[dtype] == 2 else ():
                    for configs in hopper_configs(family, head_dim):
                        yield Case(family, dtype, head_dim, configs)
                continue
            for head_tile in (64, 128, 256):
                kernels = ("forward",) if family.startswith("split") else ("forward", "dkdv", "dq")
                rows = [
                    TABLES[target][kernel, DTYPES[dtype], head_tile].configs for kernel in kernels
                ]
                for tma in (False, True):
                    chosen = [[config for config in row if config.tma == tma] for row in rows]
                    if not any(chosen):
                        continue
                    for number in range(max(map(len, chosen))):
                        names = tuple(row[min(number, len(row) - 1)].name for row in chosen if row)
                        for missing in (0, 24 if tma else 5):  # TMA wants rows of whole 16 bytes
                            yield Case(family, dtype, head_tile - missing, names)


def hopper_configs(family: str, head_dim: int) -> list[tuple[str, ...]]:
    """What the Hopper kernels can be told for a family; for lists the one that they choose, by the
    mask's rows.
    """
    from cs336_systems.attention.hopper.schedule import ORDERS, SCHEDULES, UNPAIRED
    from cs336_systems.attention.tiles import head_tile

    schedules = SCHEDULES[head_tile(head_dim)]
    if "blocks" in family:
        rows = block_size(family)[0]
        schedules = [next(one for one in schedules if rows % one.query_tile == 0)]
    if "blocks" in family or "varlen" in family:
        return [(one.name(order),) for one in schedules for order in UNPAIRED]
    forwards = [one.name(order) for one in schedules for order in ORDERS]
    unpaired = [one.name(order) for one in schedules for order in UNPAIRED]
    parts = [(forward, "parts") for forward in unpaired if head_dim <= 128]  # wide heads have none
    return [(forwards[0], "deterministic"), *parts, *((forward, "atomic") for forward in forwards)]


def divide(*, key_tiles: int, batch_heads: int, is_causal: bool, **_: int) -> Division:
    """Parts beside whole walks; of causal ones parts of a block."""
    if is_causal:
        return Division(0, 1, batch_heads * parts_before(key_tiles + 1, 1))
    return Division(1, 2, 2 * (batch_heads * key_tiles - 1))


def divide_forward(**call: Any) -> ForwardPlan:
    """The forward's, where it can have them."""
    plan = plan_forward(**call)
    if call["head_dim"] not in (64, 128) or plan.schedule.masked_tiles(plan.is_causal) > 1:
        return plan
    plan = replace(plan, part_tiles=1, whole=int(not plan.is_causal), num_programs=0)
    return replace(plan, num_programs=2) if plan.order == "dynamic" else plan


def block_size(family: str) -> tuple[int, int]:
    rows = int(family.rpartition("blocks")[2])
    return rows, 128 if family.startswith("hopper") else rows


def token_mask(device: str) -> Tensor:
    """Full, partial and dead tiles of at most 128 rows and columns; queries without a key in both
    of the last kinds.
    """
    tokens = torch.rand((1, HEADS, QUERIES, KEYS), generator=torch.Generator().manual_seed(1)) < 0.9
    tokens[..., :128, :128] = True
    tokens[:, 0, 128:] = False
    tokens[:, 1, 131:140] = False
    return tokens.to(device)


def attend(case: Case, device: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, object]]:
    """(inputs, results by the oracle's names, what the oracle must know); of split keys the forward
    alone.
    """
    from cs336_systems.attention import (
        AttentionConfig,
        BlockMask,
        KernelConfig,
        flash_attention,
        flash_attention_varlen,
    )

    hopper = case.family.startswith("hopper")
    config = (
        None
        if hopper
        else AttentionConfig(**{c.kernel: c for c in map(KernelConfig.from_name, case.configs)})
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, getattr(torch, case.dtype))

    options = {"enable_gqa": True, "return_lse": True, "backend": "triton", "config": config}
    causal = case.family.endswith("causal")
    if "varlen" in case.family:
        documents = HOPPER_DOCUMENTS if hopper else DOCUMENTS
        total, longest = sum(documents), max(documents)
        q, k, v, grad = (
            draw(total, heads, case.head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        ends = torch.tensor((0, *documents)).cumsum(0).to(device, torch.int32)
        if hopper:
            options["backend"] = "hopper"
        output, lse = flash_attention_varlen(
            *leaves, ends, ends, longest, longest, is_causal=causal, **options
        )
        grads = torch.autograd.grad((output, lse), leaves, (grad, torch.zeros_like(lse)))
        if hopper:  # of the configuration, which names a forward alone
            from cs336_systems.attention.call import Call, Documents
            from cs336_systems.attention.hopper.entry import OPERATORS

            q, k, v = (x.detach() for x in leaves)
            documents = Documents(ends, ends, longest, longest)
            call = Call(causal, case.head_dim**-0.5, config=case.configs[0], documents=documents)
            output, lse = OPERATORS["packed"](q, k, v, call)
        tensors = [x.detach().transpose(0, 1) for x in (q, k, v, grad)]
        results = [x.transpose(0, 1) if x.ndim == 3 else x for x in (output, lse, *grads)]
        mask = BlockMask.document(list(documents), is_causal=causal, device=device).to_dense()[0, 0]
        known: dict[str, object] = {"mask": mask}
    else:
        queries, keys = QUERIES, KEYS
        if case.family == "split":
            queries = FEW_QUERIES
        if case.family in ("hopper", "hopper_causal") and case.head_dim % 64:
            # so that causal queries see keys that do not exist: a kernel of its own
            queries, keys = KEYS, QUERIES
        shapes = ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys), (HEADS, queries))
        q, k, v, grad = (draw(1, heads, rows, case.head_dim) for heads, rows in shapes)
        leaves, tensors = (
            [x.requires_grad_() for x in (q, k, v)],
            [x.detach() for x in (q, k, v, grad)],
        )
        known = {"is_causal": causal}
        dividing = ExitStack()
        if "blocks" in case.family:
            known = {"mask": token_mask(device)}
            options["block_mask"] = BlockMask.from_dense(
                token_mask(device), block_size(case.family)
            )
        if hopper and "blocks" in case.family:
            output, lse = flash_attention(*leaves, **(options | {"backend": "hopper"}))
        elif hopper:
            from cs336_systems.attention.call import Call
            from cs336_systems.attention.hopper import backward, forward
            from cs336_systems.attention.hopper.entry import OPERATORS

            schedule, kind = case.configs
            if kind == "parts":
                dividing.enter_context(patch.object(backward, "divide_walks", divide))
                dividing.enter_context(patch.object(forward, "plan_forward", divide_forward))
            output, lse = OPERATORS["dense"](
                *leaves, Call(causal, case.head_dim**-0.5, kind == "deterministic", schedule)
            )
        elif case.family.startswith("split"):
            from cs336_systems.attention.triton.split import launch_split_forward

            chosen = KernelConfig.from_name(*case.configs)
            output, lse = launch_split_forward(
                *tensors[:3],
                is_causal=causal,
                scale=case.head_dim**-0.5,
                config=chosen,
                part_size=chosen.key_tile,
            )
            return tensors, {"output": output, "lse": lse}, known
        else:
            output, lse = flash_attention(*leaves, is_causal=causal, **options)
        with dividing:
            grads = torch.autograd.grad((output, lse), leaves, (grad, torch.zeros_like(lse)))
        results = [output, lse, *grads]
    return tensors, dict(zip(("output", "lse", "grad_q", "grad_k", "grad_v"), results)), known


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run every shipped configuration of every attention kernel once."
    )
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(DTYPES)
    )
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th case from the i-th on")
    parser.add_argument("--no-oracle", action="store_true", help="run the kernels alone")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu interprets the kernels"
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from cs336_systems.attention.contract import compute_oracle, contract_errors
    from cs336_systems.attention.tiles import target_of

    capability = torch.cuda.get_device_capability() if arguments.device == "cuda" else None
    first, step = map(int, arguments.shard.split("/"))
    if capability != (9, 0):
        arguments.families = [
            family for family in arguments.families if not family.startswith("hopper")
        ]
    chosen = list(cases(target_of(capability), arguments.families, arguments.dtypes))[first::step]
    started, covered, wrong = time.monotonic(), {}, []
    for case in chosen:
        tensors, results, known = attend(case, arguments.device)
        remark = ""
        if not arguments.no_oracle:
            errors = contract_errors(compute_oracle(*tensors, **known), results)
            worst = max(errors.values())
            remark = f"  error / bound {worst:.2f}"
            if worst > 1:
                wrong.append((case, errors))
        for name in case.configs:
            covered.setdefault((case.family, case.dtype), set()).add(name)
        print(
            f"{case.family:14s}{case.dtype:10s}d={case.head_dim:<4d}{' '.join(case.configs)}{remark}",
            flush=True,
        )
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    print(
        f"{len(chosen)} calls, forward and backward, in {time.monotonic() - started:.0f} s; configurations covered:"
    )
    for (family, dtype), names in covered.items():
        print(f"  {family} {dtype} ({len(names)}): {' '.join(sorted(names))}")
    for case, errors in wrong:
        print(f"WRONG {case}: {errors}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read when torch first allocates
    main()
