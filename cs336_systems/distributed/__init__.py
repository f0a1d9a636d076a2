"""Training on several processes: launching ranks, collectives, DDP, ZeRO, FSDP, TP, ring attention.

    from cs336_systems.distributed import FSDP, OverlapDDP, launch

Every collective takes its process group as an argument; None stands for the default group.
"""

from cs336_systems.distributed.checkpoint import (
    CheckpointError,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from cs336_systems.distributed.collectives import (
    all_gather_flat,
    all_reduce_mean,
    broadcast_parameters,
    num_ranks,
    rank_in,
    reduce_scatter_mean_flat,
)
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.fsdp import FSDP, gather_full_params, load_full_params, wrap_blocks
from cs336_systems.distributed.loss_scale import LossScaler
from cs336_systems.distributed.ring_attention import (
    merge_attention,
    ring_attention,
    split_context,
    zigzag_join,
    zigzag_split,
)
from cs336_systems.distributed.sharded_muon import ShardedMuon
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.spawn import RankError, is_torchrun, launch, run_ranks
from cs336_systems.distributed.tensor_parallel import apply_tensor_parallel
from cs336_systems.distributed.zero1 import Zero1Optimizer

__all__ = [
    "BucketedDDP",
    "CheckpointError",
    "FSDP",
    "FlatDDP",
    "LossScaler",
    "NaiveDDP",
    "OverlapDDP",
    "RankError",
    "ShardedMuon",
    "ShardedOptimizer",
    "Zero1Optimizer",
    "all_gather_flat",
    "all_reduce_mean",
    "apply_tensor_parallel",
    "broadcast_parameters",
    "checkpoints",
    "gather_full_params",
    "is_torchrun",
    "launch",
    "load_checkpoint",
    "load_full_params",
    "merge_attention",
    "num_ranks",
    "rank_in",
    "reduce_scatter_mean_flat",
    "ring_attention",
    "run_ranks",
    "save_checkpoint",
    "split_context",
    "wrap_blocks",
    "zigzag_join",
    "zigzag_split",
]
