"""Checkpoints of a run: each rank writes its own weights and optimizer state, and a rename makes them all count.

    out/config.json                      # what the run is
    out/checkpoints/step-00000100/rank-0.pt, rank-1.pt, ...

A folder is filled under another name and renamed when every rank has written, so a run killed while it saves keeps
the checkpoint before. The position in the data is the number of the step. Files are read with weights_only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.wrappers import Trainee

CONFIG_FILE = "config.json"
FOLDER = re.compile(r"step-(\d{8})")
KEPT = 2  # the newest, and the one before it


class Checkpoints:
    """The folder `out` of a run of `trainee`."""

    def __init__(self, out: Path, trainee: Trainee, config: TrainingConfig) -> None:
        self.out, self.trainee, self.config = out, trainee, config
        self.rank = dist.get_rank() if config.num_ranks > 1 else 0

    def begin(self) -> int:
        """Claim the folder for a new run, which starts at step 0; ValueError if another run is in it."""
        if self._said_by_rank_0((self.out / CONFIG_FILE).exists()):
            raise ValueError(f"out must hold no other run, got {self.out}: resume it or name another folder")
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=1) + "\n")
        self._barrier()
        return 0

    def resume(self) -> int:
        """Load the newest checkpoint; the step that comes next. From the start where none was completed.

        Raises ValueError if `out` holds no run, or one of another config (the number of `steps` excepted).
        """
        path = self.out / CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"out must hold a run to resume, got {self.out}")
        ours, theirs = (self._comparable(one) for one in (asdict(self.config), json.loads(path.read_text())))
        for name in ours:
            if ours[name] != theirs.get(name):
                raise ValueError(f"{name} must be {theirs.get(name)!r} to resume {self.out}, got {ours[name]!r}")
        complete = self._complete()
        if not complete:
            return 0
        step, folder = complete[-1]
        state = torch.load(folder / f"rank-{self.rank}.pt", map_location="cpu", weights_only=True)
        self.trainee.module.load_state_dict(state["module"])
        self.trainee.optimizer.load_state_dict(state["optimizer"])
        return step

    def save(self, step: int) -> None:
        """Write the state after `step` steps; every rank must call it."""
        folder = self.out / "checkpoints" / f"step-{step:08d}"
        aside = folder.with_name(f"{folder.name}.incomplete")
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        self._barrier()
        state = {"module": self.trainee.module.state_dict(), "optimizer": self.trainee.optimizer.state_dict()}
        with open(aside / f"rank-{self.rank}.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self._barrier()
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was resumed from before it
            aside.rename(folder)
            for _, old in self._complete()[:-KEPT]:
                shutil.rmtree(old)
        self._barrier()

    def _complete(self) -> list[tuple[int, Path]]:
        """Completed checkpoints by step."""
        folder = self.out / "checkpoints"
        found = [(FOLDER.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
        return sorted((int(match[1]), path) for match, path in found if match)

    @staticmethod
    def _comparable(config: dict[str, Any]) -> dict[str, Any]:
        """Without what may change between a run and its continuation."""
        return {name: value for name, value in config.items() if name != "steps"}

    def _barrier(self) -> None:
        if self.config.num_ranks > 1:
            dist.barrier()

    def _said_by_rank_0(self, value: bool) -> bool:
        """Rank 0's `value`: the other ranks may look after rank 0 has changed what they look at."""
        if self.config.num_ranks == 1:
            return value
        said = [value]
        dist.broadcast_object_list(said)
        return said[0]
