"""Summaries of raw samples: the median and quartiles that tables quote, the mean and deviation the handout asks for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Order statistics and moments of samples, in the samples' own unit."""

    count: int
    median: float
    quartile_low: float
    quartile_high: float
    mean: float
    std: float  # sample standard deviation; 0 for a single sample
    minimum: float
    maximum: float


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile with linear interpolation between order statistics (numpy's default)."""
    if not samples:
        raise ValueError("samples must not be empty")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Two of `samples` between which the median of what they are drawn from lies with at least `confidence`.

    Whatever the distribution: as many samples as heads of a fair coin lie below its median. The pair is the innermost
    of those equally far from both ends; None where even the least and the largest are too close, as of five samples.
    """
    count = len(samples)
    allowed = (1 - confidence) / 2  # that the median lies below the pair, and as much above
    outside, tail = 0, 2.0**-count  # P(at most `outside` heads)
    if tail > allowed:
        return None
    while tail + math.comb(count, outside + 1) * 2.0**-count <= allowed:
        outside += 1
        tail += math.comb(count, outside) * 2.0**-count
    ordered = sorted(samples)
    return ordered[outside], ordered[count - 1 - outside]


def summarize(samples: Sequence[float]) -> Summary:
    """Summary of `samples`; ValueError when there are none."""
    return Summary(
        median=quantile(samples, 0.5),
        count=len(samples),
        quartile_low=quantile(samples, 0.25),
        quartile_high=quantile(samples, 0.75),
        mean=statistics.fmean(samples),
        std=statistics.stdev(samples) if len(samples) > 1 else 0.0,
        minimum=min(samples),
        maximum=max(samples),
    )
