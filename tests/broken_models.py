"""Language models that go wrong in the ways a sweep must survive; named on the command line as a
user's own model.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn


class Bigram(nn.Module):
    """A working model with the course's constructor: next-token logits from the current token
    alone.
    """

    def __init__(
        self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta=10_000.0
    ):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class OutOfMemory(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 64.00 GiB.\nMore lines of advice."
        )


class FullHost(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        # more than any address space: the allocator's own error
        return torch.empty(2**58, dtype=torch.uint8)


class NoMemory(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        raise MemoryError


class Raises(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Dies(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        os.abort()


class Hangs(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        print(f"hanging in process {os.getpid()}", flush=True)  # for a test that ends the parent
        time.sleep(600)
        return super().forward(tokens)
