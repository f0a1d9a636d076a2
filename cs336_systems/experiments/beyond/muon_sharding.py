"""What it costs to shard Muon, whose update needs whole matrices: bytes and FLOPs of a rank."""

from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.analysis import HARDWARE
from cs336_systems.book.frames import digits
from cs336_systems.config import MODEL_SIZES, ModelConfig
from cs336_systems.distributed import FSDP, ShardedMuon, ShardedOptimizer
from cs336_systems.distributed.sharded_muon import choose_owners
from cs336_systems.experiments import Bars, Calculation, Listing, problem
from cs336_systems.measure.messages import MessageCounter, fake_ranks
from cs336_systems.model.muon import Muon, newton_schulz_flops

GPU = HARDWARE["H200"]
RANKS = (8, 64)
MODELS = ("xl", "8b")
GATHER_ALL, OWNERS, BROADCAST = "gather all", "owners", "owners, broadcast"
SENT_BYTES = {GATHER_ALL: 2, OWNERS: 2, BROADCAST: 4}  # of an element
COUNTED_RANKS, COUNTED_SHAPE, COUNTED_MATRICES = 8, (64, 64), 16


def matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """Return the shapes of the blocks' matrices, those that Muon updates."""
    block = [(model.d_model, model.d_model)] * 4
    block += [(model.d_ff, model.d_model)] * 2 + [(model.d_model, model.d_ff)]
    return block * model.num_layers


def sent_bytes(way: str, elements: int, num_ranks: int) -> float:
    """Return the bytes that a rank sends in a step for matrices of `elements` in all.

    "gather all": every rank gathers all rows. "owners": two all-to-alls, each of a rank's rows but
    its own. "owners, broadcast": whole weights, from their owner to all, a mean over the ranks.
    """
    others = (num_ranks - 1) / num_ranks
    num_bytes = SENT_BYTES[way] * elements
    return 2 * num_bytes * others / num_ranks if way == OWNERS else num_bytes * others


def rank_flops(way: str, shapes: list[tuple[int, int]], num_ranks: int) -> int:
    """Return the Newton-Schulz FLOPs of the busiest rank."""
    if way == GATHER_ALL:
        return sum(newton_schulz_flops(*shape) for shape in shapes)
    loads = [0] * num_ranks
    for shape, owner in zip(shapes, choose_owners(shapes, num_ranks)):
        loads[owner] += newton_schulz_flops(*shape)
    return max(loads)


def bytes_per_s(way: str, num_ranks: int) -> float:
    """Return what a rank can send: rings use all adapters of a node, an all-to-all a rank's own."""
    if way == OWNERS and num_ranks > GPU.gpus_per_node:
        return GPU.network_bytes_per_s
    return GPU.ring_bytes_per_s(num_ranks, ranks_per_node=GPU.gpus_per_node)


def counted_bytes(way: str) -> float:
    """Return the bytes that rank 0 of ranks that do not exist sends in a step of our optimizers."""
    with fake_ranks(COUNTED_RANKS):
        layers = [nn.Linear(*COUNTED_SHAPE, bias=False) for _ in range(COUNTED_MATRICES)]
        model: Any = nn.Sequential(*layers)
        if way == OWNERS:
            model = FSDP(model, granularity="layer")
        weights = [*model.parameters()]
        optimizer = ShardedMuon(weights) if way == OWNERS else ShardedOptimizer(weights, Muon)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        with MessageCounter() as sent:
            optimizer.step()
        return sent.bytes(dist.group.WORLD)


def claim(rows: pd.DataFrame) -> str:
    """Return the figure's title: how much time owners save."""
    times = rows.pivot_table(index=["model", "N"], columns="way", values="time (ms)")
    gain = times[GATHER_ALL] / times[OWNERS]
    return f"Owners take {digits(gain.min(), 2)} to {digits(gain.max(), 2)} times less time"


@problem(title="What sharding an optimizer that is not elementwise costs: Muon", order=19.5)
class MuonSharding(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return bytes, FLOPs and least time of a step by model, ranks and way; and counts."""
        rows: list[dict[str, Any]] = []
        for name in MODELS:
            model = MODEL_SIZES[name]
            shapes = matrices(model)
            elements = sum(height * width for height, width in shapes)
            for num_ranks in RANKS:
                for way in SENT_BYTES:
                    sent = sent_bytes(way, elements, num_ranks)
                    flops = rank_flops(way, shapes, num_ranks)
                    times = {"messages (ms)": 1e3 * sent / bytes_per_s(way, num_ranks)}
                    times["Newton-Schulz (ms)"] = 1e3 * flops / GPU.flops_per_s
                    rows.append(
                        {
                            "quantity": "step",
                            "model": name,
                            "N": num_ranks,
                            "way": way,
                            "case": f"{name}, {num_ranks} GPUs",
                            "sent (MiB)": sent / 2**20,
                            "TFLOP": flops / 1e12,
                            **times,
                            "time (ms)": sum(times.values()),
                        }
                    )
        elements = COUNTED_MATRICES * COUNTED_SHAPE[0] * COUNTED_SHAPE[1]
        rows += [
            {
                "quantity": "counted",
                "way": way,
                "derived (KiB)": sent_bytes(way, elements, COUNTED_RANKS) / 1024,
                "counted (KiB)": counted_bytes(way) / 1024,
            }
            for way in (OWNERS, BROADCAST)
        ]
        return rows

    tables = {
        "steps": Listing(
            title="a step of Muon's matrices, at the peaks of an H200 and its links",
            where={"quantity": "step"},
            significant=3,
            columns=(
                "model",
                "N",
                "way",
                "sent (MiB)",
                "TFLOP",
                "messages (ms)",
                "Newton-Schulz (ms)",
                "time (ms)",
            ),
        ),
        "counted": Listing(
            title=f"bytes that a rank of {COUNTED_RANKS} sends for {COUNTED_MATRICES} matrices of "
            f"{COUNTED_SHAPE[0]} × {COUNTED_SHAPE[1]}",
            where={"quantity": "counted"},
            significant=4,
            columns=("way", "derived (KiB)", "counted (KiB)"),
        ),
    }
    figures = {
        "times": Bars(
            claim=claim,
            title="A step of Muon's matrices by how they are shared out",
            subtitle="calculated: messages and Newton-Schulz at the peaks of an H200 and its links",
            x="case",
            y="time (ms)",
            y_title="ms",
            color="way",
            where={"quantity": "step"},
        )
    }
