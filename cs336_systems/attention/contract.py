"""The numerical contract: the error that tests and benchmarks allow against the float64 oracle.

For O, dQ, dK and dV, with everything computed on the same inputs:

    max |ours - ref64|  <=  2 · max |eager - ref64| + 1e-5

where ref64 is `attention_reference` in float64 and eager is the same formula in the inputs' dtype
with no upcast. The log-sum-exp agrees within 1e-3 · max(1, |L|), in float32 and float64 within
1e-5 · max(1, |L|).

The contract leaves out one case. A query that sees a single key has dS = 0. Eager finds 0 exactly;
a backward that recomputes P finds it within the rounding of dO · V - dO · O. With hundreds of such
queries on one key, their sum dK may pass 1e-5 in float32.

    oracle = compute_oracle(q, k, v, grad_output, is_causal=True)
    errors = contract_errors(oracle, {"output": o, "grad_q": dq, ...})
    assert all(error <= 1 for error in errors.values())  # each is an error over its bound
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from cs336_systems.attention.reference import attention_reference

ABSOLUTE_SLACK = 1e-5
LSE_TOLERANCE = 1e-3
LSE_TOLERANCE_FLOAT32 = 1e-5
# Query rows are computed in blocks whose score matrix stays within this many elements. The
# yardstick is plain attention as it would run, one matmul over all rows, so on a GPU its blocks are
# as large as memory allows: a float32 dK summed block by block would have a smaller error than that
# of any implementation.
MAX_SCORES = 2**28
# A pass and its gradients hold four to five tensors of scores at once.
YARDSTICK_SHARE_OF_FREE_MEMORY = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Exact attention results and the largest error that the contract allows for each.

    The names are output and lse, and with an upstream gradient grad_q, grad_k and grad_v.
    """

    expected: dict[str, Tensor]  # float64
    bounds: dict[str, Tensor | float]  # of lse one bound for each element


def compute_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_output: Tensor | None = None,
    *,
    is_causal: bool = False,
    mask: Bool[Tensor, "... queries keys"] | None = None,
    scale: float | None = None,
) -> Oracle:
    """Return attention's exact results for these inputs and the contract's bounds for their dtype.

    Inputs are (..., heads, seq, head_dim). Fewer key and value heads than query heads mean
    grouped-query attention. Gradients are computed only with `grad_output`. Query rows are
    computed in blocks, so that any length fits: rows are independent, and dK and dV are sums over
    them. ValueError where plain attention overflows, since its error is the yardstick.
    """
    exact = _blockwise(q, k, v, grad_output, torch.float64, is_causal, mask, scale)
    eager = _blockwise(q, k, v, grad_output, q.dtype, is_causal, mask, scale)
    bounds: dict[str, Tensor | float] = {
        name: 2 * _max_abs(eager[name].double() - exact[name]) + ABSOLUTE_SLACK
        for name in exact
        if name != "lse"
    }
    overflowed = [name for name, bound in bounds.items() if not math.isfinite(float(bound))]
    if overflowed:
        raise ValueError(
            f"plain {q.dtype} attention is not finite in {', '.join(overflowed)}: "
            "it bounds nothing here"
        )
    tolerance = (
        LSE_TOLERANCE_FLOAT32 if q.dtype in (torch.float32, torch.float64) else LSE_TOLERANCE
    )
    bounds["lse"] = tolerance * exact["lse"].abs().clamp(1.0)
    return Oracle(expected=exact, bounds=bounds)


def contract_errors(oracle: Oracle, results: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each result's largest error divided by its bound: at most 1 within the contract.

    `results` has tensors by the names of `oracle.expected`. A NaN gives inf. ValueError for a
    result of another shape than expected.
    """
    errors = {}
    for name, result in results.items():
        expected = oracle.expected[name]
        if result.shape != expected.shape:
            raise ValueError(
                f"{name} must have shape {tuple(expected.shape)}, got {tuple(result.shape)}"
            )
        difference = result.double() - expected
        # Equal infinities (L of a row without keys) agree; all else that is not finite does not.
        difference = (
            torch.where(result.double() == expected, 0.0, difference).abs() / oracle.bounds[name]
        )
        errors[name] = _max_abs(difference.nan_to_num(nan=math.inf))
    return errors


def _blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_output: Tensor | None,
    dtype: torch.dtype,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> dict[str, Tensor]:
    """Return the results of `attention_reference` in `dtype`, computed by blocks of query rows.

    The gradients are autograd's; there are none without `grad_output`. Sums over blocks are in
    float32 or wider, as a matmul's accumulators are. The log-sum-exp comes with float64 only:
    nothing is compared with another, and in 16 bits it would hold float32 scores of its own.
    """
    with_lse = dtype == torch.float64
    group = q.shape[-3] // max(k.shape[-3], 1)
    k, v = (x.repeat_interleave(group, dim=-3) if group > 1 else x for x in (k, v))
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    max_scores = (
        MAX_SCORES if dtype == torch.float64 else max(MAX_SCORES, _free_elements(q.device, dtype))
    )
    rows = max(1, max_scores // max(1, math.prod(q.shape[:-2]) * num_keys))

    results = {"output": q.new_zeros(q.shape, dtype=dtype)}
    if with_lse:
        results["lse"] = q.new_zeros(q.shape[:-1], dtype=dtype)
    if grad_output is not None:
        results["grad_q"] = q.new_zeros(q.shape, dtype=dtype)
    accumulate = torch.promote_types(dtype, torch.float32)
    grad_k, grad_v = (torch.zeros(x.shape, dtype=accumulate, device=x.device) for x in (k, v))

    for start in range(0, num_queries, rows):
        stop = min(start + rows, num_queries)

        # the block's part of the mask; causal: keys behind `seen` are masked for the whole block
        seen = min(stop, num_keys) if is_causal else num_keys
        block_mask = None
        if is_causal:
            row_index = torch.arange(start, stop, device=q.device)
            block_mask = row_index[:, None] >= torch.arange(seen, device=q.device)
        if mask is not None:
            token_mask = mask.expand(*mask.shape[:-2], num_queries, num_keys)[
                ..., start:stop, :seen
            ]
            block_mask = token_mask if block_mask is None else block_mask & token_mask

        # forward
        leaves = [q[..., start:stop, :], k[..., :seen, :], v[..., :seen, :]]
        leaves = [x.detach().to(dtype).requires_grad_(grad_output is not None) for x in leaves]
        if with_lse:
            output, lse = attention_reference(
                *leaves, mask=block_mask, scale=scale, return_lse=True
            )
            results["lse"][..., start:stop] = lse.detach()
        else:
            output = attention_reference(*leaves, mask=block_mask, scale=scale)
        results["output"][..., start:stop, :] = output.detach()

        # Backward: only the graph's own references may keep the block's tensors alive meanwhile.
        del block_mask
        if grad_output is not None:
            block_grads = torch.autograd.grad(
                output, leaves, grad_output[..., start:stop, :].to(dtype)
            )
            results["grad_q"][..., start:stop, :] = block_grads[0]
            grad_k[..., :seen, :] += block_grads[1]
            grad_v[..., :seen, :] += block_grads[2]

    # gradients of a key head are summed over its group of query heads
    if grad_output is not None:
        for name, grad in (("grad_k", grad_k), ("grad_v", grad_v)):
            summed = grad.unflatten(-3, (-1, group)).sum(dim=-3) if group > 1 else grad
            results[name] = summed.to(dtype)
    return results


def _free_elements(device: torch.device, dtype: torch.dtype) -> int:
    """Return how many elements fit the yardstick's share of a GPU's free memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    # PyTorch's cached blocks are free too
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free * YARDSTICK_SHARE_OF_FREE_MEMORY) // dtype.itemsize


def _max_abs(x: Tensor) -> float:
    """Return the largest absolute value in x; 0 if x is empty."""
    return x.abs().max().item() if x.numel() else 0.0
