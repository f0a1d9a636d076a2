"""A text as bytes, and the sequences of each step, which depend on its position alone.

Resuming therefore needs no state of the data.

    corpus = Corpus.load()    # Alice's Adventures in Wonderland
    tokens, targets = corpus.sequences(range(0, 16), context_length=128, seed=0)

`alice.txt` beside this file is the whole of Lewis Carroll's book of 1865, in the public domain:
Project Gutenberg's edition 2.9 as the Canterbury corpus (alice29.txt) has it, with Unix line ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from cs336_systems.config import FieldError

ALICE = Path(__file__).with_name("alice.txt")
VALIDATION_SHARE = 0.1  # the end of the text, never trained on
EPOCHS_A_SEED = 2**16  # seeds of epochs that a run's seed has for itself
# (tokens, the token after each)
Batch = tuple[Int[Tensor, "batch sequence"], Int[Tensor, "batch sequence"]]


@dataclass(frozen=True)
class Corpus:
    """Bytes of a text in two parts: one to train on, and its end, which is held out."""

    training: UInt8[Tensor, " num_bytes"]
    validation: UInt8[Tensor, " num_bytes"]

    @classmethod
    def load(cls, path: Path = ALICE) -> Corpus:
        """Return the text at `path`; ValueError if it is empty, OSError if it cannot be read."""
        text = path.read_bytes()
        if not text:
            raise FieldError("text", f"must not be empty, got {path}")
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = round(len(data) * (1 - VALIDATION_SHARE))
        return cls(training=data[:cut], validation=data[cut:])

    def sha256(self) -> str:
        """Return the SHA-256 of the whole text, as `sha256sum` prints it for the text's file."""
        digest = hashlib.sha256(self.training.numpy().data)
        digest.update(self.validation.numpy().data)
        return digest.hexdigest()

    def sequences(self, positions: Sequence[int], *, context_length: int, seed: int) -> Batch:
        """Return tokens and next tokens of the sequences at `positions` of an endless stream.

        Both are (len(positions), context_length). Each epoch cuts the text from another offset into
        windows and visits all of them in another order. Raises ValueError as `check` does.
        """
        num_windows = self.check(context_length)
        starts = []
        for position in positions:
            epoch, place = divmod(position, num_windows)
            offset, order = _epoch(num_windows, context_length, seed * EPOCHS_A_SEED + epoch)
            starts.append(offset + context_length * order[place])
        return _windows(self.training, starts, context_length)

    def validation_sequences(self, context_length: int, most: int) -> Batch:
        """Return tokens and next tokens of the first windows of the held-out part, at most `most`.

        Raises ValueError as `check` does.
        """
        self.check(context_length)
        num_windows = min(most, (len(self.validation) - 1) // context_length)
        return _windows(
            self.validation,
            [context_length * index for index in range(num_windows)],
            context_length,
        )

    def check(self, context_length: int) -> int:
        """Return the number of windows that the training part has at every offset.

        Raises ValueError if the training part or the held-out part is too short for
        `context_length`.
        """
        for name, part, windows in (
            ("train on", self.training, 2),
            ("hold out", self.validation, 1),
        ):
            if len(part) <= windows * context_length:
                raise FieldError(
                    "text",
                    f"must have more than {windows * context_length} bytes to {name} for "
                    f"context_length={context_length}, got {len(part)}",
                )
        return (len(self.training) - 1) // context_length - 1


@lru_cache(maxsize=4)
def _epoch(num_windows: int, context_length: int, seed: int) -> tuple[int, list[int]]:
    """Return an epoch's offset of the first window, and its order of the windows."""
    generator = torch.Generator().manual_seed(seed)
    offset = int(torch.randint(context_length, (), generator=generator))
    return offset, torch.randperm(num_windows, generator=generator).tolist()


def _windows(data: Tensor, starts: list[int], context_length: int) -> Batch:
    """Return tokens and next tokens of the windows of `data` that begin at `starts`."""
    windows = torch.stack([data[start : start + context_length + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
