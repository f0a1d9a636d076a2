"""Kinds of modules that people train, each as small as shows its trait, for comparisons of wrappers
with one process.

    kind = KINDS["tied embedding and head"]
    model, inputs = kind.build(), kind.inputs(generator, 4)     # float64; the batch is the inputs' first dimension

A kind's output for a sample depends on no other sample of the batch, so that the mean of ranks is
the whole batch's. Widths are odd: no weight divides evenly among ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM

WIDTH, HIDDEN, VOCABULARY, LENGTH = 5, 7, 11, 3
Inputs = Callable[[torch.Generator, int], tuple[Tensor, ...]]


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


@dataclass(frozen=True)
class Kind:
    """`build` makes a model from the current seed; `inputs(generator, samples)` are its arguments."""

    build: Callable[[], nn.Module]
    inputs: Inputs = vectors


class Net(nn.Module):
    """Parts by name, and a function of (module, *inputs) for a forward."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, value in parts.items():
            setattr(self, name, value)
        self.run = run

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def of(run: Callable[..., Any], inputs: Inputs = vectors, **parts: Callable[[], Any]) -> Kind:
    """The kind of a `Net` whose parts are made by these."""
    return Kind(lambda: Net(run, **{name: make() for name, make in parts.items()}), inputs)


# Parts


def linear(inputs: int = WIDTH, outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


def embedding(**options: Any) -> nn.Embedding:
    return nn.Embedding(VOCABULARY, WIDTH, **options)


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(WIDTH, HIDDEN), nn.GELU(), linear(HIDDEN, WIDTH))


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (WIDTH, WIDTH))) / 2)


def several(count: int, make: Callable[[], nn.Module]) -> Callable[[], nn.ModuleList]:
    return lambda: nn.ModuleList(make() for _ in range(count))


def residual(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        for inner in block if isinstance(block, nn.ModuleList) else [block]:
            x = x + inner(x)
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


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 1, batch_first=True)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 3, 10, dropout=0.0, batch_first=True)


OWNS_AND_CALLS = of(lambda m, x: torch.tanh(m.inner(x)) @ m.weight, inner=linear, weight=matrix)
# a matrix is used after a child has run: a unit within which another runs
owns_and_calls = OWNS_AND_CALLS.build


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


def routed(model: Any, x: Tensor) -> Tensor:
    """Has a branch for some samples, so that a rank may use it alone."""
    x, chosen = model.inner(x), x[:, :1] > 0.5
    return torch.where(chosen, model.branch(x), x) if chosen.any() else x


def single_among_double(model: Any, x: Tensor) -> Tensor:
    """The roundings of a float32 weight reach no other: it has a gradient, and no effect."""
    single = model.single.double()
    return model.inner(x) + (single - single.detach())


class FrozenStatistics(nn.BatchNorm1d):
    """Batch normalization as fine-tuning uses it, by running statistics: those of a batch differ
    between ranks.
    """

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


def language_model(model: Any, t: Tensor) -> Tensor:
    return model.head(residual(model, model.embedding(t)))


def tied_language_model(blocks: int) -> Kind:
    untied = of(language_model, tokens, **language_parts(blocks))
    return Kind(lambda: tie(untied.build(), to="head", from_="embedding"), tokens)


def language_parts(blocks: int) -> dict[str, Callable[[], nn.Module]]:
    head = partial(linear, WIDTH, VOCABULARY, bias=False)
    return {"embedding": embedding, "blocks": several(blocks, mlp), "head": head}


def in_place_scaling(model: Any, x: Tensor) -> Tensor:
    logits = model.linear(x)  # with a bias and three dimensions a view of addmm's output
    logits /= 2.0
    return logits


def keeps_a_loss(model: Any, x: Tensor) -> Tensor:
    output = model.a(x.tanh())
    # behind the output, not part of it
    model.loss = model.b(output.tanh()).square().mean(-1, keepdim=True)
    return output


class Slotted:
    """Keeps a tensor where `vars()` shows none."""

    __slots__ = ("loss",)


LOSSES: list[Tensor] = []  # of the blocks of a forward, in no module


def keeps_losses_elsewhere(model: Any, x: Tensor) -> Tensor:
    """Each of its losses leaves it by another way than its output: an attribute, a slot, a closure,
    a global list.
    """
    losses = [model.b(x).square().mean(-1) * factor for factor in (1.0, 0.5, 0.25, 0.125)]
    model._loss, model.slotted.loss = losses[:2]
    model.ask = lambda: losses[2]
    LOSSES.append(losses[3])
    return model.a(x)


def gathers_losses(model: Any, x: Tensor) -> list[Tensor]:
    LOSSES.clear()
    for block in model.blocks:
        x = x + block(x)
    kept = [
        loss for block in model.blocks for loss in (block._loss, block.slotted.loss, block.ask())
    ]
    return [x, *kept, *LOSSES]


class KeepsItsWeight(torch.autograd.Function):
    """A linear map that keeps its weight past `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient @ ctx.weight, gradient.t() @ ctx.x


def transposed_linear() -> nn.Module:
    layer = linear(WIDTH, HIDDEN)
    layer.weight = nn.Parameter(torch.randn(WIDTH, HIDDEN).t())
    return layer


class LowRank(nn.Module):
    """The update of a LoRA adapter, as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = matrix(2, WIDTH), matrix(WIDTH, 2)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def adapted() -> nn.Module:
    layer = linear()
    register_parametrization(layer, "weight", LowRank())
    layer.parametrizations.weight.original.requires_grad_(False)  # type: ignore[union-attr, operator]
    return layer


def selectively_checkpointed(model: Any, x: Tensor) -> Tensor:
    """Keeps the results of matmuls, and computes the rest once more."""

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_matmul = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(model.inner, x, use_reentrant=False, context_fn=contexts)


def saved_on_cpu(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model.inner(x)


def yields(model: Any, x: Tensor) -> Iterator[Tensor]:
    """Computes when its caller asks, after it was called."""
    for layer in (model.a, model.b):
        x = layer(x).tanh()
        yield x @ model.weight


def _through(block: nn.Module, x: Tensor) -> Tensor:
    block(x[:])
    return x


KINDS: dict[str, Kind] = {
    # layers
    "linear without bias": Kind(lambda: linear(bias=False)),
    "one output": Kind(lambda: nn.Sequential(linear(WIDTH, 1), nn.Tanh(), linear(1, 1))),
    "mlp": Kind(mlp),
    "conv2d": Kind(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), linear(27, 3)), images
    ),
    "layer norm": Kind(
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.LayerNorm(WIDTH)), sequences
    ),
    "batch norm": Kind(lambda: nn.Sequential(linear(), FrozenStatistics(WIDTH), linear())),
    "padding index": Kind(lambda: nn.Sequential(embedding(padding_idx=2), linear()), tokens),
    "max norm": Kind(lambda: nn.Sequential(embedding(max_norm=0.5), linear()), tokens),
    "sparse embedding": Kind(lambda: nn.Sequential(embedding(sparse=True), linear()), tokens),
    "lstm": of(
        lambda m, x: m.rnn(x)[0], sequences, rnn=lambda: nn.LSTM(WIDTH, 4, batch_first=True)
    ),
    "gru cell": of(cell_loop, sequences, cell=lambda: nn.GRUCell(WIDTH, WIDTH)),
    "multihead attention": of(lambda m, x: m.attention(x, x, x)[0], sequences, attention=attention),
    "attention in a list": of(
        lambda m, x: m.blocks[0](x, x, x)[0], sequences, blocks=several(1, attention)
    ),
    "encoder": Kind(
        lambda: nn.Sequential(
            linear(WIDTH, 6), nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
        ),
        sequences,
    ),
    "channels last": Kind(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten()).to(
            memory_format=torch.channels_last
        ),
        images,
    ),
    "transposed weight": Kind(lambda: nn.Sequential(transposed_linear(), nn.Tanh())),
    "function that keeps its weight": of(
        lambda m, x: m.blocks[0](x),
        blocks=several(1, of(lambda m, x: KeepsItsWeight.apply(x, m.weight), weight=matrix).build),
    ),
    # models
    "transformer": Kind(transformer, tokens),
    "one block": Kind(lambda: transformer(1), tokens),
    "tied embedding and head": tied_language_model(2),
    "tied and deep": tied_language_model(9),
    "head by the embedding's weight": of(
        lambda m, t: F.linear(m.inner(m.table(t)), m.table.weight),
        tokens,
        table=embedding,
        inner=linear,
    ),
    "tied autoencoder": of(
        lambda m, x: F.linear(m.encoder(x).tanh(), m.encoder.weight.t()),
        encoder=partial(linear, WIDTH, HIDDEN),
    ),
    "mixture of experts": of(mixture, gate=partial(linear, WIDTH, 3), experts=several(3, linear)),
    # how parameters are held
    "shared layer": of(lambda m, x: m.inner(m.inner(x).tanh()), inner=linear),
    "shared weight": Kind(
        lambda: tie(nn.Sequential(linear(), nn.Tanh(), linear()), to="2", from_="0")
    ),
    "shared block": of(residual, blocks=lambda: nn.ModuleList([mlp(), *[mlp()] * 2])),
    "frozen first": Kind(lambda: freeze(nn.Sequential(linear(), nn.Tanh(), linear()), "0")),
    "only the head trained": Kind(
        lambda: freeze(of(language_model, **language_parts(2)).build(), "embedding", "blocks"),
        tokens,
    ),
    "scalar": of(
        lambda m, x: m.inner(x) * m.scale,
        inner=linear,
        scale=lambda: nn.Parameter(torch.tensor(1.5)),
    ),
    "empty": of(lambda m, x: m.inner(x) + m.none.sum(), inner=linear, none=partial(matrix, 0, 4)),
    "own matrix": of(lambda m, x: x @ m.weight, weight=matrix),
    "buffer": of(
        lambda m, x: m.inner(x + m.shift), inner=linear, shift=lambda: nn.Buffer(torch.ones(WIDTH))
    ),
    "parameter list": of(
        lambda m, x: (x @ m.weights[0]).tanh() @ m.weights[1],
        weights=lambda: nn.ParameterList([matrix(), matrix()]),
    ),
    "parameter dict": of(
        lambda m, x: x @ m.weights["in"], weights=lambda: nn.ParameterDict({"in": matrix()})
    ),
    "module dict": of(
        lambda m, x: m.parts["out"](m.parts["in"](x)),
        parts=lambda: nn.ModuleDict({"in": linear(), "out": linear()}),
    ),
    "lists of lists": of(residual, blocks=several(2, lambda: nn.ModuleList([mlp(), linear()]))),
    "complex": of(
        lambda m, x: torch.view_as_real(x.to(torch.complex128) @ m.weight),
        weight=lambda: nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64)),
    ),
    "owns and calls": OWNS_AND_CALLS,
    "nested units": of(residual, blocks=several(2, owns_and_calls)),
    "recursive": Kind(lambda: recursive(2)),
    "unused layer": of(lambda m, x: m.used(x), used=linear, unused=linear),
    # Takes another of its branches in every second step, on all ranks alike; who trains it sets
    # `step`.
    "alternating branches": of(
        lambda m, x: m.branches[m.step % 2](x).tanh(), branches=several(2, linear), step=lambda: 0
    ),
    "routed samples": of(routed, inner=linear, branch=linear),
    "mixed dtypes": of(single_among_double, inner=linear, single=partial(matrix, WIDTH)),
    # parametrizations and hooks
    "weight norm": Kind(
        lambda: nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), linear())
    ),
    "legacy weight norm": Kind(
        lambda: nn.Sequential(legacy_weight_norm(linear()), nn.Tanh(), linear())
    ),
    "low-rank adapter": Kind(lambda: nn.Sequential(adapted(), nn.Tanh(), linear())),
    "gradient hook": Kind(lambda: hooked(nn.Sequential(linear(), linear()))),
    # what goes in and out
    "list and dict arguments": of(filled, blocks=several(2, of(fills_a_list, inner=linear).build)),
    "dict output": of(lambda m, x: {"a": m.a(x), "rest": [m.b(x)]}, a=linear, b=linear),
    "dataclass output": of(
        lambda m, x: m.block(x).logits,
        block=of(
            lambda m, x: Output(hidden=x, logits=m.inner(x) @ m.weight), inner=linear, weight=matrix
        ).build,
    ),
    "unused output": of(
        lambda m, x: m.head(m.block(x)[0]),
        block=of(lambda m, x: (m.a(x), m.a(x)), a=linear).build,
        head=linear,
    ),
    "view scaled in place": of(in_place_scaling, sequences, linear=linear),
    "arguments changed in place": of(
        lambda m, x: m.blocks[1](x=m.blocks[0](x=m.start(x) * 1)),
        start=linear,
        blocks=several(2, of(lambda m, x: x.add_(m.inner(x.tanh())), inner=linear).build),
    ),
    "view of a view changed in place": of(
        lambda m, x: _through(m.block, m.start(x) * 1),
        start=linear,
        block=of(lambda m, x: x[:, :].add_(m.inner(x.tanh())), inner=linear).build,
    ),
    "losses kept on blocks": of(
        lambda m, x: m.blocks[1](m.blocks[0](x)) + m.blocks[0].loss + m.blocks[1].loss,
        blocks=several(2, of(keeps_a_loss, a=linear, b=linear).build),
    ),
    "losses kept elsewhere": of(
        gathers_losses,
        blocks=several(
            2,
            of(keeps_losses_elsewhere, a=linear, b=linear, slotted=Slotted, ask=lambda: None).build,
        ),
    ),
    "weight returned": of(
        lambda m, x: x @ m.prompt(), prompt=of(lambda m: m.weight, weight=matrix).build
    ),
    "view of a weight returned": of(
        lambda m, x: m.inner(x + m.positions(LENGTH)[0]),
        sequences,
        positions=of(
            lambda m, count: (m.weight[:count], count), weight=partial(matrix, 4, WIDTH)
        ).build,
        inner=linear,
    ),
    "generator": of(
        lambda m, x: sum(m.blocks[0](x)),
        blocks=several(1, of(yields, a=linear, b=linear, weight=matrix).build),
    ),
    "in-place relu": Kind(
        lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), sequences
    ),
    # checkpoints within
    "checkpointed": Kind(lambda: checkpointed(False, mlp(), mlp(), mlp())),
    "checkpointed reentrantly": Kind(lambda: checkpointed(True, mlp(), mlp(), mlp())),
    "selectively checkpointed": of(
        lambda m, x: m.blocks[1](m.blocks[0](x)),
        blocks=several(2, of(selectively_checkpointed, inner=mlp).build),
    ),
    "selective checkpoints within another": Kind(
        lambda: checkpointed(
            False, *(of(selectively_checkpointed, inner=mlp).build() for _ in range(2))
        )
    ),
    "saved on the CPU": of(
        lambda m, x: m.blocks[1](m.blocks[0](x)),
        blocks=several(2, of(saved_on_cpu, inner=mlp).build),
    ),
    "checkpointed nested units": Kind(lambda: checkpointed(False, owns_and_calls(), recursive(1))),
    "reentrantly checkpointed nested units": Kind(
        lambda: checkpointed(True, owns_and_calls(), recursive(1))
    ),
    "checkpointed shared block": Kind(lambda: checkpointed(False, *[mlp()] * 2)),
    "reentrantly checkpointed shared block": Kind(lambda: checkpointed(True, *[mlp()] * 2)),
}


def double(model: nn.Module) -> nn.Module:
    """`model` in float64; complex parameters stay complex, and one called "single" stays float32."""
    for name, parameter in model.named_parameters():
        if not name.endswith("single"):
            parameter.data = parameter.data.to(
                torch.complex128 if parameter.is_complex() else torch.float64
            )
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.float64)
    return model
