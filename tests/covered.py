"""Sources that several modules of GPU tests cover, as their COVERS: folders and files relative to the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "cs336_systems/attention"
HOPPER = f"{FOLDER}/hopper"  # kernels of its own, with tests of their own
COMPILATION = f"{FOLDER}/compilation.py"  # reads what the compiler says, on machines without a GPU

# Attention but for the Hopper kernels: no other back end runs them, so its tests need no GPU again when they change.
ATTENTION = tuple(
    sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / FOLDER).iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file())
        and path.relative_to(ROOT).as_posix() not in (HOPPER, COMPILATION)
    )
)
# What the Hopper kernels run: themselves, what they share with the Triton kernels, whose backward is their
# deterministic one, and the way to them.
HOPPER_ATTENTION = (
    HOPPER,
    f"{FOLDER}/backends.py",
    f"{FOLDER}/api.py",
    f"{FOLDER}/contract.py",
    f"{FOLDER}/native",
    f"{FOLDER}/operator.py",
    f"{FOLDER}/reference.py",
    f"{FOLDER}/tiles",
    f"{FOLDER}/triton",
    f"{FOLDER}/validation.py",
)
