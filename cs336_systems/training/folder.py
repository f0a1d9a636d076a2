"""The folder of a training run: its config, losses and checkpoints; one run at a time.

    out/config.json                      # the run, and the SHA-256 of its text
    out/losses.jsonl                     # a line a step
    out/checkpoints/step-00000100/...    # weights and optimizer state

A checkpoint can be read with any wrapper and number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from cs336_systems.config import FieldError, ModelConfig, Precision
from cs336_systems.distributed.checkpoint import (
    CheckpointError,
    checkpoints,
    errors_name,
    folder_lock,
    load_checkpoint,
    on_rank_0,
    save_checkpoint,
)
from cs336_systems.training.hyperparameters import TrainingConfig
from cs336_systems.training.wrappers import Trainee

TEXT_SHA256 = "text_sha256"  # key in config.json, beside the fields of the config
KEPT = 2  # checkpoints: the newest, and the one before it
# Fields of the config that may change between a run and its continuation.
FREE = (
    "steps",
    "wrapper",
    "num_ranks",
    "tensor_parallel",
    "sequence_parallel",
    "replicas",
    "accumulation",
)


def read_config(out: Path) -> tuple[TrainingConfig, str]:
    """Return the config of the run in `out`, and the SHA-256 of the run's text.

    Raises ValueError if `out` holds no run, or if its config.json is damaged.
    """
    path = out / "config.json"
    if not path.is_file():
        raise FieldError("out", f"must hold a run, got {out}")
    try:
        fields = json.loads(path.read_text())
        text_sha256 = fields.pop(TEXT_SHA256)
        nested = {
            "model": ModelConfig(**fields["model"]),
            "precision": Precision(**fields["precision"]),
        }
        return TrainingConfig(**fields | nested), text_sha256
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


class RunFolder:
    """The folder `out` of the run `config` on a text; all ranks call its methods together."""

    def __init__(self, out: Path, config: TrainingConfig, text: Path, text_sha256: str) -> None:
        self.out, self.config, self.text, self.text_sha256 = out, config, text, text_sha256
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.lock = ExitStack()  # keeps other runs out, from `begin` on until it is closed

    def begin(self, trainee: Trainee, *, resume: bool) -> list[float]:
        """Claim the folder, load its newest checkpoint if `resume`, and return the losses so far.

        Raises ValueError on every rank if `out` is in use or holds another run; on a resume if it
        holds no run, one that differs in its text or in more than FREE, or a damaged checkpoint:
        its steps are not given up silently.
        """
        on_rank_0(lambda: self._claim(resume))
        losses = self._load(trainee) if resume and checkpoints(self.out / "checkpoints") else []
        on_rank_0(self._write_config)
        self.write_losses(0, losses)  # drops the losses of steps after the checkpoint
        return losses

    def save(self, trainee: Trainee, losses: list[float]) -> None:
        """Write a checkpoint of `trainee` after the steps whose losses are `losses`."""
        # losses as strings: JSON has no NaN
        at = {"loss_scale": trainee.scaler.state_dict(), "losses": [*map(str, losses)]}
        path, step = self.out / "checkpoints", len(losses)
        save_checkpoint(path, step, trainee.module, trainee.optimizer, position=at, keep=KEPT)

    def write_losses(self, first_step: int, losses: list[float]) -> None:
        """Append `losses` of the steps from `first_step` on to losses.jsonl; step 0 begins it anew.

        The first rank alone writes.
        """
        lines = [
            json.dumps({"step": first_step + index, "loss": loss}) + "\n"
            for index, loss in enumerate(losses)
        ]
        path = self.out / "losses.jsonl"
        if self.is_first:
            with errors_name(path), open(path, "a" if first_step else "w") as file:
                file.writelines(lines)

    def _claim(self, resume: bool) -> None:
        """Lock the folder; raise ValueError if this run may not begin in it or resume it."""
        run = read_config(self.out) if resume else None  # before a misspelt folder is made
        self.out.mkdir(parents=True, exist_ok=True)
        self.lock.enter_context(folder_lock(self.out))

        if run is None:
            if (self.out / "config.json").exists():
                raise FieldError(
                    "out",
                    f"must hold no other run, got {self.out}: resume it or name another folder",
                )
            return

        # A resume: the same config but for FREE, the same text, and steps that are not done yet.
        before, text_sha256 = run
        for name, ours in asdict(self.config).items():
            if name not in FREE and ours != (theirs := asdict(before)[name]):
                raise FieldError(name, f"must be {theirs!r} to resume {self.out}, got {ours!r}")
        if text_sha256 != self.text_sha256:
            raise FieldError("text", f"must be the one of {self.out} to resume it, got {self.text}")
        newest = checkpoints(self.out / "checkpoints")[-1:]
        if newest and int(newest[0].name.removeprefix("step-")) > self.config.steps:
            raise FieldError(
                "steps",
                f"must be at least those of {newest[0]} to resume it, got {self.config.steps}",
            )

        if before.steps != (steps := self.config.steps):
            self._tell(
                f"steps was {before.steps} and is {steps}: "
                "the learning rate follows the new schedule"
            )

    def _load(self, trainee: Trainee) -> list[float]:
        """Load the newest checkpoint into `trainee`, and return the losses of the steps before it.

        Raises CheckpointError, a ValueError, if it cannot be read or lacks losses.
        """
        *before, newest = checkpoints(self.out / "checkpoints")
        try:
            progress = load_checkpoint(newest, trainee.module, trainee.optimizer)
        except CheckpointError as error:
            if not before:
                raise
            raise CheckpointError(
                f"{error}; to go on from {before[-1].name}, remove {newest} or rename it"
            ) from error
        trainee.scaler.load_state_dict(progress.position.get("loss_scale", {}))
        losses = [float(loss) for loss in progress.position.get("losses", [])]
        if len(losses) != progress.step:
            raise CheckpointError(
                f"{newest} has the losses of {len(losses)} steps, and {progress.step} are done: "
                "an earlier version wrote it, and can go on"
            )
        return losses

    def _write_config(self) -> None:
        """Write config.json in one step: a process killed meanwhile leaves no half of a file."""
        aside = self.out / ".config.json.partial"
        with errors_name(self.out):
            aside.write_text(
                json.dumps({**asdict(self.config), TEXT_SHA256: self.text_sha256}, indent=1) + "\n"
            )
            os.replace(aside, self.out / "config.json")

    def _tell(self, note: str) -> None:
        """Print a note on stderr, on the first rank alone."""
        if self.is_first:
            print(f"note: {note}", file=sys.stderr, flush=True)
