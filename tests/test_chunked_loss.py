"""The loss in chunks against the plain one, and a block in parts against the whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cs336_systems.device import has_cxx_compiler
from cs336_systems.grading.counting import LiveBytes
from cs336_systems.model import Linear, TransformerLM, cross_entropy
from cs336_systems.model.block_parts import RECOMPUTES, run_in_parts
from cs336_systems.model.chunked_loss import LossTransformer, chunked_cross_entropy, loss_bytes
from tests.sharding_models import TINY, batch, seeded

COVERS = ("cs336_systems/model", "tests/sharding_models.py")
VOCABULARY, WIDTH = 29, 12
needs_compiler = pytest.mark.skipif(
    not has_cxx_compiler(), reason="torch.compile needs a C++ compiler"
)


def problem(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn((*shape, WIDTH), generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn((VOCABULARY, WIDTH), generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    return hidden, weight, torch.randint(VOCABULARY, shape, generator=generator)


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.0 * loss, inputs)  # not one: the factor has to arrive


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 9), (16,)], ids=["one", "odd", "batch", "even"])
@pytest.mark.parametrize("chunk", [1, 4, 100], ids=["each", "tail", "whole"])
def test_chunks_give_the_plain_loss_and_its_gradients(shape, chunk):
    hidden, weight, targets = problem(*shape)
    expected = cross_entropy(hidden @ weight.T, targets)
    actual = chunked_cross_entropy(hidden, weight, targets, chunk)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    for one, other in zip(gradients(actual, hidden, weight), gradients(expected, hidden, weight)):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_numerical_derivatives_agree():
    hidden, weight, targets = problem(5)
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_cross_entropy(h, w, targets, 2), (hidden, weight)
    )


@pytest.mark.parametrize("trains", ["hidden", "weight", "neither"])
def test_only_the_gradients_that_are_wanted_are_made(trains):
    hidden, weight, targets = problem(6)
    hidden.requires_grad_(trains == "hidden")
    weight.requires_grad_(trains == "weight")
    expected = cross_entropy(hidden @ weight.T, targets)
    actual = chunked_cross_entropy(hidden, weight, targets, 4)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == (trains != "neither")
    for name, one in (("hidden", hidden), ("weight", weight)):
        if trains == name:
            torch.testing.assert_close(gradients(actual, one)[0], gradients(expected, one)[0])


def test_large_logits_neither_overflow_nor_vanish():
    hidden, weight, targets = problem(6)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, targets, 4)
    torch.testing.assert_close(loss, cross_entropy(hidden @ weight.T, targets))
    assert all(one.isfinite().all() for one in gradients(loss, hidden, weight))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=needs_compiler)], ids=["eager", "compiled"]
)
def test_bfloat16_loses_no_more_than_twice_what_the_plain_loss_does(compiled, device):
    hidden, weight, targets = (one.detach().to(device) for one in problem(40, dtype=torch.bfloat16))
    hidden.requires_grad_()
    weight.requires_grad_()
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    exact = gradients(cross_entropy(wide[0] @ wide[1].T, targets), *wide)
    plain = gradients(cross_entropy(hidden @ weight.T, targets), hidden, weight)
    chunked = gradients(
        chunked_cross_entropy(hidden, weight, targets, 16, compiled=compiled), hidden, weight
    )
    for one, other, true in zip(chunked, plain, exact):
        assert one.dtype == torch.bfloat16
        budget = 2 * (other.double() - true).norm()
        assert (one.double() - true).norm() <= budget


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=needs_compiler)], ids=["eager", "compiled"]
)
def test_autocast_rounds_the_logits_and_no_gradient(compiled):
    """The gradient once had the dtype of autocast's logits, which that of the hidden states does
    not take.
    """
    hidden, weight, targets = problem(40, dtype=torch.float32)
    expected = gradients(cross_entropy(hidden @ weight.T, targets), hidden, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, targets, 16, compiled=compiled)
    for one, other in zip(gradients(loss, hidden, weight), expected):
        assert one.dtype == torch.float32 and (one - other).norm() < 0.02 * other.norm()


def test_the_logits_never_exist_and_the_closed_form_says_what_does():
    tokens, width, vocabulary, chunk = 512, 32, 4000, 32
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    given = hidden.nbytes + weight.nbytes + targets.nbytes
    with LiveBytes() as live:
        loss = chunked_cross_entropy(hidden, weight, targets, chunk)
    assert live.peak - given < tokens * vocabulary * 4 / 2
    predicted = loss_bytes(tokens, vocabulary, width, chunk, 4)
    assert 0.5 * predicted <= live.peak - given <= 1.05 * predicted
    with LiveBytes() as live:
        loss.backward()
    assert live.peak <= 1.05 * (predicted + given)  # nothing is made again


def test_gradients_come_twice_and_have_none_of_their_own():
    hidden, weight, targets = problem(6)
    loss = chunked_cross_entropy(hidden, weight, targets, 4)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, again))
    with pytest.raises(
        RuntimeError, match="can be differentiated once only: create_graph must be False"
    ):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"hidden": torch.ones(6, WIDTH, dtype=torch.int64)}, TypeError, "real floating-point dtype, got torch.int64"),
        ({"weight": torch.ones(VOCABULARY, WIDTH)}, TypeError, "got torch.float64 and torch.float32"),
        ({"weight": torch.ones(VOCABULARY, 5).double()}, ValueError, r"weight must have shape .* got weight \(29, 5\)"),
        ({"targets": torch.ones(6)}, ValueError, "targets must be integers, got torch.float32"),
        ({"targets": torch.ones(5, dtype=torch.int64)}, ValueError, r"got targets \(5,\) and hidden \(6, 12\)"),
        ({"hidden": torch.ones(0, WIDTH).double(), "targets": torch.ones(0, dtype=torch.int64)}, ValueError,
         r"targets must not be empty, got shape \(0,\)"),
        ({"hidden": torch.ones(6, WIDTH).half(), "weight": torch.ones(VOCABULARY, WIDTH).half()}, TypeError,
         "hidden must not be float16, in which gradients .* underflow"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be a positive int, got 0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, error, match):
    hidden, weight, targets = problem(6)
    arguments: dict[str, Any] = {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "chunk_tokens": 4,
    }
    with pytest.raises(error, match=match):
        chunked_cross_entropy(**arguments | change)


# The model that answers with its loss, and its blocks in parts


def loss_and_gradients(model: torch.nn.Module) -> tuple[Tensor, list[Tensor]]:
    tokens, targets = batch(0, 3)
    loss = (
        cross_entropy(model(tokens), targets)
        if type(model) is TransformerLM
        else model(tokens, targets)
    )
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def check_against_the_plain_model(recompute: Any, compiled: bool, wide_blocks: int) -> None:
    plain = seeded(lambda: TransformerLM.from_config(TINY, attention="sdpa"))
    model = seeded(lambda: LossTransformer.for_loss(TINY, attention="sdpa", chunk_tokens=5))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters())
    )
    run_in_parts(model, recompute=recompute, compiled=compiled, wide_blocks=wide_blocks)
    expected, actual = loss_and_gradients(plain), loss_and_gradients(model)
    torch.testing.assert_close(actual[0], expected[0])
    for one, other in zip(actual[1], expected[1]):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("recompute", "wide_blocks"),
    [*((recompute, 0) for recompute in RECOMPUTES), ("after_attention", 1)],
)
def test_blocks_in_parts_and_a_loss_in_chunks_are_the_plain_model(recompute, wide_blocks):
    check_against_the_plain_model(recompute, compiled=False, wide_blocks=wide_blocks)


@needs_compiler
@pytest.mark.parametrize(
    "recompute, wide_blocks, parts", [("around_attention", 0, 2), ("after_attention", 1, 4)]
)
def test_each_part_is_compiled_once_for_all_blocks(recompute, wide_blocks, parts):
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    check_against_the_plain_model(recompute, compiled=True, wide_blocks=wide_blocks)
    assert counters["stats"]["unique_graphs"] - before == parts


WIDER = replace(TINY, context_length=64, d_model=32, d_ff=88, num_layers=8)


def forward_bytes(recompute: Any, wide_blocks: int = 0) -> int:
    model = LossTransformer.for_loss(WIDER, attention="sdpa", chunk_tokens=8)
    run_in_parts(model, recompute=recompute, wide_blocks=wide_blocks)
    tokens = torch.randint(WIDER.vocab_size, (2, 4, 64))
    with LiveBytes() as live:
        loss = model(*tokens)
        live.peak = 0
        loss = loss + 0  # looked at once more: the graph is alive
    return live.peak


def test_what_is_computed_again_is_not_stored():
    nothing, after, around, block = (forward_bytes(recompute) for recompute in RECOMPUTES)
    assert nothing > after > around > block
    width = 8 * 4 * 64 * 32 * 4  # of all blocks' inputs
    assert 3.5 * width <= around - block <= 4.5 * width  # q, k, v and the output


def test_a_wide_block_keeps_the_input_and_the_outputs_of_w1_and_w3():
    more = forward_bytes("after_attention", 8) - forward_bytes("after_attention")
    assert more == pytest.approx(8 * 4 * 64 * (32 + 2 * 88) * 4, rel=0.02)


def products(wide_blocks: int) -> int:
    """Matrix products of a loss and its backward."""
    model = LossTransformer.for_loss(WIDER, attention="sdpa", chunk_tokens=256)
    run_in_parts(model, recompute="after_attention", wide_blocks=wide_blocks)
    tokens = torch.randint(WIDER.vocab_size, (2, 4, 64))
    with torch.profiler.profile() as profile:
        model(*tokens).backward()
    return sum(
        event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")
    )


def test_a_wide_block_computes_no_product_of_its_feed_forward_layer_again():
    # w1 and w3; uncompiled, w2's is not computed again in either
    assert products(0) - products(8) == 8 * 2


def test_bad_settings_of_parts_are_named():
    with pytest.raises(
        TypeError, match="model must be a TransformerLM, whose blocks have these parts, got Linear"
    ):
        run_in_parts(Linear(2, 2))
    model = TransformerLM.from_config(TINY)
    with pytest.raises(ValueError, match="recompute must be one of nothing, .*, block, got 'all'"):
        run_in_parts(model, recompute="all")  # type: ignore[arg-type]
    for recompute, number in (("after_attention", 99), ("after_attention", -1), ("block", 1)):
        with pytest.raises(
            ValueError, match=f"wide_blocks must be 0 or, .*, got {number} with '{recompute}'"
        ):
            run_in_parts(model, recompute=recompute, wide_blocks=number)  # type: ignore[arg-type]
