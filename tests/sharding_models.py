"""Small models with awkward parameters, and one-process training to compare sharded training with."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM

TINY = ModelConfig(name="test", d_model=16, d_ff=40, num_layers=4, num_heads=2, vocab_size=23, context_length=8)


class Awkward(nn.Module):
    """Tied, frozen, scalar, empty and odd-sized parameters, a buffer, and a layer that `forward` uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("offset", torch.tensor([0.25]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.inner(x))
        x = torch.relu(self.tied(x)) + self.frozen(x)
        x = torch.tanh(self.tied(self.again(x)))
        return self.out(x) * self.scale + self.offset + self.nothing.sum()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return build()


def transformer() -> nn.Module:
    return TransformerLM.from_config(TINY)


def batch(step: int, num_sequences: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(TINY.vocab_size, (2, num_sequences, TINY.context_length), generator=generator)
    return tokens[0], tokens[1]


def part(tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    """This rank's equal part of a batch."""
    return tensor.chunk(num_ranks)[rank]


def token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


class LiveBytes(TorchDispatchMode):
    """Counts the memory under all tensors that operators have touched; storages that are resized count as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0  # after any operator so far

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        self.peak = max(self.peak, self._sum())
        return result

    def _sum(self) -> int:
        storages = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


# Models as scripts have them, whose weights are used in other ways than a module's own forward on tensors


class TiedHead(nn.Module):
    """A language model whose head is its embedding: a Linear that shares the weight, or `F.linear` with it."""

    def __init__(self, num_blocks: int, functional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TINY.vocab_size, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_blocks))
        if not functional:
            self.head = nn.Linear(8, TINY.vocab_size, bias=False)
            self.head.weight = self.embedding.weight
        self.functional = functional

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.linear(x, self.embedding.weight) if self.functional else self.head(x)


class Chain(nn.Module):
    """Blocks one after the other; with `checkpointing` each under a checkpoint, outside of FSDP's hooks."""

    def __init__(self, *blocks: nn.Module, checkpointing: str = "none") -> None:
        super().__init__()
        self.start, self.layers, self.checkpointing = nn.Linear(8, 8), nn.ModuleList(blocks), checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return x


class SelfAttention(nn.MultiheadAttention):
    """It reads its out_proj's weights without calling it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def encoder() -> nn.Module:
    """It looks at the weights of its first layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


class ListOfLists(nn.Module):
    def __init__(self, inner: Callable[[list[nn.Module]], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(inner([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.layers:
            first, second = pair.children()
            x = x + second(torch.tanh(first(x)))
        return x


class LooseWeights(nn.Module):
    """Weights in a ParameterList or a ParameterDict, which are never called."""

    def __init__(self, in_dict: bool) -> None:
        super().__init__()
        weights = [torch.randn(8, 8) / 3 for _ in range(3)]
        self.start = nn.Linear(8, 8)
        self.weights: Any = (
            nn.ParameterDict({f"w{i}": w for i, w in enumerate(weights)}) if in_dict else nn.ParameterList(weights)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for weight in self.weights.values() if isinstance(self.weights, nn.ParameterDict) else self.weights:
            x = torch.tanh(x @ weight)
        return x


@dataclass
class Carried:
    x: Tensor
    penalty: Tensor


class CarryingBlock(nn.Module):
    """Takes and gives a dataclass, and reads the weights of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, carried: Carried) -> Carried:
        penalty = sum(weight.square().mean() for weight in self.linear.parameters())
        return Carried(torch.tanh(self.linear(carried.x)), carried.penalty + penalty)


class Carrying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.layers = nn.Linear(8, 8), nn.ModuleList(CarryingBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        carried = Carried(self.start(x), torch.zeros(()))
        for layer in self.layers:
            carried = layer(carried)
        return carried.x + carried.penalty


class InPlace(nn.Module):
    """Changes its input and its Linear's output in place; on 3-D input that output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.activation, self.linear = nn.LeakyReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.activation(x))
        x /= 0.7
        return x


class PenalisedBlock(nn.Module):
    """Appends to the caller's list and writes into the caller's dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, losses: list[Tensor], *, sums: dict[str, Tensor]) -> Tensor:
        routed = self.router(x)
        losses.append(routed.float().square().mean())
        sums["routed"] = sums["routed"] + routed.mean()
        return torch.tanh(self.linear(x))


class Penalised(nn.Module):
    """An auxiliary loss in a list, and a sum in a dictionary; the last block's output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layers = nn.Linear(8, 8), nn.ModuleList(PenalisedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        losses: list[Tensor] = []
        sums = {"routed": x.sum() * 0}
        for layer in self.layers:
            last = x
            x = layer(x, losses, sums=sums)
        return last.float().square() + sum(losses) + sums["routed"]  # of which the mean is one of parts of a batch


class NestedBlock(nn.Module):
    """Uses a matrix of its own after calling a child that has one too: a unit in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.child = nn.Parameter(torch.randn(8, 8) / 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(x)) @ self.weight


def nested(checkpointing: str) -> nn.Module:
    return Chain(*(NestedBlock() for _ in range(4)), checkpointing=checkpointing)


def weight_normed(weight_norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Chain(*(nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(3)))


def shared_across_blocks() -> nn.Module:
    """Blocks that hold one and the same Linear."""
    shared = nn.Linear(8, 8)
    return Chain(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), shared) for _ in range(3)))


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.start(x).to(torch.complex64) @ self.weight).abs()


USES: dict[str, Any] = {
    "tied": partial(TiedHead, 12, functional=False),
    "tied, no blocks": partial(TiedHead, 0, functional=False),
    "tied by F.linear": partial(TiedHead, 4, functional=True),
    "MultiheadAttention": lambda: nn.Sequential(nn.Linear(8, 8), SelfAttention(8, 2, batch_first=True)),
    "TransformerEncoder": encoder,
    "list of lists": partial(ListOfLists, nn.ModuleList),
    "list of dictionaries": partial(ListOfLists, lambda pair: nn.ModuleDict({"first": pair[0], "second": pair[1]})),
    "ParameterList": partial(LooseWeights, in_dict=False),
    "ParameterDict": partial(LooseWeights, in_dict=True),
    "weight_norm": partial(weight_normed, torch.nn.utils.weight_norm),
    "weight_norm as parametrization": partial(weight_normed, torch.nn.utils.parametrizations.weight_norm),
    "dataclass": Carrying,
    "in place": lambda: Chain(*(InPlace() for _ in range(4))),
    "list and dictionary": Penalised,
    "nested": partial(nested, "none"),
    "nested, reentrant": partial(nested, "reentrant"),
    "nested, non-reentrant": partial(nested, "non_reentrant"),
    "shared across blocks": shared_across_blocks,
    "complex": ComplexWeights,
}
