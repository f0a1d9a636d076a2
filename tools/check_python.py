"""Exit with one clear line unless this Python can build the environment: version, venv, headers, a
C++ compiler.

    python3 tools/check_python.py

Written without newer syntax, so that an old Python 3 runs it far enough to print the message.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig

OLDEST = (3, 11)
COMPILERS = ("c++", "g++", "clang++")


def missing():
    """What is missing and how to get it, or None."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info < OLDEST:
        needed = f"{OLDEST[0]}.{OLDEST[1]}"
        return f"Python {needed} or later is needed, {sys.executable} is {version}: set PYTHON=/path/to/python3"
    # Debian ships venv without ensurepip until python3-venv is installed.
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return f"Python {version} has no venv module: install python3-venv (Debian, Ubuntu)"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return f"Python {version} has no headers, which torch.compile needs: install python3-dev (Debian, Ubuntu)"
    if not shutil.which(os.environ.get("CXX", "")) and not any(
        shutil.which(name) for name in COMPILERS
    ):
        return "no C++ compiler, which torch.compile needs: install g++, or set CXX"
    return None


if __name__ == "__main__":
    problem = missing()
    if problem:
        sys.exit("error: " + problem)
