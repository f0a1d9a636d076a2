"""Parallel training on paper: rings, pipelines, closed forms of each scheme, predicted steps.

Nothing here is measured, and nothing needs a GPU or a process group. Tests compare measurements
with it.
"""

from cs336_systems.accounting import RankBytes
from cs336_systems.analysis.ffn import FeedForward
from cs336_systems.analysis.hardware import HARDWARE, Hardware
from cs336_systems.analysis.memory_plan import rank_bytes
from cs336_systems.analysis.pipeline import Pipeline, PipelineRun, simulate_pipeline
from cs336_systems.analysis.predictor import Prediction, predict
from cs336_systems.analysis.rings import Traffic, alternate_ring_all_reduce, ring_all_reduce
from cs336_systems.analysis.traffic import SCHEMES, Plan

__all__ = [
    "FeedForward",
    "HARDWARE",
    "Hardware",
    "Pipeline",
    "PipelineRun",
    "Plan",
    "Prediction",
    "RankBytes",
    "SCHEMES",
    "Traffic",
    "alternate_ring_all_reduce",
    "predict",
    "rank_bytes",
    "ring_all_reduce",
    "simulate_pipeline",
]
