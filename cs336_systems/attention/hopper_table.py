"""Sizes from which on `auto` takes the Hopper kernels.

`tools/backend_table.py` makes the table from the records that it names. An entry is

    (layout, is_causal) -> ((head dim, (tokens, queries in all heads)), ...)

From both numbers on, hopper was never more than 2 % slower than triton, on an H100 and, in ten
dense cases, on an H200. None in their place: at no measured size. A head dim between two entries
takes the larger one.
"""

HOPPER_FROM: dict[tuple[str, bool], tuple[tuple[int, tuple[int, int] | None], ...]] = {
    ("dense", False): (
        (16, (512, 16384)),
        (32, (512, 16384)),
        (64, (724, 1024)),
        (80, (512, 16384)),
        (96, (512, 16384)),
        (128, (512, 1024)),
        (160, (512, 8192)),
        (192, (512, 8192)),
        (256, (512, 8192)),
    ),
    ("dense", True): (
        (16, (1024, 2048)),
        (32, (1448, 16384)),
        (64, (1448, 2048)),
        (80, (512, 32768)),
        (96, (512, 32768)),
        (128, (1448, 2048)),
        (160, (512, 8192)),
        (192, (512, 8192)),
        (256, (512, 8192)),
    ),
    ("block_mask", False): (
        (64, (2048, 65536)),
        (128, (2048, 32768)),
    ),
    ("packed", False): (
        (64, (1024, 65536)),
        (128, (1024, 65536)),
    ),
    ("packed", True): (
        (64, (1024, 65536)),
        (128, (1024, 65536)),
    ),
}
