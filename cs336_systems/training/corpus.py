"""Text as bytes, and which bytes each step sees: a function of the position alone, so that resuming
needs no state.

    corpus = Corpus.load()                                          # Alice's Adventures in Wonderland
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

ALICE = Path(__file__).with_name("alice.txt")
VALIDATION_SHARE = 0.1  # the end of the text, never trained on
EPOCHS_A_SEED = 2**16
# tokens, and the token after each
Batch = tuple[Int[Tensor, "batch sequence"], Int[Tensor, "batch sequence"]]


@dataclass(frozen=True)
class Corpus:
    """A text in two parts."""

    training: UInt8[Tensor, " num_bytes"]
    validation: UInt8[Tensor, " num_bytes"]

    @classmethod
    def load(cls, path: Path = ALICE) -> Corpus:
        """The text at `path`; ValueError if it is empty, OSError if it cannot be read."""
        text = path.read_bytes()
        if not text:
            raise ValueError(f"text must not be empty, got {path}")
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = round(len(data) * (1 - VALIDATION_SHARE))
        return cls(training=data[:cut], validation=data[cut:])

    def sha256(self) -> str:
        """Of the whole text, as the `sha256sum` of its file says it."""
        digest = hashlib.sha256(self.training.numpy().data)
        digest.update(self.validation.numpy().data)
        return digest.hexdigest()

    def sequences(self, positions: Sequence[int], *, context_length: int, seed: int) -> Batch:
        """Tokens and next tokens of the sequences at `positions` of an endless stream; ValueError
        as `check`.

        Each epoch cuts the text from another offset into windows and visits all of them in another
        order.
        """
        num_windows = self.check(context_length)
        starts = []
        for position in positions:
            epoch, place = divmod(position, num_windows)
            offset, order = _epoch(num_windows, context_length, seed * EPOCHS_A_SEED + epoch)
            starts.append(offset + context_length * order[place])
        return _windows(self.training, starts, context_length)

    def validation_sequences(self, context_length: int, most: int) -> Batch:
        """The first `most` windows of the held-out part; ValueError if it holds none."""
        self.check(context_length)
        num_windows = min(most, (len(self.validation) - 1) // context_length)
        return _windows(
            self.validation,
            [context_length * index for index in range(num_windows)],
            context_length,
        )

    def check(self, context_length: int) -> int:
        """Windows of the training part that there are at every offset; ValueError where either part
        is too short.
        """
        for name, part, windows in (
            ("train on", self.training, 2),
            ("hold out", self.validation, 1),
        ):
            if len(part) <= windows * context_length:
                raise ValueError(
                    f"text must have more than {windows * context_length} bytes to {name} for "
                    f"context_length={context_length}, got {len(part)}"
                )
        return (len(self.training) - 1) // context_length - 1


@lru_cache(maxsize=4)
def _epoch(num_windows: int, context_length: int, seed: int) -> tuple[int, list[int]]:
    """Offset of the first window and order of the windows."""
    generator = torch.Generator().manual_seed(seed)
    offset = int(torch.randint(context_length, (), generator=generator))
    return offset, torch.randperm(num_windows, generator=generator).tolist()


def _windows(data: Tensor, starts: list[int], context_length: int) -> Batch:
    windows = torch.stack([data[start : start + context_length + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
