"""Whether what the specialised warps of the Hopper kernels share is accessed in order, read off
their PTX.

  ring       a row in `..._slots`, or the forward's `items`, is stored, and loaded, after a wait for its slot, which
             comes after the last rows' accesses; then threads meet; then one of them arrives
  dispatch   at the kernel's first line and at `gl.warp_specialize` all warps meet, read the numbers of their
             partitions, and meet before anything else; what is written there is followed by a
             barrier of all, too
  copies     behind a copy out of shared memory every way to the end of its partition has a wait for it

A step of a ring is straight code, so the order of the text is the order of execution; partitions
are judged one by one.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "cs336_systems/attention/hopper"
SLOT_ACCESS = re.compile(r"\b(\w+_slots|items)\.index\(\w*slot\)\.(load|store)\(")
PLACE = re.compile(r"\.loc\b.*// (\w+\.py):(\d+)\b")
EVENTS = (
    ("load", re.compile(r"\bld\.shared\b")),
    ("store", re.compile(r"\bst\.shared\b")),
    ("all meet", re.compile(r"\bbarrier\.sync\s+1;")),
    ("meet", re.compile(r"\bbar\.(?:warp\.)?sync\s+-?\w+")),
    ("wait", re.compile(r"\bmbarrier\.try_wait\b")),
    ("arrive", re.compile(r"\bmbarrier\.arrive\.shared::cta\b")),
)
NUMBER = re.compile(r"\bld\.shared\.b8\b|\bst\.shared\S*\s+\[global_smem\+\d+\]")  # of a partition
END = re.compile(r"ret;|barrier\.sync\s+1;|brx\.idx")
BRANCH = re.compile(r"(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);")
LABEL = re.compile(r"^(\$L__BB\w+):")


@cache
def lines_of(file: str) -> list[str]:
    return (KERNELS / file).read_text().splitlines() if (KERNELS / file).exists() else []


def dispatch_of(kernel: str, file: str) -> set[int]:
    """The lines of a kernel's dispatch: its first one and the statements around
    `gl.warp_specialize`.

    They are the kernel's own, or those of a function that it calls, with that one's first line and
    the call's.
    """
    functions = {
        x.name: x
        for x in ast.parse("\n".join(lines_of(file))).body
        if isinstance(x, ast.FunctionDef)
    }
    own = functions[kernel]
    statements: list[ast.stmt] = []
    firsts = {own.lineno}
    for x in own.body:
        called = next((name for name in functions if f"{name}(" in ast.unparse(x)), "")
        within = [y for y in functions[called].body if specialises(y)] if called else []
        firsts |= {functions[called].lineno} if within else set()
        statements += [x, *within] if within or specialises(x) else []
    assert statements
    return firsts | {
        line for x in statements for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)
    }


def specialises(statement: ast.stmt) -> bool:
    return "gl.warp_specialize" in ast.unparse(statement)


def ends_before_its_copies(ptx: str) -> bool:
    """Whether a partition may end, and another program have its shared memory, while a copy out of
    that goes on.
    """
    lines = list(map(str.strip, ptx.splitlines()))
    places = {match[1]: place for place, text in enumerate(lines) if (match := LABEL.match(text))}
    ways, seen = (
        [place + 1 for place, text in enumerate(lines) if "cp.async.bulk.commit_group" in text],
        set(),
    )
    while ways:
        place = ways.pop()
        if place in seen or "cp.async.bulk.wait_group" in lines[place]:
            continue
        seen.add(place)
        if END.match(lines[place]):
            return True
        branch = BRANCH.match(lines[place])
        ways += [place + 1] * (not branch or bool(branch[1])) + (
            [places[branch[2]]] if branch else []
        )
    return False


def disorder(ptx: str) -> list[str]:
    """What is out of order among these accesses of a kernel; "no ..." where there are none."""
    (kernel,) = re.findall(r"\.entry (\w+)", ptx)
    own_file = f"{re.search('forward|wide|backward', kernel)[0]}.py".replace(
        "wide", "wide_backward"
    )
    dispatch_lines = dispatch_of(kernel, own_file)
    events: list[tuple[str, str]] = []  # (kind, instruction)
    labels: dict[str, int] = {}  # how many events come before
    targets: list[str] = []
    rings, numbers = [], []
    file, line = "", 0
    for text in map(str.strip, ptx.splitlines()):
        if match := PLACE.search(text):
            file, line = match[1], int(match[2])
        elif match := LABEL.match(text):
            labels[match[1]] = len(events)
        elif not targets and text.startswith("$L__BB"):  # the list behind .branchtargets
            targets = re.findall(r"\$L__BB\w+", text)
        kind = next((kind for kind, pattern in EVENTS if pattern.search(text)), "")
        if kind in ("load", "store") and SLOT_ACCESS.search(
            "".join(lines_of(file)[line - 1 : line])
        ):
            rings.append(len(events))
        elif kind in ("load", "store") and file == own_file and line in dispatch_lines:
            numbers.append(len(events))
        if kind:
            events.append((kind, text))
    kinds = [kind for kind, _ in events]
    has_ring = kernel == "hopper_wide_dkdv_kernel" or kernel.endswith("backward_kernel")
    sought = [("a row", rings)] * has_ring + [("a partition's number", numbers)]
    found = [f"no {kind} of {name}" for name, places in sought
             for kind in ("load", "store") if kind not in {kinds[place] for place in places}]  # fmt: skip
    for place in rings:
        last_arrival = max((at for at in range(place) if kinds[at] == "arrive"), default=0)
        last_rows = max((at for at in rings if at < last_arrival), default=0)
        rest = kinds[place:]
        if "wait" not in kinds[last_rows:place]:
            found.append(f"no wait before {events[place][1]}")
        if "arrive" not in rest or "meet" not in rest[: rest.index("arrive")]:
            found.append(f"nothing between {events[place][1]} and the arrival")
    for place in numbers:
        kind, text = events[place]
        after = next((kind for kind in kinds[place + 1 :] if kind != "store"), "")
        if not NUMBER.search(text):
            found.append(f"not a partition's number: {text}")
        if after != "all meet" or (kind == "load" and kinds[place - 1] != "all meet"):
            found.append(f"no barrier of all around {text}")
    found += ["a partition ends before its copies"] * ends_before_its_copies(ptx)
    found += [f"{label} does not start with a barrier of all" for label in targets
              if labels[label] < len(kinds) and kinds[labels[label]] != "all meet"]  # fmt: skip
    return found
