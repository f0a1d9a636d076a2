"""The model package against independent formulas: layers, the whole model, loss, AdamW, clipping,
sampling, loading.
"""

import copy
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cs336_systems.config import ModelConfig
from cs336_systems.model import (
    ATTENTION_NAMES,
    AdamW,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    TransformerLM,
    build_model,
    clip_gradients,
    cross_entropy,
    generate,
    load_model_class,
    optimizer,
)

COVERS = ("cs336_systems/config.py", "cs336_systems/model")  # sources that the GPU tests below run

CONFIG = ModelConfig(
    name="test",
    d_model=24,
    d_ff=40,
    num_layers=2,
    num_heads=3,
    vocab_size=31,
    context_length=12,
    rope_theta=500.0,
)


def make_model(
    attention: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0
) -> TransformerLM:
    return build_model(CONFIG, attention=attention, device="cpu", dtype=dtype, seed=seed)


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def course_state_dict(config: ModelConfig) -> dict[str, torch.Tensor]:
    """A float64 state dict with the names and shapes of the course's own model, written out by
    hand.
    """
    shapes = {
        "token_embeddings.weight": (config.vocab_size, config.d_model),
        "ln_final.weight": (config.d_model,),
        "lm_head.weight": (config.vocab_size, config.d_model),
    }
    for layer in range(config.num_layers):
        for projection in ("q", "k", "v", "output"):
            shapes[f"layers.{layer}.attn.{projection}_proj.weight"] = (
                config.d_model,
                config.d_model,
            )
        shapes[f"layers.{layer}.ln1.weight"] = (config.d_model,)
        shapes[f"layers.{layer}.ln2.weight"] = (config.d_model,)
        shapes[f"layers.{layer}.ffn.w1.weight"] = (config.d_ff, config.d_model)
        shapes[f"layers.{layer}.ffn.w2.weight"] = (config.d_model, config.d_ff)
        shapes[f"layers.{layer}.ffn.w3.weight"] = (config.d_ff, config.d_model)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) / 4
        for name, shape in shapes.items()
    }


def rotate_by_complex_numbers(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE as multiplication by exp(i p theta^(-2j/d)): real parts first, then imaginary ones."""
    seq, dim = x.shape[-2:]
    frequencies = torch.tensor(
        [theta ** (-2 * j / dim) for j in range(dim // 2)], dtype=torch.float64
    )
    angles = torch.arange(seq, dtype=torch.float64)[:, None] * frequencies
    rotated = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.exp(1j * angles)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def model_by_hand(
    state: dict[str, torch.Tensor], config: ModelConfig, tokens: torch.Tensor
) -> torch.Tensor:
    """The logits, straight from the state dict and the equations."""

    def norm(x, name):
        return F.rms_norm(x, (config.d_model,), state[name], eps=1e-5)

    seq = tokens.shape[-1]
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    x = state["token_embeddings.weight"][tokens]
    for layer in range(config.num_layers):
        weight = {name.removeprefix(f"layers.{layer}."): value for name, value in state.items()}
        h = norm(x, f"layers.{layer}.ln1.weight")
        heads = []
        for rows in torch.arange(config.d_model).split(config.head_dim):
            q, k, v = (h @ weight[f"attn.{name}_proj.weight"][rows].T for name in "qkv")
            q, k = (rotate_by_complex_numbers(y, config.rope_theta) for y in (q, k))
            scores = (q @ k.mT / math.sqrt(config.head_dim)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ weight["attn.output_proj.weight"].T
        h = norm(x, f"layers.{layer}.ln2.weight")
        gate = h @ weight["ffn.w1.weight"].T
        x = (
            x
            + (gate * gate.sigmoid() * (h @ weight["ffn.w3.weight"].T)) @ weight["ffn.w2.weight"].T
        )
    return norm(x, "ln_final.weight") @ state["lm_head.weight"].T


# Layers


@pytest.mark.parametrize(
    ("make", "std"),
    [(lambda: Linear(300, 700), math.sqrt(2 / 1000)), (lambda: Embedding(700, 300), 1.0)],
    ids=["linear", "embedding"],
)
def test_initial_weights_are_normal_and_cut_at_three_deviations(make, std):
    torch.manual_seed(0)
    weight = make().weight.detach()
    assert weight.abs().max() <= 3 * std
    assert weight.abs().max() > 2.9 * std
    # Cut at 3, a normal variable keeps 98.66 % of its deviation; 210,000 draws settle it to 0.2 %.
    assert weight.std().item() == pytest.approx(0.9866 * std, rel=0.01)
    assert weight.mean().item() == pytest.approx(0.0, abs=0.01 * std)


@pytest.mark.parametrize("width", [1, 7, 64])
def test_rms_norm_agrees_with_torch(width):
    norm = RMSNorm(width).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, width, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    ours, theirs = norm(x), F.rms_norm(twin, (width,), norm.weight, eps=1e-5)
    torch.testing.assert_close(ours, theirs)
    ours.sin().sum().backward()
    theirs.sin().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


def test_rms_norm_computes_in_float32_and_returns_the_inputs_dtype():
    """Squares of float16 values above 256 overflow in float16."""
    x = torch.tensor([[1000.0, -2000.0, 500.0, 4000.0]], dtype=torch.float16)
    normed = RMSNorm(4)(x)
    assert normed.dtype == torch.float16
    torch.testing.assert_close(normed, F.rms_norm(x.double(), (4,), eps=1e-5).half())


@pytest.mark.parametrize(
    ("seq", "dim", "theta"), [(1, 2, 10_000.0), (9, 6, 100.0), (17, 64, 10_000.0)]
)
def test_rope_rotates_interleaved_pairs_and_concatenates_the_halves(seq, dim, theta):
    x = torch.randn(2, 3, seq, dim, dtype=torch.float64)
    rotated = RotaryEmbedding(seq, dim, theta).double()(x)
    torch.testing.assert_close(rotated, rotate_by_complex_numbers(x, theta))
    # At position 0 nothing turns: what is left is the order, even elements before odd ones.
    assert torch.equal(rotated[..., 0, :], torch.cat((x[..., 0, 0::2], x[..., 0, 1::2]), dim=-1))


def test_rope_tables_stay_float32_when_the_model_is_cast():
    rope = RotaryEmbedding(512, 64)
    exact = rope.cos.clone()
    rope.to(torch.bfloat16)
    assert rope.cos.dtype == torch.float32
    assert torch.equal(rope.cos, exact)
    assert rope(torch.randn(4, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    rope.double()
    assert rope.cos.dtype == torch.float64
    assert not torch.equal(rope.cos.float().double(), rope.cos)  # computed anew, not widened


# The model


@pytest.mark.parametrize(
    ("attention", "seq"),
    [*(("sdpa", seq) for seq in (1, 7, 12)), *((name, 12) for name in ("reference", "tiled"))],
)
def test_model_agrees_with_the_equations_on_the_courses_state_dict(attention, seq):
    model = TransformerLM.from_config(CONFIG, attention=attention).double()
    state, tokens = course_state_dict(CONFIG), random_tokens(2, seq)
    model.load_state_dict(state, strict=True)
    logits = model(tokens)
    torch.testing.assert_close(logits, model_by_hand(state, CONFIG, tokens))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_model_compiles_without_graph_breaks():
    model, tokens = make_model(), random_tokens(2, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_model_runs_under_autocast_with_float32_parameters():
    model, tokens = make_model(), random_tokens(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
        loss = cross_entropy(logits, tokens)
    loss.backward()
    assert (logits.dtype, loss.dtype, model.lm_head.weight.grad.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    torch.testing.assert_close(logits.float(), model(tokens), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("name", [name for name in ATTENTION_NAMES if name != "sdpa"])
def test_attention_is_dispatched_by_name(name, monkeypatch):
    calls = []

    def spy(q, k, v, **options):
        calls.append((tuple(q.shape), options))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    monkeypatch.setitem(
        sys.modules, "cs336_systems.attention", types.SimpleNamespace(flash_attention=spy)
    )
    model, tokens = make_model(attention=name), random_tokens(2, 5)
    torch.testing.assert_close(model(tokens), make_model()(tokens))
    assert calls == [((2, 3, 5, 8), {"is_causal": True, "backend": name})] * CONFIG.num_layers


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TransformerLM.from_config(CONFIG, attention="flash"),
         "attention must be one of reference, compiled, tiled, triton, hopper, sdpa, got 'flash'"),
        (lambda: TransformerLM(31, 12, 24, 2, 5, 40),
         "num_heads must divide d_model into even head dims, got d_model=24"),
        (lambda: TransformerLM(31, 12, 24, 0, 3, 40), "num_layers must be a positive int, got 0"),
        (lambda: make_model()(random_tokens(1, 13)), "at most context_length=12 positions, got 13"),
        (lambda: make_model()(random_tokens(5)), r"tokens must have shape \(batch, seq\), got \(5,\)"),
        (lambda: make_model()(torch.zeros(1, 4)), "tokens must be int32 or int64, got torch.float32"),
        (lambda: RotaryEmbedding(8, 7), "head_dim must be even .*, got 7"),
        (lambda: RotaryEmbedding(8, 4)(torch.zeros(9, 4)), "sequence of 9 positions is longer than context_length=8"),
        (lambda: build_model(CONFIG, device="cpu", dtype=torch.int64), "dtype must be floating point, got torch.int64"),
    ],
)  # fmt: skip
def test_bad_models_and_tokens_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Cross-entropy


@pytest.mark.parametrize("leading", [(), (5,), (3, 4), (2, 1, 3)])
@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_cross_entropy_agrees_with_torch(leading, magnitude):
    logits = (magnitude * torch.randn(*leading, 11, dtype=torch.float64)).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    targets = torch.randint(11, leading)
    ours, theirs = (
        cross_entropy(logits, targets.int()),
        F.cross_entropy(twin.reshape(-1, 11), targets.reshape(-1)),
    )
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(logits.grad, twin.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_low_precision_logits_is_computed_in_float32(dtype):
    logits, targets = torch.randn(64, 1000).to(dtype), torch.randint(1000, (64,))
    ours = cross_entropy(logits, targets)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(F.cross_entropy(logits.double(), targets).item(), abs=1e-5)


LOGITS, TARGETS = torch.zeros(2, 5), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("logits", "targets", "error", "message"),
    [
        (
            LOGITS,
            torch.zeros(3, dtype=torch.int64),
            ValueError,
            r"got targets \(3,\) and logits \(2, 5\)",
        ),
        (LOGITS, torch.zeros(2), ValueError, "targets must be integers, got torch.float32"),
        (LOGITS[:0], TARGETS[:0], ValueError, r"targets must not be empty, got shape \(0,\)"),
        (LOGITS, torch.tensor([0, -100]), (IndexError, RuntimeError), "out of bounds"),
        # Integer logits had a loss that no gradient could follow; complex ones and pairs failed
        # inside PyTorch.
        (
            LOGITS.long(),
            TARGETS,
            TypeError,
            "logits must be a real floating-point tensor, got torch.int64",
        ),
        (
            LOGITS.cfloat(),
            TARGETS,
            TypeError,
            "logits must be a real floating-point tensor, got torch.complex64",
        ),
        (
            (LOGITS, None),
            TARGETS,
            TypeError,
            "logits must be a real floating-point tensor, got tuple",
        ),
    ],
)
def test_cross_entropy_refuses_bad_logits_and_targets(logits, targets, error, message):
    with pytest.raises(error, match=message):
        cross_entropy(logits, targets)


# AdamW

HYPER = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 0.3, "weight_decay": 0.4}


class Reference(torch.optim.AdamW):
    """PyTorch's with eps outside of the bias correction, as the 2026 edition has it."""

    num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            group["eps"] = HYPER["eps"] / math.sqrt(1 - HYPER["betas"][1] ** self.num_steps)
        super().step()


def run_adamw(
    optimizer_class,
    start: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    state=None,
    **hyper,
):
    """The optimizer and the parameters after a step for each of `gradients`, on from the state dict
    `state`.
    """
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    adamw = optimizer_class(parameters, **hyper)
    if state is not None:
        adamw.load_state_dict(copy.deepcopy(state))
    for step_gradients in gradients:
        for parameter, gradient in zip(parameters, step_gradients):
            parameter.grad = gradient.clone()
        adamw.step()
    return adamw, [parameter.detach() for parameter in parameters]


def random_problem(steps: int = 6, dtype: torch.dtype = torch.float64):
    generator, shapes = torch.Generator().manual_seed(1), ((3, 4), (5,), (1,), (2, 2, 2))

    def draw():
        return [
            torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
            for shape in shapes
        ]

    return draw(), [draw() for _ in range(steps)]


def test_adamw_is_pytorchs_but_for_the_place_of_eps():
    start, gradients = random_problem()
    ours, theirs, plain = (
        run_adamw(kind, start, gradients, **HYPER)[1]
        for kind in (AdamW, Reference, torch.optim.AdamW)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    assert all((one - other).abs().min() > 1e-6 for one, other in zip(ours, plain))


def test_adamw_in_small_batches_gives_the_same_bits(monkeypatch):
    start, gradients = random_problem()
    _, at_once = run_adamw(AdamW, start, gradients, **HYPER)
    monkeypatch.setattr(optimizer, "TEMPORARY_BYTES", 70)
    _, in_batches = run_adamw(AdamW, start, gradients, **HYPER)
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_batches))


def test_adamw_counts_steps_by_parameter_and_leaves_those_without_gradient_alone():
    early, late = (
        nn.Parameter(torch.ones(2, dtype=torch.float64)),
        nn.Parameter(torch.ones(2, dtype=torch.float64)),
    )
    adamw = AdamW([early, late], **HYPER)
    early.grad = torch.full_like(early, 0.5)
    adamw.step()
    assert torch.equal(late.detach(), torch.ones(2, dtype=torch.float64))
    assert late not in adamw.state
    late.grad = torch.full_like(late, 0.5)
    adamw.step()
    assert (adamw.state[early]["step"], adamw.state[late]["step"]) == (2, 1)
    for parameter, steps in ((early, 2), (late, 1)):
        _, (expected,) = run_adamw(
            Reference, [torch.ones_like(late)], [[late.grad]] * steps, **HYPER
        )
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-12, rtol=1e-12)


def test_adamw_group_options_replace_the_defaults():
    decayed, free = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    adamw = AdamW(
        [{"params": [decayed]}, {"params": [free], "weight_decay": 0.0}], lr=0.1, weight_decay=0.5
    )
    decayed.grad, free.grad = torch.zeros(1), torch.zeros(1)
    adamw.step()
    assert (decayed.item(), free.item()) == (pytest.approx(0.95), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_resumes_from_its_state_dict_with_the_same_bits(dtype):
    start, gradients = random_problem(dtype=dtype)
    _, straight = run_adamw(AdamW, start, gradients, **HYPER)
    first, middle = run_adamw(AdamW, start, gradients[:3], **HYPER)
    assert set(first.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    resumed, ours = run_adamw(AdamW, middle, gradients[3:], first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(straight, ours))
    assert resumed.state_dict()["state"][0]["exp_avg_sq"].dtype == dtype


def test_adamw_continues_from_torchs_state_dict():
    """torch.optim.AdamW keeps its step as a tensor, which our multi-tensor calls refused."""
    start, gradients = random_problem()
    hyper = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-14, "weight_decay": 0.1}
    _, straight = run_adamw(torch.optim.AdamW, start, gradients, **hyper)
    first, middle = run_adamw(torch.optim.AdamW, start, gradients[:3], **hyper)
    resumed, ours = run_adamw(AdamW, middle, gradients[3:], first.state_dict())
    assert type(resumed.state_dict()["state"][0]["step"]) is int
    torch.testing.assert_close(ours, straight, atol=1e-10, rtol=1e-10)


def test_adamw_takes_hyperparameters_that_are_tensors():
    """A learning rate given as a tensor raised "Expected packed scalar Tensor" at the first step."""
    start, gradients = random_problem()
    _, expected = run_adamw(AdamW, start, gradients, **HYPER)
    as_tensors = {
        name: tuple(torch.tensor(beta, dtype=torch.float64) for beta in value)
        if name == "betas"
        else torch.tensor(value, dtype=torch.float64)
        for name, value in HYPER.items()
    }
    _, ours = run_adamw(AdamW, start, gradients, **as_tensors)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))


def test_adamw_runs_its_closure_with_gradients_on():
    parameter = nn.Parameter(torch.tensor([3.0]))
    adamw = AdamW([parameter], lr=0.1, weight_decay=0.0)

    def closure():
        adamw.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert adamw.step(closure).item() == 9.0
    assert parameter.item() == pytest.approx(2.9, abs=1e-5)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and non-negative, got -1.0"),
        ({"lr": math.nan}, "lr must be finite and non-negative, got nan"),
        ({"eps": 0.0}, "eps must be finite and positive, got 0.0"),
        ({"weight_decay": math.inf}, "weight_decay must be finite and non-negative, got inf"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\), got \(0.9,\)"),
    ],
)
def test_adamw_refuses_bad_hyperparameters(hyper, message):
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.zeros(1))], **hyper)
    with pytest.raises(ValueError, match=message):  # of one group, too
        AdamW([{"params": [nn.Parameter(torch.zeros(1))], **hyper}])


def test_adamw_refuses_complex_parameters_and_sparse_gradients_before_it_changes_anything():
    """The parameters of earlier groups had been updated, and the steps of earlier parameters
    counted.
    """
    complex_valued = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    complex_valued.grad = torch.ones_like(complex_valued)
    with pytest.raises(
        ValueError,
        match=r"floating point with dense gradients, got torch.complex64 of shape \(3,\)",
    ):
        AdamW([complex_valued]).step()
    first, second, sparse = (nn.Parameter(torch.ones(3)) for _ in range(3))
    adamw = AdamW([{"params": [first]}, {"params": [second, sparse]}])
    for parameter in (first, second, sparse):
        parameter.grad = torch.ones(3)
    adamw.step()
    before = [parameter.detach().clone() for parameter in (first, second, sparse)]
    sparse.grad = torch.ones(3).to_sparse()
    with pytest.raises(
        ValueError, match=r"floating point with dense gradients, got torch.float32 of shape \(3,\)"
    ):
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(before, (first, second, sparse)))
    assert [adamw.state[parameter]["step"] for parameter in (first, second, sparse)] == [1, 1, 1]


# Gradient clipping


def with_gradients(*gradients: torch.Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient).to_dense()) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    return parameters


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3], ids=["much", "some", "not"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clip_gradients_agrees_with_torch(max_norm, dtype):
    _, (gradients,) = random_problem(steps=1, dtype=dtype)
    # the last has none
    ours, theirs = ([*with_gradients(*gradients), nn.Parameter(torch.zeros(3))] for _ in range(2))
    storages = [parameter.grad.data_ptr() for parameter in ours[:-1]]
    norm, expected = (
        clip_gradients(iter(ours), max_norm),
        nn.utils.clip_grad_norm_(theirs, max_norm),
    )
    tolerance = (
        {"atol": 1e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-7, "rtol": 1e-6}
    )
    torch.testing.assert_close(norm.double(), expected.double(), **tolerance)
    for a, b in zip(ours[:-1], theirs[:-1]):
        torch.testing.assert_close(a.grad, b.grad, **tolerance)
    assert storages == [parameter.grad.data_ptr() for parameter in ours[:-1]]
    assert ours[-1].grad is None
    if max_norm == 1e3:
        assert all(
            torch.equal(parameter.grad, gradient) for parameter, gradient in zip(ours, gradients)
        )


LARGE = [3e30, 4e30]


@pytest.mark.parametrize(
    ("gradients", "max_norm", "norm", "clipped"),
    [
        # A norm of 128,000 is infinite in float16; that of LARGE was in float32, and its gradients
        # silently became 0.
        ([torch.full((4096,), 2000.0).half()], 64.0, 128_000.0, [1.0] * 4096),
        ([torch.tensor(LARGE)], 5.0, 5e30, [3.0, 4.0]),
        ([torch.tensor(LARGE).bfloat16()], 5.0, 5e30, [3.0, 4.0]),
        ([torch.tensor([large]).bfloat16() for large in LARGE], 5.0, 5e30, [3.0, 4.0]),
        ([torch.tensor([3.0]).bfloat16(), torch.tensor([4.0]).double()], 2.5, 5.0, [1.5, 2.0]),
    ],
    ids=["float16", "float32", "bfloat16", "two tensors", "two dtypes"],
)
def test_clip_gradients_takes_the_norm_in_float64(gradients, max_norm, norm, clipped):
    parameters = with_gradients(*gradients)
    found = clip_gradients(parameters, max_norm)
    assert found.dtype in (torch.float32, torch.float64)
    # 3e30 and 4e30 are rounded
    rel = 2e-2 if gradients[0].dtype == torch.bfloat16 and norm > 5 else 1e-6
    assert found.item() == pytest.approx(norm, rel=rel)
    assert torch.cat([parameter.grad for parameter in parameters]).tolist() == pytest.approx(
        clipped, rel=rel
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clip_gradients_makes_all_gradients_nan_if_one_is_not_finite(value):
    """One infinite gradient made zeros of all the finite ones, and the step passed for a clipped
    one.
    """
    parameters = with_gradients(torch.tensor([1.0, value]), torch.tensor([3.0, 4.0]))
    assert not clip_gradients(parameters, 1.0).isfinite()
    assert all(parameter.grad.isnan().all() for parameter in parameters)


@pytest.mark.parametrize(
    ("gradient", "got"),
    [
        (torch.ones(3).to_sparse(), r"torch.sparse_coo torch.float32 of shape \(3,\)"),
        (torch.ones(3, dtype=torch.complex64), r"torch.strided torch.complex64 of shape \(3,\)"),
    ],
    ids=["sparse", "complex"],
)
def test_clip_gradients_refuses_gradients_before_it_scales_any(gradient, got):
    """A sparse gradient failed inside PyTorch, with a message about its back ends."""
    parameters = with_gradients(torch.full((3,), 100.0), gradient)
    with pytest.raises(
        TypeError, match=f"parameters must have dense floating-point gradients, got {got}"
    ):
        clip_gradients(parameters, 1.0)
    assert parameters[0].grad.tolist() == [100.0] * 3


def test_clip_gradients_without_gradients_and_with_a_bad_bound():
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    with pytest.raises(ValueError, match="max_norm must be positive, got 0.0"):
        clip_gradients([], 0.0)


# Generation


class FixedLogits(nn.Module):
    """Predicts the distribution `probabilities`, whatever it sees, and remembers the lengths that
    it saw.
    """

    vocab_size, context_length = 4, 6

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(probabilities).log()
        self.lengths: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.lengths.append(tokens.shape[1])
        return self.logits.expand(*tokens.shape, -1)


SKEWED = [0.1, 0.5, 0.1, 0.3]


def test_generation_repeats_with_a_generator():
    model, prompt = make_model(), random_tokens(3)

    def sample(seed):
        return generate(
            model, prompt, 20, top_p=0.9, generator=torch.Generator().manual_seed(seed)
        ).tolist()

    assert len(sample(0)) == 20
    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


def test_generation_at_temperature_zero_is_greedy():
    model, tokens = make_model(), random_tokens(3).tolist()
    new = generate(model, torch.tensor(tokens), 5, temperature=0.0)
    assert new.shape == (5,)
    for token in new.tolist():
        assert token == model(torch.tensor([tokens]))[0, -1].argmax().item()
        tokens.append(token)


def test_generation_samples_the_softmax_at_its_temperature():
    model = FixedLogits(SKEWED)
    drawn = generate(
        model, torch.tensor([0]), 4000, temperature=0.5, generator=torch.Generator().manual_seed(0)
    )
    frequencies = drawn.bincount(minlength=4) / 4000
    squares = torch.tensor(SKEWED).square()
    torch.testing.assert_close(frequencies, squares / squares.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {1}), (0.45, {1}), (0.55, {1, 3}), (0.79, {1, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_sufficient_set_and_at_least_one_token(top_p, kept):
    generator = torch.Generator().manual_seed(0)
    drawn = generate(FixedLogits(SKEWED), torch.tensor([0]), 300, top_p=top_p, generator=generator)
    assert set(drawn.tolist()) == kept


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-46, 5e-324])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_generation_with_a_tiny_temperature_is_greedy(temperature, top_p):
    """A temperature that is 0 in float32 divided 0 by 0, and no token could be drawn."""
    new = generate(FixedLogits(SKEWED), torch.tensor([0]), 3, temperature=temperature, top_p=top_p)
    assert new.tolist() == [1, 1, 1]


def test_generation_stops_after_eos():
    greedy = {"temperature": 0.0}
    assert generate(FixedLogits(SKEWED), torch.tensor([0]), 10, eos_token=1, **greedy).tolist() == [
        1
    ]
    assert (
        generate(FixedLogits(SKEWED), torch.tensor([0]), 4, eos_token=2, **greedy).tolist()
        == [1] * 4
    )
    assert generate(FixedLogits(SKEWED), torch.tensor([1]), 0).tolist() == []


def test_generation_sees_the_last_context_length_tokens():
    model = FixedLogits(SKEWED)
    generate(model, torch.tensor([0, 1, 2, 3]), 5)
    assert model.lengths == [4, 5, 6, 6, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prompt_tokens": torch.zeros(1, 3, dtype=torch.int64)},
            r"prompt_tokens must have shape .* got \(1, 3\)",
        ),
        (
            {"prompt_tokens": torch.zeros(0, dtype=torch.int64)},
            r"prompt_tokens must have shape .* got \(0,\)",
        ),
        ({"prompt_tokens": torch.tensor([0, 4])}, r"prompt_tokens must be in \[0, 4\), got 0 to 4"),
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative, got -1"),
        ({"temperature": -0.5}, "temperature must be finite and not negative, got -0.5"),
        ({"temperature": math.inf}, "temperature must be finite and not negative, got inf"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"prompt_tokens": [0, 1]}, "prompt_tokens must be a tensor, got list"),
    ],
)
def test_generation_refuses_bad_arguments(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate(
            FixedLogits(SKEWED),
            **{"prompt_tokens": torch.tensor([0]), "max_new_tokens": 1, **arguments},
        )


# Loading


class UserModel(nn.Module):
    """A user's own model: the seven arguments, no choice of attention, a buffer put on the CPU by
    hand.
    """

    def __init__(
        self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta
    ):
        super().__init__()
        self.shape = (vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta)
        self.weight = nn.Parameter(torch.randn(vocab_size, d_model))
        self.register_buffer("positions", torch.arange(context_length, device="cpu"))


class HandsOn(UserModel):
    """A constructor that takes anything, and hands it on to one that does not."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class OtherArguments(nn.Module):
    def __init__(self, vocab_size, n_layers):
        super().__init__()


class NoConstructor(nn.Module):
    pass


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("user_module", "must be named \"package.module:Class\", got 'user_module'"),
        (f"{__name__}:", 'must be named "package.module:Class"'),
        (".model:TransformerLM", 'must be named "package.module:Class"'),
        (f"{__name__}:A:B", 'must be named "package.module:Class"'),
        (
            "no_such_module:Model",
            r"cannot import 'no_such_module' \(ModuleNotFoundError: .*PYTHONPATH",
        ),
        (f"{__name__}:Absent", f"module '{__name__}' has no attribute 'Absent'"),
        (f"{__name__}:CONFIG", "'CONFIG' is not a subclass of torch.nn.Module"),
        (f"{__name__}:ModelConfig", "'ModelConfig' is not a subclass of torch.nn.Module"),
        (
            f"{__name__}:OtherArguments",
            "'OtherArguments' must accept the keyword arguments vocab_size, .*rope_theta",
        ),
        (f"{__name__}:NoConstructor", "'NoConstructor' must accept the keyword arguments"),
    ],
)
def test_load_model_class_says_what_is_wrong(spec, message):
    with pytest.raises(ValueError, match=message):
        load_model_class(spec)


@pytest.mark.parametrize(
    ("code", "error"),
    [("1 / 0", "ZeroDivisionError"), ("exit(0)", "SystemExit"), ("exit('usage')", "SystemExit")],
)
def test_load_model_class_reports_errors_of_the_users_module(code, error, tmp_path, monkeypatch):
    """A script without a main guard that ends in sys.exit(0) ended the whole command silently, as a
    success.
    """
    (tmp_path / "broken_user_module.py").write_text(f"from sys import exit\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"cannot import 'broken_user_module' \({error}: "):
        load_model_class("broken_user_module:Model")


def test_build_model_repeats_and_leaves_the_callers_random_state():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, again, other = (make_model(seed=seed).state_dict() for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_build_model_in_bfloat16_rounds_the_float32_model_of_the_same_seed():
    exact, rounded = make_model().state_dict(), make_model(dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    assert make_model(dtype=torch.bfloat16)(random_tokens(1, 12)).isfinite().all()


def test_build_model_on_meta_then_materialised_loads_a_state_dict():
    """The tables of RoPE are not in it, and would be uninitialised memory."""
    model = build_model(CONFIG, attention="sdpa", device="meta", dtype=torch.float64)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    state, tokens = course_state_dict(CONFIG), random_tokens(2, 12)
    model.load_state_dict(state, strict=True)
    torch.testing.assert_close(model(tokens), model_by_hand(state, CONFIG, tokens))


@pytest.mark.parametrize("name", ["UserModel", "HandsOn"])
def test_build_model_builds_the_users_model_on_one_device_with_its_own_attention(name):
    """**kwargs was taken for an argument "attention", which the constructor behind it refused:
    every row failed.
    """
    spec = f"{__name__}:{name}"
    model = build_model(CONFIG, model_spec=spec, device="meta", dtype=torch.bfloat16)
    assert model.shape == (31, 12, 24, 2, 3, 40, 500.0)
    assert (model.weight.dtype, model.positions.dtype) == (torch.bfloat16, torch.int64)
    assert model.positions.is_meta
    with pytest.raises(
        ValueError, match=f"'{spec}' brings its own attention: .* to choose 'triton'"
    ):
        build_model(CONFIG, attention="triton", model_spec=spec, device="cpu")


def test_build_model_passes_attention_where_it_is_an_argument():
    model = build_model(
        CONFIG, attention="tiled", model_spec="cs336_systems.model:TransformerLM", device="meta"
    )
    assert model.layers[0].attn.attention == "tiled"


# On a GPU


@pytest.mark.gpu
def test_build_model_on_cuda_repeats_and_leaves_the_random_states():
    torch.manual_seed(123)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, again = (build_model(CONFIG, attention="sdpa", device="cuda", seed=7) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
    assert all(tensor.is_cuda for tensor in (*first.parameters(), *first.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    tokens = random_tokens(2, 12)
    reference = copy.deepcopy(first).to("cpu", torch.float64)
    torch.testing.assert_close(
        first(tokens.cuda()).cpu().double(), reference(tokens), atol=1e-2, rtol=1e-2
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)
def test_the_model_attends_with_the_hopper_kernels():
    tokens, grads = random_tokens(2, 12).cuda(), {}
    for attention in ("hopper", "sdpa"):
        model = build_model(CONFIG, attention=attention, device="cuda", seed=0)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
        logits.float().square().sum().backward()
        grads[attention] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, expected in grads["sdpa"].items():
        assert (grads["hopper"][name] - expected).norm() <= 0.05 * expected.norm(), name
    model = build_model(CONFIG, attention="hopper", device="cuda", seed=0)
    with pytest.raises(ValueError, match="hopper takes float16, bfloat16, not float32"):
        model(tokens)


@pytest.mark.gpu
def test_adamw_and_clipping_need_little_memory_beyond_their_state():
    # 64 MiB each, 1 GiB
    parameters = [nn.Parameter(torch.ones(2**24, device="cuda")) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    adamw = AdamW(parameters)
    adamw.step()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    clip_gradients(parameters, 1.0)
    adamw.step()
    assert torch.cuda.max_memory_allocated() - resident <= optimizer.TEMPORARY_BYTES + 2**20
