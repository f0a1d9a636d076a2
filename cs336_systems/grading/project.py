"""The project that a file of adapters belongs to: its root, its packages, and how to import them.

    root = project_root(Path("student/tests/adapters.py"))   # student
    find_package(root, "cs336_basics")                       # student/cs336-basics/cs336_basics

A student's package has the name of this one, `cs336_systems`. So each name is bound to the
student's folder before the adapters are imported. If the project has no `cs336_systems`, importing
it fails.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from cs336_systems.grading.registry import Adapters

OWN_PACKAGE = Path(__file__).resolve().parent.parent
STUDENT_PACKAGES = ("cs336_systems", "cs336_basics", "tests")
# Folders in which the course's repositories and their copies keep a package, from the root.
PLACES = ("cs336-basics", "cs336-basics/src", "cs336-systems", "cs336-systems/src", ".", "src")
# Packages that the course's own pyproject.toml files install beside PyTorch.
COURSE_PACKAGES = (
    "einops",
    "einx",
    "humanfriendly",
    "jaxtyping",
    "matplotlib",
    "numpy",
    "pandas",
    "psutil",
    "regex",
    "submitit",
    "tiktoken",
    "tqdm",
    "wandb",
)


def project_root(adapters: Path) -> Path:
    """Return the folder of the project that the file `adapters` belongs to.

    It is the nearest of four folders above the file that has a pyproject.toml, a `cs336_systems` or
    a `cs336-basics`. If there is none, it is the parent of a folder `tests`, or the file's own
    folder.
    """
    marks = ("pyproject.toml", "cs336_systems", "cs336-basics")
    for folder in list(adapters.parents)[:4]:
        if any((folder / mark).exists() for mark in marks):
            return folder
    return adapters.parent.parent if adapters.parent.name == "tests" else adapters.parent


def find_package(root: Path, name: str) -> Path | None:
    """Return the folder of the package `name` in the project `root`, or None.

    A path in `[tool.uv.sources]` of its pyproject.toml comes first. If a folder of that name holds
    another one of the same name with the modules, as cs336_basics/cs336_basics/, the inner one is
    returned.
    """
    sources = _uv_sources(root / "pyproject.toml")
    declared = [sources[key] for key in (name, name.replace("_", "-")) if key in sources]
    for place in (*declared, *(path + "/src" for path in declared), *PLACES):
        outer = root / place / name
        for folder in (outer / name, outer):
            if folder.is_dir() and any(folder.glob("*.py")):
                return folder

    # A namespace package without a module at its top, such as cs336_systems/ddp/wrapper.py.
    return root / name if (root / name).is_dir() else None


def wanted_packages(root: Path) -> set[str]:
    """Return the packages that the project, its `cs336_basics` or the course depends on."""
    basics = find_package(root, "cs336_basics")
    files = [root / "pyproject.toml"]
    if basics is not None:
        files += [folder / "pyproject.toml" for folder in list(basics.parents)[:2]]
    wanted = set(COURSE_PACKAGES)
    for file in files:
        requirements = _read(file).get("project", {}).get("dependencies", [])
        names = [re.match(r"[\w.-]+", str(requirement)) for requirement in requirements]
        wanted |= {name.group().replace("-", "_").lower() for name in names if name}
    return wanted


def _read(pyproject: Path) -> dict[str, Any]:
    """Return the content of a pyproject.toml, empty if it is missing or not valid."""
    try:
        return tomllib.loads(pyproject.read_text())
    except (OSError, ValueError):
        return {}


def _uv_sources(pyproject: Path) -> dict[str, str]:
    """Return the paths of packages in `[tool.uv.sources]`, by name."""
    sources = _read(pyproject).get("tool", {}).get("uv", {}).get("sources", {})
    return {
        name: source["path"]
        for name, source in sources.items()
        if isinstance(source, dict) and isinstance(source.get("path"), str)
    }


class StudentPackages(MetaPathFinder):
    """An import hook that finds a student's packages before installed ones of the same name.

    `folders` maps a package to its folder; with None in its place an import raises
    ModuleNotFoundError.
    """

    def __init__(self, root: Path, folders: dict[str, Path | None]) -> None:
        self.root, self.folders = root, folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a package in `folders`, None for any other name."""
        if fullname not in self.folders:
            return None
        folder = self.folders[fullname]
        if folder is None:
            told = f"{self.root} has no folder {fullname}, and the grade's own is not served for it"
            raise ModuleNotFoundError(told, name=fullname)
        if (folder / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(
                fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def load_adapters(path: Path, scratch: Path) -> Adapters:
    """Import the file at `path` as if in its own project and return its adapters.

    `scratch` is an empty folder for made-up metadata; it is put on the import path.
    """
    root = project_root(path)
    sys.path[:0] = [str(folder) for folder in (path.parent, root, root / "src", scratch)]

    # Bind the student's package names to the project's folders, and forget what was imported.
    served: dict[str, Path | None] = {}
    for name in STUDENT_PACKAGES:
        folder = find_package(root, name)
        if folder is not None and folder.resolve() != OWN_PACKAGE:
            served[name] = folder
        elif folder is None and name == "cs336_systems":
            served[name] = None
        _know_version(name, scratch)
    for loaded in [module for module in sys.modules if module.split(".")[0] in served]:
        del sys.modules[loaded]
    sys.meta_path.insert(0, StudentPackages(root, served))

    # Make the file's folder a package for relative imports, whatever the folder is called.
    submission = types.ModuleType("submission")
    submission.__path__ = [str(path.parent)]
    sys.modules["submission"] = submission
    spec = importlib.util.spec_from_file_location("submission.adapters", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapters"] = sys.modules["submission.adapters"] = module
    spec.loader.exec_module(module)
    return Adapters(module)


def _know_version(name: str, scratch: Path) -> None:
    """Write metadata with a version for a package that is not installed, into `scratch`.

    Packages of the course ask for their own version when they are imported.
    """
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        info = scratch / f"{name}-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
