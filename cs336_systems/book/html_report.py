"""Write `report.html` of a results folder: one offline file with a section per problem.

The sections are in handout order. Each has the interactive figures of this run beside the published
ones, and its tables, which a click on a heading sorts. It lists what this machine cannot run and
what failed. A record that cannot be placed, or a table or figure that cannot be made, is left out
with a warning. The template, report.html beside this file, escapes all text.
"""

from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from cs336_systems.bench.placing import (
    attempt,
    place_records,
    plan_for,
    read_of_one_machine,
    warn_of,
)
from cs336_systems.bench.records import Record, failures
from cs336_systems.bench.spec import Experiment, experiments
from cs336_systems.book.figures import PAGE_INK, spec_of
from cs336_systems.book.frames import load_frame
from cs336_systems.book.tables import Table
from cs336_systems.measure.text import in_one_line, write_whole

PAGE = "report.html"


def write_report(
    folder: Path, published: Path | None = None, only: Collection[str] = ()
) -> list[str]:
    """Write `folder`/report.html from `folder`/records, and return a summary line per problem.

    A line counts the problem's rows by status. If no experiment has records there, nothing is
    written and the list is empty. `published` is the folder whose figures stand beside this one's;
    `only` chooses problems, empty means all.
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

    # Include Vega, Vega-Lite and Vega-Embed once if there are figures.
    library = ""
    if any(section["figures"] for section in sections):
        import vl_convert  # imported here, since machines that only measure may lack it

        # without an argument the bundle has all three libraries
        script = vl_convert.javascript_bundle()  # type: ignore[call-arg]
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
    """Return the newest records of an experiment in `folder`, in the file's order, and their frame.

    Both are empty if there are no records of it; the frame alone is if it cannot be made.
    """
    records = read_of_one_machine(folder, experiment.name)
    if not records:
        return [], pd.DataFrame()
    placed, left_out = place_records(experiment.name, records, plan_for(experiment, records))
    warn_of(left_out, stacklevel=2)
    frame = attempt(f"the section {experiment.name}", partial(load_frame, experiment, placed))
    if frame is None:
        return placed, pd.DataFrame()
    if frame.empty:
        return [], frame
    return [placed[position] for position in sorted(frame["position"])], frame


def _section(
    experiment: Experiment, records: list[Record], frame: pd.DataFrame, published: Path | None
) -> dict[str, Any]:
    """Return what the template shows of one problem: figures, tables, skips and failures."""
    frames = {"this run": frame}
    if published is not None:
        frames[f"published, {published.name}"] = _measured(experiment, published)[1]
    figures: list[dict[str, Any]] = []
    for name, figure in experiment.figures.items():
        for whose, frame in frames.items():
            spec = attempt(f"the figure {name} of {experiment.name}", partial(_spec, figure, frame))
            if spec is not None:
                place = f"{experiment.name}-{len(figures)}"
                caption = f"{name.replace('_', ' ')}, {whose}"
                figures.append({"place": place, "caption": caption, "spec": spec})

    tables: list[Table] = []
    needs: dict[str, list[str]] = {}  # reason of a skip on this machine -> columns of tables
    for name, declared in experiment.tables.items() if not frame.empty else ():
        made = attempt(f"the table {name} of {experiment.name}", partial(declared.build, frame))
        table, skipped = (made or Table("", [], [])).without_blanks()
        if table.lines:  # a table for another scale has no lines here
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
    """Return the Vega-Lite specification of a figure of `frame`; None if nothing is drawn."""
    chart = None if frame.empty else figure.chart(frame)
    return None if chart is None else spec_of(chart, "transparent", PAGE_INK)
