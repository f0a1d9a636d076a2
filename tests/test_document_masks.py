"""Masks of documents that packed kernels attend: the form, and its results beside the lists'."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from cs336_systems.attention import api, flash_attention
from cs336_systems.attention.api import attend_documents
from cs336_systems.attention.masks import BlockMask, block_mask
from tests.test_s4_attention import all_results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (70, 1, 0, 57)
IDS = torch.tensor([[3] * 70 + [1] * 58, [0] * 20 + [9] * 100 + [2] * 8])


@pytest.fixture(autouse=True)
def documents_of_any_length(monkeypatch) -> None:
    """So that small ones have the form."""
    monkeypatch.setattr(block_mask, "MIN_PACKED_LENGTH", 1)


def test_constructors_find_the_documents() -> None:
    form = BlockMask.document(LENGTHS, is_causal=True, block_size=64).packed_form
    assert form is not None and form.lengths == LENGTHS and form.is_causal and form.longest == 70
    assert form.cu_seqlens.dtype == torch.int32 and form.cu_seqlens.tolist() == [0, 70, 71, 71, 128]
    form = BlockMask.document(ids=IDS, block_size=64).packed_form
    assert form is not None and form.lengths == (70, 58, 20, 100, 8) and not form.is_causal


def test_a_document_in_two_places_is_attended_along_lists() -> None:
    """Its tokens attend each other, which packed documents do not."""
    twice = IDS.clone()
    twice[1, -8:] = 0
    assert BlockMask.document(ids=twice, block_size=64).packed_form is None
    # the same id in another batch entry is another document
    assert BlockMask.document(ids=IDS[:1].repeat(2, 1), block_size=64).packed_form is not None


def test_short_documents_are_attended_along_lists(monkeypatch) -> None:
    """Packed tiles begin at each document: lengths count by their tokens."""
    monkeypatch.setattr(block_mask, "MIN_PACKED_LENGTH", 100)
    assert BlockMask.document([99, 99], block_size=64).packed_form is None
    assert BlockMask.document([100, 100], block_size=64).packed_form is not None
    # (150² + 10 · 5²) / 200
    assert BlockMask.document([150, *[5] * 10], block_size=64).packed_form is not None


def test_a_causal_mask_keeps_the_documents_and_others_lose_them() -> None:
    documents = BlockMask.document(LENGTHS, block_size=64)
    causal = BlockMask.causal(128, block_size=64)
    for mask in (documents & causal, causal & documents):
        form = mask.packed_form
        assert form is not None and form.is_causal and form.lengths == LENGTHS
        dense = BlockMask.document(LENGTHS, is_causal=True, block_size=64).to_dense()
        assert torch.equal(mask.to_dense(), dense)
    window = BlockMask.sliding_window(128, window=9, block_size=64)
    for mask in (documents & window, documents | causal, documents | window):
        assert mask.packed_form is None
    # heads of their own: one form for all batch entries would lose them
    heads = BlockMask.from_dense(causal.to_dense().repeat(1, 2, 1, 1), 64)
    assert (documents & heads).packed_form is None


def test_written_lists_lose_the_documents_in_copies_too() -> None:
    mask = BlockMask.document(LENGTHS, block_size=64)
    for same in (copy.deepcopy(mask), mask.to("cpu")):
        assert same.packed_form is not None and same.packed_form.lengths == LENGTHS
    mask.lists.token_bits.zero_()
    assert mask.packed_form is None and copy.deepcopy(mask).packed_form is None


@pytest.mark.parametrize("lengths", [LENGTHS, (64, 64), (128,), (5, 60, 63)])
def test_documents_made_causal_can_be_copied(lengths: tuple[int, ...]) -> None:
    """Their lists number patterns in another order than those of causal documents: a copy raised."""
    documents, causal = (
        BlockMask.document(lengths, block_size=64),
        BlockMask.causal(128, block_size=64),
    )
    for mask in (documents & causal, causal & documents):
        same = copy.deepcopy(mask)
        assert torch.equal(same.to_dense(), mask.to_dense())
        assert (same.packed_form is None) == (mask.packed_form is None)


def test_a_loaded_mask_has_documents_that_fit_it() -> None:
    """Kernels read where boundaries say: a file with others is refused."""
    mask, file = BlockMask.document(LENGTHS, block_size=64), io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.packed_form is not None and loaded.packed_form.lengths == LENGTHS
    state = mask.__getstate__() | {"packed_form": ((200, 1), False)}
    with pytest.raises(ValueError, match="must have the mask's 128 tokens"):
        BlockMask.__new__(BlockMask).__setstate__(state)
    del state["packed_form"]  # of a file that knew none
    older = BlockMask.__new__(BlockMask)
    older.__setstate__(state)
    assert older.packed_form is None


@pytest.fixture
def triton_serves_packed(monkeypatch) -> None:
    """On a CPU too, where `auto` takes plain PyTorch."""
    explain = api.explain_backend

    def answer(*tensors, layout="dense", **options):
        if layout == "packed":
            return "triton", "the test says so"
        return explain(*tensors, layout=layout, **options)

    monkeypatch.setattr(api, "explain_backend", answer)


@pytest.mark.parametrize(
    ("is_causal", "by_ids", "tokens_first"),
    [(False, False, False), (True, False, True), (True, True, False), (False, True, True)],
)
def test_packed_kernels_give_what_the_lists_do(
    is_causal: bool, by_ids: bool, tokens_first: bool, triton_serves_packed
) -> None:
    """Output, log-sum-exp and gradients, with grouped heads, of strided inputs too."""
    mask = (
        BlockMask.document(ids=IDS.to(DEVICE), is_causal=is_causal, block_size=64)
        if by_ids
        else BlockMask.document(LENGTHS, is_causal=is_causal, block_size=64, device=DEVICE)
    )
    assert mask.packed_form is not None
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (2, 128, heads, 16) if tokens_first else (2, heads, 128, 16)
        x = torch.randn(shape, generator=generator).to(DEVICE)
        return x.transpose(1, 2) if tokens_first else x

    q, k, v, grad_output = draw(2), draw(1), draw(1), draw(2)
    attend = partial(flash_attention, block_mask=mask, scale=0.25, enable_gqa=True, return_lse=True)
    listed, packed = partial(attend, backend="triton"), attend  # `auto` takes the packed kernels
    grad_lse = grad_output[..., 0]
    expected = all_results(listed, [q, k, v], grad_output, grad_lse)
    for name, result in all_results(packed, [q, k, v], grad_output, grad_lse).items():
        assert result.shape == expected[name].shape
        torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_more_leading_dimensions(triton_serves_packed) -> None:
    mask = BlockMask.document(LENGTHS, block_size=64, device=DEVICE)
    q, k, v = (torch.randn(1, 128, 16, device=DEVICE) for _ in range(3))
    output, lse = flash_attention(q, k, v, block_mask=mask, return_lse=True)
    assert output.shape == q.shape and lse.shape == q.shape[:-1]
    more = [x.expand(1, 2, 1, 128, 16) for x in (q, k, v)]
    outputs, lses = flash_attention(*more, block_mask=mask, return_lse=True)
    assert outputs.shape == more[0].shape and lses.shape == more[0].shape[:-1]
    torch.testing.assert_close(outputs, output.expand_as(outputs))


def test_other_back_ends_attend_the_mask() -> None:
    """`auto` on a CPU takes plain PyTorch, which has no packed kernels."""
    if DEVICE == "cuda":
        pytest.skip("`auto` takes a kernel here")
    mask = BlockMask.document(LENGTHS, block_size=64)
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    assert attend_documents(q, k, v, mask.packed_form, 0.25, None) is None
    expected = flash_attention(q, k, v, block_mask=mask, backend="reference")
    assert torch.equal(flash_attention(q, k, v, block_mask=mask), expected)


def test_the_compiler_walks_the_lists_and_compiles_once(triton_serves_packed) -> None:
    """Documents are values: guards on their lengths compiled anew for each mask, and under
    `fullgraph` the second one raised. Writes into the lists went unnoticed.
    """
    q, k, v = (torch.randn(1, 1, 128, 16, device=DEVICE) for _ in range(3))
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v, mask: flash_attention(q, k, v, block_mask=mask),
        backend=counter, fullgraph=True,
    )  # fmt: skip
    for lengths in (LENGTHS, (60, 68), (50, 40, 38), (128 - 17, 17)):
        mask = BlockMask.document(lengths, block_size=64, device=DEVICE)
        assert mask.packed_form is not None
        expected = flash_attention(q, k, v, block_mask=mask, backend="reference")
        torch.testing.assert_close(compiled(q, k, v, mask), expected)
    assert counter.frame_count <= 2  # the second for lists of another width
    mask.lists.token_bits.zero_()
    expected = flash_attention(q, k, v, block_mask=mask, backend="reference")
    torch.testing.assert_close(compiled(q, k, v, mask), expected)


def test_forms_of_a_file_are_those_of_its_lists() -> None:
    """A window that said it was full, or two documents, was attended as such."""
    window = BlockMask.sliding_window(128, window=9, block_size=64)
    state = window.__getstate__()
    loaded = BlockMask.__new__(BlockMask)
    loaded.__setstate__(state | {"dense_form": "full"})
    assert loaded.dense_form is None
    with pytest.raises(ValueError, match="must be that of the lists"):
        BlockMask.__new__(BlockMask).__setstate__(state | {"packed_form": ((100, 28), False)})
