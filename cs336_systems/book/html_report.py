"""`report.html` of a results folder: one file that needs no network, a section a problem in handout
order.

Each section has the figures of this run, interactive, beside the published ones, and its tables,
which a click on a heading sorts. What this machine cannot run is a line, and so is what failed. A
record that cannot be placed, a table or a figure that cannot be made costs itself and a warning.
The template, report.html beside this file, escapes all text.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from cs336_systems.bench.placing import attempt, of_one_machine, place_records, plan_for, warn_of
from cs336_systems.bench.records import Record, failures, read_records
from cs336_systems.bench.spec import Experiment, experiments
from cs336_systems.book.figures import PAGE_INK, spec_of
from cs336_systems.book.frames import load_frame
from cs336_systems.book.tables import Table
from cs336_systems.measure.text import in_one_line, write_whole

PAGE = "report.html"


def write_report(
    folder: Path, published: Path | None = None, only: Collection[str] = ()
) -> list[str]:
    """Write `folder`/report.html from `folder`/records: a line a problem for the terminal, how many
    quantities were measured and what became of the others; no line and no page if no experiment has
    records there.

    `published` is the folder whose figures stand beside this one's; `only` chooses problems.
    """
    measured: dict[str, list[Record]] = {}
    sections: list[dict[str, Any]] = []
    for name, experiment in experiments().items():
        if not only or name in only:
            records, frame = _measured(experiment, folder)
            if records:
                measured[name] = records
                sections.append(_section(experiment, records, frame, published))
    if not measured:
        return []
    run = next(iter(measured.values()))[-1].run
    software = [f"{name} {version}" for name, version in run.software.items()]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    library = ""
    # Vega, Vega-Lite and Vega-Embed, once a page
    if any(section["figures"] for section in sections):
        import vl_convert  # measuring needs none of it, on machines that have none

        script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # without one: all three
        library = Markup(script.replace("</script", "<\\/script"))
    text = environment.get_template(PAGE).render(
        title=f"{run.device.get('name')}, {run.scale} scale",
        facts=", ".join([*software, f"commit {run.commit[:10]}", run.date]),
        sections=sections,
        library=library,
    )
    write_whole(folder / PAGE, text)
    counts = {
        name: Counter(record.status for record in records) for name, records in measured.items()
    }
    return [
        f"{name}, rows: {', '.join(f'{count} {status}' for status, count in of.most_common())}"
        for name, of in counts.items()
    ]


def _measured(experiment: Experiment, folder: Path) -> tuple[list[Record], pd.DataFrame]:
    """The newest records of an experiment in a results folder, in the order of the file, and their
    frame.
    """
    records = of_one_machine(read_records(folder / "records" / f"{experiment.name}.jsonl"))
    if not records:
        return [], pd.DataFrame()
    placed, left_out = place_records(experiment.name, records, plan_for(experiment, records))
    warn_of(left_out, stacklevel=2)
    frame = attempt(f"the section {experiment.name}", load_frame, experiment, placed)
    if frame is None:
        return placed, pd.DataFrame()
    if frame.empty:
        return [], frame
    return [placed[position] for position in sorted(frame["position"])], frame


def _section(
    experiment: Experiment, records: list[Record], frame: pd.DataFrame, published: Path | None
) -> dict[str, Any]:
    """What the template shows of one problem."""
    frames = {"this run": frame}
    if published is not None:
        frames[f"published, {published.name}"] = _measured(experiment, published)[1]
    figures: list[dict[str, Any]] = []
    for name, figure in experiment.figures.items():
        for whose, frame in frames.items():
            spec = attempt(f"the figure {name} of {experiment.name}", _spec, figure, frame)
            if spec is not None:
                place = f"{experiment.name}-{len(figures)}"
                caption = f"{name.replace('_', ' ')}, {whose}"
                figures.append({"place": place, "caption": caption, "spec": spec})
    tables: list[Table] = []
    needs: dict[str, list[str]] = {}  # why something is skipped on this machine, and what
    for name, declared in experiment.tables.items() if not frame.empty else ():
        made = attempt(f"the table {name} of {experiment.name}", declared.build, frame)
        table, skipped = (made or Table("", [], [])).without_blanks()
        if table.lines:  # another scale's table has none here
            tables.append(table)
        for column, why in skipped.items():
            columns = needs.setdefault(why, [])
            columns += [column] if column not in columns else []
    failed = [in_one_line(line).removeprefix(f"{experiment.name}: ") for line in failures(records)]
    return {
        "name": experiment.name,
        "title": experiment.title,
        "figures": figures,
        "tables": tables,
        "needs": needs,
        "failed": failed,
    }


def _spec(figure: Any, frame: pd.DataFrame) -> dict[str, Any] | None:
    """The specification of a figure of a frame; None where nothing is drawn."""
    chart = None if frame.empty else figure.chart(frame)
    return None if chart is None else spec_of(chart, "transparent", PAGE_INK)
