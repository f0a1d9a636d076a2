"""How a check ended, in words: outcomes of errors and of processes that died.

An outcome is a dictionary with `status` (passed, failed, not begun, skipped), `message` (one line)
and `detail` (the traceback). A check that needs a GPU is `skipped` on a machine without one. So is
a check that needs a package that the project declares and that is not installed.
"""

import linecache
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from cs336_systems.grading.project import (
    COURSE_PACKAGES,
    OWN_PACKAGE,
    project_root,
    wanted_packages,
)
from cs336_systems.grading.registry import Check, NotImplementedYet, Skipped

MAX_DETAIL = 20_000  # characters of a traceback
NEEDS_A_GPU = "needs a GPU"
# Errors of torch and Triton on a machine without CUDA, and source lines that refuse a CPU tensor.
SAYS_CUDA = re.compile(r"\b(cuda|gpus?|nvidia|nvtx|active drivers)\b|is_cuda", re.I)
READS_CUDA = re.compile(r"torch\.cuda\b|\.is_cuda\b|\.cuda\(|[\"']cuda|\bnvtx\b")


def is_under_test(filename: str, adapters: Path) -> bool:
    """Return whether a file in a traceback belongs to the project under test."""
    path = Path(filename)
    in_grading = path.is_relative_to(OWN_PACKAGE / "grading")
    return path.is_relative_to(project_root(adapters)) and not in_grading


def outcome_of_error(error: BaseException, adapters: Path) -> dict[str, Any]:
    """Return the outcome of a check that raised `error`; the message names the project's line."""
    if isinstance(error, Skipped):
        return {"status": "skipped", "message": str(error)}
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_under_test(frame.filename, adapters)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    detail = "".join(traceback.format_exception(error))[-MAX_DETAIL:]

    # The machine's fault: a package that is not installed, or no GPU.

    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package.lower() in wanted_packages(project_root(adapters)):
        what = "'cs336-systems[course]'" if package in COURSE_PACKAGES else package
        told = f"{package} is not installed: {sys.executable} -m pip install {what}"
        return {"status": "skipped", "message": told, "detail": detail}
    if own and not torch.cuda.is_available() and _refuses_a_cpu(error, own[-1]):
        return {"status": "skipped", "message": f"{NEEDS_A_GPU}{place}", "detail": detail}

    # The project's fault: say what was raised and where, with a hint if there is one.
    text = " ".join(str(error).split())
    if not isinstance(error, AssertionError | NotImplementedYet) or own or not text:
        text = f"{type(error).__name__}: {text}"[:300] + place
    if isinstance(error, NotImplementedError) and own and not str(error):
        text = f"{own[-1].name} is not implemented{place}"
    if isinstance(error, SyntaxError):
        version = ".".join(map(str, sys.version_info[:2]))
        text += f"; Python {version} runs the checks: does the file need a newer one?"
    elif isinstance(error, ModuleNotFoundError) and error.name and " has no folder " not in text:
        text += f"; it is neither in {project_root(adapters)} nor installed for {sys.executable}"
    begun = not isinstance(error, NotImplementedYet | NotImplementedError)
    status = "failed" if begun else "not begun"
    return {"status": status, "message": text, "detail": detail}


def _refuses_a_cpu(error: BaseException, frame: traceback.FrameSummary) -> bool:
    """Return whether the failing statement or the error's text shows that a GPU is needed."""
    last = frame.end_lineno or frame.lineno or 0
    lines = range(frame.lineno or 0, last + 1)
    statement = "".join(linecache.getline(frame.filename, line) for line in lines)
    return bool(READS_CUDA.search(statement) or SAYS_CUDA.search(str(error)))


def outcome_of_death(check: Check, exit_code: int) -> dict[str, Any]:
    """Return the outcome of a check whose process ended without reporting one."""
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    cause = ""
    if how in ("SIGSEGV", "SIGBUS") and "triton" in check.name:
        cause = ": a load or store out of bounds?"
    return {"status": "failed", "message": f"the process died ({how}){cause}"}
