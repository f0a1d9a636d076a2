"""Check and time `hopper_backward` on a Hopper GPU, without the Hopper forward: O and L come from the Triton back end.

    PYTHONPATH=. python3 scratch/hopper_backward_check.py                 # every group, each in a process with a time-out
    PYTHONPATH=. python3 scratch/hopper_backward_check.py --group time    # one group, in this process
"""

import argparse
import random
import statistics
import subprocess
import sys
import time

import torch
import triton

from cs336_systems.attention.api import flash_attention
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.hopper.backward import hopper_backward

DEVICE = "cuda"
NAMES = ("grad_q", "grad_k", "grad_v")
worst = {}


def inputs(batch, heads, kv_heads, sq, sk, dim, dtype, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)

    return (
        draw(batch, heads, sq, dim), draw(batch, kv_heads, sk, dim), draw(batch, kv_heads, sk, dim),
        draw(batch, heads, sq, dim),
    )  # fmt: skip


def forward(q, k, v, causal):
    with torch.no_grad():
        return flash_attention(q, k, v, is_causal=causal, backend="triton", return_lse=True, enable_gqa=True)


def check(label, q, k, v, do, causal, oracle=None):
    """One case against the contract; prints the label first, so that a hang names its case."""
    print(f"... {label}", flush=True)
    scale = q.shape[-1] ** -0.5
    o, lse = forward(q, k, v, causal)
    grads = hopper_backward(q, k, v, o, lse, do, None, causal, scale, "")
    torch.cuda.synchronize()
    oracle = oracle or compute_oracle(q, k, v, do, is_causal=causal)
    errors = contract_errors(oracle, dict(zip(NAMES, grads)))
    for x, grad in zip((q, k, v), grads):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous(), (label, grad.shape, grad.stride())
    for name, error in errors.items():
        worst[name] = max(worst.get(name, 0.0), error)
    if not all(error <= 1 for error in errors.values()):
        print(f"WRONG {label}: error over bound {errors}", flush=True)
        return False
    return True


def lengths(dim):
    good = True
    for length in range(1, 301):
        for causal in (True, False):
            q, k, v, do = inputs(1, 2, 2, length, length, dim, torch.bfloat16, length)
            good &= check(f"S={length} causal={causal} d={dim}", q, k, v, do, causal)
    return good


def unequal(dim):
    good = True
    sizes = (1, 2, 63, 64, 65, 127, 128, 129, 200, 256, 300, 513)
    for sq in sizes:
        for sk in sizes:
            for causal in (True, False):
                q, k, v, do = inputs(2, 4, 2, sq, sk, dim, torch.bfloat16, sq * 1000 + sk)
                good &= check(f"Sq={sq} Sk={sk} causal={causal} d={dim} group 2", q, k, v, do, causal)
    return good


def shapes():
    good = True
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (1, 8, 16, 33, 40, 59, 64, 80, 96, 111, 128) if dtype == torch.bfloat16 else (40, 64, 111, 128):
            for causal in (True, False):
                for sq, sk in ((257, 257), (256, 384)):
                    q, k, v, do = inputs(2, 4, 4, sq, sk, dim, dtype)
                    good &= check(f"{dtype} d={dim} Sq={sq} Sk={sk} causal={causal}", q, k, v, do, causal)
        for dim in (64, 128):
            for heads, kv_heads, causal in ((8, 1, True), (6, 2, True), (6, 2, False), (7, 7, True)):
                if dtype == torch.bfloat16:
                    q, k, v, do = inputs(3, heads, kv_heads, 640, 512, dim, dtype)
                    good &= check(f"{dtype} d={dim} heads={heads}/{kv_heads} causal={causal}", q, k, v, do, causal)
            for length in (1024, 1025, 4096, 4001):
                for causal in (True, False):
                    q, k, v, do = inputs(1, 2, 2, length, length, dim, dtype)
                    good &= check(f"{dtype} d={dim} S={length} causal={causal}", q, k, v, do, causal)
    return good


def many_heads():
    """More batch and heads than a grid's second dimension has; offsets past 2^31 elements."""
    good = True
    q, k, v, do = inputs(1100, 64, 64, 8, 8, 64, torch.bfloat16)
    o, lse = forward(q, k, v, True)
    grads = hopper_backward(q, k, v, o, lse, do, None, True, 0.125, "")
    part = slice(1090, 1100)
    oracle = compute_oracle(q[part], k[part], v[part], do[part], is_causal=True)
    errors = contract_errors(oracle, dict(zip(NAMES, (x[part] for x in grads))))
    print("70,400 heads", errors, flush=True)
    good &= all(error <= 1 for error in errors.values())
    del q, k, v, do, o, lse, grads
    base = torch.empty(2**31 + 2**28, device=DEVICE, dtype=torch.bfloat16)
    wide = base.view(1, 2, -1, 64)[:, :, -512:]  # head 1 starts past 2^30 elements, its last rows past 2^31
    small = inputs(1, 2, 2, 512, 512, 64, torch.bfloat16)
    wide.copy_(small[0])
    for name, args in (("q", (wide, *small[1:])), ("k", (small[0], wide, *small[2:])), ("dO", (*small[:3], wide))):
        good &= check(f"{name} past 2^31 elements", *args, True)
    del base, wide
    torch.cuda.empty_cache()
    return good


def strides():
    good = True
    for dim in (64, 128):
        for causal in (True, False):
            packed = torch.randn(2, 300, 3, 4, dim, device=DEVICE, dtype=torch.bfloat16)
            q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
            do = torch.randn(2, 300, 4, dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
            good &= check(f"fused qkv d={dim} causal={causal}", q, k, v, do, causal)
            ones = torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(2, 4, 300, dim)
            good &= check(f"expanded dO d={dim} causal={causal}", q, k, v, ones, causal)
            column = torch.randn(2, 4, dim, 300, device=DEVICE, dtype=torch.bfloat16).mT
            good &= check(f"transposed q, dO d={dim} causal={causal}", column, k, v, column, causal)
            odd = torch.randn(2 * 4 * 300 * dim + 1, device=DEVICE, dtype=torch.bfloat16)[1:].view(2, 4, 300, dim)
            good &= check(f"offset by one element d={dim} causal={causal}", odd, odd, odd, odd, causal)
            # the gradient of L: dS gains dL * P, that is delta loses dL
            q, k, v, do = inputs(2, 4, 4, 300, 300, dim, torch.bfloat16)
            o, lse = forward(q, k, v, causal)
            dl = torch.randn(2, 300, 4, device=DEVICE).transpose(1, 2)
            ours = hopper_backward(q, k, v, o, lse, do, dl, causal, dim**-0.5, "")
            leaves = [x.float().requires_grad_() for x in (q, k, v)]
            scores = leaves[0] @ leaves[1].mT * dim**-0.5
            if causal:
                scores = scores.masked_fill(torch.ones(300, 300, device=DEVICE).tril() == 0, -torch.inf)
            exact = torch.autograd.grad(
                [scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)], leaves, [do.float(), dl]
            )  # fmt: skip
            errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(ours, exact)]
            print(f"gradient of L d={dim} causal={causal}: relative errors {errors}", flush=True)
            good &= all(error < 1e-2 for error in errors)
    return good


def hard():
    """Outliers, and scores around -1e5 with a ragged last key tile, whose missing keys score 0."""
    good = True
    for dim in (64, 128):
        for sq, sk in ((256, 256), (300, 300), (200, 129)):
            for causal in (True, False):
                q, k, v, do = inputs(1, 2, 2, sq, sk, dim, torch.bfloat16)
                spikes = [x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 1e-3) for x in (q, k, v)]
                good &= check(f"outliers d={dim} {sq} {sk} causal={causal}", *spikes, do, causal)
                for sign in (1, -1):
                    offset = (1e5 * dim**0.5) ** 0.5
                    q2, k2 = q.clone(), k.clone()
                    q2[..., 0], k2[..., 0] = offset, sign * offset
                    o, lse = forward(q2, k2, v, causal)
                    grads = hopper_backward(q2, k2, v, o, lse, do, None, causal, dim**-0.5, "")
                    finite = all(x.isfinite().all().item() for x in grads)
                    print(f"scores around {sign}e5 d={dim} {sq} {sk} causal={causal}: finite {finite}", flush=True)
                    good &= finite
    return good


def repeats():
    good = True
    for dim in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            for causal in (True, False):
                for sq, sk, heads, kv_heads in ((1024, 1024, 16, 16), (1000, 777, 16, 4)):
                    q, k, v, do = inputs(2, heads, kv_heads, sq, sk, dim, dtype)
                    o, lse = forward(q, k, v, causal)
                    first = hopper_backward(q, k, v, o, lse, do, None, causal, dim**-0.5, "")
                    oracle = compute_oracle(q, k, v, do, is_causal=causal)
                    errors = contract_errors(oracle, dict(zip(NAMES, first)))
                    good &= all(error <= 1 for error in errors.values())
                    same, spread = True, 0.0
                    for _ in range(200):
                        again = hopper_backward(q, k, v, o, lse, do, None, causal, dim**-0.5, "")
                        same &= torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
                        spread = max(spread, (first[0].float() - again[0].float()).abs().max().item())
                    good &= contract_errors(oracle, {"grad_q": again[0]})["grad_q"] <= 1
                    good &= same
                    print(
                        f"repeats d={dim} {dtype} causal={causal} {sq}x{sk}: dK, dV bit-equal {same}, "
                        f"dQ moves by {spread:.1e} at most", flush=True,
                    )  # fmt: skip
    return good


ROWS = [
    (1, 16, 16384, 64, True), (4, 32, 4096, 64, True), (1, 32, 16384, 64, True), (1, 32, 16384, 64, False),
    (8, 16, 2048, 128, True), (2, 16, 8192, 128, True), (1, 16, 16384, 128, True), (1, 16, 16384, 128, False),
    (1, 64, 8192, 128, False), (1, 32, 32768, 128, True),
]  # fmt: skip


def milliseconds(call, repeats):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def timing():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rounds = 7
    print("shape                      cuDNN ms  ours ms   cuDNN TFLOP/s  ours   ratio  (main kernel alone)", flush=True)
    for batch, heads, length, dim, causal in ROWS:
        q, k, v, do = inputs(batch, heads, heads, length, length, dim, torch.bfloat16)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        q, k, v = (x.detach() for x in leaves)
        o, lse = forward(q, k, v, causal)
        theirs = torch.autograd.grad(out, leaves, do, retain_graph=True)
        ours = hopper_backward(q, k, v, o, lse, do, None, causal, dim**-0.5, "")
        for name, a, b in zip(NAMES, ours, theirs):
            error = ((a.float() - b.float()).norm() / b.float().norm()).item()
            if not error < 1.5e-2:
                print(f"DIFFERS from cuDNN in {name}: {error}", flush=True)
        calls = {
            "cudnn": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
            "ours": lambda: hopper_backward(q, k, v, o, lse, do, None, causal, dim**-0.5, ""),
        }
        flops = 10 * length * length * dim * heads * batch * (0.5 if causal else 1)
        repeats = max(2, min(20, int(3e13 / flops)))
        times = {name: [] for name in calls}
        for call in calls.values():
            milliseconds(call, 2)
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(milliseconds(call, repeats))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                calls["ours"]()
            torch.cuda.synchronize()
        kernels = {
            event.key.removeprefix("hopper_backward_").removesuffix("_kernel"): event.device_time
            for event in profile.key_averages()
            if "hopper_backward" in event.key
        }
        median = {name: statistics.median(x) for name, x in times.items()}
        rate = {name: flops / x / 1e9 for name, x in median.items()}
        print(
            f"{batch},{heads},{length},{dim} {'causal' if causal else 'full':6s}".ljust(26)
            + f"{median['cudnn']:8.3f} {median['ours']:8.3f}   {rate['cudnn']:8.0f} {rate['ours']:8.0f} "
            + f"{rate['ours'] / rate['cudnn']:7.3f}   {({k: round(v) for k, v in kernels.items()})} us",
            flush=True,
        )
        del out, theirs, ours, leaves, q, k, v, o, lse, do
    for batch, heads, length, dim in ((1, 16, 512, 64), (8, 16, 2048, 128), (1, 8, 1024, 64)):
        q, k, v, do = inputs(batch, heads, heads, length, length, dim, torch.bfloat16)
        o, lse = forward(q, k, v, True)
        hopper_backward(q, k, v, o, lse, do, None, True, dim**-0.5, "")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            hopper_backward(q, k, v, o, lse, do, None, True, dim**-0.5, "")
        host = (time.perf_counter() - start) / 200
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / 200
        print(f"host time of a backward call at {batch},{heads},{length},{dim}: {host * 1e6:.0f} us (GPU {wall * 1e6:.0f})")
    return True


GROUPS = {
    "lengths-64": lambda: lengths(64), "lengths-128": lambda: lengths(128), "unequal-64": lambda: unequal(64),
    "unequal-128": lambda: unequal(128), "shapes": shapes, "strides": strides, "hard": hard, "heads": many_heads,
    "repeats": repeats, "time": timing,
}  # fmt: skip
TIMEOUT_S = 70


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", choices=GROUPS)
    parser.add_argument("--skip", default="", help="groups not to run, with commas")
    arguments = parser.parse_args()
    if arguments.group:
        random.seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = arguments.group != "time"  # new tensors are NaN
        if arguments.group == "time":
            torch.use_deterministic_algorithms(False)
        else:
            assert torch.ones(1, device=DEVICE).new_empty(100_000).isnan().all(), "outputs are not poisoned"
        good = GROUPS[arguments.group]()
        torch.cuda.synchronize()
        print(f"worst error over bound: {({k: round(v, 3) for k, v in worst.items()})}", flush=True)
        sys.exit(0 if good else 1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    for group in GROUPS:
        if group in arguments.skip.split(","):
            continue
        start = time.monotonic()
        command = [sys.executable, __file__, "--group", group]
        try:
            result = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
            text, code = (result.stdout + result.stderr).decode(), result.returncode
        except subprocess.TimeoutExpired as error:
            text, code = (error.stdout or b"").decode() + "\nHANGS (time-out)", -1
        lines = text.strip().splitlines()
        shown = [line for line in lines if not line.startswith("...")]
        if code:
            shown = [line for line in lines if line.startswith("... ")][-1:] + shown[:8] + ["[...]"] + shown[-12:]
        print(f"== {group}: {'OK' if code == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
        print("\n".join("   " + line for line in shown), flush=True)


if __name__ == "__main__":
    main()
