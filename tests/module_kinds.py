"""Kinds of modules that people train, each as small as shows its trait, for comparisons of wrappers with one process.

    kind = KINDS["tied embedding and head"]
    model, inputs = kind.build(), kind.inputs(generator, 4)     # float64; the batch is the inputs' first dimension

A kind's output for a sample depends on no other sample of the batch, so that the mean of ranks is the whole batch's.
Widths are odd: no weight divides evenly among ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM

WIDTH, HIDDEN, VOCABULARY, LENGTH = 5, 7, 11, 3
Inputs = Callable[[torch.Generator, int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Kind:
    """`build` makes a model from the current seed; `inputs(generator, samples)` are its arguments."""

    build: Callable[[], nn.Module]
    inputs: Inputs


class Net(nn.Module):
    """Parts by name, and a function of (module, *inputs) for a forward."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, value in parts.items():
            setattr(self, name, value)
        self.run = run

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


@dataclass
class Output:
    """What some models return in place of a tensor."""

    hidden: Tensor
    logits: Tensor


# Inputs


def vectors(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64),)


def sequences(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64),)


def images(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 2, 5, 5, generator=generator, dtype=torch.float64),)


def tokens(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
    return (torch.randint(VOCABULARY, (samples, LENGTH), generator=generator),)


# Parts


def linear(inputs: int = WIDTH, outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


def embedding(**options: Any) -> nn.Embedding:
    return nn.Embedding(VOCABULARY, WIDTH, **options)


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(WIDTH, HIDDEN), nn.GELU(), linear(HIDDEN, WIDTH))


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (WIDTH, WIDTH))) / 2)


def residual(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = x + block(x)
    return x


def tie(model: nn.Module, to: str, from_: str) -> nn.Module:
    """`model` with the weight of its part `to` also that of its part `from_`."""
    model.get_submodule(to).weight = model.get_submodule(from_).weight
    return model


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def hooked(model: nn.Module) -> nn.Module:
    """A gradient hook of the user's on a weight, made before anything is wrapped."""
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient * 2)
    return model


def legacy_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def transformer(num_layers: int = 2) -> nn.Module:
    return TransformerLM.from_config(
        ModelConfig(
            name="kind", d_model=8, d_ff=12, num_layers=num_layers, num_heads=2, vocab_size=VOCABULARY,
            context_length=LENGTH,
        )
    )  # fmt: skip


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 3, 10, dropout=0.0, batch_first=True)


def owns_and_calls() -> nn.Module:
    """Owns a matrix, and uses it after a child has run: a unit within which another unit runs."""
    return Net(lambda m, x: torch.tanh(m.inner(x)) @ m.weight, inner=linear(), weight=matrix())


def recursive(depth: int) -> nn.Module:
    """A block that holds a block of its own kind."""
    rest = recursive(depth - 1) if depth else nn.Identity()
    return Net(lambda m, x: x + m.rest(m.own(x)), own=owns_and_calls(), rest=rest)


def fills_a_list(model: Any, x: Tensor, losses: list[Tensor], found: dict[str, Tensor]) -> Tensor:
    """Adds an auxiliary loss to a list that its caller hands it."""
    x = model.inner(x).tanh()
    losses.append(x.square().mean(-1))
    found["last"] = x
    return x


def filled(model: Any, x: Tensor) -> list[Tensor]:
    losses: list[Tensor] = []
    found: dict[str, Tensor] = {}
    for block in model.blocks:
        x = block(x, losses, found)
    return [x, *losses, found["last"]]


def alternates() -> nn.Module:
    """Takes another of its branches in every second step, on all ranks alike; who trains it sets `step`."""
    branches = nn.ModuleList([linear(), linear()])
    return Net(lambda m, x: m.branches[m.step % 2](x).tanh(), branches=branches, step=0)


def routed(model: Any, x: Tensor) -> Tensor:
    """Has a branch for some samples, so that a rank may use it alone."""
    x, chosen = model.inner(x), x[:, :1] > 0.5
    return torch.where(chosen, model.branch(x), x) if chosen.any() else x


def single_among_double(model: Any, x: Tensor) -> Tensor:
    """The roundings of a float32 weight reach no other: it has a gradient, and no effect."""
    single = model.single.double()
    return model.inner(x) + (single - single.detach())


class FrozenStatistics(nn.BatchNorm1d):
    """Batch normalization as fine-tuning uses it, by running statistics: those of a batch differ between ranks."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.train()

    def train(self, mode: bool = True) -> FrozenStatistics:
        return super().train(False)  # type: ignore[return-value]


def checkpointed(use_reentrant: bool, *blocks: nn.Module) -> nn.Module:
    def run(model: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()  # what a reentrant checkpoint needs of its first input
        for block in model.blocks:
            x = x + checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return Net(run, blocks=nn.ModuleList(blocks))


def mixture(model: Any, x: Tensor) -> Tensor:
    weights = model.gate(x).softmax(-1)
    return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(model.experts))  # type: ignore[return-value]


def cell_loop(model: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), WIDTH)
    for position in range(x.shape[1]):
        state = model.cell(x[:, position], state)
    return state


def recurrent(model: Any, x: Tensor) -> Tensor:
    return model.rnn(x)[0]


def language_model(model: Any, t: Tensor) -> Tensor:
    return model.head(residual(model.blocks, model.embedding(t)))


def language_parts(blocks: int) -> dict[str, nn.Module]:
    return {
        "embedding": embedding(), "blocks": nn.ModuleList(mlp() for _ in range(blocks)),
        "head": linear(WIDTH, VOCABULARY, bias=False),
    }  # fmt: skip


def in_place_scaling(model: Any, x: Tensor) -> Tensor:
    logits = model.linear(x)  # with a bias and three dimensions a view of addmm's output
    logits /= 2.0
    return logits


def keeps_a_loss(model: Any, x: Tensor) -> Tensor:
    output = model.a(x.tanh())
    model.loss = model.b(output.tanh()).square().mean(-1, keepdim=True)  # behind the output, not part of it
    return output


def _through(block: nn.Module, x: Tensor) -> Tensor:
    block(x[:])
    return x


KINDS: dict[str, Kind] = {
    # layers
    "linear without bias": Kind(lambda: linear(bias=False), vectors),
    "one output": Kind(lambda: nn.Sequential(linear(WIDTH, 1), nn.Tanh(), linear(1, 1)), vectors),
    "mlp": Kind(mlp, vectors),
    "conv2d": Kind(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), linear(27, 3)), images),
    "layer norm": Kind(lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.LayerNorm(WIDTH)), sequences),
    "batch norm": Kind(lambda: nn.Sequential(linear(), FrozenStatistics(WIDTH), linear()), vectors),
    "padding index": Kind(
        lambda: Net(lambda m, t: m.head(m.table(t)), table=embedding(padding_idx=2), head=linear()), tokens
    ),
    "max norm": Kind(lambda: nn.Sequential(embedding(max_norm=0.5), linear()), tokens),
    "sparse embedding": Kind(lambda: nn.Sequential(embedding(sparse=True), linear()), tokens),
    "lstm": Kind(lambda: Net(recurrent, rnn=nn.LSTM(WIDTH, 4, batch_first=True)), sequences),
    "gru cell": Kind(lambda: Net(cell_loop, cell=nn.GRUCell(WIDTH, WIDTH)), sequences),
    "multihead attention": Kind(
        lambda: Net(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(WIDTH, 1, batch_first=True)),
        sequences,
    ),
    "attention in a list": Kind(
        lambda: Net(
            lambda m, x: m.blocks[0](x, x, x)[0],
            blocks=nn.ModuleList([nn.MultiheadAttention(WIDTH, 1, batch_first=True)]),
        ),
        sequences,
    ),
    "encoder": Kind(
        lambda: nn.Sequential(linear(WIDTH, 6), nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)),
        sequences,
    ),
    # models
    "transformer": Kind(transformer, tokens),
    "one block": Kind(lambda: transformer(1), tokens),
    "tied embedding and head": Kind(
        lambda: tie(Net(language_model, **language_parts(2)), to="head", from_="embedding"), tokens
    ),
    "tied and deep": Kind(lambda: tie(Net(language_model, **language_parts(9)), to="head", from_="embedding"), tokens),
    "head by the embedding's weight": Kind(
        lambda: Net(lambda m, t: F.linear(m.inner(m.table(t)), m.table.weight), table=embedding(), inner=linear()),
        tokens,
    ),
    "tied autoencoder": Kind(
        lambda: Net(lambda m, x: F.linear(m.encoder(x).tanh(), m.encoder.weight.t()), encoder=linear(WIDTH, HIDDEN)),
        vectors,
    ),
    "mixture of experts": Kind(
        lambda: Net(mixture, gate=linear(WIDTH, 3), experts=nn.ModuleList(linear() for _ in range(3))), vectors
    ),
    # how parameters are held
    "shared layer": Kind(lambda: Net(lambda m, x: m.inner(m.inner(x).tanh()), inner=linear()), vectors),
    "shared weight": Kind(lambda: tie(nn.Sequential(linear(), nn.Tanh(), linear()), to="2", from_="0"), vectors),
    "shared block": Kind(
        lambda: Net(lambda m, x: residual(m.blocks, x), blocks=nn.ModuleList([mlp(), *[mlp()] * 2])), vectors
    ),
    "frozen first": Kind(lambda: freeze(nn.Sequential(linear(), nn.Tanh(), linear()), "0"), vectors),
    "only the head trained": Kind(
        lambda: freeze(Net(language_model, **language_parts(2)), "embedding", "blocks"), tokens
    ),
    "scalar": Kind(
        lambda: Net(lambda m, x: m.inner(x) * m.scale, inner=linear(), scale=nn.Parameter(torch.tensor(1.5))), vectors
    ),
    "empty": Kind(lambda: Net(lambda m, x: m.inner(x) + m.none.sum(), inner=linear(), none=matrix(0, 4)), vectors),
    "own matrix": Kind(lambda: Net(lambda m, x: x @ m.weight, weight=matrix()), vectors),
    "buffer": Kind(
        lambda: Net(lambda m, x: m.inner(x + m.shift), inner=linear(), shift=nn.Buffer(torch.ones(WIDTH))), vectors
    ),
    "parameter list": Kind(
        lambda: Net(
            lambda m, x: (x @ m.weights[0]).tanh() @ m.weights[1], weights=nn.ParameterList([matrix(), matrix()])
        ),
        vectors,
    ),
    "parameter dict": Kind(
        lambda: Net(lambda m, x: x @ m.weights["in"], weights=nn.ParameterDict({"in": matrix()})), vectors
    ),
    "module dict": Kind(
        lambda: Net(
            lambda m, x: m.parts["out"](m.parts["in"](x)), parts=nn.ModuleDict({"in": linear(), "out": linear()})
        ),
        vectors,
    ),
    "lists of lists": Kind(
        lambda: Net(
            lambda m, x: residual((block for stage in m.stages for block in stage), x),
            stages=nn.ModuleList(nn.ModuleList([mlp(), linear()]) for _ in range(2)),
        ),
        vectors,
    ),
    "complex": Kind(
        lambda: Net(
            lambda m, x: torch.view_as_real(x.to(torch.complex128) @ m.weight),
            weight=nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64)),
        ),
        vectors,
    ),
    "owns and calls": Kind(owns_and_calls, vectors),
    "nested units": Kind(
        lambda: Net(lambda m, x: residual(m.blocks, x), blocks=nn.ModuleList([owns_and_calls(), owns_and_calls()])),
        vectors,
    ),
    "recursive": Kind(lambda: recursive(2), vectors),
    "unused layer": Kind(lambda: Net(lambda m, x: m.used(x), used=linear(), unused=linear()), vectors),
    "alternating branches": Kind(alternates, vectors),
    "routed samples": Kind(lambda: Net(routed, inner=linear(), branch=linear()), vectors),
    "mixed dtypes": Kind(lambda: Net(single_among_double, inner=linear(), single=matrix(WIDTH)), vectors),
    # parametrizations and hooks
    "weight norm": Kind(lambda: nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), linear()), vectors),
    "legacy weight norm": Kind(lambda: nn.Sequential(legacy_weight_norm(linear()), nn.Tanh(), linear()), vectors),
    "gradient hook": Kind(lambda: hooked(nn.Sequential(linear(), linear())), vectors),
    # what goes in and out
    "list and dict arguments": Kind(
        lambda: Net(filled, blocks=nn.ModuleList(Net(fills_a_list, inner=linear()) for _ in range(2))), vectors
    ),
    "dict output": Kind(lambda: Net(lambda m, x: {"a": m.a(x), "rest": [m.b(x)]}, a=linear(), b=linear()), vectors),
    "dataclass output": Kind(
        lambda: Net(
            lambda m, x: m.block(x).logits,
            block=Net(lambda m, x: Output(hidden=x, logits=m.inner(x) @ m.weight), inner=linear(), weight=matrix()),
        ),
        vectors,
    ),
    "unused output": Kind(
        lambda: Net(
            lambda m, x: m.head(m.block(x)[0]), block=Net(lambda m, x: (m.a(x), m.a(x)), a=linear()), head=linear()
        ),
        vectors,
    ),
    "view scaled in place": Kind(lambda: Net(in_place_scaling, linear=linear()), sequences),
    "arguments changed in place": Kind(
        lambda: Net(
            lambda m, x: m.blocks[1](x=m.blocks[0](x=m.start(x) * 1)),
            start=linear(),
            blocks=nn.ModuleList(Net(lambda m, x: x.add_(m.inner(x.tanh())), inner=linear()) for _ in range(2)),
        ),
        vectors,
    ),
    "view of a view changed in place": Kind(
        lambda: Net(
            lambda m, x: _through(m.block, m.start(x) * 1),
            start=linear(),
            block=Net(lambda m, x: x[:, :].add_(m.inner(x.tanh())), inner=linear()),
        ),
        vectors,
    ),
    "losses kept on blocks": Kind(
        lambda: Net(
            lambda m, x: m.blocks[1](m.blocks[0](x)) + m.blocks[0].loss + m.blocks[1].loss,
            blocks=nn.ModuleList(Net(keeps_a_loss, a=linear(), b=linear()) for _ in range(2)),
        ),
        vectors,
    ),
    "in-place relu": Kind(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), sequences),
    # checkpoints within
    "checkpointed": Kind(lambda: checkpointed(False, mlp(), mlp(), mlp()), vectors),
    "checkpointed reentrantly": Kind(lambda: checkpointed(True, mlp(), mlp(), mlp()), vectors),
    "checkpointed nested units": Kind(lambda: checkpointed(False, owns_and_calls(), recursive(1)), vectors),
    "reentrantly checkpointed nested units": Kind(lambda: checkpointed(True, owns_and_calls(), recursive(1)), vectors),
    "checkpointed shared block": Kind(lambda: checkpointed(False, *[mlp()] * 2), vectors),
    "reentrantly checkpointed shared block": Kind(lambda: checkpointed(True, *[mlp()] * 2), vectors),
}


def double(model: nn.Module) -> nn.Module:
    """`model` in float64; complex parameters stay complex, and one called "single" stays float32."""
    for name, parameter in model.named_parameters():
        if not name.endswith("single"):
            parameter.data = parameter.data.to(torch.complex128 if parameter.is_complex() else torch.float64)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.float64)
    return model
