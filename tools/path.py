"""Which files and functions of the package a call of `flash_attention` and its backward pass before
the launch.

    TRITON_INTERPRET=1 python tools/path.py           # files, functions, crossings between files: first and later calls
    TRITON_INTERPRET=1 python tools/path.py --which   # and the functions in their order

What a kernel itself calls is left out: the interpreter runs it, a GPU does not. Prints JSON lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PACKAGE = ROOT / "cs336_systems"
# the last: interpreted kernels
WITHIN = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")


def passed(call: Callable[[], Any]) -> tuple[Any, list[tuple[str, str]]]:
    """What `call` returns, and (file, function) of each call of the package's functions meanwhile."""
    functions: list[tuple[str, str]] = []

    def see(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(str(PACKAGE))
            and code.co_name not in WITHIN
        ):
            functions.append(
                (Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_qualname)
            )

    sys.setprofile(see)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, functions


def kernels() -> set[tuple[str, str]]:
    """(file, function) of what Triton compiles."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("cs336_systems.attention"):
            for value in vars(module).values():
                function = getattr(value, "fn", None)
                if function is not None and "triton" in type(value).__module__:
                    place = Path(function.__code__.co_filename)
                    if place.is_relative_to(PACKAGE):
                        found.add((place.relative_to(PACKAGE).as_posix(), function.__qualname__))
    return found


def main() -> None:
    import torch

    import cs336_systems.attention.triton.passes  # noqa: F401  # imports are no part of a call
    from cs336_systems.attention import flash_attention

    def call() -> list[tuple[str, list[tuple[str, str]]]]:
        q, k, v = (torch.randn(1, 2, 64, 32, requires_grad=True) for _ in range(3))
        output, forward = passed(lambda: flash_attention(q, k, v, is_causal=True, backend="triton"))
        gradient = torch.randn_like(output)
        # the backward in this thread, where it is seen
        torch.autograd.set_multithreading_enabled(False)
        _, backward = passed(lambda: torch.autograd.grad(output, (q, k, v), gradient))
        return [("forward", forward), ("backward", backward)]

    for number in (1, 2, 3):
        for name, functions in call():
            functions = [one for one in functions if one not in kernels()]
            files = [file for file, _ in functions]
            crossings = sum(one != other for one, other in zip(files, files[1:]))
            line = {"call": number, "pass": name, "files": len(set(files)), "functions": len(set(functions)),
                    "crossings": crossings}  # fmt: skip
            print(json.dumps(line))
            if "--which" in sys.argv:
                print("".join(f"    {file} {function}\n" for file, function in functions), end="")


if __name__ == "__main__":
    main()
