"""The mask experiments: what each scale promises and that wrong results are not timed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.attention import attention_reference
from cs336_systems.attention.masks import MAX_LIST_DENSITY
from cs336_systems.bench.records import case_to_dict, read_records
from cs336_systems.bench.spec import Cell, Disagreement, load
from cs336_systems.book.frames import load_frame, pick
from cs336_systems.config import MaskCase, RunConfig
from cs336_systems.experiments.beyond.dense_masks import DenseMasks
from cs336_systems.inputs import attention_inputs
from cs336_systems.subjects import attention_builders
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects import mask_cases as masks
from cs336_systems.subjects.attention_builders import Built
from cs336_systems.subjects.implementations import REGISTRY, build_case
from cs336_systems.subjects.mask_builders import _predicate, is_plain, mask_of
from cs336_systems.subjects.mask_cases import FAMILIES, best_over_dense

TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")
DOCUMENT = "document:40,0,24,64"


def small_case(mask: str) -> MaskCase:
    return MaskCase(
        mask=mask,
        batch=1,
        heads=2,
        seqlen_q=128,
        head_dim=16,
        dtype="float32",
        query_block=64,
        key_block=64,
    )


# What is measured


def cells(problem: str, run: RunConfig = HANDOUT) -> list[Cell]:
    return load(problem).cells(run)


def test_the_block_sparse_grids():
    cases = {cell.case for cell in cells("block_sparse")}
    short = {case.mask for case in cases if case.seqlen_q == 16384}
    assert short == {
        "full",
        *(f"random:{d}" for d in (0.1, 0.3, 0.5, 0.7, 0.9, 1)),
        "tokens:0.1",
        "tokens:0.5",
    } | {f"{order}:{radius}" for order in ("grid", "hilbert") for radius in (1, 7, 15)}
    long = {
        (case.query_block, case.key_block, case.mask) for case in cases if case.seqlen_q == 49152
    }
    blocks = [(q, k) for q in (64, 128) for k in (64, 128)]
    assert long == {(*block, f"random:{d}") for block in blocks for d in (0.05, 0.1, 0.2, 0.5, 1)}
    by_case = {
        case: {cell.implementation for cell in cells("block_sparse") if cell.case == case}
        for case in cases
    }
    assert all({"triton", "flex"} <= names for names in by_case.values())


@pytest.mark.parametrize(
    "problem", ["dense_masks", "block_sparse", "dynamic_mask", "dilated_attention"]
)
def test_every_suite_has_the_dense_kernel_that_auto_takes_and_no_unknown_name(problem):
    masks = {cell.case.mask for cell in cells(problem) if cell.implementation == "hopper"}
    assert masks >= {cell.case.mask for cell in cells(problem)} & {"full", "causal"} != set()
    assert any(not is_plain(mask) for mask in masks), "and itself under masks"
    columns = [
        load(problem).columns(case_to_dict(cell.case) | {"mode": "forward"})
        for cell in cells(problem)
    ]
    families = {row["family"] for row in columns}
    assert families <= {family for family, _ in FAMILIES.values()} and len(families) >= 3
    for run in (TINY, RunConfig(scale="smoke", device="cpu"), HANDOUT):
        assert {cell.implementation for cell in cells(problem, run)} <= REGISTRY.keys()


@pytest.fixture
def block_sparse():
    return load_frame(
        load("block_sparse"), read_records(Path("results/nvidia-h100/records/block_sparse.jsonl"))
    )


@pytest.mark.parametrize(
    ("mode", "least"),
    [("forward", (4.0, 2.0, 1.3, 1.1, 0.95)), ("backward", (3.0, 1.7, 1.2, 1.05, 0.95))],
)
def test_the_published_lists_pay_beside_the_fastest_dense_kernel(block_sparse, mode, least):
    """By density of tiles; random tokens, of which no tile is dead, lose at most a fifth."""
    for density, wanted in zip((0.1, 0.3, 0.5, 0.7, 0.9), least):
        assert (
            best_over_dense(block_sparse, mode, pattern=f"random:{density}", seqlen_q=16384)
            >= wanted
        ), density
    assert best_over_dense(block_sparse, mode, pattern="tokens:0.1") >= 0.8


def test_the_verdict_on_lists_is_of_the_published_record(block_sparse):
    """`doctor --mask` draws the line where lists of our fastest kernel take as long as dense
    attention.
    """
    where = {
        "quantity": "time",
        "mode": "forward_backward",
        "family": "random tiles",
        "seqlen_q": 16384,
    }
    ours = pick(block_sparse, where | {"implementation": ("triton", "hopper")})
    for live, speed in ours.groupby("live")["over_dense"].max().items():
        assert (speed > 1) == (live < MAX_LIST_DENSITY), live


# How it is measured


@pytest.mark.parametrize(
    "name", ["eager", "tiled", "triton", "triton_lists", "sdpa_mask", "sdpa_padded"]
)
@pytest.mark.parametrize("mask", [DOCUMENT, f"{DOCUMENT}+causal"])
def test_implementations_of_documents_agree(name, mask):
    """Packed, padded and by lists: the same output and gradients, back in the common layout."""
    case = small_case(mask)
    inputs = attention_inputs(case.shape, device="cpu")
    dense = mask_of(case, TINY).to_dense()
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    expected = attention_reference(*leaves, mask=dense)
    expected_grads = torch.autograd.grad(expected, leaves, inputs.grad_output.double())

    chosen = build_case(name, case, TINY)
    packed = [chosen.pack(x).requires_grad_() for x in inputs[:3]]
    output = chosen.attend(*packed)
    grads = torch.autograd.grad(output, packed, chosen.pack(inputs.grad_output))
    for result, wanted in zip((output, *grads), (expected, *expected_grads)):
        torch.testing.assert_close(chosen.unpack(result).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "mask", ["causal", DOCUMENT, f"{DOCUMENT}+causal", f"{DOCUMENT}+window:20", "random:0.5"]
)
def test_flex_attention_attends_what_the_mask_says(mask):
    """Documents under a window lost the window: its predicate was theirs alone."""
    truth = mask_of(small_case(mask), TINY)
    flex = truth.to_flex(_predicate(small_case(mask), truth))
    query, key = torch.arange(128)[:, None], torch.arange(128)
    tiles = flex.to_dense()[0, 0].bool().repeat_interleave(64, 0).repeat_interleave(64, 1)
    assert torch.equal(tiles & flex.mask_mod(0, 0, query, key), truth.to_dense()[0, 0])


@pytest.mark.slow_if(mask="causal")
@pytest.mark.slow_if(mask="shared:16+causal")
@pytest.mark.slow_if(mask="dilated:100/3")
@pytest.mark.parametrize("mask", ["causal", "random:0.5", "shared:16+causal", "topk:16", "dilated:100/3", "window:40",
                                  f"{DOCUMENT}+window:20"])  # fmt: skip
def test_a_cell_reports_all_that_it_promises(mask):
    cell = masks.mask_cell(small_case(mask), "triton", TINY)
    rows = {measurement.row: measurement for measurement in DenseMasks().measure(cell, TINY)}
    assert set(rows) == set(cell.rows)
    truth = mask_of(cell.case, TINY)
    assert rows[masks.DENSITY].samples == [truth.density]
    assert rows[masks.BLOCK_DENSITY].samples == [truth.block_density]
    assert (attention.MASK_TIME in rows) == mask.startswith(("shared", "topk")), (
        "lists that each call builds anew"
    )
    times = [rows[row] for row in (attention.FORWARD, attention.BACKWARD, attention.BOTH)]
    assert all(time.kernel.startswith("interpreter") and 0 <= time.error <= 1 for time in times)


def test_an_implementation_that_ignores_the_mask_is_not_timed(monkeypatch):
    unmasked = Built(attend=lambda q, k, v: attention_reference(q, k, v))
    monkeypatch.setattr(attention, "build_case", lambda *_: unmasked)
    cell = masks.mask_cell(small_case("random:0.5"), "eager", TINY)
    rows = []
    with pytest.raises(Disagreement, match="output is off by"):
        rows.extend(measurement.row for measurement in DenseMasks().measure(cell, TINY))
    assert attention.FORWARD not in rows


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("window:32", {"causal": True, "window_size": (31, 0)}),
        ("document:64,64+causal", {"causal": True, "max_seqlen_q": 64, "max_seqlen_k": 64}),
        ("document:64,64", {"causal": False, "max_seqlen_q": 64, "max_seqlen_k": 64}),
        ("causal", {"causal": True}),
    ],
)
def test_flash_attention_4_is_asked_for_the_mask(mask, expected, monkeypatch):
    """Of a stand-in for the library, which needs a GPU."""
    asked = {}

    def attend(q, k, v, **options):
        asked.update(
            {name: value for name, value in options.items() if not name.startswith("cu_seqlens")}
        )
        return q, None

    stand_in = SimpleNamespace(flash_attn_func=attend, flash_attn_varlen_func=attend)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=stand_in))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", stand_in)
    monkeypatch.setattr(attention_builders, "version", lambda name: "0")
    case = MaskCase(mask=mask, batch=1, heads=2, seqlen_q=128, head_dim=32, dtype="bfloat16")
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)  # its boundaries stay on the CPU
    built = build_case("fa4", case, HANDOUT)
    x = torch.zeros(1, 2, 128, 32)
    assert (
        built.unpack(built.attend(*(built.pack(x) for _ in range(3)))).shape == x.shape
        and asked == expected
    )
