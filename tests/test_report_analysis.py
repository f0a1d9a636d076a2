"""Calculated problems in documents, and the training run's table, figure and sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs336_systems.records import append_records
from cs336_systems.report import build_report, check_documents
from cs336_systems.report.answers import answer
from cs336_systems.report.blocks import Blocks
from cs336_systems.report.calculated import CALCULATIONS, calculated_figures, calculation, plot_digest
from cs336_systems.report.figures import draw
from cs336_systems.report.frames import load_frame
from cs336_systems.report.plots import plots
from cs336_systems.report.tables import sections
from tests.training_records import training_record, training_records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "results" / "nvidia-h200"
    append_records(path / "records" / "training_run.jsonl", training_records())
    return path


def test_the_training_table_has_a_row_a_wrapper_in_the_order_of_the_stages():
    (shown,) = sections("training_run", load_frame(training_records()))
    rows = [line.split("|")[1].strip() for line in shown.body.splitlines()[2:5]]
    assert rows == ["none", "zero1", "fsdp"]
    differences = [line.split("|")[7].strip() for line in shown.body.splitlines()[2:5]]
    assert differences == ["–", "–", "0.1250"], "one process has nothing to differ from"
    assert "5.0000" in shown.body and "4.000" in shown.body and "0.125" in shown.body
    assert "failed [1]" in shown.body and "3 times the bound" in shown.body


def test_the_training_answer_says_what_was_learned_and_how_far_wrappers_differ():
    said = answer("training_run", load_frame(training_records()))
    assert "falls from 5.000 to 4.000 nats a byte in 3 steps, and 3.250 on text it never saw" in said
    differ = "differ from one process's by at most 0.12 times what rounding may make (the bound)"
    assert f"The curves of fsdp {differ}." in said
    for error, worst in ((0.01, ", the most for fsdp"), (0.125, "")):
        more = training_record("flat", "loss", [5.0, 4.0, 3.0], error=error)
        said = answer("training_run", load_frame([*training_records(), more]))
        assert f"The curves of flat, fsdp {differ}{worst}." in said


def test_a_run_in_which_everything_failed_is_still_reported():
    broken = [training_record("none", "loss", [], status="oom", message="CUDA out of memory")]
    frame = load_frame(broken)
    assert "OOM" in sections("training_run", frame)[0].body
    assert answer("training_run", frame) == ""
    (plot,) = plots("training_run", frame)
    draw(plot)


def test_the_loss_figure_has_a_mark_a_step():
    (plot,) = plots("training_run", load_frame(training_records()))
    assert plot.data[plot.data["series"] == "fsdp"]["y"].tolist() == [5.0, 4.0, 3.0]
    assert not plot.data[plot.data["series"] == "zero1"]["drawn"].any()
    axes = draw(plot).axes[0]
    assert axes.get_yscale() == "linear"
    assert {line.get_label() for line in axes.lines} == {"none", "fsdp"}


@pytest.mark.parametrize("problem", CALCULATIONS)
def test_calculated_blocks_need_no_records_and_say_what_they_are(folder: Path, problem: str):
    blocks = Blocks.load(folder)
    document = folder.parent.parent / "writeup.md"
    assert blocks.text(f"{problem}.table", document).endswith("*Calculated, not measured.*")
    figures = blocks.text(f"{problem}.figures", document)
    assert "(results/calculated/figures/" in figures or figures == f"*`{problem}` has no figure.*"
    answered = blocks.text(f"{problem}.answer", document)
    assert answered.startswith("- ") or answered == f"*`{problem}` has no sentence.*"
    with pytest.raises(KeyError, match=f"'picture' of {problem} is none of table, answer, figures"):
        blocks.text(f"{problem}.picture", document)


def test_the_accounting_answers_all_three_questions():
    said = calculation("communication_accounting").answer
    assert [sentence[:3] for sentence in said] == ["(a)", "(b)", "(c)"]
    assert "3.518 TB" in said[0] and "N_FSDP = 38" in said[1] and "319.4 tokens a device" in said[2]


def test_calculated_figures_are_drawn_where_a_document_shows_them_and_checked(folder: Path):
    document = folder.parent.parent / "writeup.md"
    document.write_text("<!-- begin generated: tp_calcs.figures -->\n<!-- end generated: tp_calcs.figures -->\n")
    build_report(folder, published=True, documents=[document])
    drawn = sorted((folder.parent / "calculated" / "figures").iterdir())
    assert [path.name for path in drawn] == ["tp_calcs_tp_times.png"]
    assert check_documents([document], folder) == []
    other = next(plot for path, plot, _ in calculated_figures(folder) if "limits" in path.name)
    from cs336_systems.report.figures import save_figure

    save_figure(draw(other), drawn[0], plot_digest(other))
    (found,) = check_documents([document], folder)
    assert found.endswith("shows other numbers than those calculated")
    drawn[0].unlink()
    assert any(line.endswith("tp_calcs_tp_times.png: missing") for line in check_documents([document], folder))
