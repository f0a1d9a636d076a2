"""Tensor and sequence parallelism, FSDP on top of it, and hybrid sharding: equal to one process in
float64, bytes equal to the closed forms, checkpoints on other meshes, what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

from cs336_systems.analysis import ffn
from cs336_systems.config import ModelConfig
from cs336_systems.distributed import (
    FSDP,
    OverlapDDP,
    ShardedOptimizer,
    Zero1Optimizer,
    gather_full_params,
    load_checkpoint,
    load_full_params,
    run_ranks,
    save_checkpoint,
)
from cs336_systems.distributed.tensor_parallel import (
    apply_tensor_parallel,
    clip_grad_norm_,
    splits,
)
from cs336_systems.measure.messages import MessageCounter, fake_ranks
from cs336_systems.model import AdamW, Linear, SwiGLU, TransformerLM
from cs336_systems.model.block_parts import run_in_parts
from cs336_systems.model.checkpointing import apply_checkpointing
from tests.one_job import OneJob, run_alone

COVERS = ("cs336_systems/distributed", "cs336_systems/measure/messages.py")

# six heads and 36 hidden units divide over 2, 3 and 6 ranks, twelve heads over 4
SIZES = ModelConfig(
    name="test", d_model=48, d_ff=36, num_layers=2, num_heads=12, vocab_size=29, context_length=12
)
EXACT = 1e-12  # float64, relative to the largest element of each parameter
MAX_NORM = 0.5
JOBS = {2: OneJob(2), 4: OneJob(4), 3: OneJob(3), 6: OneJob(6)}


def whole_model(seed: int = 0) -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM.from_config(SIZES).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (2, 12, SIZES.context_length)
    tokens, targets = torch.randint(SIZES.vocab_size, shape, generator=generator)
    return tokens, targets


Step = Callable[[], object]


def train(
    model: nn.Module,
    steps: range,
    optimizer: torch.optim.Optimizer,
    *,
    place: tuple[int, int] = (0, 1),
    finish: Step = lambda: None,
    clip: Callable[[float], Tensor] | None = None,
) -> list[float]:
    """Train on part `place` of each batch; the norms of all gradients before they were clipped."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        tokens, targets = (one.chunk(place[1])[place[0]] for one in batch(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        finish()
        clip = clip or partial(nn.utils.clip_grad_norm_, [*model.parameters()])
        norms.append(clip(1e9).item())  # so large that nothing is rounded to float32
        optimizer.step()
    return norms


def reference(steps: int = 3) -> tuple[dict[str, Tensor], list[float]]:
    model = whole_model()
    norms = train(model, range(steps), sgd(model))
    return {name: one.detach() for name, one in model.named_parameters()}, norms


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW would hide a gradient that is too large by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def assert_equal_to_one_process(model: nn.Module, norms: list[float], steps: int = 3) -> None:
    expected, expected_norms = reference(steps)
    full = gather_full_params(model)
    assert list(full) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            full[name], value, rtol=0, atol=EXACT * value.abs().max().item(), msg=name
        )
    torch.testing.assert_close(norms, expected_norms, rtol=1e-6, atol=0)


# Tensor and sequence parallelism


def alone(rank: int, num_ranks: int, sequence_parallel: bool, checkpointing: str) -> None:
    # rank 0's values count
    model = whole_model(seed=rank)
    apply_checkpointing(model, checkpointing)
    apply_tensor_parallel(model, sequence_parallel=sequence_parallel)
    assert len(splits(model)) == 7 * SIZES.num_layers
    norms = train(model, range(3), sgd(model), clip=partial(clip_grad_norm_, model))
    assert_equal_to_one_process(model, norms)


ALONE = [(False, "none"), (True, "none"), (True, "1")]
for job in JOBS.values():
    job.calls += tuple((alone, *case) for case in ALONE)
# The mesh's 6 ranks are 2 x 3, its 4 ranks 2 x 2; more ranks than cores, so they are slow.
RANKS = [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 3, 6))]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("sequence_parallel", "checkpointing"), ALONE)
def test_a_split_model_trains_as_one_process(num_ranks, sequence_parallel, checkpointing):
    JOBS[num_ranks].results(alone, sequence_parallel, checkpointing)


def over_data(rank: int, num_ranks: int, wrapper: str, sequence_parallel: bool) -> None:
    """Two groups of ranks that each split the model, on halves of the batch."""
    num_tensor = num_ranks // 2
    mesh = init_device_mesh("cpu", (2, num_tensor), mesh_dim_names=("data", "tensor"))
    model: Any = whole_model(seed=rank)
    apply_tensor_parallel(model, mesh.get_group("tensor"), sequence_parallel=sequence_parallel)
    group = mesh.get_group("data")
    model = FSDP(model, process_group=group) if wrapper == "fsdp" else OverlapDDP(model, group)
    norms = train(
        model,
        range(3),
        sgd(model),
        place=(mesh.get_local_rank("data"), 2),
        finish=model.finish_gradient_synchronization,
        clip=model.clip_grad_norm_ if wrapper == "fsdp" else partial(clip_grad_norm_, model),
    )
    assert_equal_to_one_process(model, norms)


OVER_DATA = [("fsdp", False), ("fsdp", True), ("overlap", True)]
for number in (4, 6):
    JOBS[number].calls += tuple((over_data, *case) for case in OVER_DATA)


@pytest.mark.parametrize("num_ranks", RANKS[1::2])
@pytest.mark.parametrize(("wrapper", "sequence_parallel"), OVER_DATA)
def test_a_mesh_of_data_and_tensor_parallel_ranks_trains_as_one_process(
    num_ranks, wrapper, sequence_parallel
):
    JOBS[num_ranks].results(over_data, wrapper, sequence_parallel)


def hybrid(rank: int, num_ranks: int, num_shards: int, granularity: Any) -> None:
    """HSDP: `num_shards` ranks share a replica."""
    shape = (num_ranks // num_shards, num_shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = FSDP(
        whole_model(seed=rank),
        granularity=granularity,
        process_group=mesh.get_group("shard"),
        replicate_group=mesh.get_group("replicate"),
    )
    norms = train(
        model,
        range(3),
        sgd(model),
        place=(rank, num_ranks),
        finish=model.finish_gradient_synchronization,
        clip=model.clip_grad_norm_,
    )
    assert_equal_to_one_process(model, norms)
    # 1 / num_shards of each weight, whatever the number of replicas
    head = model.module.lm_head.weight
    assert len(head) <= -(-SIZES.vocab_size // num_shards)


HYBRID = {2: [1, 2], 4: [2, 4], 6: [2, 3]}
for number, shards in HYBRID.items():
    JOBS[number].calls += tuple((hybrid, one, "block") for one in shards)


@pytest.mark.parametrize(
    ("num_ranks", "num_shards"),
    [
        pytest.param(number, one, marks=[pytest.mark.slow] * (number > 2))
        for number, shards in HYBRID.items()
        for one in shards
    ],
)
def test_hybrid_sharding_trains_as_one_process(num_ranks, num_shards):
    JOBS[num_ranks].results(hybrid, num_shards, "block")


def part_between_replicas(rank: int, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = FSDP(
        whole_model(),
        process_group=mesh.get_group("shard"),
        replicate_group=mesh.get_group("replicate"),
    )
    if rank == 1:
        model.module.layers = model.module.layers[::-1]
    train(model, range(2), sgd(model), finish=model.finish_gradient_synchronization)


def test_replicas_that_run_other_modules_are_told_where():
    with pytest.raises(RuntimeError, match="all ranks must run the same modules in the same order"):
        run_ranks(part_between_replicas, 2, start_method="forkserver", timeout_s=20)


# Bytes against the closed forms


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_sends_what_the_closed_form_says(num_ranks, sequence_parallel):
    layer = ffn.FeedForward(tokens=24, d_model=16, d_ff=36)
    with fake_ranks(num_ranks):
        model = nn.Sequential(SwiGLU(layer.d_model, layer.d_ff)).bfloat16()
        group = dist.group.WORLD
        ranks = apply_tensor_parallel(model, group)
        ranks.sequence_parallel = sequence_parallel
        rows = layer.tokens // (num_ranks if sequence_parallel else 1)
        x = torch.zeros(rows, layer.d_model, dtype=torch.bfloat16, requires_grad=True)
        with MessageCounter() as forward:
            y = model(x)
        with MessageCounter() as backward:
            y.sum().backward()
        for mode, sent in (("forward", forward), ("backward", backward)):
            expected = ffn.tp_seconds(layer, mode, num_ranks, bytes_per_s=1.0)
            assert sent.bytes(group) == pytest.approx(expected, rel=1e-12)
            kinds = [one.kind for one in sent.messages]
            assert kinds == (
                []
                if num_ranks == 1
                else ["all_gather", "reduce_scatter"]
                if sequence_parallel
                else ["all_reduce"]
            )


@pytest.mark.parametrize(("num_fsdp", "num_tp"), [(1, 2), (4, 1), (2, 2), (2, 3), (4, 6)])
def test_fsdp_over_split_weights_sends_what_the_closed_forms_say(num_fsdp, num_tp):
    layer = ffn.FeedForward(tokens=48, d_model=32, d_ff=72)
    with fake_ranks(num_fsdp * num_tp):
        mesh = init_device_mesh("cpu", (num_fsdp, num_tp), mesh_dim_names=("data", "tensor"))
        model: Any = nn.Sequential(SwiGLU(layer.d_model, layer.d_ff)).bfloat16()
        apply_tensor_parallel(model, mesh.get_group("tensor"))
        model = FSDP(model, process_group=mesh.get_group("data"))
        x = torch.zeros(layer.tokens // num_fsdp, layer.d_model, dtype=torch.bfloat16)
        with MessageCounter() as sent:
            model(x.requires_grad_())
        # the first step also compares messages, eight bytes each
        weights = [one for one in sent.over(mesh.get_group("data")) if one.size_bytes > 100]
        of_data = sum(one.bytes_sent for one in weights)
        of_tensor = sent.bytes(mesh.get_group("tensor"))
        both = partial(ffn.fsdp_tp_seconds, layer, num_fsdp, num_tp, bytes_per_s=1.0)
        assert of_data + of_tensor == pytest.approx(both(overlap=False), rel=1e-12)
        assert max(of_data, of_tensor) == pytest.approx(both(overlap=True), rel=1e-12)


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(4, 1), (2, 2), (1, 4), (2, 4)])
def test_hybrid_sharding_sends_the_shards_gradients_between_replicas(num_shards, num_replicas):
    with fake_ranks(num_shards * num_replicas):
        mesh = init_device_mesh(
            "cpu", (num_replicas, num_shards), mesh_dim_names=("replicate", "shard")
        )
        groups = [mesh.get_group(name) for name in ("shard", "replicate")]
        linear = nn.Linear(8, 16, bias=False)
        model = FSDP(nn.Sequential(linear), process_group=groups[0], replicate_group=groups[1])
        model(torch.zeros(1, 8)).sum()
        weight_bytes = 4 * 8 * 16
        with MessageCounter() as sent:
            model(torch.zeros(1, 8)).sum().backward()
        large = [one for one in sent.messages if one.size_bytes > 64]
        by_kind = {
            kind: sum(one.bytes_sent for one in large if one.kind == kind)
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
        }
        share = (num_shards - 1) / num_shards
        assert by_kind["reduce_scatter"] == share * weight_bytes
        assert by_kind["all_gather"] == share * weight_bytes  # kept whole for the backward
        between = 2 * (num_replicas - 1) / num_replicas * weight_bytes / num_shards
        assert by_kind["all_reduce"] == between


def test_a_counter_does_not_guess():
    with fake_ranks(2), MessageCounter() as sent:
        dist.all_reduce(torch.zeros(5))
        with pytest.raises(NotImplementedError, match="does not know the bytes of send"):
            dist.send(torch.zeros(5), 1)
        with pytest.raises(NotImplementedError, match="_c10d_functional::all_reduce"):
            all_reduce(torch.zeros(5), "sum", dist.group.WORLD)
    assert [(one.kind, one.bytes_sent) for one in sent.messages] == [("all_reduce", 20)]


# Checkpoints, and whole parameters


def on_mesh(rank: int, num_ranks: int, num_tensor: int, seed: int) -> tuple[Any, Any, Any]:
    """A model split over `num_tensor` ranks, sharded over the others; its optimizer, the mesh."""
    shape = (num_ranks // num_tensor, num_tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model: Any = whole_model(seed)
    apply_tensor_parallel(model, mesh.get_group("tensor"))
    if num_tensor < num_ranks:
        model = FSDP(model, process_group=mesh.get_group("data"))
    return model, AdamW(model.parameters(), lr=0.01), mesh


def go_on(model: Any, optimizer: Any, mesh: Any, steps: range) -> None:
    place = (mesh.get_local_rank("data"), mesh.size(0)) if mesh else (0, 1)
    finish = getattr(model, "finish_gradient_synchronization", lambda: None)
    train(model, steps, optimizer, place=place, finish=finish, clip=lambda _: torch.zeros(()))


def save_after_two_steps(rank: int, num_ranks: int, num_tensor: int, folder: str) -> None:
    model, optimizer, mesh = on_mesh(rank, num_ranks, num_tensor, 0)
    go_on(model, optimizer, mesh, range(2))
    save_checkpoint(folder, 2, model, optimizer)


def resume(rank: int, num_ranks: int, num_tensor: int, folder: str) -> dict[str, Tensor]:
    model, optimizer, mesh = on_mesh(rank, num_ranks, num_tensor, 1)
    load_checkpoint(folder, model, optimizer)
    go_on(model, optimizer, mesh, range(2, 4))
    return gather_full_params(model)


def resume_alone(rank: int, num_ranks: int, folder: str) -> dict[str, Tensor]:
    model = whole_model(1)
    optimizer = AdamW(model.parameters(), lr=0.01)
    load_checkpoint(folder, model, optimizer)
    go_on(model, optimizer, None, range(2, 4))
    return gather_full_params(model)


def test_a_checkpoint_resumes_on_another_mesh_and_in_one_process(tmp_path):
    """Columns were not known to checkpoints."""
    folder = str(tmp_path)
    run_ranks(save_after_two_steps, 4, 2, folder, start_method="forkserver")
    expected = whole_model()
    optimizer = AdamW(expected.parameters(), lr=0.01)
    go_on(expected, optimizer, None, range(4))
    results = [
        run_ranks(resume, 2, 2, folder, start_method="forkserver")[0],
        run_ranks(resume, 2, 1, folder, start_method="forkserver")[1],
        run_alone(resume_alone, folder),
    ]
    for result in results:
        for name, value in expected.named_parameters():
            torch.testing.assert_close(result[name], value.detach(), rtol=0, atol=1e-9)


def save_without_optimizer(rank: int, num_ranks: int, folder: str) -> None:
    model = whole_model()
    apply_tensor_parallel(model)
    save_checkpoint(folder, 0, model)


def save_empty_rows(rank: int, num_ranks: int, folder: str) -> None:
    """Three ranks share four rows: the last has none, where the next part begins."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(SwiGLU(8, 8)).double()
    apply_tensor_parallel(model, mesh.get_group("tensor"))
    model = FSDP(model, process_group=mesh.get_group("data"))
    save_checkpoint(folder, 0, model, sgd(model))


@pytest.mark.slow
def test_every_part_is_saved_without_an_optimizer_and_beside_empty_rows(tmp_path):
    """The checkpoint was told as damaged when it was loaded, and the one before it was gone."""
    for place, (save, build, ranks) in enumerate(
        [
            (save_without_optimizer, lambda: whole_model(1), 2),
            (save_empty_rows, lambda: nn.Sequential(SwiGLU(8, 8)).double(), 6),
        ]
    ):
        run_ranks(save, ranks, str(tmp_path / str(place)), start_method="forkserver")
        model = build()
        load_checkpoint(tmp_path / str(place), model)
        torch.manual_seed(0)
        expected = whole_model() if place == 0 else nn.Sequential(SwiGLU(8, 8)).double()
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.slow
@JOBS[4].check
def test_whole_parameters_can_be_loaded(rank: int, num_ranks: int) -> None:
    model, _, _ = on_mesh(rank, num_ranks, 2, 0)
    other = dict(whole_model(5).named_parameters())
    load_full_params(model, other)
    for name, value in gather_full_params(model).items():
        assert torch.equal(value, other[name]), name
    with pytest.raises(ValueError, match=r"full must hold 'layers.0.ffn.w2.weight' of shape"):
        load_full_params(model, {**other, "layers.0.ffn.w2.weight": torch.ones(48, 18)})


@JOBS[2].check
def test_sequence_parallelism_can_be_switched_off_for_any_length(rank: int, num_ranks: int) -> None:
    model = whole_model()
    tokens = batch(0)[0][:, :7]
    expected = model(tokens)
    ranks = apply_tensor_parallel(model, sequence_parallel=True)
    with pytest.raises(ValueError, match="dimension -2 must be a multiple of 2 ranks, got 7"):
        model(tokens)
    ranks.sequence_parallel = False
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)


# What is refused


class Gated(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LowRank(Linear):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.a = nn.Parameter(torch.ones(d_out, 1))


def change_swiglu(model: Any) -> None:
    model.layers[0].ffn = Gated(48, 36).double()


def change_linear(model: Any) -> None:
    model.layers[0].attn.q_proj = LowRank(48, 48).double()


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(model.layers[0].ffn.w1)


def hook_forward(model: Any) -> None:
    model.layers[0].attn.register_forward_hook(lambda *_: None)


def hook_gradient(model: Any) -> None:
    model.layers[0].ffn.w1.weight.register_hook(lambda gradient: 2 * gradient)


def tie_weights(model: Any) -> None:
    model.layers[0].attn.k_proj.weight = model.layers[0].attn.q_proj.weight


def share_layer(model: Any) -> None:
    model.layers[1].ffn = model.layers[0].ffn


def share_norm(model: Any) -> None:
    model.layers[1].ln1 = model.layers[0].ln1


def scale_block(model: Any) -> None:
    model.layers[0].gamma = nn.Parameter(torch.ones(48).double())


LOST = [change_swiglu, change_linear, parametrize, hook_forward, hook_gradient, tie_weights]
LOST += [share_layer, share_norm, scale_block]


@JOBS[2].check
def test_what_a_part_would_lose_is_refused(rank: int, num_ranks: int) -> None:
    """Adapters, hooks, norms of weights and ties vanished, and the loss was another one."""
    for change in LOST:
        model = whole_model()
        change(model)
        with pytest.raises(ValueError, match=r"'layers\.\d.*' (must|has parameters)"):
            apply_tensor_parallel(model, sequence_parallel=True)
        assert not splits(model), change


@JOBS[2].check
def test_wrappers_over_ranks_with_other_parts_are_refused(rank: int, num_ranks: int) -> None:
    """The parts of rank 0 replaced all others."""
    for wrap in (
        FSDP,
        OverlapDDP,
        lambda model: Zero1Optimizer(model.parameters(), AdamW),
        lambda model: ShardedOptimizer(model.parameters(), AdamW),
    ):
        model = whole_model()
        apply_tensor_parallel(model)
        with pytest.raises(ValueError, match="part 0 of 2, rank 1|Zero1Optimizer would mix"):
            wrap(model)
    with pytest.raises(ValueError, match="must be split and not sharded"):
        clip_grad_norm_(whole_model(), 1.0)


@pytest.mark.slow
@JOBS[4].check
def test_groups_that_are_no_mesh_are_refused(rank: int, num_ranks: int) -> None:
    """Rows of different places were averaged."""
    shard, _ = dist.new_subgroups(2)
    crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    for replicas in (shard, dist.group.WORLD, crossed[rank in (1, 2)]):
        with pytest.raises(ValueError, match="replicate_group must hold the ranks of one place"):
            FSDP(nn.Linear(4, 4), process_group=shard, replicate_group=replicas)


def part_between_replicas_of_a_mesh(rank: int, num_ranks: int) -> None:
    """The replicas are not the whole job: the others split the matrices."""
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    model: Any = whole_model()
    apply_tensor_parallel(model, mesh.get_group("tensor"))
    model = FSDP(
        model,
        process_group=mesh.get_group("shard"),
        replicate_group=mesh.get_group("replicate"),
    )
    if mesh.get_local_rank("replicate") == 1:
        model.module.layers = model.module.layers[::-1]
    train(model, range(2), sgd(model), finish=model.finish_gradient_synchronization)


@pytest.mark.slow
def test_replicas_on_a_mesh_that_run_other_modules_are_told_where():
    with pytest.raises(RuntimeError, match="all ranks must run the same modules in the same order"):
        run_ranks(part_between_replicas_of_a_mesh, 4, start_method="forkserver", timeout_s=20)


@JOBS[2].check
def test_what_would_go_wrong_in_silence_is_refused(rank: int, num_ranks: int) -> None:
    sizes = {"d_ff": 36, "num_heads": 12} | {
        "vocab_size": 29,
        "context_length": 12,
        "num_layers": 1,
    }
    for odd, name in (({"d_ff": 35}, "'layers.0.ffn'"), ({"num_heads": 3}, "'layers.0.attn'")):
        model = TransformerLM(**{"d_model": 48, **sizes, **odd})
        with pytest.raises(ValueError, match=f"{name} must have .* a multiple of 2 ranks, got"):
            apply_tensor_parallel(model)
        assert not splits(model), "nothing is split if one layer cannot be"
    with pytest.raises(ValueError, match="must hold SwiGLU or attention layers, .* has none"):
        apply_tensor_parallel(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="must be a TransformerLM for sequence_parallel"):
        apply_tensor_parallel(nn.Sequential(SwiGLU(4, 8)), sequence_parallel=True)
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match="'token_embeddings.weight' is on the meta device"),
    ):
        apply_tensor_parallel(TransformerLM.from_config(SIZES))

    model = whole_model()
    before = sgd(model)
    apply_tensor_parallel(model)
    with pytest.raises(ValueError, match="this one is split already"):
        apply_tensor_parallel(model)
    with pytest.raises(ValueError, match="model must run its own layers"):
        run_in_parts(model)
    with pytest.raises(ValueError, match="cut them: build it after wrapping"):
        before.step()
    # Newton-Schulz of a part is not a part of that of the whole
    matrices = [one for name, one in model.named_parameters() if name in splits(model)]
    with pytest.raises(ValueError, match="Muon"):
        train(model, range(1), torch.optim.Muon(matrices), clip=lambda _: torch.zeros(()))
    loss = model(batch(0)[0]).square().sum()
    first = torch.autograd.grad(loss, model.token_embeddings.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
