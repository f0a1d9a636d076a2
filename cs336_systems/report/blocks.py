"""What generated blocks hold, by name, from the records of one device's folder.

    blocks = Blocks.load(Path("results/nvidia-h200"))
    blocks.text("flash_benchmarking.table.bfloat16.forward", document=Path("writeup.md"))

Names: `<problem>.table`, `.answer`, `.figures`; one table as `<problem>.table.<section>`, one figure as
`<problem>.figures.<plot>`; `headline.distributed`.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd

from cs336_systems.records import Record, latest, read_records
from cs336_systems.report.answers import answer
from cs336_systems.report.distributed import DISTRIBUTED_CASES
from cs336_systems.report.figures import file_stem
from cs336_systems.report.frames import load_frame, refuse_mixture
from cs336_systems.report.headline import distributed_headline
from cs336_systems.report.markdown import one_line
from cs336_systems.report.plots import Plot, plots
from cs336_systems.report.sections import Section
from cs336_systems.report.sharding import SHARDING_CASES
from cs336_systems.report.tables import TABLES, problem_table, sections

DISTRIBUTED_HEADLINE = "headline.distributed"
CASE_TYPES = {  # of the problems with tables and figures of their own
    **DISTRIBUTED_CASES,
    **SHARDING_CASES,
}
KINDS = ("table", "answer", "figures")


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The frames of one folder, and the texts made from them."""

    folder: Path  # results/<device>
    frames: dict[str, pd.DataFrame]  # by problem, sorted
    digests: dict[str, str]  # by problem: of the records shown
    _sections: dict[str, list[Section]] = field(default_factory=dict, repr=False)
    _plots: dict[str, list[Plot]] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, folder: Path) -> Blocks:
        """Read all of `folder`/records; ValueError if there is none, or if devices or scales are mixed."""
        paths = sorted((folder / "records").glob("*.jsonl"))
        records = _of_known_cases(latest(record for path in paths for record in read_records(path)))
        if not records:
            raise ValueError(f"{folder / 'records'}: no records to report")
        refuse_mixture("devices", [str(record.device.get("name")) for record in records])
        refuse_mixture("scales", [record.scale for record in records])
        problems = sorted({record.problem for record in records})
        by_problem = {name: [record for record in records if record.problem == name] for name in problems}
        return cls(
            folder=folder,
            frames={name: load_frame(rows) for name, rows in by_problem.items()},
            digests={name: digest(rows) for name, rows in by_problem.items()},
        )

    @property
    def device(self) -> str:
        return str(next(iter(self.frames.values()))["device"].iloc[0])

    def sections(self, problem: str) -> list[Section]:
        if problem not in self._sections:
            self._sections[problem] = sections(problem, self.frames[problem])
        return self._sections[problem]

    def plots(self, problem: str) -> list[Plot]:
        if problem not in self._plots:
            self._plots[problem] = plots(problem, self.frames[problem])
        return self._plots[problem]

    def figure_path(self, problem: str, plot: Plot) -> Path:
        return self.folder / "figures" / f"{file_stem(problem, plot)}.png"

    def text(self, name: str, document: Path) -> str:
        """Content of block `name` in `document` (its image links are relative); KeyError says what is wrong."""
        if name == DISTRIBUTED_HEADLINE:
            return distributed_headline(self.frames)
        problem, _, rest = name.partition(".")
        kind, _, part = rest.partition(".")
        if problem not in self.frames and problem not in TABLES:
            raise KeyError(f"no problem {problem!r}; there are {', '.join(sorted({*self.frames, *TABLES}))}")
        if kind not in KINDS or (kind == "answer" and part):
            raise KeyError(f"{rest!r} of {problem} is none of {', '.join(KINDS)}")
        if problem not in self.frames:
            return f"*Not measured on {self.device}: there are no records of `{problem}`.*"
        if kind == "answer":
            return answer(problem, self.frames[problem]) or f"*Too few records of `{problem}` for an answer.*"
        return self._table(problem, part) if kind == "table" else self._figures(problem, part, document)

    def _table(self, problem: str, part: str) -> str:
        if not part:
            return problem_table(self.sections(problem), self.frames[problem])
        names = [section.name for section in self.sections(problem)]
        if part not in names:
            raise KeyError(f"{problem} has no table {part!r}; it has {', '.join(names)}")
        return problem_table([self.sections(problem)[names.index(part)]], self.frames[problem])

    def _figures(self, problem: str, part: str, document: Path) -> str:
        found = [plot for plot in self.plots(problem) if part in ("", plot.name)]
        if part and not found:
            names = ", ".join(plot.name for plot in self.plots(problem))
            raise KeyError(f"{problem} has no figure {part!r}; it has {names or 'none'}")
        links = [_image(plot.title, self.figure_path(problem, plot), document) for plot in found]
        return "\n\n".join(links) or f"*`{problem}` has no figure.*"

    def page(self, document: Path) -> str:
        """Everything about the folder as one Markdown text, with links relative to `document`."""
        parts = [
            f"# Report: {one_line(self.device)}",
            "Generated from the records in `records/`, and from nothing else.",
        ]
        for problem, frame in self.frames.items():
            parts.append(f"## {problem}")
            said = answer(problem, frame)
            links = self._figures(problem, "", document) if self.plots(problem) else ""
            parts += [part for part in (said, links, self._table(problem, "")) if part]
        return "\n\n".join(parts) + "\n"


def _of_known_cases(records: list[Record]) -> list[Record]:
    """`records` without those of a problem whose tables and figures could not place their case; a warning names it."""
    kept = []
    for record in records:
        types = CASE_TYPES.get(record.problem)
        if types is None or record.case["type"] in types:
            kept.append(record)
        else:
            wanted = " or ".join(types)
            warnings.warn(
                f"{record.problem}: a case of type {record.case['type']!r}, not {wanted}, left out", stacklevel=3
            )
    return kept


def digest(records: list[Record]) -> str:
    """A short fingerprint of `records`, whatever their order: it says whether a figure shows them."""
    known = [asdict(record) for record in records]
    for fields in known:
        if not fields["rounds"]:  # as before there were any: figures of other records stay as they are
            del fields["rounds"]
    lines = sorted(json.dumps(fields, sort_keys=True) for fields in known)
    return "records sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _image(title: str, path: Path, document: Path) -> str:
    link = Path(os.path.relpath(path.resolve(), document.resolve().parent)).as_posix()
    return f"![{one_line(title.replace(chr(10), ', '))}]({link})"
