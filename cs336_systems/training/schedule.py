"""The learning rate of each step: a linear warm-up, then a cosine down to the final rate."""

from __future__ import annotations

import math

from cs336_systems.training.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Rate of step `step`, counted from 0: (step + 1)/warmup_steps of the highest, then half a cosine to the last."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    fall = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + fall * (1 + math.cos(math.pi * min(1.0, progress))) / 2
