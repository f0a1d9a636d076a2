"""`report.html` of a results folder: one file that needs no network, a section a problem in handout order.

Each section has the figures of this run, interactive, beside the published ones, and its tables, which a click on a
heading sorts. What this machine cannot run is a line, and so is what failed. The template, report.html beside this
file, escapes all text.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from cs336_systems.experiments.figures import spec_of
from cs336_systems.experiments.frames import load_frame
from cs336_systems.experiments.records import Record, failures, latest, read_records
from cs336_systems.experiments.spec import Experiment, experiments
from cs336_systems.experiments.tables import Table

PAGE = "report.html"


def write_report(folder: Path, published: Path | None = None, only: Collection[str] = ()) -> list[str]:
    """Write `folder`/report.html from `folder`/records: a line a problem for the terminal, how many quantities were
    measured and what became of the others; no line and no page if no experiment has records there.

    `published` is the folder whose figures stand beside this one's; `only` chooses problems.
    """
    measured = {
        name: records
        for name in experiments()
        if (not only or name in only) and (records := _records_of(folder, name))
    }  # fmt: skip
    if not measured:
        return []
    sections = [_section(experiments()[name], records, published) for name, records in measured.items()]
    run = next(iter(measured.values()))[-1].run
    software = [f"{name} {version}" for name, version in run.software.items()]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )  # fmt: skip
    library = ""
    if any(section["figures"] for section in sections):  # Vega, Vega-Lite and Vega-Embed, once a page
        import vl_convert  # measuring needs none of it, on machines that have none

        script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # without one: all three
        library = Markup(script.replace("</script", "<\\/script"))
    text = environment.get_template(PAGE).render(
        title=f"{run.device.get('name')}, {run.scale} scale",
        facts=", ".join([*software, f"commit {run.commit[:10]}", run.date]),
        sections=sections,
        library=library,
    )
    (folder / PAGE).write_text(text, encoding="utf-8", newline="\n")
    counts = {name: Counter(record.status for record in records) for name, records in measured.items()}
    return [
        f"{name}, rows: {', '.join(f'{count} {status}' for status, count in of.most_common())}"
        for name, of in counts.items()
    ]


def _records_of(folder: Path, name: str) -> list[Record]:
    """The newest records of the problem `name` in a results folder."""
    return latest(read_records(folder / "records" / f"{name}.jsonl"))


def _section(experiment: Experiment, records: list[Record], published: Path | None) -> dict[str, Any]:
    """What the template shows of one problem."""
    frames = {"this run": load_frame(experiment, records)}
    if published is not None:
        frames[f"published, {published.name}"] = load_frame(experiment, _records_of(published, experiment.name))
    figures: list[dict[str, Any]] = []
    for name, figure in experiment.figures.items():
        for whose, frame in frames.items():
            chart = figure.chart(frame) if not frame.empty else None
            if chart is not None:
                place = f"{experiment.name}-{len(figures)}"
                caption = f"{name.replace('_', ' ')}, {whose}"
                figures.append({"place": place, "caption": caption, "spec": spec_of(chart, "transparent")})
    tables: list[Table] = []
    needs: dict[str, list[str]] = {}  # why something is skipped on this machine, and what
    for spec in experiment.tables.values() if not frames["this run"].empty else ():
        table, skipped = spec.build(frames["this run"]).without_blanks()
        if table.lines:  # another scale's table has none here
            tables.append(table)
        for column, why in skipped.items():
            columns = needs.setdefault(why, [])
            columns += [column] if column not in columns else []
    failed = [line.removeprefix(f"{experiment.name}: ") for line in failures(records)]
    return {
        "name": experiment.name, "title": experiment.title, "figures": figures, "tables": tables, "needs": needs,
        "failed": failed,
    }  # fmt: skip
