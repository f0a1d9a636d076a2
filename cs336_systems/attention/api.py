"""`flash_attention`: validate the inputs, choose a back end, dispatch to it.

    out = flash_attention(q, k, v, is_causal=True)      # the fastest back end that serves the call
    out, lse = flash_attention(q, k, v, backend="tiled", return_lse=True)
    window = BlockMask.sliding_window(4096, window=512, device="cuda")
    out = flash_attention(q, k, v, block_mask=window)

The back ends are the stages of this package: `reference`, `compiled`, `tiled`, `triton_first`,
`triton`, `hopper`. `backend="auto"` chooses among them, and `explain_backend` returns the choice
with its reason. A back end that is named is used, or refused with a ValueError that says why.
"""

from __future__ import annotations

from typing import Never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cs336_systems.attention.call import Call, Documents, Saved
from cs336_systems.attention.checks import (
    check_attention_inputs,
    check_flags,
    refuse_keywords,
    resolve_scale,
    to_autocast_dtypes,
)
from cs336_systems.attention.choose import AttentionLayout, explain_backend
from cs336_systems.attention.compiled import compiled_reference
from cs336_systems.attention.masks.block_mask import (
    BlockMask,
    PackedForm,
    check_block_mask,
    from_attn_mask,
)
from cs336_systems.attention.reference import attention_reference
from cs336_systems.attention.rule import AttentionOperator
from cs336_systems.attention.tiled import tiled_attention
from cs336_systems.attention.tiles import AttentionConfig


def flash_attention(
    q: Float[Tensor, "... heads queries head_dim"],
    k: Float[Tensor, "... kv_heads keys head_dim"],
    v: Float[Tensor, "... kv_heads keys head_dim"],
    *,
    is_causal: bool = False,
    block_mask: BlockMask | None = None,
    attn_mask: Bool[Tensor, "... queries keys"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    config: AttentionConfig | None = None,
    **unknown: Never,
) -> Float[Tensor, "... heads queries head_dim"] | tuple[Tensor, Tensor]:
    """Return exact scaled dot-product attention, with the log-sum-exp L where `return_lse` is set.

    Memory is linear in the sequence length with the back ends `tiled`, `triton` and `hopper`.

    Args:
        q, k, v: one floating dtype, one device, any strides. `triton` takes a head_dim of at most
            256. `hopper` takes float16 and bfloat16 with a head_dim of at most 256, under a
            block_mask of at most 128.
        is_causal: query i attends keys j <= i, aligned at the top left as in SDPA, also when
            lengths differ.
        block_mask: which keys each query attends, instead of is_causal. Its batch and heads are 1
            or those of q, whose leading dimensions count as one flattened batch. `triton` and
            `hopper` walk its lists of tiles and never read a dead one, at any density; they take
            tiles of at least 64 x 64, `hopper` of at least 64 x 128. The other back ends attend
            through `block_mask.to_dense()`, a bool (batch, heads, queries, keys) tensor. A query
            without a key has O = 0, L = -inf and no gradient, whatever gradient reaches its L. A
            NaN in the gradient of its O stays out of other gradients in `tiled` alone. With
            backend `auto` and no config, a mask that is exactly full or causal
            (`block_mask.dense_form`) takes the dense kernels, as without a mask. One of long
            documents (`block_mask.packed_form`) takes the kernels of `flash_attention_varlen`,
            where `auto` takes `triton` or `hopper` for these.
        attn_mask: as in SDPA, bools only: True where attended, broadcast to (..., heads, queries,
            keys). Each call converts it to a BlockMask and waits for the GPU meanwhile. Convert a
            mask that is used often once, with `BlockMask.from_dense`.
        scale: factor of the scores, positive; 1/sqrt(head_dim) by default.
        enable_gqa: allow kv_heads that divide heads: query head h uses key head
            h // (heads / kv_heads).
        return_lse: also return the natural log of the summed exponentials of the scaled scores,
            (..., heads, queries), float32 (float64 for float64 inputs). Gradients flow through it.
        deterministic: True makes every gradient equal to the last bit in each run. Without it, one
            gradient alone may differ between runs: dQ of `hopper` up to head_dim 128 (also where
            `auto` takes `hopper`), which atomic additions sum in any order. True adds in a fixed
            order instead, and that backward takes up to 8 % longer, 16 % at 2,048 causal tokens.
            With few heads it takes longer still, since their work is then not divided; `auto`
            therefore takes `triton` there. Without a mask the float32 sums of dQ take twice the
            memory. Under a block_mask `hopper` runs the backward of `triton`. None: as
            `torch.use_deterministic_algorithms` has set it.
        backend: `auto`, `reference`, `compiled`, `tiled`, `triton_first`, `triton` or `hopper`.
            `triton_first` takes lengths in whole tiles of 64, head dims of 16, 32, 64 and 128, and
            no block mask.
        config: tiles of the `triton` kernels, instead of the table's; `auto` then takes `triton`.

    Few queries, as in one head or one generated token, do not fill a GPU. There the forward of
    `triton` splits the keys among programs and holds a float32 output for each part, of at most
    128 parts. `hopper` divides the keys likewise, with at most 34 MiB on 132 multiprocessors, and
    in the backward the queries, with at most 66 MiB.

    Inputs must be finite. A NaN or infinity in a row of K or V makes wrong every query that attends
    this key, and its gradients. One in V also reaches the queries that do not attend the key but
    share a tile with it: their weight for it is 0, and 0 times NaN is NaN. In `reference`,
    `compiled`, and `tiled` under a block_mask, these are all queries of the head. Other queries,
    heads and batch entries keep their bits. `triton` and `hopper` never read a dead tile of a
    block_mask.

    Scores must be finite too. If one score of a query is NaN, or all are -inf, some back ends give
    NaN for its O and L, others 0 and -inf. The backward of `tiled`, `triton` and `hopper` reads L
    rounded to float32: with random scores of a standard deviation of hundreds gradients leave the
    contract in float32, and from 1e8 on they may overflow in 16 bits. If a query sees one key only,
    its exact dQ and dK are 0; rounding gives some 1e-5 in float32.

    Under autocast, inputs of 16 or 32 bits are cast to autocast's dtype, as in SDPA. Without keys
    the output is 0 and the log-sum-exp -inf. There is no dropout, no additive bias and no value
    head dim other than the key's. Only `reference` has double backward. `tiled`, `triton` and
    `hopper` have no forward-mode AD, and of torch.func's transforms vmap alone.

    Raises:
        TypeError, ValueError: an argument is wrong or the back end cannot serve it; raised before
            anything is launched.
        NotImplementedError: an input of `tiled`, `triton` or `hopper` carries a forward-mode
            tangent, or torch.func differentiates one of them.

    Source: FlashAttention-2 (Dao 2023).
    """
    if unknown:
        refuse_keywords("flash_attention", unknown)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    check_flags(
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
        deterministic=deterministic,
    )
    q, k, v = to_autocast_dtypes(q, k, v)
    check_attention_inputs(q, k, v, enable_gqa=enable_gqa)
    scale = resolve_scale(scale, q.shape[-1])
    if attn_mask is not None:
        if block_mask is not None:
            raise ValueError("attn_mask must be None with a block_mask, got both")
        block_mask = from_attn_mask(attn_mask, q, k)
    if block_mask is not None:
        check_block_mask(block_mask, q, k, is_causal=is_causal)
        if backend == "auto" and config is None:
            if block_mask.dense_form is not None:
                is_causal, block_mask = block_mask.dense_form == "causal", None
            elif block_mask.packed_form is not None:
                attended = attend_documents(q, k, v, block_mask.packed_form, scale, deterministic)
                if attended is not None:
                    return attended if return_lse else attended[0]

    layout: AttentionLayout = "dense" if block_mask is None else "block_mask"
    size = None if block_mask is None else block_mask.block_size
    backend, _ = explain_backend(
        q,
        k,
        backend=backend,
        is_causal=is_causal,
        layout=layout,
        block_size=size,
        deterministic=deterministic,
        config=config,
    )

    mask = lists = None
    leading = q.shape[:-3]
    if backend in ("triton", "hopper"):
        lists = None if block_mask is None else block_mask.lists
    else:  # these back ends take neither grouped heads nor lists of tiles
        if q.shape[-3] != k.shape[-3]:
            k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for x in (k, v))
        mask = None if block_mask is None else block_mask.to_dense()

    if backend in ("reference", "compiled"):
        if mask is not None:
            sizes = [1] * len(leading) if len(mask) == 1 else leading
            mask = mask.reshape(*sizes, *mask.shape[1:])
        attend = attention_reference if backend == "reference" else compiled_reference()
        return attend(q, k, v, is_causal=is_causal, mask=mask, scale=scale, return_lse=return_lse)

    # operators take (batch, heads, seq, head_dim)
    if len(leading) != 1:
        q, k, v = (x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4) for x in (q, k, v))
    names = "" if config is None else config.names
    call = Call(is_causal, scale, deterministic, names, mask, lists)
    output, lse = operator_of(backend, layout)(q, k, v, call)
    if len(leading) != 1:
        output, lse = (
            output.reshape(*leading, *output.shape[1:]),
            lse.reshape(*leading, *lse.shape[1:]),
        )
    return (output, lse) if return_lse else output


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, form: PackedForm, scale: float, deterministic: bool | None
) -> tuple[Tensor, Tensor] | None:
    """Return (output, lse) of a mask's documents by the packed kernels that `auto` takes.

    q, k and v are (..., heads, tokens, head_dim). None where `auto` takes neither `triton` nor
    `hopper` for packed documents. Where all batch entries have the same documents, the heads of all
    become those of one sequence; else the sequences are packed one behind the other. Inputs are
    viewed in that layout where their strides allow it, as those of one sequence do, else copied.
    """
    (*leading, heads, tokens, head_dim) = q.shape
    if sum(form.lengths) == tokens:  # the documents of each batch entry
        packed_q, packed_k, packed_v = (x.flatten(0, -3).transpose(0, 1) for x in (q, k, v))
    else:
        packed_q, packed_k, packed_v = (
            x.flatten(0, -4).transpose(1, 2).flatten(0, 1) for x in (q, k, v)
        )

    backend, _ = explain_backend(
        packed_q.transpose(0, 1),
        packed_k.transpose(0, 1),
        is_causal=form.is_causal,
        layout="packed",
        longest=(form.longest, form.longest),
    )
    if backend not in ("triton", "hopper"):
        return None
    documents = Documents(form.cu_seqlens, form.cu_seqlens, form.longest, form.longest)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    call = Call(form.is_causal, scale, deterministic, documents=documents)
    output, lse = operator_of(backend, "packed")(packed_q, packed_k, packed_v, call)

    if sum(form.lengths) == tokens:
        output = output.transpose(0, 1)
    else:
        output = output.unflatten(0, (-1, tokens)).transpose(1, 2)
        lse = lse.unflatten(1, (-1, tokens)).transpose(0, 1)
    return output.reshape(*leading, heads, tokens, head_dim), lse.reshape(*leading, heads, tokens)


_operators: dict[tuple[str, AttentionLayout], AttentionOperator] = {}


def operator_of(backend: str, layout: AttentionLayout = "dense") -> AttentionOperator:
    """Return the AttentionOperator of `tiled`, `triton_first`, `triton` or `hopper` for `layout`.

    Kernels are imported when they are first asked for, since they load Triton.
    """
    if backend == "tiled":
        return tiled_attention
    known = _operators.get((backend, layout))
    if known is not None:
        return known
    if backend == "triton_first":
        from cs336_systems.attention.triton.first import triton_first_attention

        operators = {"dense": triton_first_attention}
    elif backend == "hopper":
        from cs336_systems.attention.hopper.entry import OPERATORS as operators
    else:
        from cs336_systems.attention.triton.passes import OPERATORS as operators
    _operators[backend, layout] = operators[layout]
    return operators[layout]


@torch.no_grad()
def attention_backward(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    output: Float[Tensor, "batch heads queries head_dim"],
    lse: Float[Tensor, "batch heads queries"],
    grad_output: Float[Tensor, "batch heads queries head_dim"],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the output and log-sum-exp over these or more keys.

    `k` and `v` may be one part of the keys that `output` and `lse` (natural log) were computed
    over, as in ring attention. P = exp(S - L) with the L of all keys is this part's share of the
    softmax. The gradients of q then add up over the parts, and no part's own output is needed.
    `reference` and `compiled` save no L and take the backward of `tiled`.
    """
    backend, _ = explain_backend(q, k, backend=backend, is_causal=is_causal)
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = Call(is_causal, resolve_scale(scale, q.shape[-1]), deterministic)
    saved = Saved(q, k, v, output, lse, grad_output)
    if backend not in ("triton", "hopper"):  # only these two take grouped heads
        backend = "tiled" if backend in ("reference", "compiled") else backend
        repeated_k, repeated_v = (
            x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v)
        )
        saved = saved._replace(k=repeated_k, v=repeated_v)
    operator = operator_of(backend)
    operator.check_backward(saved)
    grad_q, *grads = operator.gradients(saved, call)
    # the gradients of repeated heads are summed over their group
    grad_k, grad_v = (
        grad if grad.shape == k.shape else grad.unflatten(1, (k.shape[1], -1)).sum(2)
        for grad in grads
    )
    return grad_q, grad_k, grad_v
