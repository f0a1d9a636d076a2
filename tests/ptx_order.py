"""Whether the accesses of the Hopper kernels on which racecheck is blind are in order, read off their PTX.

  ring       a row is stored, and loaded, after a wait for its slot, which comes after the last rows' accesses; then
             threads meet; then one of them arrives
  dispatch   all warps meet, read the numbers of their partitions, and meet before anything else; what is written there
             is followed by a barrier of all, too

A step of a ring is straight code, so the order of the text is the order of execution; partitions are judged one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

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
LABEL = re.compile(r"^(\$L__BB\w+):")


def disorder(ptx: str, is_slot: Callable[[str, int], bool], is_dispatch: Callable[[str, int], bool]) -> list[str]:
    """What is out of order among the accesses at these places (file, line); "no ..." where there are none."""
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
        if kind in ("load", "store") and is_slot(file, line):
            rings.append(len(events))
        elif kind in ("load", "store") and is_dispatch(file, line):
            numbers.append(len(events))
        if kind:
            events.append((kind, text))
    kinds = [kind for kind, _ in events]
    found = [f"no {kind} of {name}" for name, places in (("a row", rings), ("a partition's number", numbers))
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
    found += [f"{label} does not start with a barrier of all" for label in targets
              if labels[label] < len(kinds) and kinds[labels[label]] != "all meet"]  # fmt: skip
    return found
