"""Compare attention with the float64 oracle on random inputs, for some time or one seed.

    python tools/fuzz.py --seconds 60            # make fuzz: new seeds each time
    python tools/fuzz.py --seed 1234567          # the one that failed, again

A seed decides everything: back end, shapes (tiny, odd and ragged ones), dtype, strides, heads that share keys, scale,
and the mask: none, causal or random tiles. Outputs and gradients must agree within the numerical contract. Without a
GPU, Triton's kernels are interpreted, in float32 and float16. Scores are of ordinary size: in float32 a backward that
is recomputed from a rounded log-sum-exp of 50 errs up to 1.3 times what the contract allows, bug or none.
"""

import argparse
import importlib.util
import random
import sys
import time
from typing import Any

import torch
from torch import Tensor

LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 97, 128, 131)
HEAD_DIMS = (8, 16, 24, 32, 40, 59, 64, 96)


def draw_case(seed: int, device: str) -> dict[str, Any]:
    """The arguments of one call."""
    dice = random.Random(seed)
    backends = ["tiled", *(["triton"] if importlib.util.find_spec("triton") else [])]
    backend = dice.choice(backends)
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    if device == "cpu":
        dtypes = [torch.float32] if backend == "tiled" else dtypes[:2]
    kv_heads = dice.choice((1, 2))
    return {
        "backend": backend,
        "dtype": dice.choice(dtypes),
        "batch": dice.choice((1, 2)),
        "heads": kv_heads * dice.choice((1, 1, 3)),
        "kv_heads": kv_heads,
        "queries": dice.choice(LENGTHS),
        "keys": dice.choice(LENGTHS),
        "head_dim": dice.choice(HEAD_DIMS),
        "mask": dice.choice(("none", "causal", "tiles")),
        "scale": dice.choice((None, 0.2)),
        "magnitude": dice.choice((0.3, 1.0, 1.0)),
        "is_strided": dice.random() < 0.3,
    }


def errors_of(case: dict[str, Any], seed: int, device: str) -> dict[str, float]:
    """By result, the largest error over its bound: at most 1 is right."""
    from cs336_systems.attention import BlockMask, flash_attention
    from cs336_systems.attention.contract import compute_oracle, contract_errors

    generator = torch.Generator().manual_seed(seed)

    def tensor(heads: int, length: int) -> Tensor:
        x = torch.randn(case["batch"], length, heads, case["head_dim"], generator=generator).transpose(1, 2)
        x = (x if case["is_strided"] else x.contiguous()) * case["magnitude"]
        return x.to(device, case["dtype"])

    queries, keys = case["queries"], case["keys"]
    q, k, v = tensor(case["heads"], queries), tensor(case["kv_heads"], keys), tensor(case["kv_heads"], keys)
    grad_output = tensor(case["heads"], queries)
    block_mask = mask = None
    if case["mask"] == "tiles" and queries and keys:
        tiles = torch.rand(1, case["heads"], -(-queries // 64), -(-keys // 64), generator=generator) < 0.6
        mask = tiles.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :queries, :keys].to(device)
        block_mask = BlockMask.from_dense(mask, 64)
    is_causal = case["mask"] == "causal"
    options = {"is_causal": is_causal, "scale": case["scale"]}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output, lse = flash_attention(
        *leaves, **options, block_mask=block_mask, enable_gqa=True, return_lse=True, backend=case["backend"]
    )
    output.backward(grad_output)
    results = {"output": output, "lse": lse, **{f"grad_{n}": leaf.grad for n, leaf in zip("qkv", leaves)}}
    oracle = compute_oracle(q, k, v, grad_output, mask=mask, **options)
    return contract_errors(oracle, {name: result.detach() for name, result in results.items()})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from cs336_systems.device import interpret_kernels

        interpret_kernels()
    seeds = random.SystemRandom()
    end, count = time.monotonic() + options.seconds, 0
    while count == 0 or (options.seed is None and time.monotonic() < end):
        seed = seeds.randrange(2**31) if options.seed is None else options.seed
        case = draw_case(seed, device)
        wrong = {name: error for name, error in errors_of(case, seed, device).items() if not error <= 1}
        count += 1
        if wrong:
            print(f"errors over their bounds of 1: {wrong}\n{case}\nagain: python tools/fuzz.py --seed {seed}")
            return 1
    print(f"{count} cases agree with the oracle on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
