"""Grades as lines for a terminal, as JSON, as a CSV of a class and as Gradescope's results.json."""

import csv
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from typing import Any, TextIO

from cs336_systems.grading.outcomes import NEEDS_A_GPU
from cs336_systems.grading.points import Grade, Result
from cs336_systems.handout import COMMANDS, HandoutProblem

MOST_NAMES = 3  # of checks that a line for a terminal names
PACKAGES = ("cs336-systems", "torch", "triton", "numpy")


def in_points(points: float) -> str:
    """Return points as text, with one decimal if they have a fraction: `35`, `8.8`."""
    return f"{points:.1f}".removesuffix(".0")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the checks run with, by name."""
    found = {"python": platform.python_version(), "executable": sys.executable}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


# For a terminal


def lines(graded: Grade) -> list[str]:
    """Return a grade as lines: problems and what lost points, problems not begun, the total."""
    begun: list[HandoutProblem] = []
    not_begun: list[HandoutProblem] = []
    for problem in graded.problems:
        required = graded.results_of(problem, beyond=False)
        untouched = bool(required) and all(result.status == "not begun" for result in required)
        (not_begun if untouched else begun).append(problem)

    width = max(len("problem"), *(len(problem.name) for problem in graded.problems))
    told = [f"{'problem':<{width}}  points      checks"]
    for problem in begun:
        told += _problem_lines(graded, problem, width)
    for problem in not_begun:
        required = graded.results_of(problem, beyond=False)
        why = "; ".join(dict.fromkeys(result.message for result in required))
        told.append(f"{problem.name:<{width}}  {f'0 of {problem.points}':<10}  not begun: {why}")

    told += _beyond_lines(graded, begun)
    for answer in ("measured", "written", "a script"):
        names = [problem.name for problem in graded.others if _answered(problem) == answer]
        if names:
            told.append(f"{answer}, no points here: {', '.join(names)}")
    return [*told, total_line(graded)]


def _answered(problem: HandoutProblem) -> str:
    """Return how a problem that no adapter reaches is answered."""
    return "a script" if problem.name in COMMANDS else problem.answer


def _problem_lines(graded: Grade, problem: HandoutProblem, width: int) -> list[str]:
    """Return the line of a problem's points and passed checks, and a line for each reason."""
    required = graded.results_of(problem, beyond=False)
    points = f"{in_points(graded.earned(problem))} of {problem.points}"
    passed = sum(result.status == "passed" for result in required)
    row = f"{problem.name:<{width}}  {points:<10}  {passed} of {len(required)}"
    return [row, *(f"  {reason}" for reason in reasons(graded, required, most_names=MOST_NAMES))]


def reasons(
    graded: Grade, results: Iterable[Result], *, most_names: int | None = None
) -> list[str]:
    """Return what lost points: a line a reason with the checks that it fails, not begun ones last.

    A line names `most_names` checks and says how many more there are; None names them all.
    """
    results = list(results)
    order = {"failed": 0, "passed": 1, "skipped": 2, "not begun": 3}
    by_reason: dict[str, list[str]] = {}
    for result in sorted(results, key=lambda result: order[result.status]):
        if graded.counts(result):
            continue
        reason = result.message
        if result.status == "passed":
            reason = f"earns nothing without {result.check.needs.partition('.')[2]}"
        elif result.status in ("skipped", "not begun"):
            reason = f"{result.status}: {reason}"
        by_reason.setdefault(reason, []).append(result.check.name)
    told = []
    for reason, names in by_reason.items():
        more = len(names) - most_names if most_names is not None else 0
        named = ", ".join(names[:most_names]) + (f" and {more} more" if more > 0 else "")
        told.append(f"{named}: {reason}")
    return told


def _beyond_lines(graded: Grade, begun: list[HandoutProblem]) -> list[str]:
    """Return how many checks beyond the handout pass, and why not, for problems with points."""
    results = [
        one for problem in graded.problems for one in graded.results_of(problem, beyond=True)
    ]
    if not results:
        return []
    passed = sum(result.status == "passed" for result in results)
    told = [f"beyond the handout, without points: {passed} of {len(results)} checks pass"]
    later = []  # these have other work first
    for problem in graded.problems:
        bad = [one for one in graded.results_of(problem, beyond=True) if one.status != "passed"]
        if problem in begun and graded.earned(problem):
            shown = reasons(graded, bad, most_names=MOST_NAMES)
            told += [f"  {problem.name}.{reason}" for reason in shown]
        elif bad:
            later.append(f"{problem.name} ({len(bad)})")
    if later:
        told.append(f"  told once the problem earns points: {', '.join(later)}")
    return told


def total_line(graded: Grade) -> str:
    """Return the last line: `total: 35 of 35 points that this machine can grade, 20 need a GPU`."""
    earned, full = in_points(graded.points), graded.full_points
    if graded.gradable_points == full:
        return f"total: {earned} of {full} points"
    gpu = other = 0.0
    for problem in graded.problems:
        for result in graded.results_of(problem, beyond=False):
            if result.status == "skipped" and result.message.startswith(NEEDS_A_GPU):
                gpu += graded.share(problem)
            elif result.status == "skipped":
                other += graded.share(problem)
    told = [f"{in_points(gpu)} need a GPU"] * (gpu > 0)
    told += [f"{in_points(other)} are skipped"] * (other > 0)
    gradable = in_points(graded.gradable_points)
    return f"total: {earned} of {gradable} points that this machine can grade, {', '.join(told)}"


# For programs


def as_dict(graded: Grade) -> dict[str, Any]:
    """Return the grade as JSON values, with each check's traceback and the versions that ran."""
    problems = []
    for problem in graded.problems:
        checks = [
            {
                "name": result.check.name,
                "requires": result.check.requires,
                "beyond_the_handout": beyond,
                "status": result.status,
                "message": result.message,
                "detail": result.detail,
                "seconds": round(result.seconds, 2),
            }
            for beyond in (False, True)
            for result in graded.results_of(problem, beyond=beyond)
        ]
        earned = round(graded.earned(problem), 2)
        problems.append({**asdict(problem), "earned": earned, "checks": checks})
    return {
        "total": round(graded.points, 2),
        "gradable_here": round(graded.gradable_points, 2),
        "points": graded.full_points,
        "seconds": round(graded.seconds, 1),
        "versions": versions(),
        "problems": problems,
        "not_graded_here": [asdict(problem) for problem in graded.others],
    }


def write_csv(grades: dict[str, Grade], file: TextIO) -> None:
    """Write a header and one row per submission: totals, and the points of each problem."""
    first = next(iter(grades.values()))
    names = [problem.name for problem in first.problems]
    writer = csv.writer(file)
    writer.writerow(["submission", "total", "gradable_here", "points", *names, "seconds"])
    for submission, graded in grades.items():
        earned = [round(graded.earned(problem), 2) for problem in graded.problems]
        totals = [round(graded.points, 2), round(graded.gradable_points, 2), graded.full_points]
        writer.writerow([submission, *totals, *earned, round(graded.seconds)])


def gradescope(graded: Grade) -> dict[str, Any]:
    """Return the content of Gradescope's results.json, with one test per problem.

    Points that this machine cannot grade are left out of each maximum.
    """
    tests = []
    for problem in graded.problems:
        required = graded.results_of(problem, beyond=False)
        tests.append(
            {
                "name": problem.name,
                "score": round(graded.earned(problem), 2),
                "max_score": round(problem.points - graded.skipped(problem), 2),
                "output": "\n".join(reasons(graded, required)) or "every check passes",
            }
        )
    return {
        "score": round(graded.points, 2),
        "execution_time": round(graded.seconds),
        "output": "\n".join(lines(graded)),
        "output_format": "text",
        "tests": tests,
    }
