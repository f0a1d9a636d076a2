"""Build the wheel, install it in fresh environments outside of the repository, and use it there.

    python tools/check_wheel.py

Phases: copy the tracked files, so that nothing else can get into the wheel; build it; look into it;
install it; run commands in an empty folder and look at what they leave. Three environments: the
core alone, what the extra `lab` adds, and that without Triton. They see packages that are installed
here by links, so that nothing is downloaded.
"""

import email
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
INSIDE = (
    "cs336_systems/py.typed",
    "cs336_systems/grading/server.py",
    "cs336_systems/book/report.html",
    "cs336_systems/book/site.html",
    "cs336_systems/training/alice.txt",
    "cs336_systems/attention/native/replay.cpp",
)
# Imported where a command starts: `python -c` would find the folder that it is started in.
SNIPPET = """
import torch
from cs336_systems.attention import flash_attention
q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
flash_attention(q, k, v, is_causal=True).sum().backward()
import cs336_systems
print(cs336_systems.__file__)
"""


# The core: attention with and without the operators of torch.compile, every wrapper on two ranks, a
# checkpoint.
CORE_SNIPPET = """
import time
begin = time.monotonic()
import torch
with_torch = time.monotonic()
from cs336_systems import distributed
from cs336_systems.attention import flash_attention
from cs336_systems.model import TransformerLM, cross_entropy

def train(rank, num_ranks, name):
    torch.manual_seed(0)
    model = getattr(distributed, name)(TransformerLM(16, 8, 8, 2, 2, 16))
    tokens = torch.arange(8)[None] + rank
    for _ in range(2):
        loss = cross_entropy(model(tokens), tokens)
        loss.backward()
        model.finish_gradient_synchronization()
    distributed.save_checkpoint(name, 2, model)
    return loss.item()

if __name__ == "__main__":
    done = time.monotonic()
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    flash_attention(q, k, v, is_causal=True).sum().backward()
    for name in ("NaiveDDP", "FlatDDP", "OverlapDDP", "BucketedDDP", "FSDP"):
        assert len(distributed.run_ranks(train, 2, name)) == 2
    print(f"torch is imported in {with_torch - begin:.1f} s, the core in {done - with_torch:.1f} s more")
"""


def call(*command: str | Path, cwd: Path, expected: int = 0) -> str:
    """The output of a command; RuntimeError where it ends otherwise than expected."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if result.returncode != expected:
        text = f"{' '.join(map(str, command))} ended with {result.returncode}\n{result.stdout}{result.stderr}"
        raise RuntimeError(text)
    return result.stdout + result.stderr


def build(folder: Path) -> Path:
    """The wheel of the files that git tracks, built in a copy of them."""
    copy = folder / "source"
    for name in call(
        "git", "ls-files", "cs336_systems", "docs", "pyproject.toml", "LICENSE", cwd=ROOT
    ).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    call(sys.executable, "-m", "pip", "wheel", *options, copy, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> str:
    """The version of `wheel`, which holds what the package needs and describes itself without dead
    links.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in INSIDE:
            assert name in names, f"{name} is not in the wheel"
        strangers = {name.split("/")[0] for name in names if not name.startswith("cs336_systems")}
        assert not strangers, f"the wheel holds {strangers}"
        metadata = email.message_from_bytes(
            archive.read(next(n for n in names if n.endswith("/METADATA")))
        )
    assert metadata["Project-URL"] and metadata["License-Expression"] == "MIT"
    page = str(metadata.get_payload())
    assert "](" not in page.replace("](http", ""), "the package page has a relative link"
    return str(metadata["Version"])


def needed_by(wheel: Path, extra: str = "") -> set[str]:
    """The names of the installed distributions that `wheel` and its `extra` need, and of what those
    need in turn.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    asked = [(text, extra) for text in metadata.get_all("Requires-Dist", [])]
    found: set[str] = set()
    while asked:
        text, chosen = asked.pop()
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        if name in found or (
            requirement.marker and not requirement.marker.evaluate({"extra": chosen})
        ):
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except (
            importlib.metadata.PackageNotFoundError
        ):  # as CUDA's libraries beside a CPU build of torch
            continue
        found.add(name)
        asked += [(need, "") for need in needs]
    return found


def entries_of(names: set[str]) -> set[Path]:
    """Files and folders at the top of site-packages that belong to these distributions."""
    found = set()
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            if file.parts[0] != "..":
                found.add(Path(distribution.locate_file(file.parts[0])))
    return found


def install(wheel: Path, folder: Path, entries: set[Path]) -> Path:
    """The `bin` of a new environment that holds the wheel and sees `entries` of the packages
    installed here.
    """
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for entry in entries:
        (packages / entry.name).symlink_to(entry)
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    pip = ("-m", "pip", "--python", python, "--disable-pip-version-check")
    call(sys.executable, *pip, "install", "--no-deps", "--quiet", wheel, cwd=folder)
    libraries = call(
        python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder
    ).strip()
    Path(libraries, "packages.pth").write_text(f"{packages}\n")
    return python.parent


def use(programs: Path, folder: Path, version: str, *, with_triton: bool) -> None:
    """Run the commands that a reader runs first, in an empty folder."""
    work = folder / "work"
    work.mkdir()
    command = programs / "cs336-systems"
    (work / "snippet.py").write_text(SNIPPET)
    assert str(programs.parent) in call(programs / "python", "snippet.py", cwd=work)
    problems = ["leaderboard_2025", "flash_benchmarking"]
    call(command, "run", *problems, "--scale", "tiny", "--device", "cpu", cwd=work)
    records = [json.loads(line) for path in work.rglob("records/*.jsonl") for line in path.open()]
    statuses = {(record.get("status", ""), record.get("message", "")) for record in records}
    assert not [status for status in statuses if status[0] == "failed"], statuses
    missing = ("skipped", "backend 'triton' cannot be used: triton is not installed")
    assert (missing in statuses) is not with_triton, statuses
    text = "".join(path.read_text() for path in work.rglob("*.jsonl"))
    assert f"unknown ({version})" in text, "records do not name the version"
    shutil.copy(ROOT / "tests/solutions/minimal.py", work / "adapters.py")
    arguments = ("grade", "adapters.py", "--problem", "flash_backward")
    graded = call(command, *arguments, cwd=work)
    if with_triton:
        return
    assert "skipped: triton is not installed" in graded, graded
    assert "flash_backward" in call(command, "list", cwd=work)
    assert "triton is not installed" in call(command, "doctor", "--device", "cpu", cwd=work)
    call(command, "report", cwd=work)


def use_core(programs: Path, folder: Path, names: set[str]) -> str:
    """Run attention and the wrappers where nothing but the core is installed; what that takes."""
    work = folder / "work"
    work.mkdir()
    (work / "core.py").write_text(CORE_SNIPPET)
    seconds = call(programs / "python", "core.py", cwd=work).strip().splitlines()[-1]
    refused = call(programs / "cs336-systems", "list", cwd=work, expected=2)
    assert "needs the extra 'lab'" in refused and len(refused.splitlines()) == 1, refused
    files = {file for name in names for file in importlib.metadata.distribution(name).files or []}
    sizes = [Path(file.locate()).stat().st_size for file in files if Path(file.locate()).is_file()]
    return f"{len(names)} packages, {sum(sizes) / 2**20:,.0f} MiB; {seconds}"


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as name:
        folder = Path(name).resolve()
        wheel = build(folder)
        version = check_contents(wheel)
        core, lab = needed_by(wheel), needed_by(wheel, "lab")
        place = folder / "core"
        print(
            f"{wheel.name}, core: {use_core(install(wheel, place, entries_of(core)), place, core)}"
        )
        for with_triton in (True, False):
            place = folder / ("with-triton" if with_triton else "without-triton")
            programs = install(wheel, place, entries_of(lab if with_triton else lab - {"triton"}))
            use(programs, place, version, with_triton=with_triton)
            print(
                f"{wheel.name} works {place.name.replace('-', ' ')} ({time.monotonic() - started:.0f} s)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
