"""Where `auto` takes the Hopper kernels: made from the records of `backend_choice` by `tools/backend_table.py`.

(layout, causal) -> by head dim, the shortest length and the fewest queries in all heads from which on hopper was never
more than 2 % slower than triton on an H200; None: at no size measured. A head dim in between takes the next larger one.
"""

HOPPER_FROM: dict[tuple[str, bool], tuple[tuple[int, tuple[int, int] | None], ...]] = {
    ("dense", False): (
        (32, (4096, 65536)),
        (64, (512, 24576)),
        (80, (4096, 65536)),
        (96, (4096, 65536)),
        (128, (512, 24576)),
    ),
    ("dense", True): (
        (32, (4096, 65536)),
        (64, (512, 24576)),
        (80, (4096, 65536)),
        (96, (4096, 65536)),
        (128, (512, 24576)),
    ),
    ("block_mask", False): (
        (64, None),
        (128, (512, 24576)),
    ),
    ("packed", False): (
        (64, None),
        (128, None),
    ),
    ("packed", True): (
        (64, None),
        (128, None),
    ),
}
