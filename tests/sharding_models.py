"""Small models with awkward parameters, and one-process training to compare sharded training with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.config import ModelConfig
from cs336_systems.distributed import FSDP, OverlapDDP, ShardedOptimizer, Zero1Optimizer
from cs336_systems.distributed.ddp import DataParallel
from cs336_systems.model import TransformerLM
from tests.module_kinds import Net, tie

TINY = ModelConfig(
    name="test", d_model=16, d_ff=40, num_layers=4, num_heads=2, vocab_size=23, context_length=8
)


def awkward() -> nn.Module:
    """Tied, frozen, scalar, empty and odd-sized parameters, a buffer, and a layer that the forward
    uses twice.
    """

    def run(model: Any, x: Tensor) -> Tensor:
        x = torch.relu(model.inner(x))
        x = torch.relu(model.tied(x)) + model.frozen(x)
        x = torch.tanh(model.tied(model.again(x)))
        return model.out(x) * model.scale + model.offset + model.nothing.sum()

    layers = {
        "inner": nn.Linear(5, 7),
        "frozen": nn.Linear(7, 7).requires_grad_(False),
        "out": nn.Linear(7, 1),
    }
    layers |= {name: nn.Linear(7, 7, bias=False) for name in ("tied", "again")}
    scale, nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
    model = Net(run, scale=scale, nothing=nothing, offset=nn.Buffer(torch.tensor([0.25])), **layers)
    return tie(model, to="again", from_="tied")


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return build()


def transformer() -> nn.Module:
    return TransformerLM.from_config(TINY)


def shard(
    scheme: str, model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any
) -> tuple[nn.Module, Any]:
    """`model` in its wrapper, and its optimizer of the class `kind`, by "ddp", "sharded", "zero1"
    or "fsdp".
    """
    if scheme == "zero1":
        return model, Zero1Optimizer(model.parameters(), kind, **options)
    model = FSDP(model) if scheme == "fsdp" else OverlapDDP(model, find_unused_parameters=True)
    if scheme == "sharded":
        return model, ShardedOptimizer(model.parameters(), kind, **options)
    return model, kind(model.parameters(), **options)


def finish(model: nn.Module) -> None:
    """Average the gradients of a wrapper; a Zero1Optimizer does it itself."""
    if isinstance(model, FSDP | DataParallel):
        model.finish_gradient_synchronization()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters by name."""
    if isinstance(model, FSDP):
        return model.gather_full_params()
    inner = model.module if isinstance(model, DataParallel) else model
    return {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}


def batch(step: int, num_sequences: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(
        TINY.vocab_size, (2, num_sequences, TINY.context_length), generator=generator
    )
    return tokens[0], tokens[1]


def part(tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    """This rank's equal part of a batch."""
    return tensor.chunk(num_ranks)[rank]


def token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


class RaiseInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("planted")
