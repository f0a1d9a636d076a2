"""Bytes that our wrappers send for a feed-forward layer, counted, beside the closed forms.

    rows = counted_rows("TP", [(1, 2), (1, 4)])      # (FSDP ranks, TP ranks)

Rank 0 of ranks that do not exist (`fake_ranks`) runs the wrappers on a stack of small layers in
bfloat16, and a `MessageCounter` records every collective of its third step; the first two also
compare what the ranks do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cs336_systems.analysis import ffn
from cs336_systems.analysis.ffn import FeedForward
from cs336_systems.book.tables import Listing
from cs336_systems.distributed import FSDP, apply_tensor_parallel
from cs336_systems.measure.messages import MessageCounter, fake_ranks
from cs336_systems.model import SwiGLU

LAYER = FeedForward(tokens=256, d_model=128, d_ff=384)
NUM_LAYERS = 8
MODES = ("forward", "backward")
HASH_BYTES = 8  # of each rank's messages so far, which FSDP compares once a step


class Stack(nn.Module):
    """Feed-forward layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SwiGLU(LAYER.d_model, LAYER.d_ff) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, (tokens, d_model), after all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def counted_bytes(num_fsdp: int, num_tp: int) -> dict[str, dict[str, float]]:
    """Return the bytes that a rank sends in a layer of the stack, by mode and axis.

    They are those of the stack over its layers; an axis of one rank sends nothing.
    """
    with fake_ranks(num_fsdp * num_tp):
        mesh = init_device_mesh("cpu", (num_fsdp, num_tp), mesh_dim_names=("FSDP", "TP"))
        torch.manual_seed(0)
        model: Any = Stack().bfloat16()
        if num_tp > 1:
            apply_tensor_parallel(model, mesh.get_group("TP"))
        if num_fsdp > 1:
            model = FSDP(model, process_group=mesh.get_group("FSDP"))
        sent: dict[str, dict[str, float]] = {}
        for _ in range(3):
            x = torch.zeros(LAYER.tokens // num_fsdp, LAYER.d_model, dtype=torch.bfloat16)
            with MessageCounter() as forward:
                y = model(x.requires_grad_())
            with MessageCounter() as backward:
                y.sum().backward()
            if num_fsdp > 1:
                model.finish_gradient_synchronization()
            sent = {
                mode: {axis: _of_tensors(counter, mesh.get_group(axis)) for axis in ("FSDP", "TP")}
                for mode, counter in zip(MODES, (forward, backward))
            }
    return sent


def _of_tensors(counter: MessageCounter, group: dist.ProcessGroup) -> float:
    """Return the bytes sent over `group` in a layer, without the hashes that ranks compare."""
    messages = counter.over(group)
    sent = [one.bytes_sent for one in messages if one.size_bytes > HASH_BYTES * group.size()]
    return sum(sent) / NUM_LAYERS


def derived_bytes(num_fsdp: int, num_tp: int) -> dict[str, dict[str, float]]:
    """Return what `counted_bytes` should, by the closed forms of section 8."""
    of_rank = FeedForward(tokens=LAYER.tokens // num_fsdp, d_model=LAYER.d_model, d_ff=LAYER.d_ff)
    return {
        mode: {
            # FSDP gathers a TP rank's part of the weights; TP reduces an FSDP rank's activations
            "FSDP": ffn.fsdp_seconds(LAYER, mode, num_fsdp, bytes_per_s=1.0) / num_tp,
            "TP": ffn.tp_seconds(of_rank, mode, num_tp, bytes_per_s=1.0),
        }
        for mode in MODES
    }


def counted_rows(grids: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return a row for each grid, mode and axis of several ranks: bytes derived and counted."""
    rows = []
    for num_fsdp, num_tp in grids:
        derived, counted = (of(num_fsdp, num_tp) for of in (derived_bytes, counted_bytes))
        rows += [
            {
                "quantity": "bytes",
                "grid": f"{num_fsdp} × {num_tp}",
                "FSDP ranks": num_fsdp,
                "TP ranks": num_tp,
                "pass": mode,
                "axis": axis,
                "derived (KiB)": derived[mode][axis] / 1024,
                "counted (KiB)": counted[mode][axis] / 1024,
            }
            for mode in MODES
            for axis, ranks in (("FSDP", num_fsdp), ("TP", num_tp))
            if ranks > 1
        ]
    return rows


def counted_table(columns: list[str]) -> Listing:
    """Return a table of `counted_rows` with `columns` before the bytes."""
    return Listing(
        title=f"bytes that a rank sends for a layer of D = {LAYER.d_model}, F = {LAYER.d_ff}, "
        f"B = {LAYER.tokens}",
        where={"quantity": "bytes"},
        significant=4,
        columns=(*columns, "pass", "derived (KiB)", "counted (KiB)"),
    )
