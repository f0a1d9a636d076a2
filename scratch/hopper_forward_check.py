"""Check and time the Hopper forward on a GPU of sm_90.

    PYTHONPATH=. python3 scratch/hopper_forward_check.py check      # every batch of shapes in a process with a time-out
    PYTHONPATH=. python3 scratch/hopper_forward_check.py time       # against SDPA's cuDNN, and what a call costs the host
    PYTHONPATH=. python3 scratch/hopper_forward_check.py batch NAME # one batch, here

Outputs start as NaN between guard zones; inputs lie between NaN. Bounds are those of DESIGN's numerical contract.
"""

import itertools
import statistics
import subprocess
import sys
import time

import torch

TIMEOUT_S = 70
GUARD = 8192
guards = []


def guarded(shape, dtype, device, fill=float("nan")):
    n = 1
    for x in shape:
        n *= x
    buffer = torch.full((n + 2 * GUARD,), fill, dtype=dtype, device=device)
    guards.append((buffer, n))
    return buffer[GUARD : GUARD + n].view(shape)


def poison():
    def new_empty(self, shape, *, dtype=None, **_):
        return guarded(tuple(shape), dtype or self.dtype, self.device)

    torch.Tensor.new_empty = new_empty


def check_guards():
    for buffer, n in guards:
        assert buffer[:GUARD].isnan().all() and buffer[GUARD + n :].isnan().all(), "wrote past the end"
    guards.clear()


def tensor(shape, dtype):
    x = guarded(shape, dtype, "cuda")
    return x.copy_(torch.randn(shape, device="cuda"))


def softmax_parts(q, k, causal, scale):
    group = q.shape[1] // k.shape[1]
    s = (q @ k.repeat_interleave(group, 1).mT) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    return s


def one(tag, q, k, v, causal, config="", scale=None, ref_dtype=torch.float64):
    from cs336_systems.attention.hopper.forward import hopper_forward

    scale = scale or q.shape[-1] ** -0.5
    out, lse = hopper_forward(q, k, v, causal, scale, config)
    torch.cuda.synchronize()
    group = q.shape[1] // k.shape[1]
    s = softmax_parts(q.to(ref_dtype), k.to(ref_dtype), causal, scale)
    exact = s.softmax(-1) @ v.to(ref_dtype).repeat_interleave(group, 1)
    exact_lse = s.logsumexp(-1)
    eager = softmax_parts(q, k, causal, scale).softmax(-1) @ v.repeat_interleave(group, 1)
    error, bound = (out - exact).abs().max().item(), 2 * (eager - exact).abs().max().item() + 1e-5
    lse_error = ((lse - exact_lse).abs() / exact_lse.abs().clamp(min=1)).max().item()
    good = error <= bound and lse_error <= 1e-3 and out.is_contiguous() and out.dtype == q.dtype
    if not good:
        print("BAD", tag, tuple(q.shape), tuple(k.shape), "causal" if causal else "full", q.dtype, config, error, bound, lse_error)
    return good


def names(head_dim):
    from cs336_systems.attention.hopper.schedule import ORDERS, SCHEDULES
    from cs336_systems.attention.tiles.config import head_tile

    return [SCHEDULES[head_tile(head_dim)].name(order) for order in ORDERS]


def batch_short(head_dim, dtype, causal):
    good = True
    for n in range(1, 301):
        q, k, v = (tensor((1, 2, n, head_dim), dtype) for _ in range(3))
        for config in names(head_dim):
            good &= one("short", q, k, v, causal, config)
        check_guards()
    return good



def batch_unequal(head_dim, dtype, causal):
    good = True
    edges = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 385, 641)
    for nq, nk in itertools.product(edges, edges):
        q, k, v = tensor((2, 4, nq, head_dim), dtype), *(tensor((2, 2, nk, head_dim), dtype) for _ in range(2))
        for config in names(head_dim):
            good &= one("unequal gqa", q, k, v, causal, config)
        check_guards()
    return good


def batch_dims(dtype):
    good = True
    for head_dim, n, causal in itertools.product((1, 7, 16, 32, 40, 59, 64, 80, 96, 111, 128), (97, 1025), (True, False)):
        q, k, v = (tensor((2, 2, n, head_dim), dtype) for _ in range(3))
        good &= one("dims", q, k, v, causal)
        check_guards()
    return good


def batch_strides(dtype):
    good = True
    for head_dim, causal in itertools.product((64, 128), (True, False)):
        shape = (2, 3, 333, head_dim)
        for kind in ("bshd", "fused", "expanded", "transposed", "offset", "sliced"):
            def make():
                if kind == "bshd":
                    return tensor((2, 333, 3, head_dim), dtype).transpose(1, 2)
                if kind == "fused":
                    return tensor((2, 333, 3, 3 * head_dim), dtype)[..., head_dim : 2 * head_dim].transpose(1, 2)
                if kind == "expanded":
                    return tensor((2, 1, 333, head_dim), dtype).expand(shape)
                if kind == "transposed":
                    return tensor((2, 3, head_dim, 333), dtype).mT
                if kind == "offset":
                    return tensor((2 * 3 * 333 * head_dim + 1,), dtype)[1:].view(shape)
                return tensor((4, 6, 666, head_dim), dtype)[::2, ::2, ::2]
            q, k, v = make(), make(), make()
            assert q.shape == shape
            good &= one("strides " + kind, q, k, v, causal)
            check_guards()
    return good


def batch_hard(dtype):
    good = True
    for head_dim, causal in itertools.product((64, 128), (True, False)):
        n = 2048
        def r():
            return torch.randn(1, 3, n, head_dim, device="cuda")
        ramp = torch.linspace(0, 40, n, device="cuda")[:, None]
        u = torch.nn.functional.normalize(torch.randn(head_dim, device="cuda"), dim=0)
        def out():
            return (r() + 10 * r() * (torch.rand(1, 3, n, head_dim, device="cuda") < 1e-3)).to(dtype)
        for config in names(head_dim):
            good &= one("ramp up", (r() * 0.3 + 3 * u).to(dtype), (r() * 0.3 + ramp * u).to(dtype), r().to(dtype), causal, config)
            good &= one("ramp down", (r() * 0.3 + 3 * u).to(dtype), (r() * 0.3 - ramp * u).to(dtype), r().to(dtype), causal, config)
            good &= one("outliers", out(), out(), out(), causal, config)
            good &= one("scale 20", (r() * 20).to(dtype), r().to(dtype), r().to(dtype), causal, config)
            same = torch.ones(1, 3, n, head_dim, device="cuda", dtype=dtype)
            good &= one("constant", same, same, same, causal, config)
            big = (r().sign() * 100).to(dtype)
            good &= one("1e5", big, big, r().to(dtype), causal, config)
        # NaN and inf stay in their rows; the rest is bit-identical
        from cs336_systems.attention.hopper.forward import hopper_forward
        q, k, v = (r().to(dtype) for _ in range(3))
        clean, clean_lse = hopper_forward(q, k, v, causal, head_dim**-0.5, "")
        for bad in (float("nan"), float("inf"), float("-inf")):
            q2 = q.clone()
            q2[0, 1, 77] = bad
            q2[0, 2, 1999, 3] = bad
            dirty, lse = hopper_forward(q2, k, v, causal, head_dim**-0.5, "")
            keep = torch.ones(1, 3, n, dtype=torch.bool, device="cuda")
            keep[0, 1, 77] = keep[0, 2, 1999] = False
            ok = torch.equal(dirty[keep], clean[keep]) and torch.equal(lse[keep], clean_lse[keep]) and dirty[0, 1, 77].isnan().all()
            if not ok:
                print("BAD confinement", bad, head_dim, causal)
            good &= bool(ok)
        # keys after the last tile that a query sees are never read
        if causal:
            k2, v2 = k.clone(), v.clone()
            k2[:, :, 1024:], v2[:, :, 1024:] = float("nan"), float("nan")
            dirty, _ = hopper_forward(q, k2, v2, True, head_dim**-0.5, "")
            first = 896 if head_dim == 64 else 1024  # where the tile with query 1024 starts
            ok = torch.equal(dirty[:, :, :first], clean[:, :, :first])
            q3 = q[:, :, :100]
            k2[:, :, 128:], v2[:, :, 128:] = float("nan"), float("nan")
            few, _ = hopper_forward(q3, k2, v2, True, head_dim**-0.5, "")
            ok &= torch.equal(few, clean[:, :, :100])
            if not ok:
                print("BAD dead tile read", head_dim)
            good &= bool(ok)
    return good


def batch_repeat(dtype):
    from cs336_systems.attention.hopper.forward import hopper_forward

    good = True
    for head_dim, causal in itertools.product((64, 128), (True, False)):
        q, k, v = (torch.randn(2, 16, 4096, head_dim, device="cuda").to(dtype) for _ in range(3))
        for config in names(head_dim):
            first = hopper_forward(q, k, v, causal, head_dim**-0.5, config)
            unequal = 0
            for _ in range(200):
                again = hopper_forward(q, k, v, causal, head_dim**-0.5, config)
                unequal += not all(torch.equal(a, b) for a, b in zip(first, again))
            if unequal:
                print("BAD repeats", head_dim, causal, config, unequal)
            good &= not unequal
    return good


def batch_large(dtype):
    from cs336_systems.attention.hopper.forward import hopper_forward

    good = True
    # offsets past 2^31 elements; batch x heads past 65,535; long rows
    for shape in ((33, 64, 8192, 128), (1100, 64, 130, 64), (17, 1024, 1024, 128)):
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        out, lse = hopper_forward(q, k, v, True, shape[-1] ** -0.5, "")
        for b, h in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 3)):
            one_out, one_lse = hopper_forward(
                *(x[b : b + 1, h : h + 1].clone() for x in (q, k, v)), True, shape[-1] ** -0.5, ""
            )
            ok = torch.equal(out[b, h], one_out[0, 0]) and torch.equal(lse[b, h], one_lse[0, 0])
            if not ok:
                print("BAD large", shape, b, h)
            good &= ok
        del q, k, v, out, lse
    good &= one("long", *(torch.randn(1, 1, 16384, 128, device="cuda").to(dtype) for _ in range(3)), True, ref_dtype=torch.float32)
    # streams, graphs
    q, k, v = (torch.randn(2, 4, 500, 128, device="cuda").to(dtype) for _ in range(3))
    expected = hopper_forward(q, k, v, True, 0.1, "")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other = hopper_forward(q, k, v, True, 0.1, "")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper_forward(q, k, v, True, 0.1, "")
    captured[0].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    ok = torch.equal(other[0], expected[0]) and torch.equal(captured[0], expected[0]) and torch.equal(captured[1], expected[1])
    if not ok:
        print("BAD stream or graph")
    return good & ok


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = {}
for _dtype in DTYPES:
    for _d in (64, 128):
        for _c in (1, 0):
            BATCHES[f"short-{_d}-{_c}-{_dtype}"] = (batch_short, (_d, DTYPES[_dtype], bool(_c)))
            BATCHES[f"unequal-{_d}-{_c}-{_dtype}"] = (batch_unequal, (_d, DTYPES[_dtype], bool(_c)))
    for _name, _f in (("dims", batch_dims), ("strides", batch_strides), ("hard", batch_hard), ("repeat", batch_repeat), ("large", batch_large)):
        BATCHES[f"{_name}-{_dtype}"] = (_f, (DTYPES[_dtype],))
GUARDED = ("short", "unequal", "dims", "strides")


def run_batch(name):
    torch.manual_seed(0)
    if name.split("-")[0] in GUARDED:
        poison()
    function, arguments = BATCHES[name]
    good = function(*arguments)
    print("OK" if good else "WRONG", name, flush=True)
    return good


def check(chosen):
    bad = []
    for name in chosen or BATCHES:
        start = time.time()
        try:
            r = subprocess.run([sys.executable, __file__, "batch", name], capture_output=True, text=True, timeout=TIMEOUT_S)
            lines = [x for x in r.stdout.splitlines() if x][:12]
            if r.returncode:
                bad.append(name)
                print(f"FAILED {name} rc {r.returncode}", *lines, *r.stderr.strip().splitlines()[-4:], sep="\n    ", flush=True)
            else:
                print(f"{lines[-1]}  {time.time() - start:.0f} s", flush=True)
        except subprocess.TimeoutExpired as error:
            bad.append(name)
            print(f"HUNG {name} after {TIMEOUT_S} s", (error.stdout or b"")[-500:], flush=True)
    print("ALL GOOD" if not bad else f"BAD: {' '.join(bad)}", flush=True)
    return not bad


ROWS = [
    (1, 16, 16384, 64, True), (4, 32, 4096, 64, True), (1, 32, 16384, 64, True), (1, 32, 16384, 64, False),
    (8, 16, 2048, 128, True), (2, 16, 8192, 128, True), (1, 16, 16384, 128, True), (1, 16, 16384, 128, False),
    (1, 64, 8192, 128, False), (1, 32, 32768, 128, True),
    (8, 16, 2048, 64, True), (8, 16, 2048, 128, False), (4, 16, 4096, 128, True), (8, 16, 1024, 128, True),
]  # fmt: skip


def times(rounds=5):
    import triton
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cs336_systems.attention.hopper.forward import hopper_forward

    def cudnn(q, k, v, causal):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    print("TFLOP/s, median of rounds [ratio to cuDNN]")
    for batch, heads, n, d, causal in ROWS:
        q, k, v = (torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        runs = {"cudnn": lambda: cudnn(q, k, v, causal)}
        for name in names(d):
            runs[name] = lambda name=name: hopper_forward(q, k, v, causal, d**-0.5, name)
        flop = 4 * n * n * d * heads * batch * (0.5 if causal else 1)
        tflops = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                tflops[name].append(flop / triton.testing.do_bench(run, warmup=10, rep=30, return_mode="median") / 1e9)
        base = statistics.median(tflops["cudnn"])
        cells = [f"{name} {statistics.median(x):.0f} [{statistics.median(x) / base:.2f}]" for name, x in tflops.items()]
        print(f"B{batch} H{heads} S{n} d{d} {'causal' if causal else 'full'}:", *cells, sep="  ", flush=True)
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for name, run in (
        ("hopper_forward", lambda: hopper_forward(q, k, v, True, 0.125, "")),
        ("sdpa", lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
        ("sdpa cudnn", lambda: cudnn(q, k, v, True)),
    ):
        for _ in range(50):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            run()
        host = (time.perf_counter() - start) / 500
        torch.cuda.synchronize()
        print(f"host microseconds a call: {name} {host * 1e6:.1f}", flush=True)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "check":
        sys.exit(not check(rest))
    elif command == "batch":
        sys.exit(not run_batch(rest[0]))
    else:
        times()
