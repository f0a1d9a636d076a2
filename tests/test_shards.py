"""A run in several processes: each takes a shard of the cells, into one folder."""

import pytest

from cs336_systems.bench.harness import Shard, planned_cells
from cs336_systems.bench.records import read_records, read_runs
from cs336_systems.bench.spec import load
from cs336_systems.config import RunConfig
from tests.command_line import invoke, tiny_run

HANDOUT = RunConfig(scale="handout", device="cuda")


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/2/3", "-1/2"])
def test_a_shard_is_one_of_several(text):
    with pytest.raises(ValueError, match="--shard must be I/N"):
        Shard.parse(text)


@pytest.mark.parametrize(
    "problem", ["flash_benchmarking", "benchmarking_script", "naive_ddp_benchmarking"]
)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_share_the_cells_out_and_split_no_group(problem, count):
    cells = planned_cells(problem, HANDOUT)
    parts = [Shard(index=index, count=count).of(cells) for index in range(1, count + 1)]
    assert sorted(map(id, sum(parts, []))) == sorted(map(id, cells))
    for part in parts:
        assert part == [cell for cell in cells if any(cell is other for other in part)], (
            "in their order"
        )
    where = [{cell.group for cell in part if not cell.alone} for part in parts]
    assert sum(map(len, where)) == len(set().union(*where)), (
        "what tables compare is measured on one GPU"
    )
    assert not any(cell.alone for part in parts[1:] for cell in part)
    assert all(cell.alone for cell in planned_cells("short_calls", HANDOUT)), "they time the host"


@pytest.mark.slow
def test_two_shards_measure_everything_once(tmp_path):
    for shard in ("1/2", "2/2"):
        result = invoke(*tiny_run(tmp_path, "mixed_precision_accumulation", "--shard", shard))
        assert result.exit_code == 0, result.output
    (path,) = tmp_path.rglob("mixed_precision_accumulation.jsonl")
    records = read_records(path)
    assert len(records) == len({record.key for record in records}) == 4
    assert {record.run.id.rpartition("-")[2] for record in records} == {"1of2", "2of2"}
    assert len(read_runs(path.parent)) == 2


def test_an_implementation_of_a_readers_own_gets_a_cell_a_case():
    run = RunConfig(scale="smoke", device="cpu")
    cells = planned_cells("flash_benchmarking", run, ["tests.own_attention:attend"])
    own = [cell for cell in cells if cell.implementation == "tests.own_attention:attend"]
    assert [cell.case for cell in own] == list(dict.fromkeys(cell.case for cell in cells))
    assert {cell.predicted_bytes for cell in own} == {0}, (
        "that plain attention's scores do not fit says nothing of it"
    )
    assert cells[: -len(own)] == planned_cells("flash_benchmarking", run)


def test_own_implementations_take_turns_in_the_cell_of_their_case():
    """Each had a cell of its own, of which the next one replaced the others' rows: ratios were of
    unrelated rounds.
    """
    own = ["tests.own_attention:attend", "tests.own_attention:attend_to_everything"]
    (cell,) = planned_cells(
        "attention_shapes", RunConfig(scale="tiny", device="cpu"), ["triton", *own]
    )
    assert cell.implementations == (*load("attention_shapes").implementations, *own)
    rows = {
        name: [(row.mode, row.quantity) for row in cell.rows if row.implementation == name]
        for name in own
    }
    assert rows[own[0]] == rows[own[1]] and len(rows[own[0]]) == 3


def test_a_readers_own_attention_is_checked_and_measured(tmp_path):
    statuses = {
        "tests.own_attention:attend": "ok",
        "tests.own_attention:attend_to_everything": "failed",
    }
    result = invoke(
        *tiny_run(tmp_path, "attention_shapes", *(f"--implementation={own}" for own in statuses))
    )
    (path,) = tmp_path.rglob("attention_shapes.jsonl")
    for own, status in statuses.items():
        records = [record for record in read_records(path) if record.implementation == own]
        assert {(record.mode, record.status) for record in records} == {
            (mode, status) for mode in ("forward", "backward", "forward_backward")
        }, result.output
        assert status == "ok" or "numerical contract" in records[0].message
