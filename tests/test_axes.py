"""What `run --mode --heads --seqlen --head-dim --stages` sets of the sweeps of attention."""

import pytest

from cs336_systems.bench.harness import planned_cells
from cs336_systems.bench.records import read_records
from cs336_systems.bench.spec import load
from cs336_systems.book.frames import load_frame
from cs336_systems.config import Axes, RunConfig
from cs336_systems.subjects.mask_builders import document_lengths
from tests.command_line import invoke, tiny_run


def planned(problem: str, **axes):
    return planned_cells(problem, RunConfig(scale="handout", device="cuda", axes=Axes(**axes)))


def test_chosen_sizes_stand_in_the_place_of_the_problems_own():
    cells = planned("dense_masks", heads=(16,), seqlens=(4096, 8192), head_dims=(64,))
    assert {(cell.case.heads, cell.case.seqlen_q, cell.case.head_dim) for cell in cells} == {
        (16, 4096, 64), (16, 8192, 64)
    }  # fmt: skip
    assert len({(cell.case, cell.implementation) for cell in cells}) == len(cells), (
        "what collapses is one cell"
    )
    cases = [cell.case for cell in cells]
    assert [*dict.fromkeys(cases)] == [
        case for i, case in enumerate(cases) if i == 0 or cases[i - 1] != case
    ]
    for case in cases:
        if case.mask.startswith("document"):
            assert sum(document_lengths(case)) == case.seqlen_q


@pytest.mark.parametrize("problem", ["masked_attention", "backend_choice"])
def test_chosen_lengths_of_cases_that_hold_their_mask_have_one(problem):
    """Documents kept the problem's lengths, so that rows of `masked_attention --seqlen 3000`
    failed.
    """
    cells = planned(problem, seqlens=(3000,), heads=(2,))
    lengths = [
        document_lengths(case)
        for case in {cell.case.mask_case for cell in cells}
        if "document" in case.mask
    ]
    assert lengths and all(sum(each) == 3000 for each in lengths)


def test_rows_of_other_modes_go_and_the_masks_shares_stay():
    rows = {
        (row.mode, row.quantity)
        for cell in planned("dense_masks", modes=("backward",))
        for row in cell.rows
    }
    assert rows == {("backward", "time"), ("forward", "density"), ("forward", "block_density")}


def test_key_heads_keep_their_share_of_the_query_heads_and_few_queries_stay_few():
    cells = planned("few_queries", heads=(16,), seqlens=(512,))
    grouped = [cell.case for cell in cells if cell.case.kv_heads]
    assert {16 // case.kv_heads for case in grouped} <= {4, 8} and {
        case.seqlen_k for case in grouped
    } == {512}
    assert {case.seqlen_q for case in grouped} == {1, 8}
    with pytest.raises(
        ValueError, match="--heads must be a multiple of the 4 heads that share a key head, got 6"
    ):
        planned("few_queries", heads=(6,))


def test_a_run_of_chosen_axes_has_a_folder_of_its_own_and_tables_that_tell_sizes_apart(tmp_path):
    chosen = ("--mode", "forward", "--heads", "1,2", "--seqlen", "64", "--head-dim", "16")
    result = invoke(*tiny_run(tmp_path, "dense_masks", *chosen, "--implementation", "eager"))
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.rglob("dense_masks.jsonl")
    assert path.parents[1].name.endswith("-tiny-chosen")
    records = list(read_records(path))
    assert {record.mode for record in records} == {"forward"} and {
        record.status for record in records
    } == {"ok"}
    table = load("dense_masks").tables["forward"].build(load_frame(load("dense_masks"), records))
    assert table.header[:3] == ["mask", "tokens", "heads"] and [
        line[2].text for line in table.lines
    ] == ["1", "2"]


def test_stages_are_measured_and_shown_each_beside_the_one_before(tmp_path):
    result = invoke(*tiny_run(tmp_path, "flash_benchmarking", "--stages", "--seqlen", "64"))
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.rglob("flash_benchmarking.jsonl")
    found = {record.implementation: record.status for record in read_records(path)}
    assert found == dict.fromkeys(("eager", "tiled", "triton_first", "triton"), "ok")
    assert "| pass | dtype | d | S | eager | tiled | triton_first | triton |" in result.output
