"""Communication on paper: rings against sums, closed forms against simulation, predictions against
their limits.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch

from cs336_systems.accounting import num_parameters
from cs336_systems.analysis import HARDWARE, FeedForward, Plan, predict, rank_bytes, rings, xxl
from cs336_systems.analysis import ffn as calcs
from cs336_systems.analysis.predictor import pipeline_s
from cs336_systems.analysis.simulate import Weights, simulate
from cs336_systems.analysis.traffic import SCHEMES, bytes_sent, num_elements, parameters
from cs336_systems.config import MODEL_SIZES, ModelConfig

SMALL = ModelConfig(
    name="tiny", d_model=32, d_ff=96, num_layers=3, num_heads=4, vocab_size=120, context_length=64
)
HEAD = SMALL.vocab_size * SMALL.d_model
BLOCK = 4 * SMALL.d_model**2 + 3 * SMALL.d_model * SMALL.d_ff
LAYER = FeedForward(tokens=65_536, d_model=4096, d_ff=11_008)
H200 = HARDWARE["H200"]
C, W = H200.flops_per_s, H200.node_bytes_per_s
RANKS = [1, 2, 3, 4, 7, 16]
MODES = ("forward", "backward")


# Rings


def buffers_of(num_ranks: int, length: int) -> list[list[int]]:
    return [
        [(rank + 1) * 1000 + element * element for element in range(length)]
        for rank in range(num_ranks)
    ]


def column_sums(buffers: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*buffers)]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("length", [0, 1, 5, 112], ids=lambda length: f"{length}_elements")
@pytest.mark.parametrize("all_reduce", [rings.ring_all_reduce, rings.alternate_ring_all_reduce])
def test_all_reduce_leaves_the_sum_on_every_rank(all_reduce: Any, num_ranks: int, length: int):
    buffers = buffers_of(num_ranks, length)
    results, _ = all_reduce(buffers)
    assert results == [column_sums(buffers)] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_reduce_scatter_and_all_gather_keep_each_ranks_chunk(num_ranks: int):
    buffers = buffers_of(num_ranks, 3 * num_ranks + 1)
    scattered, _ = rings.ring_reduce_scatter(buffers)
    bounds = rings.chunk_bounds(3 * num_ranks + 1, num_ranks)
    assert scattered == [column_sums(buffers)[start:end] for start, end in bounds]
    gathered, _ = rings.ring_all_gather(scattered)
    assert gathered == [column_sums(buffers)] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_simulated_rings_take_the_closed_forms_time(num_ranks: int):
    """Where N divides the buffer, exactly: 2(N - 1)/N · S/W, and (N - 1) · S/W of the alternate
    ring.
    """
    length, element_bytes, rate = 16 * num_ranks, 2, 10.0
    size = length * element_bytes
    _, ring = rings.ring_all_reduce(buffers_of(num_ranks, length))
    _, alternate = rings.alternate_ring_all_reduce(buffers_of(num_ranks, length))
    assert ring.steps == 2 * (num_ranks - 1)
    assert alternate.steps == num_ranks - 1
    assert ring.seconds(rate, element_bytes) == pytest.approx(
        rings.all_reduce_seconds(size, num_ranks, rate)
    )
    expected = rings.alternate_all_reduce_seconds(size, num_ranks, rate)
    assert alternate.seconds(rate, element_bytes) == pytest.approx(expected)
    assert expected == pytest.approx(
        num_ranks / 2 * rings.all_reduce_seconds(size, num_ranks, rate)
    )


# The feed-forward layer


def random_layer(batch: int, d_model: int, d_ff: int) -> tuple[Weights, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    weights = Weights(draw(d_model, d_ff), draw(d_model, d_ff), draw(d_ff, d_model))
    return weights, draw(batch, d_model), draw(batch, d_model)


@pytest.mark.parametrize(("num_fsdp", "num_tp"), [(1, 1), (4, 1), (1, 4), (2, 3), (4, 2)])
def test_split_layer_has_autograds_results_and_the_closed_forms_counts(num_fsdp: int, num_tp: int):
    """The equations of each scheme, executed: y, dx, all gradients; FLOPs and bytes of one device."""
    weights, x, dy = random_layer(8, 12, 24)
    leaves = [tensor.clone().requires_grad_() for tensor in (*weights, x)]
    w1, w2, w3, inputs = leaves
    y = (torch.nn.functional.silu(inputs @ w1) * (inputs @ w2)) @ w3
    y.backward(dy)
    ours = simulate(weights, x, dy, num_fsdp=num_fsdp, num_tp=num_tp)
    torch.testing.assert_close(ours.y, y.detach())
    for result, leaf in zip((*ours.gradients, ours.dx), leaves):
        torch.testing.assert_close(result, leaf.grad)

    layer = FeedForward(tokens=8, d_model=12, d_ff=24)
    for mode, count in ours.counts.items():
        assert count.flops == calcs.ffn_flops(layer, mode, num_fsdp * num_tp)
        fsdp_s = calcs.fsdp_seconds(layer, mode, num_fsdp, bytes_per_s=1.0) / num_tp
        tp_s = calcs.tp_seconds(layer, mode, num_tp, bytes_per_s=1.0) / num_fsdp
        assert count.fsdp_bytes == pytest.approx(fsdp_s)
        assert count.tp_bytes == pytest.approx(tp_s)
    sent = ours.counts["forward"].fsdp_bytes, ours.counts["forward"].tp_bytes
    for overlap, expected in ((True, max(sent)), (False, sum(sent))):
        seconds = calcs.fsdp_tp_seconds(layer, num_fsdp, num_tp, bytes_per_s=1.0, overlap=overlap)
        assert seconds == pytest.approx(expected)


def hidden(communication_s: float, flops: float) -> bool:
    return communication_s <= flops / C * (1 + 1e-12)


@pytest.mark.parametrize(
    ("mode", "seconds", "limit"),
    [
        # whose forward sends nothing
        ("backward", calcs.data_parallel_seconds, calcs.data_parallel_limit),
        *(
            (mode, partial(calcs.fsdp_seconds, mode=mode), partial(calcs.fsdp_limit, mode=mode))
            for mode in MODES
        ),
        *(
            (mode, partial(calcs.tp_seconds, mode=mode), partial(calcs.tp_limit, mode=mode))
            for mode in MODES
        ),
    ],
    ids=["data_parallel", *(f"{scheme}-{mode}" for scheme in ("fsdp", "tp") for mode in MODES)],
)
def test_limits_are_where_communication_stops_being_hidden(mode: str, seconds: Any, limit: Any):
    most = math.floor(limit(LAYER, flops_per_s=C, bytes_per_s=W))
    for devices, expected in ((most, True), (most + 1, False)):
        communication = seconds(LAYER, num_devices=devices, bytes_per_s=W)
        assert hidden(communication, calcs.ffn_flops(LAYER, mode, devices)) is expected


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tokens", [16, 4096, 65_536])
def test_no_grid_beats_the_limit_and_the_search_comes_close(tokens: int, overlap: bool):
    layer = FeedForward(tokens=tokens, d_model=4096, d_ff=11_008)
    limit = calcs.fsdp_tp_limit(layer, flops_per_s=C, bytes_per_s=W, overlap=overlap)

    def compute_bound(num_fsdp: float, num_tp: float) -> bool:
        seconds = calcs.fsdp_tp_seconds(layer, num_fsdp, num_tp, bytes_per_s=W, overlap=overlap)  # type: ignore[arg-type]
        return hidden(seconds, calcs.ffn_flops(layer, "forward", num_fsdp * num_tp))  # type: ignore[arg-type]

    assert compute_bound(limit.fsdp, limit.tp)
    if limit.fsdp > 1:
        assert not compute_bound(limit.fsdp * 1.001, limit.tp)
    # brute force over real-valued grids: none that is compute-bound has more devices
    a = layer.tokens * W / C
    for step in range(101):
        fsdp = 1 + a * step / 100
        if not compute_bound(fsdp, 1.0):
            continue
        low, high = 1.0, 1e6
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if compute_bound(fsdp, middle) else (low, middle)
        assert fsdp * low <= limit.devices * (1 + 1e-9)
    best = calcs.best_integer_grid(layer, flops_per_s=C, bytes_per_s=W, overlap=overlap)
    assert compute_bound(*best) and math.prod(best) <= limit.devices * (1 + 1e-9)
    assert math.prod(best) >= 0.6 * limit.devices


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FeedForward(tokens=0, d_model=4, d_ff=4), "FeedForward.tokens must be a positive int, got 0"),
        (lambda: simulate(*random_layer(8, 4, 12), num_fsdp=3), "num_fsdp must divide 8 and 4, got 3"),
        (lambda: Plan(scheme="zero9"), "Plan.scheme must be one of none, naive, .*, got 'zero9'"),
        (lambda: Plan(scheme="none", data_parallel=2), "Plan.data_parallel must be 1 for scheme none, got 2"),
        (
            lambda: predict(SMALL, Plan(scheme="none", tensor_parallel=3), H200, batch=1),
            "tensor_parallel must divide 8 GPUs a node, got 3",
        ),
        (
            lambda: predict(SMALL, Plan(scheme="none"), H200, batch=1, matmul_efficiency=0),
            r"matmul_efficiency must be in \(0, 1\], got 0",
        ),
        (lambda: xxl.fewest_devices(xxl.XXL, 20_000), "tokens must leave room in 9.5e.10 bytes, got 20000 with"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call()


# The 2025 edition


def test_xxl_needs_this_much_memory():
    """P = 126 · 2 · 16384 · 53248; 16 bytes of each; 2 · (16384 + 53248) · 126 bytes saved for a
    token.
    """
    assert xxl.XXL.parameters == 219_848_638_464
    assert xxl.fixed_bytes(xxl.XXL) == 16 * 219_848_638_464
    assert math.ceil(xxl.fixed_bytes(xxl.XXL) / xxl.H100_BYTES) == 44
    assert xxl.saved_bytes(xxl.XXL, 1) == 17_547_264


@pytest.mark.parametrize("tokens", [0, 1, 1024, 10_000])
def test_xxl_fits_on_the_fewest_devices_and_not_on_one_less(tokens: int):
    fewest = xxl.fewest_devices(xxl.XXL, tokens)
    assert xxl.bytes_per_device(xxl.XXL, tokens, fewest) < xxl.V5P_BYTES
    assert xxl.bytes_per_device(xxl.XXL, tokens, fewest - 1) >= xxl.V5P_BYTES
    assert fewest == 38 or tokens > 1


@pytest.mark.parametrize("overlap", [True, False])
def test_xxl_is_compute_bound_from_its_smallest_batch_on(overlap: bool):
    model, mesh = xxl.XXL, xxl.V5P
    per_device = xxl.smallest_batch_per_device(model, mesh, overlap=overlap)
    for factor, expected in ((1.0001, True), (0.9999, False)):
        tokens = factor * per_device * mesh.devices
        math_s = 4 * tokens * model.d_model * model.d_ff / (mesh.devices * mesh.flops_per_s)
        fsdp_s = 4 * model.d_model * model.d_ff / (mesh.tp * mesh.link_bytes_per_s * mesh.fsdp_axes)
        tp_s = 4 * tokens * model.d_model / (mesh.fsdp * mesh.link_bytes_per_s * mesh.tp_axes)
        assert ((max(fsdp_s, tp_s) if overlap else fsdp_s + tp_s) <= math_s) is expected
    assert per_device == pytest.approx(4.6e14 / 1.8e11 / 8 if overlap else 395.339, rel=1e-5)


# Predictions


@pytest.mark.parametrize("size", ["small", "xl", "10b", "8b"])
def test_listed_parameters_are_the_models(size: str):
    assert num_elements(parameters(MODEL_SIZES[size])) == num_parameters(MODEL_SIZES[size])


def test_schemes_send_what_they_should():
    """All-reduce counts twice; ZeRO-1's two halves send the same; FSDP gathers twice and reduces
    once, in two bytes.
    """
    size, share = 4 * num_parameters(SMALL), 3 / 4
    sent = {
        scheme: bytes_sent(SMALL, Plan(scheme=scheme, data_parallel=4)) for scheme in SCHEMES[1:]
    }
    for scheme in ("naive", "flat", "overlap", "bucketed", "zero1"):
        assert sent[scheme] == pytest.approx(2 * share * size)
    assert sent["sharded-optimizer"] == pytest.approx(3 * share * size)
    norms = 4 * (2 * SMALL.num_layers + 1) * SMALL.d_model
    matrices = (size - norms) / 2
    kept = 2 * (HEAD + BLOCK)  # the last two units stay for the backward
    assert sent["fsdp"] == pytest.approx(share * (3 * matrices - kept + 2 * norms))
    assert all(bytes_sent(SMALL, Plan(scheme=scheme)) == 0 for scheme in SCHEMES)


def test_pipeline_hides_gathers_behind_computation_as_far_as_it_may_look_ahead():
    # three layers of 10 s each; gathers of 1 s: only the first is waited for
    assert pipeline_s([1, 1, 1], [10, 10, 10], [0, 0, 0], 2) == 31
    # gathers of 20 s: computation of the last follows three gathers in a row
    assert pipeline_s([20, 20, 20], [10, 10, 10], [0, 0, 0], 3) == 70
    # looking one ahead, a gather begins only when the layer before it is done
    assert pipeline_s([20, 20, 20], [10, 10, 10], [0, 0, 0], 1) == 90
    # the last scatter follows the last layer
    assert pipeline_s([0, 0, 0], [10, 10, 10], [4, 4, 4], 2) == 34


@pytest.mark.parametrize("num_ranks", [2, 8, 64, 16_384])
def test_overlap_hides_what_naive_exposes(num_ranks: int):
    exposed = {}
    for scheme in SCHEMES[1:]:
        plan = Plan(scheme=scheme, data_parallel=num_ranks)
        prediction = predict(MODEL_SIZES["xl"], plan, H200, batch=4)
        assert prediction.exposed_s > 0
        if scheme != "flat":  # which adds copies
            assert prediction.exposed_s <= prediction.communication_s * (1 + 1e-9)
        exposed[scheme] = prediction.exposed_s
    assert exposed["bucketed"] < min(exposed["flat"], exposed["naive"])
    assert exposed["overlap"] < exposed["naive"]


def test_the_predicted_step_reaches_the_closed_forms_limit():
    """Compute-bound with many tokens a GPU; with few, the step is communication and nothing else."""
    model = MODEL_SIZES["xl"]
    plan = Plan(scheme="fsdp", data_parallel=8)
    bound = predict(model, plan, H200, batch=256, matmul_efficiency=1.0)
    assert bound.exposed_s < 0.01 * bound.step_s
    starved = predict(model, plan, H200, batch=1, matmul_efficiency=1.0)
    assert starved.exposed_s > 0.3 * starved.step_s
    assert (
        starved.exposed_s + starved.forward_s + starved.backward_s >= 0.9 * starved.communication_s
    )


def test_fsdp_fits_10b_on_two_h200_and_nothing_replicated_does():
    model, usable = MODEL_SIZES["10b"], 0.95 * H200.memory_bytes
    assert rank_bytes(model, Plan(scheme="fsdp", data_parallel=2), batch=2).peak < usable
    for scheme in ("naive", "bucketed", "zero1", "sharded-optimizer"):
        assert (
            rank_bytes(model, Plan(scheme=scheme, data_parallel=2), batch=2).peak
            > H200.memory_bytes
        )


def test_each_scheme_divides_what_it_shards():
    model, total = MODEL_SIZES["xl"], 4 * num_parameters(MODEL_SIZES["xl"])
    by_scheme = {
        scheme: rank_bytes(model, Plan(scheme=scheme, data_parallel=4), batch=1)
        for scheme in SCHEMES[1:]
    }
    for scheme in ("naive", "overlap", "bucketed"):
        assert (by_scheme[scheme].parameters, by_scheme[scheme].optimizer) == (total, 2 * total)
    assert by_scheme["flat"].buffers == total
    assert by_scheme["flat"].peak > by_scheme["bucketed"].peak
    for scheme in ("zero1", "sharded-optimizer"):
        assert by_scheme[scheme].optimizer == total / 2
    fsdp = by_scheme["fsdp"]
    assert total / 4 <= fsdp.parameters <= 1.01 * total / 4
    assert fsdp.persistent == 3 * fsdp.parameters
    block = 4 * 2560 * 2560 + 3 * 2560 * 10240
    assert fsdp.gathered == 2 * 4 * block  # three blocks' weights and one's gradients, in two bytes
    assert rank_bytes(model, Plan(scheme="fsdp"), batch=1).gathered == 0


def test_buckets_are_there_beside_the_activations() -> None:
    """Their memory was counted at backward's end only, as if it were free while activations need
    theirs.
    """
    model = MODEL_SIZES["xl"]
    kept = rank_bytes(model, Plan(scheme="bucketed", data_parallel=2), batch=2)
    freed = rank_bytes(model, Plan(scheme="overlap", data_parallel=2), batch=2)
    assert kept.peak == kept.persistent + kept.gradients + kept.activations + kept.loss
    assert freed.peak == freed.persistent + max(
        freed.activations + freed.loss, freed.gradients + freed.block
    )
    zero = rank_bytes(model, Plan(scheme="zero1", data_parallel=2), batch=2)
    assert (
        zero.peak == zero.persistent + zero.gradients + zero.buffers + zero.activations + zero.loss
    )
