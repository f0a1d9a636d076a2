"""A process that runs the Hopper kernels over lengths, so that a hang costs its time-out and not the tests.

    python -m tests.hopper_lengths equal 64          # 1 to 300 queries and as many keys, full and causal, head_dim 64
    python -m tests.hopper_lengths unequal 128       # every pair of lengths around the tiles' edges

Prints one line a shape outside of the contract, or `ok` and the number of shapes; flushed, so that the last line before
a hang is that of the last shape that ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from cs336_systems.attention.contract import compute_oracle, contract_errors
from tests.test_s4_attention import inputs, run

LONGEST = 300
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)


def lengths(kind: str) -> Iterator[tuple[int, int]]:
    if kind == "equal":
        yield from ((length, length) for length in range(1, LONGEST + 1))
    else:
        yield from ((queries, keys) for queries in EDGES for keys in EDGES)


def main(kind: str, head_dim: int) -> int:
    wrong = count = 0
    for queries, keys in lengths(kind):
        tensors = inputs(1, 2, 2, queries, keys, head_dim, torch.bfloat16, "cuda")
        for is_causal in (False, True):
            errors = contract_errors(
                compute_oracle(*tensors, is_causal=is_causal), run(*tensors, backend="hopper", is_causal=is_causal)
            )
            count += 1
            if not max(errors.values()) <= 1:
                wrong += 1
                print(f"queries={queries} keys={keys} causal={is_causal}: {errors}", flush=True)
        if queries % 50 == 0:
            print(f"reached queries={queries} keys={keys}", flush=True)
    print(f"{wrong} wrong of {count}" if wrong else f"ok {count}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
