"""Muon, alone and over shards: equal to torch's, to one process in float64, bytes by formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cs336_systems.config import ModelConfig
from cs336_systems.distributed import (
    FSDP,
    OverlapDDP,
    ShardedMuon,
    ShardedOptimizer,
    apply_tensor_parallel,
    gather_full_params,
    load_checkpoint,
    run_ranks,
    save_checkpoint,
)
from cs336_systems.distributed.sharded_muon import choose_owners
from cs336_systems.measure.messages import MessageCounter, fake_ranks
from cs336_systems.model import TransformerLM
from cs336_systems.model.muon import Muon, muon_groups, newton_schulz, newton_schulz_flops
from tests.one_job import OneJob, run_alone

COVERS = (
    "cs336_systems/distributed",
    "cs336_systems/model/muon.py",
    "cs336_systems/measure/messages.py",
)

# 25 rows divide over no number of ranks
SIZES = ModelConfig(
    name="test", d_model=10, d_ff=25, num_layers=3, num_heads=1, vocab_size=29, context_length=12
)
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "float64"}
JOBS = {2: OneJob(2), 3: OneJob(3), 4: OneJob(4), 6: OneJob(6)}
RANKS = [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 4, 6))]


def whole_model(seed: int = 0) -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM.from_config(SIZES).double()


def train(model: Any, optimizer: Any, steps: range, place: tuple[int, int] = (0, 1)) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        shape = (2, 12, SIZES.context_length)
        tokens, targets = torch.randint(SIZES.vocab_size, shape, generator=generator)
        tokens, targets = (one.chunk(place[1])[place[0]] for one in (tokens, targets))
        logits = model(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits, targets.flatten()).backward()
        getattr(model, "finish_gradient_synchronization", lambda: None)()
        optimizer.step()


def reference(steps: int) -> dict[str, Tensor]:
    model = whole_model()
    train(model, Muon(muon_groups(model), **OPTIONS), range(steps))
    return {name: one.detach() for name, one in model.named_parameters()}


def assert_equal(full: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    # Newton-Schulz multiplies rounding by the reciprocals of small singular values
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=1e-8, msg=name)


# One process


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (7, 7), (1, 9)])
def test_a_matrix_is_updated_as_by_torchs_muon(shape):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, shape, generator=generator)
    ours = nn.Parameter(draw())
    theirs = nn.Parameter(ours.detach().clone())
    optimizers = [
        Muon([ours], lr=0.02, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(4):
        ours.grad = draw()
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_newton_schulz_keeps_singular_vectors_and_makes_their_values_about_one(shape):
    left, values, right = torch.linalg.svd(
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        full_matrices=False,
    )
    values = values.clamp(min=0.2 * values.max())
    result = left.mT @ newton_schulz(left @ values.diag() @ right, steps=10) @ right.mT
    diagonal = result.diagonal()
    assert (result - diagonal.diag()).abs().max() < 1e-10
    assert diagonal.min() > 0.65 and diagonal.max() < 1.25


def test_the_flops_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((12, 40), (40, 12)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.ones(shape), steps=3)
        assert counter.get_total_flops() == newton_schulz_flops(*shape, steps=3)


def test_blocks_matrices_take_muon_and_all_else_adamw():
    model = whole_model()
    groups = muon_groups(model)
    assert [len(group["params"]) for group in groups] == [7 * 3, 2 + 2 * 3 + 1]
    optimizer = Muon(groups, **OPTIONS)
    train(model, optimizer, range(1))
    states = [{*optimizer.state[one]} for group in groups for one in group["params"]]
    assert states[0] == {"step", "momentum_buffer"}
    assert states[-1] == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([torch.zeros(3)], {}, r"must be matrices for use_muon, got shape \(3,\)"),
        ([torch.zeros(3, 3)], {"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ([torch.zeros(3, 3)], {"lr": -1.0}, "lr must be finite and non-negative"),
    ],
)
def test_bad_arguments_are_refused_by_name(params, options, message):
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(one) for one in params], **options)


# Over shards


def over_fsdp(rank: int, num_ranks: int, num_replicas: int) -> None:
    shape = (num_replicas, num_ranks // num_replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    groups = {"process_group": mesh.get_group("shard")}
    if num_replicas > 1:
        groups["replicate_group"] = mesh.get_group("replicate")
    model = FSDP(whole_model(seed=rank), **groups)
    optimizer = ShardedMuon(muon_groups(model), **OPTIONS)
    train(model, optimizer, range(3), (rank, num_ranks))
    assert_equal(gather_full_params(model), reference(3))
    held = sum(
        state["momentum_buffer"].numel()
        for state in optimizer.state.values()
        if "momentum_buffer" in state
    )
    matrices = sum(one.numel() for one in muon_groups(whole_model())[0]["params"])
    assert held <= 1.3 * matrices / shape[1], "rows are padded to whole ones"


def over_ddp(rank: int, num_ranks: int) -> None:
    model = OverlapDDP(whole_model(seed=rank))
    optimizer = ShardedOptimizer(muon_groups(model), Muon, **OPTIONS)
    train(model, optimizer, range(3), (rank, num_ranks))
    assert_equal(gather_full_params(model), reference(3))
    assert len(optimizer.state) < len(list(model.parameters()))


for job in JOBS.values():
    job.calls += ((over_fsdp, 1), (over_ddp,))
JOBS[4].calls += ((over_fsdp, 2),)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_fsdps_rows_are_updated_as_in_one_process(num_ranks):
    JOBS[num_ranks].results(over_fsdp, 1)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_owners_of_whole_matrices_update_as_in_one_process(num_ranks):
    JOBS[num_ranks].results(over_ddp)


@pytest.mark.slow
def test_replicas_update_as_in_one_process():
    JOBS[4].results(over_fsdp, 2)


@JOBS[2].check
def test_what_would_update_matrices_wrongly_is_refused(rank: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="must be matrices that FSDP has cut"):
        ShardedMuon(muon_groups(whole_model()))
    model = FSDP(whole_model())
    with pytest.raises(ValueError, match="Muon does not update a weight element by element"):
        train(model, Muon(muon_groups(model), **OPTIONS), range(1), (rank, 2))
    # by the settings of each group, not by the defaults
    groups = muon_groups(model)
    with pytest.raises(ValueError, match="Muon does not update a weight element by element"):
        train(model, Muon(groups, **OPTIONS, use_muon=False), range(1), (rank, 2))
    two = [*muon_groups(model), *muon_groups(FSDP(whole_model(), process_group=dist.new_group()))]
    with pytest.raises(ValueError, match="matrices must be of one FSDP group, got 2"):
        ShardedMuon(two)
    inner: Any = TransformerLM.from_config(
        ModelConfig(**{**vars(SIZES), "d_ff": 24, "num_heads": 1})
    )
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    apply_tensor_parallel(inner, mesh.get_group("tensor"))
    model = FSDP(inner, process_group=mesh.get_group("data"))
    with pytest.raises(ValueError, match="and tensor parallelism has split these"):
        train(model, ShardedMuon(muon_groups(model)), range(1), (rank, 2))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_step_sends_what_the_formula_says(num_ranks):
    with fake_ranks(num_ranks):
        # sixteen equal matrices, of which each rank owns as many as any other
        layers = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(16))
        model = FSDP(nn.Sequential(layers[0], *layers[1:]), granularity="layer")
        weights = [*model.parameters()]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = ShardedMuon(weights)
        with MessageCounter() as sent:
            optimizer.step()
        matrix_bytes = 2 * 16 * 8 * 16  # bfloat16
        expected = 2 * matrix_bytes * (num_ranks - 1) / num_ranks**2
        assert sent.bytes(dist.group.WORLD) == pytest.approx(expected, rel=1e-12)
        assert [one.kind for one in sent.messages] == ["all_to_all"] * 2
        owners = choose_owners([one.shape for one in model.weights.values()], num_ranks)
        assert {owners.count(rank) for rank in range(num_ranks)} == {16 // num_ranks}


# Checkpoints


def save_two_steps(rank: int, num_ranks: int, folder: str) -> None:
    model = FSDP(whole_model())
    optimizer = ShardedMuon(muon_groups(model), **OPTIONS)
    train(model, optimizer, range(2), (rank, num_ranks))
    save_checkpoint(folder, 2, model, optimizer)


def resume(rank: int, num_ranks: int, folder: str) -> dict[str, Tensor]:
    model: Any = whole_model(1)
    if num_ranks > 1:
        model = FSDP(model)
    kind = ShardedMuon if num_ranks > 1 else Muon
    optimizer = kind(muon_groups(model), **OPTIONS)
    load_checkpoint(folder, model, optimizer)
    train(model, optimizer, range(2, 4), (rank, num_ranks))
    return gather_full_params(model)


def test_a_checkpoint_resumes_on_other_ranks_and_in_one_process(tmp_path):
    run_ranks(save_two_steps, 2, str(tmp_path), start_method="forkserver")
    expected = reference(4)
    assert_equal(run_ranks(resume, 3, str(tmp_path), start_method="forkserver")[2], expected)
    assert_equal(run_alone(resume, str(tmp_path)), expected)
