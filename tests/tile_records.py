"""Synthetic records of `tile_choice` for tests of the report: a good row, a bad one, what was skipped, fixed tiles."""

from __future__ import annotations

from typing import Any

from cs336_systems.config import AttentionShape
from cs336_systems.records import Record, case_to_dict

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
PROBLEM = "tile_choice"
QUANTITIES = {"forward": "time", "dkdv": "dkdv_time", "dq": "dq_time"}
TILES = {"forward": "64x128_w4_s2_tma", "dkdv": "64x64_w4_s3_tma", "dq": "128x64_w8_s3_tma"}  # the table's
OTHERS = {"64x64_w4_s2": 1.25, "128x128_w8_s2": 2.0}  # of the grid, with their times over the table's
SPILLS = "out of resource: shared memory, Required: 262144, Hardware limit: 232448"


def tile_case(seqlen: int, head_dim: int = 64, kv_heads: int | None = None) -> AttentionShape:
    return AttentionShape(
        batch=1, heads=16, kv_heads=kv_heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, is_causal=True,
        dtype="bfloat16",
    )  # fmt: skip


def tile_records() -> list[Record]:
    """Table rows that are the best, but for dkdv at 8192 tokens with grouped heads: another takes 0.8 of its time."""
    found = [tile_record(tile_case(1024), "compile_ahead", "forward_backward", "compile_time", [40.0], unit="s")]
    for case in (tile_case(1024), tile_case(8192, kv_heads=4)):
        for kernel, quantity in QUANTITIES.items():
            mode = "forward" if kernel == "forward" else "backward"
            chosen_ms = 0.1 * case.seqlen_q / 1024
            tiles = f"sm90_{kernel}_{TILES[kernel]}"
            samples = [chosen_ms * jitter for jitter in (0.99, 1.0, 1.01)]
            found.append(tile_record(case, f"table_{kernel}", mode, quantity, samples, kernel=f"{tiles} sm90_other"))
            for spelled, ratio in OTHERS.items():
                name = f"sm90_{kernel}_{spelled}"
                if kernel == "dkdv" and case.kv_heads:
                    ratio *= 0.64
                found.append(tile_record(case, name, mode, quantity, [chosen_ms * ratio] * 3, kernel=name))
            name = f"sm90_{kernel}_128x128_w4_s3"
            found.append(tile_record(case, name, mode, quantity, [], status="skipped", message=SPILLS))
    for case, milliseconds in ((tile_case(8192), 1.0), (tile_case(16384), 4.0)):
        for name, ratio in (("table", 1.0), ("fixed", 1.5), ("fixed_tma", 1.1)):
            found.append(tile_record(case, name, "backward", "time", [milliseconds * ratio] * 3))
    return found


def tile_record(
    case: AttentionShape, implementation: str, mode: str, quantity: str, samples: list[float], **changes: Any
) -> Record:
    values: dict[str, Any] = {"unit": "ms", "device": GPU, "commit": "c0ffee", "dirty": False, "scale": "handout"}
    values |= {"software": {"torch": "2.11.0", "triton": "3.6.0"}, "date": "2026-01-02T03:04:05+00:00"}
    values |= {"problem": PROBLEM, "implementation": implementation, "mode": mode, "quantity": quantity}
    return Record(case=case_to_dict(case), samples=samples, **values | changes)
