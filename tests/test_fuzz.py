"""Attention against the float64 oracle on drawn inputs: tiny, odd and ragged shapes, strides, shared keys, masks.

`make fuzz` draws ten times as many. Without a GPU, Triton's kernels are interpreted, in float32 and float16. Scores are
of ordinary size: in float32 a backward that is recomputed from a rounded log-sum-exp of 50 errs up to 1.3 times what
the contract allows, bug or none.
"""

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs336_systems.attention import BlockMask, flash_attention
from cs336_systems.attention.backends import available_backends
from cs336_systems.attention.contract import compute_oracle, contract_errors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS = [("tiled", torch.float32), ("triton", torch.float32), ("triton", torch.float16)]
if DEVICE == "cuda":
    CALLS += [("tiled", torch.float16), ("tiled", torch.bfloat16), ("triton", torch.bfloat16)]
LENGTHS = st.sampled_from((0, 1, 2, 15, 16, 17, 63, 64, 65, 97, 128, 131))


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 8)  # a tenth of a second each
@given(
    call=st.sampled_from([call for call in CALLS if available_backends()[call[0]] == "ok"]),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from((1, 3)), LENGTHS, LENGTHS),
    head_dim=st.sampled_from((8, 16, 24, 32, 40, 59, 64, 96)),
    masked=st.sampled_from(("no", "causal", "tiles")),
    scale=st.sampled_from((None, 0.2)),
    magnitude=st.sampled_from((1.0, 0.3)),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_is_within_the_contract(call, sizes, head_dim, masked, scale, magnitude, strided, seed):
    (backend, dtype), (batch, kv_heads, group, queries, keys) = call, sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int) -> Tensor:
        x = torch.randn(batch, length, heads, head_dim, generator=generator).transpose(1, 2) * magnitude
        return (x if strided else x.contiguous()).to(DEVICE, dtype)

    heads = kv_heads * group
    q, k, v, grad_output = draw(heads, queries), draw(kv_heads, keys), draw(kv_heads, keys), draw(heads, queries)
    block_mask = mask = None
    if masked == "tiles" and queries and keys:
        tiles = torch.rand(1, heads, -(-queries // 64), -(-keys // 64), generator=generator) < 0.6
        mask = tiles.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :queries, :keys].to(DEVICE)
        block_mask = BlockMask.from_dense(mask, 64)
    options = {"is_causal": masked == "causal", "scale": scale}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output, lse = flash_attention(
        *leaves, **options, block_mask=block_mask, enable_gqa=True, return_lse=True, backend=backend
    )
    output.backward(grad_output)
    results = {"output": output, "lse": lse, **{f"grad_{n}": leaf.grad for n, leaf in zip("qkv", leaves)}}
    oracle = compute_oracle(q, k, v, grad_output, mask=mask, **options)
    errors = contract_errors(oracle, {name: x.detach() for name, x in results.items()})
    assert max(errors.values()) <= 1, errors
