"""Synthetic records of the mask experiments for tests of the report: every status, and a dense case beside."""

from __future__ import annotations

import itertools
from typing import Any

from cs336_systems.config import MaskCase
from cs336_systems.records import Record, case_to_dict

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
DENSE_MS = {"triton": 10.0, "sdpa_flash": 8.0}  # forward of the dense case
MODES = {"forward": 1.0, "backward": 2.0, "forward_backward": 3.0}
OOM = "CUDA out of memory. Tried to allocate 64.00 GiB"
NO_MASK = "sdpa_flash takes no mask but the causal one"
SEQLEN = 16384


def mask_case(mask: str, seqlen: int = SEQLEN, block: int = 128) -> MaskCase:
    return MaskCase(
        mask=mask, batch=1, heads=16, seqlen_q=seqlen, head_dim=128, dtype="bfloat16", query_block=block,
        key_block=block,
    )  # fmt: skip


def _record(problem: str, case: MaskCase, implementation: str, mode: str, **changes: Any) -> Record:
    values: dict[str, Any] = {"quantity": "time", "unit": "ms", "device": GPU, "commit": "c0ffee", "dirty": False}
    values |= {"software": {"torch": "2.11.0", "triton": "3.6.0"}, "date": "2026-01-02T03:04:05+00:00"}
    values |= {"problem": problem, "implementation": implementation, "mode": mode, "scale": "handout"}
    return Record(case=case_to_dict(case), **values | changes)


def measured(
    problem: str, case: MaskCase, implementation: str, forward_ms: float, pairs: float, live: float
) -> list[Record]:
    """All rows of a cell that ran."""
    rows = [
        _record(problem, case, implementation, mode, samples=[forward_ms * part * jitter for jitter in (0.9, 1.0, 1.1)])
        for mode, part in MODES.items()
    ]
    for quantity, value in (("density", pairs), ("block_density", live)):
        rows.append(_record(problem, case, implementation, "forward", quantity=quantity, unit="1", samples=[value]))
    peak = {"quantity": "peak_memory", "unit": "MiB", "samples": [100.0]}
    return [*rows, _record(problem, case, implementation, "forward_backward", **peak)]


def broken(problem: str, case: MaskCase, implementation: str, status: str, message: str) -> list[Record]:
    return [_record(problem, case, implementation, "forward", status=status, message=message)]


def _dense(problem: str, mask: str, share: float) -> list[Record]:
    found = []
    for implementation, milliseconds in DENSE_MS.items():
        found += measured(problem, mask_case(mask), implementation, milliseconds * share, share, share)
    return found


def block_sparse_records() -> list[Record]:
    """Ours gains 0.8 of the ideal; FlexAttention half of ours; SDPA with a mask runs out of memory at density 0.5."""
    found = _dense("block_sparse", "full", 1.0)
    for density in (0.1, 0.5):
        case = mask_case(f"random:{density}")
        found += measured("block_sparse", case, "triton", 8.0 * density / 0.8, density, density)
        found += measured("block_sparse", case, "flex", 16.0 * density / 0.8, density, density)
    found += measured("block_sparse", mask_case("random:0.1"), "sdpa_mask", 40.0, 0.1, 0.1)
    found += broken("block_sparse", mask_case("random:0.5"), "sdpa_mask", "oom", OOM)
    found += measured("block_sparse", mask_case("tokens:0.1"), "triton", 10.0, 0.1, 1.0)
    found += broken("block_sparse", mask_case("tokens:0.1"), "sdpa_flash", "skipped", NO_MASK)
    for block, density in itertools.product((128, 64), (0.1, 1.0)):
        case = mask_case(f"random:{density:g}", 49152, block)
        found += measured(
            "block_sparse", case, "triton", 50.0 * density ** (0.8 if block == 128 else 0.7), density, density
        )
    return found


def dense_masks_records() -> list[Record]:
    found = []
    for seqlen in (1024, 4096):
        documents = f"document:{seqlen // 2},{seqlen // 4},{seqlen // 4}"
        shares = {"full": 1.0, "causal": 0.5, documents: 0.375, f"{documents}+causal": 0.19}
        for mask, share in shares.items():
            case, milliseconds = mask_case(mask, seqlen), share * (seqlen / 1024) ** 2
            found += measured("dense_masks", case, "triton", milliseconds, share, share)
            peer = "sdpa_padded" if mask.startswith("document") else "sdpa_cudnn"
            found += measured("dense_masks", case, peer, 2 * milliseconds, share, share)
    lists = mask_case("document:1024,1024,2048+causal", 4096)
    build = {"quantity": "mask_time", "unit": "ms", "samples": [1.5]}
    found.append(_record("dense_masks", lists, "triton_lists", "forward", **build))
    found += broken("dense_masks", mask_case("causal", 4096), "flex", "failed", "no compiler")
    return found


def dynamic_mask_records() -> list[Record]:
    found = _dense("dynamic_mask", "causal", 0.5)
    for mask, milliseconds, pairs, live in (("shared:1024+causal", 0.5, 0.06, 0.5), ("topk:1024", 9.0, 0.06, 0.5)):
        found += measured("dynamic_mask", mask_case(mask), "triton", milliseconds, pairs, live)
        build = {"quantity": "mask_time", "unit": "ms", "samples": [1.5]}
        found.append(_record("dynamic_mask", mask_case(mask), "triton", "forward", **build))
    return found + broken("dynamic_mask", mask_case("topk:1024"), "sdpa_mask", "oom", OOM)


def dilated_attention_records() -> list[Record]:
    found = _dense("dilated_attention", "full", 1.0) + _dense("dilated_attention", "causal", 0.5)
    for rate, suffix in itertools.product((2, 4), ("", "+causal")):
        case = mask_case(f"dilated:{SEQLEN}/{rate}{suffix}")
        share = (0.5 if suffix else 1.0) / rate
        found += measured("dilated_attention", case, "triton", 8.5 * share, share, 0.5 if suffix else 1.0)
    return found + broken("dilated_attention", case, "sdpa_mask", "oom", OOM)


MASK_MAKERS = {
    "block_sparse": block_sparse_records,
    "dense_masks": dense_masks_records,
    "dynamic_mask": dynamic_mask_records,
    "dilated_attention": dilated_attention_records,
}
