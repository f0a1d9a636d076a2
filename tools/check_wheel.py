"""Build the wheel, install it in a fresh environment outside of the repository, and use it with and without Triton.

    python tools/check_wheel.py

Phases: copy the tracked files, so that nothing else can get into the wheel; build it; look into it; install it; run
commands in an empty folder and look at what they leave. The environments see the packages that are installed here by
links, of which one lacks Triton's, so that nothing is downloaded.
"""

import email
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSIDE = (
    "cs336_systems/py.typed",
    "cs336_systems/grading/server.py",
    "cs336_systems/experiments/report.html",
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


def call(*command: str | Path, cwd: Path, expected: int = 0) -> str:
    """The output of a command; RuntimeError where it ends otherwise than expected."""
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != expected:
        text = f"{' '.join(map(str, command))} ended with {result.returncode}\n{result.stdout}{result.stderr}"
        raise RuntimeError(text)
    return result.stdout + result.stderr


def build(folder: Path) -> Path:
    """The wheel of the files that git tracks, built in a copy of them."""
    copy = folder / "source"
    for name in call("git", "ls-files", "cs336_systems", "docs", "pyproject.toml", "LICENSE", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    call(sys.executable, "-m", "pip", "wheel", *options, copy, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> str:
    """The version of `wheel`, which holds what the package needs and describes itself without dead links."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in INSIDE:
            assert name in names, f"{name} is not in the wheel"
        strangers = {name.split("/")[0] for name in names if not name.startswith("cs336_systems")}
        assert not strangers, f"the wheel holds {strangers}"
        metadata = email.message_from_bytes(archive.read(next(n for n in names if n.endswith("/METADATA"))))
    assert metadata["Project-URL"] and metadata["License-Expression"] == "MIT"
    page = str(metadata.get_payload())
    assert "](" not in page.replace("](http", ""), "the package page has a relative link"
    return str(metadata["Version"])


def install(wheel: Path, folder: Path, *, with_triton: bool) -> Path:
    """The `bin` of a new environment that holds the wheel and sees the packages installed here."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    own = ("cs336_systems", "cs336-systems", "__editable__")
    for place in [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]:
        for entry in Path(place).iterdir():
            left_out = entry.name.startswith(own) or entry.suffix == ".pth"
            is_triton = entry.name.split("-")[0] == "triton" and not with_triton
            if left_out or is_triton or (packages / entry.name).exists():
                continue
            (packages / entry.name).symlink_to(entry)
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    pip = ("-m", "pip", "--python", python, "--disable-pip-version-check")
    call(sys.executable, *pip, "install", "--no-deps", "--quiet", wheel, cwd=folder)
    libraries = call(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
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
    graded = call(command, *arguments, cwd=work, expected=int(not with_triton))
    if with_triton:
        return
    assert "skipped, triton is not installed" in graded, graded
    assert "flash_backward" in call(command, "list", cwd=work)
    assert "triton is not installed" in call(command, "doctor", "--device", "cpu", cwd=work)
    call(command, "report", cwd=work)


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as name:
        folder = Path(name).resolve()
        wheel = build(folder)
        version = check_contents(wheel)
        for with_triton in (True, False):
            place = folder / ("with-triton" if with_triton else "without-triton")
            programs = install(wheel, place, with_triton=with_triton)
            use(programs, place, version, with_triton=with_triton)
            print(f"{wheel.name} works {place.name.replace('-', ' ')} ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
