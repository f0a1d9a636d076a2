"""Times how a partial tile's bits are applied, beside dense attention and FlexAttention; then shared keys.

    PYTHONPATH=. python3 scratch/mask_variants.py            # bf16, one GPU, about a minute
    PYTHONPATH=. python3 scratch/mask_variants.py --no-flex

CS336_MASK_SELECT is set between calls: `and` tests a bit a score, `r2p` several at a time, `early` is `r2p` with the
words read before the matmuls. Each variant is first compared with the oracle in float64.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from cs336_systems.attention import BlockMask, attention_reference, flash_attention
from cs336_systems.attention.dynamic import choose_keys, mask_chosen, shared_keys_attention
from cs336_systems.device import available_backends, get_device_info

VARIANTS = ("and", "r2p", "early")
HEADS, SEQLEN = 16, 16384


def use(variant: str) -> None:
    os.environ["CS336_MASK_SELECT"] = variant


def inputs(seqlen: int, head_dim: int, heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda: torch.randn(1, heads, seqlen, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)  # noqa: E731
    return [*(make().requires_grad_() for _ in range(3)), make()]


def random_mask(seqlen: int, density: float) -> BlockMask:
    generator = torch.Generator("cuda").manual_seed(1)
    return BlockMask.from_dense(torch.rand(seqlen, seqlen, device="cuda", generator=generator) < density)


def both(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    output = attend(q, k, v)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), grad)]


def check(variant: str) -> float:
    """Largest relative error (Frobenius) of the output and the gradients; AssertionError from 1 % on."""
    worst = 0.0
    for head_dim in (64, 128):
        for seqlen, density in ((1024, 0.1), (1000, 0.5), (1000, 0.002)):
            q, k, v, grad = inputs(seqlen, head_dim, heads=2)
            mask = random_mask(seqlen, density)
            dense = mask.to_dense()
            exact = both(
                lambda q, k, v: attention_reference(q, k, v, mask=dense),  # noqa: B023
                *(x.detach().double().requires_grad_() for x in (q, k, v)), grad.double(),
            )  # fmt: skip
            use(variant)
            ours = both(lambda q, k, v: flash_attention(q, k, v, block_mask=mask, backend="triton"), q, k, v, grad)  # noqa: B023
            worst = max(worst, *(float((x.double() - y).norm() / y.norm()) for x, y in zip(ours, exact)))
    assert worst < 0.01, (variant, worst)
    return worst


def medians(calls: dict[str, Callable[[], object]], rounds: int = 9, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of each call: all of them in turn, `rounds` times, so that the clock's drift is shared."""
    for call in calls.values():
        call()
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / repeats)
    return {name: statistics.median(values) for name, values in samples.items()}


def under(variant: str, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        use(variant)
        return call()

    return run


def backends() -> list[str]:
    available = available_backends(get_device_info("cuda"))
    return [name for name in ("triton", "hopper") if available[name] == "ok"]


def time_tokens(head_dim: int, density: float, flex: Callable[..., Tensor] | None) -> None:
    q, k, v, grad = inputs(SEQLEN, head_dim)
    mask = random_mask(SEQLEN, density)
    calls: dict[str, Callable[..., Tensor]] = {
        name: lambda q, k, v, name=name: flash_attention(q, k, v, backend=name) for name in backends()
    }
    for variant in VARIANTS:
        calls[variant] = lambda q, k, v: flash_attention(q, k, v, block_mask=mask, backend="triton")
    if flex is not None:
        flex_mask = mask.to_flex()
        calls["flex"] = lambda q, k, v: flex(q, k, v, block_mask=flex_mask)

    def forward(name: str) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return calls[name](q, k, v)

        return under(name, run) if name in VARIANTS else run

    def backward(name: str) -> Callable[[], object]:
        output = calls[name](q, k, v)
        run = lambda: torch.autograd.grad(output, (q, k, v), grad, retain_graph=True)  # noqa: E731
        return under(name, run) if name in VARIANTS else run

    for mode, make in (("forward", forward), ("backward", backward)):
        times = medians({name: make(name) for name in calls})
        text = " ".join(f"{name}={ms:.3f} ({times['triton'] / ms:.3f}x)" for name, ms in times.items())
        print(f"tokens:{density:g} d={head_dim} {mode:8} ms (speed over dense triton): {text}", flush=True)


def time_shared() -> None:
    seqlen, num_keys = 32768, 1024
    q, k, v, grad = inputs(seqlen, 128)
    bias = torch.rand(1, 1, seqlen, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    positions, chosen = choose_keys(bias, num_keys)
    gathered = [x.detach().gather(2, positions[..., None].expand(1, HEADS, -1, 128)) for x in (k, v)]
    mask = mask_chosen(positions, chosen, seqlen, seqlen, is_causal=True)

    def shared() -> Tensor:
        return shared_keys_attention(q, k, v, bias, num_keys, is_causal=True, backend="triton")

    def causal() -> Tensor:
        return flash_attention(q, k, v, is_causal=True, backend="triton")

    times = medians({
        "choose": lambda: choose_keys(bias, num_keys),
        "choose+mask": lambda: mask_chosen(*choose_keys(bias, num_keys), seqlen, seqlen, is_causal=True),
        "attend": lambda: flash_attention(q.detach(), *gathered, block_mask=mask, backend="triton"),
        "shared": shared, "shared_fwd_bwd": lambda: torch.autograd.grad(shared(), (q, k, v), grad),
        "causal": causal, "causal_fwd_bwd": lambda: torch.autograd.grad(causal(), (q, k, v), grad),
    }, repeats=1)  # fmt: skip
    print("shared keys, S=32768 W=1024, ms:", " ".join(f"{name}={ms:.3f}" for name, ms in times.items()))
    ratios = (times["causal"] / times["shared"], times["causal_fwd_bwd"] / times["shared_fwd_bwd"])
    print("causal over shared: forward {:.2f}x, forward + backward {:.2f}x (gate 6)".format(*ratios))


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:  # in a process of its own: fills Triton's cache
        if sys.argv[2] == "flex":
            q, k, v, grad = inputs(SEQLEN, 128)
            mask = random_mask(SEQLEN, 0.1).to_flex()
            compiled = torch.compile(torch.nn.attention.flex_attention.flex_attention, dynamic=False)
            both(lambda q, k, v: compiled(q, k, v, block_mask=mask), q, k, v, grad)
            return
        use(sys.argv[2])
        for head_dim in (64, 128):
            q, k, v, grad = inputs(SEQLEN, head_dim)
            mask = random_mask(SEQLEN, 0.1)
            both(lambda q, k, v: flash_attention(q, k, v, block_mask=mask, backend="triton"), q, k, v, grad)  # noqa: B023
        return
    with_flex = "--no-flex" not in sys.argv
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}")
    children = [
        subprocess.Popen([sys.executable, __file__, "--compile", name])
        for name in (*VARIANTS, *(["flex"] if with_flex else []))
    ]
    assert not any([child.wait() for child in children])
    for variant in VARIANTS:
        print(f"{variant}: largest relative error of output and gradients {check(variant):.2e}", flush=True)
    flex = torch.compile(torch.nn.attention.flex_attention.flex_attention, dynamic=False) if with_flex else None
    for head_dim, density in ((128, 0.1), (128, 0.5), (64, 0.1)):
        time_tokens(head_dim, density, flex if (head_dim, density) == (128, 0.1) else None)
    use("r2p")
    time_shared()


if __name__ == "__main__":
    main()
