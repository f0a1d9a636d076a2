"""Packed documents: `flash_attention_varlen` against each document on its own, on CPU and on CUDA."""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import AttentionConfig, flash_attention_varlen
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.triton import launch
from tests.covered import ATTENTION
from tests.test_block_sparse import poisoned  # noqa: F401
from tests.test_s4_attention import (
    BACKENDS,
    DTYPES,
    all_results,
    assert_equal,
    assert_refused,
    draw,
    skip_what_cannot_run,
    tiles,
)

COVERS = ATTENTION

# (lengths of the queries, lengths of the keys or None for the same, rows behind the last document)
DOCUMENTS = {
    "odd": ([0, 1, 17, 64, 65, 0, 97], None, 0),
    "one": ([130], None, 0),
    "none": ([], None, 5),
    "all-empty": ([0, 0, 0], None, 3),
    "one-token-each": ([1] * 20, None, 0),
    "rows-behind": ([63, 2], None, 70),
    "more-keys": ([5, 0, 70, 3], [80, 9, 71, 0], 0),
    "more-queries": ([80, 0, 70, 66], [5, 4, 0, 65], 2),
}

DOCUMENTS_OF_TILES = {
    "ragged": ([70, 128, 0, 17, 193], None, 5),
    "more-keys": ([64, 5, 130], [140, 200, 64], 0),
    "more-queries": ([200, 64, 3, 129], [64, 9, 0, 70], 0),
}


def boundaries(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def packed(
    lengths_q: list[int], lengths_k: list[int] | None, behind: int, heads: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: str,
) -> tuple[list[Tensor], tuple[Tensor, Tensor, int, int]]:  # fmt: skip
    """[q, k, v, grad_output] and the four arguments that say where documents are."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    totals = [sum(lengths) + behind for lengths in (lengths_q, lengths_k)]
    shapes = [(totals[0], heads), (totals[1], kv_heads), (totals[1], kv_heads), (totals[0], heads)]
    tensors = [
        draw(*shape, head_dim, dtype=dtype, device=device, seed=seed)
        for seed, shape in enumerate(shapes)
    ]
    longest = [max(lengths, default=0) for lengths in (lengths_q, lengths_k)]
    return tensors, (boundaries(lengths_q, device), boundaries(lengths_k, device), *longest)


def run_packed(
    tensors: list[Tensor], documents: tuple[Tensor, Tensor, int, int], **options
) -> dict[str, Tensor]:
    *qkv, grad_output = tensors
    attend = partial(flash_attention_varlen, return_lse=True, **options)
    return all_results(lambda q, k, v: attend(q, k, v, *documents), qkv, grad_output)


def document_of(results: dict[str, Tensor], queries: slice, keys: slice) -> dict[str, Tensor]:
    """One document's results, (1, heads, seq, head_dim) each."""
    of_queries = {
        name: results[name][queries].transpose(0, 1)[None] for name in ("output", "grad_q")
    }
    of_keys = {name: results[name][keys].transpose(0, 1)[None] for name in ("grad_k", "grad_v")}
    return of_queries | of_keys | {"lse": results["lse"][None, :, queries]}


def worst_error(
    tensors: list[Tensor],
    documents: tuple[Tensor, Tensor, int, int],
    results: dict[str, Tensor],
    is_causal: bool,
) -> float:
    """The largest error over its bound of all documents; rows of none must be as rows without keys."""
    q, k, v, grad_output = tensors
    worst = 0.0
    ends_q, ends_k = (x.tolist() for x in documents[:2])
    for start_q, end_q, start_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        queries, keys = slice(start_q, end_q), slice(start_k, end_k)
        part = document_of(results, queries, keys)
        if end_q == start_q or end_k == start_k:
            assert not any(part[name].any() for name in ("output", "grad_q", "grad_k", "grad_v"))
            assert (part["lse"] == -math.inf).all()
            continue
        alone = [
            x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys], grad_output[queries])
        ]
        worst = max(
            worst, *contract_errors(compute_oracle(*alone, is_causal=is_causal), part).values()
        )
    behind = document_of(results, slice(ends_q[-1], None), slice(ends_k[-1], None))
    assert not any(behind[name].any() for name in ("output", "grad_q", "grad_k", "grad_v"))
    assert (behind["lse"] == -math.inf).all()
    return worst


# P5: equal to each document on its own


def assert_documents(
    tensors: list[Tensor], documents: tuple[Tensor, Tensor, int, int], **options
) -> dict[str, Tensor]:
    results = run_packed(tensors, documents, backend="triton", enable_gqa=True, **options)
    assert worst_error(tensors, documents, results, options["is_causal"]) <= 1
    return results


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("case", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents(case, backend, is_causal, device):
    tensors, documents = packed(*case, 1, 1, 32, torch.float32, device)
    results = run_packed(tensors, documents, is_causal=is_causal, backend=backend)
    assert worst_error(tensors, documents, results, is_causal) <= 1


@pytest.mark.slow_if(device="cpu", dtype="float32")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_heads_groups_and_dtypes(head_dim, dtype, device):
    """Documents of 16 rows or more: with few keys plain attention may lose nothing to rounding, and
    bound nothing.
    """
    skip_what_cannot_run("triton", dtype, device)
    lengths = [70, 0, 17, 33] if device == "cpu" else [1000, 0, 17, 333, 2049, 64]
    assert_documents(
        *packed(lengths, None, 3, 4, 2, head_dim, DTYPES[dtype], device), is_causal=True
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.alone
def test_many_documents_of_random_lengths(device):
    """Every tile of every document has a program, whatever the lengths are."""
    number, longest = (400, 300) if device == "cuda" else (25, 40)
    lengths = torch.randint(
        0, longest, (number,), generator=torch.Generator().manual_seed(4)
    ).tolist()
    assert_documents(*packed(lengths, None, 0, 1, 1, 16, torch.float32, device), is_causal=True)


def test_a_document_does_not_depend_on_where_it_lies(device):
    """Alone, or behind others, in bits: tiles start where documents start."""
    tensors, documents = packed([33, 70], None, 0, 1, 1, 32, torch.float16, device)
    together = document_of(
        run_packed(tensors, documents, backend="triton"), slice(33, None), slice(33, None)
    )
    ends = boundaries([70], device)
    alone = run_packed([x[33:] for x in tensors], (ends, ends, 70, 70), backend="triton")
    assert_equal(together, document_of(alone, slice(0, None), slice(0, None)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_do_not_depend_on_the_longest_length(backend, device):
    """On a GPU it is not checked, and one too small must not leave rows out; in 32 bits 2³² was
    less than 70.
    """
    tensors, documents = packed([70, 20], None, 0, 1, 1, 32, torch.float32, device)
    expected = run_packed(tensors, documents, backend=backend)
    for longest in ((1000, 2000), (2**32, 2**62)) if device == "cpu" else ((1, 1),):
        for name, result in run_packed(
            tensors, (*documents[:2], *longest), backend=backend
        ).items():
            torch.testing.assert_close(result, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_wrong_boundaries_on_a_gpu_read_nothing_outside():
    """Not checked there, so they must stay harmless: whatever they say, programs keep to existing
    rows.
    """
    tensors, _ = packed([70, 20], None, 0, 1, 1, 32, torch.float32, "cuda")
    right, least = torch.tensor([0, 5, 90], dtype=torch.int32, device="cuda"), -(2**31)
    for values in (
        [0, 500, 90],
        [-20, 40, 90],
        [0, 60, 30, 90],
        [90, 60, 0],
        [0, 5, least],
        [0, least + 100, 90],
    ):
        cu_seqlens = torch.tensor(values, dtype=torch.int32, device="cuda")
        run_packed(tensors, (cu_seqlens, cu_seqlens, 90, 90), backend="triton", is_causal=True)
        if len(values) == len(right):
            run_packed(tensors, (right, cu_seqlens, 90, 90), backend="triton", is_causal=True)
    torch.cuda.synchronize()


# Tiles read by Hopper's copy engine (TMA): whole ones, whose rows are all the document's


@pytest.mark.usefixtures("poisoned")
@pytest.mark.slow_if(device="cpu")  # interpreted: by TMA and by pointers
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("case", DOCUMENTS_OF_TILES.values(), ids=DOCUMENTS_OF_TILES.keys())
def test_tma_equals_pointers(case, head_dim, is_causal, device):
    """In the interpreter, which does the same arithmetic on the same tiles, in bits."""
    tensors, documents = packed(*case, 4, 2, head_dim, torch.float16, device)
    by_tma, by_pointers = (
        assert_documents(tensors, documents, is_causal=is_causal, config=tiles(spelling, device))
        for spelling in ("64x64_w4_s2_tma", "64x64_w4_s2")
    )
    if device == "cpu":
        assert_equal(by_tma, by_pointers)


@pytest.mark.parametrize("spelling", ["64x64_w4_s2", "64x64_w4_s2_tma"])
def test_no_number_of_a_neighbour_is_read(spelling, is_causal, device):
    """Documents end within tiles, and what is not a number beside them stays there."""
    tensors, documents = packed([70, 150, 30, 129], None, 9, 2, 2, 64, torch.float16, device)
    options = {"is_causal": is_causal, "backend": "triton", "config": tiles(spelling, device)}
    before = run_packed(tensors, documents, **options)
    for x in tensors:
        x[70:220] = math.nan
        x[-9:] = math.nan
    after = run_packed(tensors, documents, **options)
    for rows in (slice(0, 70), slice(220, 379)):
        assert_equal(document_of(after, rows, rows), document_of(before, rows, rows))


@pytest.mark.gpu
def test_launches_that_are_made_again_read_what_lies_there_now():
    """Other numbers and other boundaries at the same addresses."""
    tensors, (ends, _, *longest) = packed([200, 57, 100], None, 0, 2, 2, 64, torch.bfloat16, "cuda")
    for turn in range(4):
        ends.copy_(boundaries([200 - 40 * turn, 57 + 40 * turn, 100], "cuda"))
        for seed, x in enumerate(tensors):
            x.copy_(draw(*x.shape, dtype=x.dtype, device="cuda", seed=4 * turn + seed))
        assert_documents(tensors, (ends, ends, *longest), is_causal=True)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="TMA is sm_90's",
)
def test_documents_take_tma_where_it_can_read(capfd, monkeypatch):
    """A fused projection is read in place; one whose rows start between 16 bytes takes the
    pointers.
    """
    monkeypatch.setattr(launch, "_log_is_on", lambda: True)
    launch._print_once.cache_clear()
    for width, tma in ((64, True), (66, False)):
        fused = draw(300, 3 * 2, width, dtype=torch.bfloat16, device="cuda", seed=0)[..., :64]
        documents = boundaries([171, 129], "cuda")
        tensors = [
            *fused.split(2, dim=1),
            draw(300, 2, 64, dtype=torch.bfloat16, device="cuda", seed=1),
        ]
        assert_documents(tensors, (documents, documents, 171, 171), is_causal=True)
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 3 and all(line.endswith("_tma") == tma for line in lines), lines


# Refusals

X = torch.ones(10, 4, 16)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)
REFUSALS = {
    "four-dims": ({"q": X[None]}, r"ValueError: q must have shape \(total, heads, head_dim\).*, got \(1, 10, 4, 16\)"),
    "keys": ({"k": torch.ones(10, 4, 8)}, r"ValueError: k must have shape \(10, 4, 16\) .* got \(10, 4, 8\)"),
    "values": ({"v": torch.ones(9, 4, 16)}, r"ValueError: v must have k's shape \(10, 4, 16\), got \(9, 4, 16\)"),
    "dtype": ({"cu_seqlens_q": CU.long()}, r"TypeError: cu_seqlens_q must be a tensor of int32, got torch\.int64"),
    "rank": ({"cu_seqlens_q": CU[None]}, r"ValueError: cu_seqlens_q must have shape \(documents \+ 1,\), got \(1, 3\)"),
    "device": ({"cu_seqlens_q": CU.to("meta")}, "ValueError: cu_seqlens_q must be contiguous on q's device cpu"),
    "start": ({"cu_seqlens_q": CU + 1}, "ValueError: cu_seqlens_q must rise from 0 to at most the 10 rows of q"),
    "wrap-around": (
        {"cu_seqlens_k": torch.tensor([0, 2**31 - 1, -(2**31)], dtype=torch.int32), "max_seqlen_k": 2**31 - 1},
        r"ValueError: cu_seqlens_k must rise from 0 to at most the 10 rows of k, got \[0, 2147483647, -2147483648\]",
    ),
    "number": ({"cu_seqlens_k": CU[:2]}, "ValueError: .*as many documents as cu_seqlens_q, 2, got 1"),
    "longest": ({"max_seqlen_q": 5}, "ValueError: max_seqlen_q must be at least the longest length, 6, got 5"),
    "longest-bits": ({"max_seqlen_k": 2**64}, "ValueError: .*must be at most 9223372036854775807, got 18446"),
    "config": ({"config": AttentionConfig(), "backend": "tiled"}, "ValueError: config chooses the tiles of"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", REFUSALS.values(), ids=REFUSALS.keys())
def test_wrong_arguments_are_named(change, message):
    good = {
        "q": X,
        "k": X,
        "v": X,
        "cu_seqlens_q": CU,
        "cu_seqlens_k": CU,
        "max_seqlen_q": 6,
        "max_seqlen_k": 6,
    }
    assert_refused(message, flash_attention_varlen, **good | change)
