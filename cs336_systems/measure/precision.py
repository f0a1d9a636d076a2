"""What low precision does, read from real runs: sums that lose digits, autocast's dtypes, an overflowing norm.

accumulate("float16", "float16")            # 9.953125 instead of 10
autocast_dtypes("cuda", "float16")          # {"fc1 output": "float16", "layer norm output": "float32", ...}
norm_in("float16", scale=300.0)             # two fifths of the squares are infinite: the output is zero
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

ADDENDS = 1000  # of the handout's sum
ADDEND = 0.01
NORM_WIDTH = 1024
NORM_EPS = 1e-5


def accumulate(accumulator: str, addend: str, *, converted: bool = False) -> float:
    """0 + 0.01 + 0.01 + ... a thousand times, one by one, in `accumulator`'s dtype.

    Each 0.01 is rounded to `addend`'s dtype first, and with `converted` brought to float32 explicitly before it is
    added; without it, in-place addition converts it to the accumulator's dtype by itself.
    """
    total = torch.tensor(0.0, dtype=getattr(torch, accumulator))
    term = torch.tensor(ADDEND, dtype=getattr(torch, addend))
    for _ in range(ADDENDS):
        total += term.to(torch.float32) if converted else term
    return float(total)


class ToyModel(nn.Module):
    """The handout's: linear, ReLU, layer norm, linear."""

    def __init__(self, in_features: int = 20, out_features: int = 5) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)

    def forward(self, x: Float[Tensor, "batch features"]) -> Float[Tensor, "batch classes"]:
        return self.fc2(self.ln(F.relu(self.fc1(x))))


AUTOCAST_TENSORS = ("parameters", "fc1 output", "layer norm output", "logits", "loss", "gradients")


def autocast_dtypes(device: str, dtype: str) -> dict[str, str]:
    """The dtype of each of `AUTOCAST_TENSORS` in a step of `ToyModel` under autocast to `dtype` on `device`."""
    model = ToyModel().to(device)
    seen: dict[str, Tensor] = {}
    for name, module in (("fc1 output", model.fc1), ("layer norm output", model.ln), ("logits", model.fc2)):
        module.register_forward_hook(lambda _module, _inputs, output, name=name: seen.__setitem__(name, output))
    x = torch.randn(8, 20, device=device)
    targets = torch.zeros(8, dtype=torch.int64, device=device)
    with torch.autocast(device, dtype=getattr(torch, dtype)):
        seen["parameters"] = model.fc1.weight
        seen["loss"] = F.cross_entropy(model(x), targets)
    seen["loss"].backward()
    gradient = model.fc1.weight.grad
    assert gradient is not None
    seen["gradients"] = gradient
    return {name: str(seen[name].dtype).removeprefix("torch.") for name in AUTOCAST_TENSORS}


@dataclass(frozen=True, kw_only=True)
class NormResult:
    """A layer norm computed in one dtype from end to end."""

    overflowing_squares: float  # the fraction of squared deviations that are infinite
    error: float  # largest deviation of the output from float64's, which itself is of order 1; NaN if one is not finite


def norm_in(dtype: str, scale: float, *, device: str = "cpu") -> NormResult:
    """Layer norm with every step rounded to `dtype`, on normal inputs of standard deviation `scale`.

    Twice as large inputs have the same normalised output, but squares four times as large: in float16 they pass 65,504
    where |x - mean| exceeds 256. bfloat16 has float32's range and loses digits instead.
    """
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(16, NORM_WIDTH, generator=generator, dtype=torch.float64)).to(device)
    expected = F.layer_norm(x, (NORM_WIDTH,), eps=NORM_EPS)
    low = x.to(getattr(torch, dtype))
    deviation = low - low.mean(dim=-1, keepdim=True)
    squares = deviation.square()
    normalized = deviation * torch.rsqrt(squares.mean(dim=-1, keepdim=True) + NORM_EPS)
    return NormResult(
        overflowing_squares=float(squares.isinf().double().mean()),
        error=float((normalized.double() - expected).abs().max()),
    )
