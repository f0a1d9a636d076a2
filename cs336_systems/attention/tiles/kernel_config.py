"""`KernelConfig`: how one attention kernel is tiled, and what that costs in shared memory.

config = KernelConfig.from_name("sm90_forward_128x64_w8_s3")
config.shared_memory_bytes(head_dim=64, bytes_per_element=2)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

KERNELS = ("forward", "dkdv", "dq")
TILE_ROWS = tuple(2**power for power in range(4, 13))  # tensor cores multiply no fewer than 16
MIN_HEAD_TILE = 64
NUM_WARPS = (1, 2, 4, 8, 16, 32)  # of a program: at most 1,024 threads
NUM_STAGES = tuple(range(1, 9))  # shared memory has no room for more
MAX_HEAD_DIM = 256
TMA_ALIGNMENT_BYTES = 16  # rows that Hopper's copy engine reads begin at multiples of it
# Bytes of rows that the programs running at one time should share: about half of the L2 cache of an
# H200 or a B200 (50 to 126 MB); the rest streams. Heads take turns where their tiles are of unequal
# length, so that the longest start first. Without a mask one head follows the other, which is up to
# 11 % faster. Half the share is 2 to 5 % faster for a block mask and up to 4 % for Triton's causal
# backward, and 2 % slower for its causal forward (one H100, by turns, 2026-11-26).
L2_SHARE_BYTES = 32 * 2**20
HALF_L2_SHARE_BYTES = L2_SHARE_BYTES // 2
PRECISIONS = ("ieee", "tf32x3")  # of float32 dots; 16-bit ones have no choice
# Barriers that copies signal, as far apart as the tiles' alignment puts them.
TMA_BARRIER_BYTES = 1024
_NAME = re.compile(
    r"(?P<target>[a-z0-9]+)_(?P<kernel>[a-z]+)_(?P<query_tile>\d+)x(?P<key_tile>\d+)"
    r"_w(?P<num_warps>\d+)"
    r"_s(?P<num_stages>\d+)(?P<tma>_tma)?(_(?P<precision>[a-z0-9]+))?"
)


def head_tile(head_dim: int) -> int:
    """Return the columns of a tile for `head_dim`: the next power of two, at least 64.

    Narrower tiles are not used: on sm_90 triton 3.6 can miscompile a kernel with two dots of 16 or
    32 columns.
    """
    tile = MIN_HEAD_TILE
    while tile < head_dim:
        tile *= 2
    return tile


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Launch configuration of one kernel; its name spells it: `sm90_forward_128x64_w8_s3`."""

    # Architecture that the table was made for: sm80, sm86, sm89, sm90, sm100 or portable.
    target: str
    kernel: str  # forward, dkdv or dq
    query_tile: int  # rows of a query tile
    key_tile: int  # rows of a key tile
    num_warps: int
    num_stages: int  # depth of the software pipeline over the inner loop's tiles
    # Whether Hopper's copy engine reads the tiles; for the inputs it can read: `triton/launch.py`.
    tma: bool = False
    # Of float32 dots: ieee on the FMA units, tf32x3 as three products on the tensor cores.
    precision: str = "ieee"

    def __post_init__(self) -> None:
        """Raise ValueError naming the field whose value is not among its choices."""
        for field, choices in (
            ("kernel", KERNELS),
            ("query_tile", TILE_ROWS),
            ("key_tile", TILE_ROWS),
            ("num_warps", NUM_WARPS),
            ("num_stages", NUM_STAGES),
            ("precision", PRECISIONS),
        ):
            value = getattr(self, field)
            if (
                isinstance(value, bool)
                or not isinstance(value, type(choices[0]))
                or value not in choices
            ):
                raise ValueError(
                    f"KernelConfig.{field} must be one of {', '.join(map(str, choices))}, "
                    f"got {value!r}"
                )

    @property
    def name(self) -> str:
        """Spelling of all fields, which `from_name` reads: `sm90_forward_128x64_w8_s3_tma`."""
        tiles = f"{self.query_tile}x{self.key_tile}"
        precision = "" if self.precision == "ieee" else f"_{self.precision}"
        tma = "_tma" if self.tma else ""
        return (
            f"{self.target}_{self.kernel}_{tiles}_w{self.num_warps}_s{self.num_stages}"
            f"{tma}{precision}"
        )

    @classmethod
    def from_name(cls, name: str) -> KernelConfig:
        """Return the configuration that `name` spells; ValueError if it spells none."""
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise ValueError(f"config must be named like sm90_forward_128x64_w8_s3, got {name!r}")
        values: dict[str, Any] = match.groupdict()
        for field in ("query_tile", "key_tile", "num_warps", "num_stages"):
            values[field] = int(values[field])
        return cls(
            **values | {"tma": match["tma"] is not None, "precision": match["precision"] or "ieee"}
        )

    @property
    def spelling(self) -> str:
        """Name without target and kernel, as in a row of a table: `128x64_w8_s3`."""
        return self.name.removeprefix(f"{self.target}_{self.kernel}_")

    def num_programs(self, *, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> int:
        """Return the programs of a launch: tiles of queries, or of keys for dkdv, of all heads."""
        rows, tile = (
            (seqlen_k, self.key_tile) if self.kernel == "dkdv" else (seqlen_q, self.query_tile)
        )
        return -(-rows // tile) * batch * heads

    def shared_memory_bytes(self, head_dim: int, bytes_per_element: int) -> int:
        """Return an estimate of a program's shared memory, from tile sizes alone.

        It counts the tiles that a program holds and `num_stages` times those that it streams, so
        that a row can be ruled out without a compiler. The compiler adds memory for reductions and
        changes of layout, which differs by architecture; `cs336-systems doctor --kernels` prints
        its own number. On sm_90 that is less than the estimate, down to half in tf32x3: scores that
        fit registers and operands that share a buffer count here.
        """
        row = head_tile(head_dim) * bytes_per_element
        queries, keys = self.query_tile * row, self.key_tile * row
        # tf32x3 holds the leading bits and the rest of each operand
        held = 1 if self.precision == "ieee" else 2
        barriers = TMA_BARRIER_BYTES if self.tma else 0

        if self.kernel == "forward":  # holds Q, streams K and V
            return held * queries + self.num_stages * 2 * keys + barriers

        # P or dS passes through shared memory to become an operand
        scores = self.query_tile * self.key_tile * bytes_per_element
        if self.kernel == "dq":  # holds Q and dO, streams K and V
            return held * 2 * queries + self.num_stages * 2 * keys + scores + barriers
        # dkdv holds K and V, streams Q and dO
        return held * 2 * keys + self.num_stages * 2 * queries + scores + barriers


def tma_reads_rows(head_dim: int, bytes_per_element: int) -> bool:
    """Return whether Hopper's copy engine can read contiguous rows of `head_dim` elements."""
    return head_dim * bytes_per_element % TMA_ALIGNMENT_BYTES == 0


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The tiles that a caller of `flash_attention` chooses; None leaves a kernel to the table."""

    forward: KernelConfig | None = None
    dkdv: KernelConfig | None = None
    dq: KernelConfig | None = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless each field is a configuration of its kernel."""
        for kernel in KERNELS:
            config = getattr(self, kernel)
            if config is not None and not isinstance(config, KernelConfig):
                raise TypeError(
                    f"AttentionConfig.{kernel} must be a KernelConfig or None, got {config!r}"
                )
            if config is not None and config.kernel != kernel:
                raise ValueError(
                    f"AttentionConfig.{kernel} must be a {kernel} configuration, got {config.name}"
                )

    @property
    def names(self) -> str:
        """Names of the chosen configurations, comma-separated, as an operator takes them."""
        return ",".join(
            config.name for config in (self.forward, self.dkdv, self.dq) if config is not None
        )


def parse_configs(names: str) -> dict[str, KernelConfig]:
    """Return {kernel: configuration} of `AttentionConfig.names`."""
    configs = [KernelConfig.from_name(name) for name in names.split(",") if name]
    return {config.kernel: config for config in configs}
