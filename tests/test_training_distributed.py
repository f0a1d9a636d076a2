"""Training on two gloo ranks: one process's losses under every wrapper, resuming, torchrun, and the
bytes predicted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.analysis import traffic
from cs336_systems.bench.spec import Unsupported, load
from cs336_systems.config import Precision, RunConfig
from cs336_systems.distributed.spawn import run_ranks
from cs336_systems.experiments.beyond.training_run import FIRST_BOUND, LAST_BOUND, curve_error
from cs336_systems.training import Corpus, TrainingConfig, TrainingResult, train
from cs336_systems.training.hyperparameters import WRAPPERS
from cs336_systems.training.loop import RunOptions, _step, train_rank
from cs336_systems.training.wrappers import build_trainee
from tests.one_job import run_alone
from tests.test_launch import start_agents
from tests.test_training import SHORT

NUM_RANKS = 2
HALF_WRAPPERS = ("overlap", "zero1", "fsdp")
FOR_ONE = "saved by two"


def wrapped(wrapper: str, **fields: Any) -> TrainingConfig:
    return replace(SHORT, wrapper=wrapper, num_ranks=NUM_RANKS, **fields)


def everything(rank: int, num_ranks: int, out: str) -> dict[str, Any]:
    """All wrappers in one pair of processes: starting them costs more than training."""
    found: dict[str, Any] = {name: {} for name in ("plain", "split", "resumed", "handed over")}
    for wrapper in WRAPPERS[1:]:
        folder = Path(out) / wrapper
        found["plain"][wrapper] = train(wrapped(wrapper), RunOptions(log_every=2, sample_bytes=20))
        found["split"][wrapper] = train(
            wrapped(wrapper, context_parallel=2, accumulation=2),
            RunOptions(log_every=2, sample_bytes=20),
        )
        train(wrapped(wrapper), RunOptions(out=folder, checkpoint_every=2, stop_after=4))
        found["resumed"][wrapper] = train(
            wrapped(wrapper), RunOptions(out=folder, resume=True, log_every=2)
        )
    # one wrapper's checkpoint under the next one's hands
    for earlier, later in zip(WRAPPERS[1:], WRAPPERS[2:]):
        folder = Path(out) / f"{earlier}-{later}"
        train(wrapped(earlier), RunOptions(out=folder, checkpoint_every=3, stop_after=3))
        found["handed over"][later] = train(
            wrapped(later), RunOptions(out=folder, resume=True, log_every=2)
        )
    train(wrapped("fsdp"), RunOptions(out=Path(out) / FOR_ONE, checkpoint_every=3, stop_after=3))
    for wrapper in HALF_WRAPPERS:
        folder = Path(out) / f"half-{wrapper}"
        half = wrapped(wrapper, precision=Precision(autocast="float16"))
        found["plain"][f"half {wrapper}"] = train(half, RunOptions(log_every=2))
        train(half, RunOptions(out=folder, checkpoint_every=2, stop_after=4))
        found["resumed"][f"half {wrapper}"] = train(
            half, RunOptions(out=folder, resume=True, log_every=2)
        )
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(runs: Path) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(everything, NUM_RANKS, str(runs))


@pytest.fixture(scope="module")
def alone() -> TrainingResult:
    """What one process makes of the whole batches."""
    return train(SHORT, RunOptions(sample_bytes=20))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
@pytest.mark.parametrize("way", ["plain", "split", "handed over"])
def test_every_wrapper_has_one_processs_losses(results, alone, way, wrapper):
    """Two ranks of four sequences, clipped and scheduled, against one process with all eight."""
    for found in results:
        if way == "handed over" and wrapper == WRAPPERS[1]:
            continue  # nobody's successor
        result: TrainingResult = found[way][wrapper]
        assert result.losses == pytest.approx(alone.losses, rel=2e-6)
        assert result.validation_loss == pytest.approx(alone.validation_loss, rel=2e-6)
        assert way not in ("plain", "split") or result.sample == alone.sample


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_wrapper_resumes_to_the_same_losses(results, wrapper):
    for found in results:
        assert found["resumed"][wrapper].first_step == 4
        assert found["resumed"][wrapper].losses == found["plain"][wrapper].losses


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", HALF_WRAPPERS)
def test_float16_trains_under_a_loss_scale_and_resumes_with_it(results, alone, wrapper):
    """The resumed run goes on with the scale of the first, which has halved it from 2¹⁶ if need be."""
    for found in results:
        half, resumed = found["plain"][f"half {wrapper}"], found["resumed"][f"half {wrapper}"]
        assert half.losses[0] == pytest.approx(alone.losses[0], rel=1e-3)
        assert half.losses[-1] < half.losses[0]
        assert resumed.losses == half.losses


@pytest.mark.slow
def test_a_run_saved_by_two_ranks_goes_on_in_one_process(results, alone, runs):
    resumed = train(SHORT, RunOptions(out=runs / FOR_ONE, resume=True, sample_bytes=20))
    assert resumed.first_step == 3
    assert resumed.losses == pytest.approx(alone.losses, rel=2e-6)
    assert len(resumed.sample) > 10


def with_muon(rank: int, num_ranks: int) -> dict[str, TrainingResult]:
    return {
        wrapper: train(wrapped(wrapper, optimizer="muon"), RunOptions(log_every=2))
        for wrapper in ("overlap", "sharded-optimizer", "fsdp")
    }


@pytest.mark.slow
def test_muon_has_one_processs_losses_whoever_owns_a_matrix():
    alone = train(replace(SHORT, optimizer="muon"))
    for results in run_ranks(with_muon, NUM_RANKS):
        for result in results.values():
            # bfloat16 products of gradients that differ by float32's rounding
            assert result.losses == pytest.approx(alone.losses, rel=2e-3)
    assert alone.losses != train(SHORT).losses


MESHES: dict[str, dict[str, Any]] = {
    "tensor": {"wrapper": "none", "num_ranks": 2, "tensor_parallel": 2},
    "overlap x tensor": {"wrapper": "overlap", "tensor_parallel": 2},
    "sharded-optimizer x sequence": {
        "wrapper": "sharded-optimizer",
        "tensor_parallel": 2,
        "sequence_parallel": True,
    },
    "fsdp x tensor": {"wrapper": "fsdp", "tensor_parallel": 2, "accumulation": 2},
    "replicas x fsdp": {"wrapper": "fsdp", "replicas": 2},
    "half fsdp x sequence": {
        "wrapper": "fsdp",
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "precision": Precision(autocast="float16"),
    },
}


def on_meshes(rank: int, num_ranks: int, out: str) -> dict[str, TrainingResult]:
    """Each mesh of four ranks, and then a run that each mesh goes on with after the one before."""
    found = {
        name: train(
            replace(SHORT, **{"num_ranks": 4, **fields}), RunOptions(log_every=2, sample_bytes=20)
        )
        for name, fields in MESHES.items()
        if fields.get("num_ranks") != 2
    }
    for done, fields in enumerate(list(MESHES.values())[1:5], start=1):
        options = RunOptions(
            out=Path(out), checkpoint_every=1, log_every=1, resume=done > 1, stop_after=done
        )
        found["handed over"] = train(replace(SHORT, num_ranks=4, **fields), options)
    return found


@pytest.mark.slow
def test_every_mesh_has_one_processs_losses_and_goes_on_with_anothers(alone, tmp_path):
    found = run_ranks(on_meshes, 4, str(tmp_path))
    found += run_ranks(train_rank_of, 2, MESHES["tensor"])
    for results in found:
        for name, result in results.items():
            half = name.startswith("half")
            bound = 1e-3 if half else 2e-6
            losses = alone.losses[:1] if half else alone.losses[: len(result.losses)]
            assert result.losses[: len(losses)] == pytest.approx(losses, rel=bound), name
            if name == "handed over":
                assert len(result.losses) == 4
            else:
                assert half or result.sample == alone.sample, name
                assert result.losses[-1] < result.losses[0]


def train_rank_of(rank: int, num_ranks: int, fields: dict[str, Any]) -> dict[str, TrainingResult]:
    config = replace(SHORT, **fields)
    return {"tensor": train_rank(rank, num_ranks, config, RunOptions(sample_bytes=20))}


def test_a_wrong_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="config.num_ranks must be the number of ranks, 1, got 2"):
        run_alone(train_rank, wrapped("naive"), RunOptions())


@pytest.mark.slow
def test_two_agents_of_torchrun_train_as_one_process(tmp_path):
    """The command of the README on two nodes, both on this host."""
    arguments = [
        "train",
        "--wrapper",
        "fsdp",
        "--batch",
        "4",
        "--steps",
        "3",
        "--context-length",
        "16",
    ]
    arguments += ["--device", "cpu", "--log-every", "1", "--out", str(tmp_path / "run")]
    # a module in place of a script
    agents = start_agents(Path("-m"), 2, 1, ["cs336_systems", *arguments])
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sum("on held-out text" in output for output in outputs) == 1  # rank 0 alone
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run" / "losses.jsonl").read_text().splitlines()
    ]
    model = replace(TrainingConfig().model, context_length=16)
    alone = train(TrainingConfig(model=model, batch=4, steps=3))
    assert losses == pytest.approx(alone.losses, rel=1e-5)


# What is really sent, against the prediction


class SentBytes(TorchDispatchMode):
    """Bytes that each rank of a ring would send for the collectives that are called."""

    SHARES = {
        "allreduce_": 2.0,
        "_allgather_base_": 1.0,
        "_reduce_scatter_base_": 1.0,
        "broadcast_": 1.0,
    }

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.share = (num_ranks - 1) / num_ranks
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            largest = max(
                leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
            )
            self.total += self.SHARES[func.overloadpacket.__name__] * self.share * largest
        return func(*args, **(kwargs or {}))


def bytes_of_a_step(wrapper: str, rank: int, num_ranks: int) -> float:
    """Bytes sent in the second step, the first having built what later steps use."""
    corpus, config = Corpus.load(), wrapped(wrapper, clip_norm=None)
    trainee = build_trainee(config, torch.device("cpu"))
    _step(trainee, corpus, config, 0, rank)
    with SentBytes(num_ranks) as counter:
        _step(trainee, corpus, config, 1, rank)
    return counter.total


def bytes_of_all(rank: int, num_ranks: int) -> dict[str, float]:
    return {wrapper: bytes_of_a_step(wrapper, rank, num_ranks) for wrapper in WRAPPERS[1:]}


def test_predicted_bytes_are_those_that_the_wrappers_send(monkeypatch):
    """Within 2 %: buckets and shards are padded, and a wrapper may agree with its peers in a few
    bytes.
    """
    monkeypatch.setattr(traffic, "COMPUTE_BYTES", 4)  # the wrappers' model is in float32
    for found in run_ranks(bytes_of_all, NUM_RANKS):
        for wrapper, sent in found.items():
            predicted = traffic.bytes_sent(
                SHORT.model, traffic.Plan(scheme=wrapper, data_parallel=NUM_RANKS)
            )
            assert sent == pytest.approx(predicted, rel=0.02), wrapper


# The experiment


def test_the_experiments_cells_yield_the_promised_rows():
    run = RunConfig(scale="tiny", device="cpu")
    problem = load("training_run")
    cells = problem.cells(run)
    assert [cell.implementation for cell in cells] == ["none", "bucketed"]
    for cell in cells:
        found = list(problem.measure(cell, run))
        assert tuple(measurement.row for measurement in found) == cell.rows
        losses, held_out = (measurement.samples for measurement in found)
        assert len(losses) == cell.case.steps and len(held_out) == 1
        assert found[0].error is not None and found[0].error <= 1


def test_another_model_is_not_recorded_as_trained():
    """The records of this package's model were once under the name of the user's."""
    run = RunConfig(scale="tiny", device="cpu", model="tests.broken_models:Raises")
    cell = load("training_run").cells(run)[0]
    with pytest.raises(Unsupported, match="the run trains this package's model, not the user's"):
        list(load("training_run").measure(cell, run))


def test_another_curve_is_not_recorded():
    curve = [5.0 - 0.01 * step for step in range(30)]
    assert curve_error(curve, curve) == 0
    assert curve_error([*curve[:3], curve[3] * (1 + 2 * FIRST_BOUND), *curve[4:]], curve) > 1
    assert (
        curve_error([*curve[:20], *(loss * (1 + 2 * LAST_BOUND) for loss in curve[20:])], curve) > 1
    )
    assert curve_error([*curve[:15], float("nan"), *curve[16:]], curve) == float("inf")
    assert curve_error(curve[:-1], curve) == float("inf")
