"""Models that the distributed checks train, and the comparison with one-process training."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 4  # of training in a check


class Toy(nn.Module):
    """Linear layers and a norm, with a frozen parameter and two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 20)
        self.norm = nn.LayerNorm(20)
        self.shared = nn.Linear(20, 20, bias=False)
        self.again = nn.Linear(20, 20, bias=False)
        self.again.weight = self.shared.weight
        self.last = nn.Linear(20, 5)
        self.fixed = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.first(x)))
        x = torch.tanh(self.again(torch.relu(self.shared(x))))
        return self.last(x) * self.fixed


class Stack(nn.Module):
    """Eight equal weights of 40 kB with a tanh after each, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(100, 100, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def seeded(build: Any, seed: int = 0) -> Any:
    """Return the module that `build` makes after PyTorch's random generator is seeded."""
    torch.manual_seed(seed)
    return build()


def regression_batch(step: int, inputs: int = 10, outputs: int = 5) -> tuple[Tensor, Tensor]:
    """Return eight rows of inputs and outputs for a step, the same in every process."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, inputs, generator=generator), torch.randn(8, outputs, generator=generator)


def part(batch: tuple[Tensor, Tensor], rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a batch that belong to `rank`."""
    return batch[0].chunk(num_ranks)[rank], batch[1].chunk(num_ranks)[rank]


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of `model` on a batch of inputs and outputs."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# Layers of the kind that FSDP shards


class Linear(nn.Module):
    """y = W x without a bias, like the course's layer."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Embedding(nn.Module):
    """A lookup of one row per token, like the course's layer."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """An RMSNorm that computes in float32 and returns its input's dtype, like the course's."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight * wide).to(x.dtype)


def layer_classes() -> tuple[type, type, type]:
    """Return the course's Linear, Embedding and RMSNorm, since FSDP may decide by class.

    If no `cs336_basics` is found, they are the ones above. If one is found and cannot be imported,
    the error is raised, since the code under test looks for its layers.
    """
    if importlib.util.find_spec("cs336_basics") is None:
        return Linear, Embedding, RMSNorm
    model = importlib.import_module("cs336_basics.model")
    return model.Linear, model.Embedding, model.RMSNorm


# Functions that a model's forward calls with (name, tensor). Hooks would not do, since a wrapper
# may replace modules.
OBSERVERS: list[Callable[[str, Tensor], None]] = []


def tell(name: str, tensor: Tensor) -> None:
    """Call every function in OBSERVERS with the name and the tensor."""
    for observer in OBSERVERS:
        observer(name, tensor)


class Language(nn.Module):
    """Embedding, norms and three Linear layers, in the order of the course's FSDP test."""

    def __init__(self) -> None:
        super().__init__()
        linear, embedding, norm = layer_classes()
        self.embedding = embedding(100, 64)
        self.norm1 = norm(64)
        self.linear1 = linear(64, 128)
        self.norm2 = norm(128)
        self.linear2 = linear(128, 64)
        self.lm_head = linear(64, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear1(self.norm1(self.embedding(tokens)))
        tell("linear1", x)
        x = torch.relu(x)
        return self.lm_head(self.linear2(self.norm2(x)))


class Deep(nn.Module):
    """Sixteen equal layers that FSDP shards, so that gathered weights can be counted in layers."""

    LAYERS, WIDTH = 16, 128

    def __init__(self) -> None:
        super().__init__()
        linear = layer_classes()[0]
        self.layers = nn.ModuleList(linear(self.WIDTH, self.WIDTH) for _ in range(self.LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            tell(f"before {number}", x)
            x = torch.tanh(layer(x))
            tell(f"after {number}", x)
        return x


def sharded_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of every layer whose weight the handout shards."""
    linear, embedding, _ = layer_classes()
    for name, module in model.named_modules():
        if isinstance(module, linear | embedding):
            yield name, module


def token_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return eight sequences of six tokens and eight targets for a step, the same everywhere."""
    generator = torch.Generator().manual_seed(200 + step)
    tokens = torch.randint(100, (8, 6), generator=generator)
    return tokens, torch.randint(100, (8,), generator=generator)


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of the last position's logits, computed in float32."""
    return nn.functional.cross_entropy(model(batch[0])[:, -1].float(), batch[1])


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference between two sets of parameters, and the name of that parameter.

    `ours` may have more names. A NaN counts as an infinite difference.
    """
    missing = [name for name in theirs if name not in ours]
    assert not missing, f"{', '.join(missing)} is missing: the names are {', '.join(sorted(ours))}"
    for name, expected in theirs.items():
        shape = tuple(ours[name].shape)
        assert shape == expected.shape, f"{name} has shape {shape}, not {tuple(expected.shape)}"
    differences = {name: (ours[name].detach() - theirs[name].detach()).abs() for name in theirs}
    return max((x.nan_to_num(nan=math.inf).max().item(), name) for name, x in differences.items())


def assert_like_one_process(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    start: dict[str, Tensor],
    step: int,
    num_ranks: int,
    bound: float,
) -> None:
    """Assert that the parameters `found` after `step` are one process's within `bound`.

    After step 0 the message names a common mistake if it explains the difference: with a wrong
    scale of gradients SGD moves the parameters from `start` by a multiple of the right step.
    """
    error, name = largest_difference(found, expected)
    if error <= bound:
        return
    causes = {
        num_ranks: "gradients were summed and not averaged",
        1 / num_ranks: "gradients were averaged twice",
        0: "gradients were lost",
    }
    hint = ""
    for factor, cause in causes.items() if step == 0 else ():
        wrong = {
            name: start[name] + factor * (x.detach() - start[name]) for name, x in expected.items()
        }
        if largest_difference(found, wrong)[0] < error / 4:
            hint = f", as if {cause}"
    raise AssertionError(
        f"{name} differs by {error:.2g} from one process's after step {step + 1}{hint}"
    )


def equal_on_all_ranks(tensor: Tensor) -> bool:
    """Return whether `tensor` has the same values on all ranks; every rank must call it."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return all(torch.equal(tensors[0], other) for other in tensors)
