"""Checkpoints of a run: a folder that says what the run is, and `distributed.checkpoint`'s saves in it.

    out/config.json                      # the run, and the SHA-256 of its text
    out/losses.jsonl                     # a line a step
    out/checkpoints/step-00000100/...    # weights and optimizer state, for any wrapper and number of ranks

A checkpoint counts once it is complete, so a run killed while it saves keeps the one before. The position in the data
is the number of the step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.wrappers import Trainee

CONFIG_FILE = "config.json"
TEXT_SHA256 = "text_sha256"  # beside the fields of the config; older folders have none
LOSS_SCALE = "loss_scale"  # beside the position in the data
KEPT = 2  # the newest, and the one before it
FREE = ("steps", "wrapper", "num_ranks", "accumulation")  # may change between a run and its continuation


class Checkpoints:
    """The folder `out` of a run of `trainee` on the file `text`."""

    def __init__(self, out: Path, trainee: Trainee, config: TrainingConfig, *, text: Path, text_sha256: str) -> None:
        self.folder, self.out, self.trainee, self.config = out / "checkpoints", out, trainee, config
        self.text = text
        self.described = {**asdict(config), TEXT_SHA256: text_sha256}
        self.rank = dist.get_rank()

    def begin(self) -> int:
        """Claim the folder for a new run, which starts at step 0; ValueError if another run is in it."""
        taken = [(self.out / CONFIG_FILE).exists()]
        dist.broadcast_object_list(taken)  # the other ranks may look after rank 0 has changed what they look at
        if taken[0]:
            raise ValueError(f"out must hold no other run, got {self.out}: resume it or name another folder")
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            self._write_config()
        dist.barrier()
        return 0

    def resume(self) -> int:
        """Load the newest checkpoint; the step that comes next. From the start where none was completed.

        Raises ValueError if `out` holds no run, or one that differs in its text or in more than FREE, and
        CheckpointError, a ValueError as well, for a damaged checkpoint. It does not go back to the one before by
        itself: the steps between would be lost without a word.
        """
        from cs336_systems.distributed.checkpoint import (
            PROGRESS,
            CheckpointError,
            complete_checkpoints,
            load_checkpoint,
        )
        from cs336_systems.distributed.checkpoint_storage import read_json

        path = self.out / CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"out must hold a run to resume, got {self.out}")
        theirs = read_json(path)
        for name, ours in asdict(self.config).items():
            if name not in FREE and ours != theirs.get(name):
                raise ValueError(f"{name} must be {theirs.get(name)!r} to resume {self.out}, got {ours!r}")
        if theirs.get(TEXT_SHA256, self.described[TEXT_SHA256]) != self.described[TEXT_SHA256]:
            raise ValueError(f"text must be the one of {self.out} to resume it, got {self.text}")
        complete = complete_checkpoints(self.folder)
        self._tell_passed_over(complete)
        if not complete:
            self._continue(theirs)
            return 0
        try:
            progress = load_checkpoint(self.folder, self.trainee.module, self.trainee.optimizer)
        except CheckpointError as error:
            if len(complete) == 1:
                raise
            before = complete[-2].name
            raise CheckpointError(f"{error}; to go on from {before}, remove {complete[-1]} or rename it") from error
        if progress.step > self.config.steps:  # also where a damaged file makes it a number that no list has room for
            raise ValueError(
                f"steps must be at least the {progress.step} that are done to resume {self.out}, "
                f"got {self.config.steps}"
            )
        if self.trainee.scaler is not None and LOSS_SCALE in progress.position:
            saved = progress.position[LOSS_SCALE]
            try:
                self.trainee.scaler.load_state_dict(saved)
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{complete[-1] / PROGRESS} is damaged: {LOSS_SCALE} is {saved!r}"[:500]) from None
        self._continue(theirs)
        return progress.step

    def _continue(self, before: dict[str, Any]) -> None:
        """Let the folder describe the run as it goes on, and say on stderr what that changes."""
        if self.rank or before == self.described:
            return
        steps = before.get("steps", self.config.steps)
        if steps != self.config.steps:
            print(
                f"note: steps was {steps} and is {self.config.steps}: the learning rate follows the new schedule",
                file=sys.stderr,
                flush=True,
            )
        if TEXT_SHA256 not in before:
            print(
                f"note: {self.out} does not say which text it was trained on: from now on it is {self.text}",
                file=sys.stderr,
                flush=True,
            )
        self._write_config()

    def _tell_passed_over(self, complete: list[Path]) -> None:
        """Say on stderr which checkpoints newer than the one that is loaded are incomplete."""
        from cs336_systems.distributed.checkpoint import PROGRESS, passed_over

        goes_on = f"goes on from {complete[-1].name}" if complete else "begins at step 0"
        for path in passed_over(self.folder) if self.rank == 0 else ():
            print(
                f"note: {path} is incomplete (no file {PROGRESS}) and passed over: the run {goes_on}; "
                f"when the step is saved again, the folder is renamed to {path.name}.incomplete",
                file=sys.stderr,
                flush=True,
            )

    def _write_config(self) -> None:
        """In one step: a process killed while it writes leaves no half of a file, which nobody could resume."""
        aside = self.out / f".{CONFIG_FILE}.partial"
        with open(aside, "w") as file:
            file.write(json.dumps(self.described, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.out / CONFIG_FILE)

    def save(self, step: int) -> None:
        """Write the state after `step` steps; every rank must call it."""
        from cs336_systems.distributed.checkpoint import save_checkpoint

        position: dict[str, Any] = {"sequence": step * self.config.batch}
        if self.trainee.scaler is not None:
            position[LOSS_SCALE] = self.trainee.scaler.state_dict()
        save_checkpoint(self.folder, step, self.trainee.module, self.trainee.optimizer, position=position, keep=KEPT)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group for a process that is alone, so that it can save as many do; none where there is one already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
