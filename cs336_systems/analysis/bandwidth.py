"""Algorithm and bus bandwidth: the rates that a collective's time implies.

Algorithm bandwidth is the tensor's bytes over the time, the rate that a program sees. Bus bandwidth
is what the busiest link must have carried for it, so that operations and numbers of ranks can be
compared with each other and with the link's peak. Source: the performance notes of NVIDIA's
nccl-tests.
"""

from __future__ import annotations


def bus_factor(operation: str, num_ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth of `operation` among `num_ranks` ranks.

    It is the share of the tensor that one rank must send over its link. Every rank of an all-reduce
    sends (n-1)/n of the tensor twice, of an all-gather or reduce-scatter once. A broadcast passes
    all of it on, in pieces down a chain of ranks. Zero for a single rank, which sends nothing.
    """
    if num_ranks == 1:
        return 0.0
    sent = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * sent, "broadcast": 1.0}.get(operation, sent)


def bus_gb_per_s(operation: str, num_ranks: int, num_bytes: int, ms: float) -> float:
    """Return the bus bandwidth in 10⁹ bytes per second of a collective that took `ms` milliseconds.

    `num_bytes` are those of the whole tensor.
    """
    return num_bytes / (ms * 1e-3) / 1e9 * bus_factor(operation, num_ranks)


def bucket_overhead_s(
    total_bytes: float, bytes_per_s: float, seconds_per_call: float, num_buckets: float
) -> float:
    """Return the seconds that data parallelism in `num_buckets` buckets adds to a step.

    Each bucket is taken to be computed as fast as it is sent. The last one is sent when there is
    nothing left to compute, total_bytes / (num_buckets · bytes_per_s), and every call costs a
    constant: n·o + s / (n·w).
    """
    return num_buckets * seconds_per_call + total_bytes / (num_buckets * bytes_per_s)


def best_bucket_bytes(total_bytes: float, bytes_per_s: float, seconds_per_call: float) -> float:
    """Return the bucket size in bytes with the least `bucket_overhead_s`.

    With n = sqrt(s / (w·o)) buckets, each has sqrt(s·w·o) bytes.
    """
    return (total_bytes * bytes_per_s * seconds_per_call) ** 0.5
