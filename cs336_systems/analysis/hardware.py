"""Machines as the analysis sees them: FLOP/s, bandwidths and memory, each with its source.

# bandwidth of a ring over two nodes, from NVLink and the network
HARDWARE["H200"].ring_bytes_per_s(16, ranks_per_node=8)
"""

from __future__ import annotations

from dataclasses import dataclass

from cs336_systems.device import PEAKS

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU in nodes of `gpus_per_node`; bandwidths are one way, out of a GPU."""

    name: str
    flops_per_s: float  # C: dense bfloat16 matmuls
    node_bytes_per_s: float  # W inside a node
    network_bytes_per_s: float  # W of a GPU's own adapter between nodes
    memory_bytes: int  # of a GPU
    memory_bytes_per_s: float
    gpus_per_node: int = 8
    call_s: float = 10e-6  # assumed: launching a collective
    node_hop_s: float = 1e-6  # assumed: latency of a message inside a node
    network_hop_s: float = 5e-6  # assumed: the same between nodes
    source: str

    def ring_bytes_per_s(self, num_ranks: int, *, ranks_per_node: int) -> float:
        """Return the bytes per second of each rank of a ring with `ranks_per_node` ranks on a node.

        Inside a node that is the node's link. Between nodes a collective runs as many rings at once
        as it has ranks on a node, each of which leaves the node through another adapter; so the
        rank's share is the sum of their adapters, and never more than its link inside the node. One
        rank a node has one adapter.
        """
        if num_ranks <= ranks_per_node:
            return self.node_bytes_per_s
        return min(self.node_bytes_per_s, ranks_per_node * self.network_bytes_per_s)

    def latency_s(self, num_ranks: int, *, ranks_per_node: int) -> float:
        """Return the latency of a reduce-scatter or an all-gather, in seconds.

        It is the launch, a ring inside a node, and doubling between nodes. A flat ring would take
        num_ranks - 1 network hops, 80 ms at 16,384 ranks; large collectives are built as trees or
        by doubling, with a number of hops that grows as the logarithm.
        """
        local = min(num_ranks, ranks_per_node)
        nodes = -(-num_ranks // local)
        launch = self.call_s if num_ranks > 1 else 0.0
        return (
            launch + (local - 1) * self.node_hop_s + (nodes - 1).bit_length() * self.network_hop_s
        )


HARDWARE: dict[str, Hardware] = {
    "H200": Hardware(
        name="H200",
        flops_per_s=PEAKS["H200"].bf16_tflops * TERA,
        node_bytes_per_s=450 * GB,
        network_bytes_per_s=50 * GB,
        memory_bytes=141 * GB,
        memory_bytes_per_s=PEAKS["H200"].memory_gb_per_s * GB,
        source="NVIDIA H200 datasheet (141 GB; NVLink 900 GB/s, both ways); "
        "DGX H200 datasheet (one 400 Gb/s adapter a GPU)",
    ),
    "B200": Hardware(
        name="B200",
        flops_per_s=PEAKS["B200"].bf16_tflops * TERA,
        node_bytes_per_s=900 * GB,
        network_bytes_per_s=50 * GB,
        memory_bytes=180 * GB,
        memory_bytes_per_s=PEAKS["B200"].memory_gb_per_s * GB,
        source="NVIDIA Blackwell datasheet (HGX B200: 180 GB; NVLink 1.8 TB/s, both ways); "
        "DGX B200 datasheet (one 400 Gb/s adapter a GPU)",
    ),
}
