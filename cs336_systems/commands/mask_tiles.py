"""`cs336-systems doctor --mask PATTERN`: count a mask's tiles, and what skipping dead ones gains.

cs336-systems doctor --mask random:0.1 --seqlen 16384
cs336-systems doctor --mask document:3000,96,1000+causal --seqlen 4096 --block-size 64
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from cs336_systems.commands.terminal import show_table

if TYPE_CHECKING:
    from cs336_systems.attention.masks import BlockMask

DEFAULT_SEQLEN = 4096  # tokens, where --seqlen is not given
DEFAULT_BLOCK = 128  # rows and columns of a tile, where --block-size is not given
MOST_TILES = 2**22  # 262,144 tokens in tiles of 128: a few seconds
MOST_PAIRS = 2**30  # of tokens, for patterns that look at them one by one
BY_PAIRS = ("tokens", "topk", "shared")  # patterns that look at every pair of tokens
LARGEST_PICTURE = 64  # tiles along a side that are drawn


def show_mask(
    pattern: str, *, seqlen: int | None, block_size: int | None, heads: int | None, seed: int | None
) -> None:
    """Print the diagnosis of the mask `pattern` and, if the mask is small, a picture of its tiles.

    `attention.masks.parse` defines the patterns; an option that is None takes its default.
    ValueError for an unknown pattern, and for more tiles or pairs of tokens than are looked at one
    by one.
    """
    from cs336_systems.attention.checks import check_count
    from cs336_systems.attention.masks import parse_mask
    from cs336_systems.attention.masks.tiles import check_block_size

    seqlen = DEFAULT_SEQLEN if seqlen is None else seqlen
    size = check_block_size(DEFAULT_BLOCK if block_size is None else block_size)
    heads = 1 if heads is None else heads
    seed = 0 if seed is None else seed

    # Refuse masks that would take minutes before building them.
    num_tiles = -(-seqlen // size[0]) * -(-seqlen // size[1]) * heads
    if num_tiles > MOST_TILES:
        raise ValueError(
            f"--seqlen {seqlen}, --block-size {size[0]} and --heads {heads} are "
            f"{num_tiles:,} tiles, and at most {MOST_TILES:,} are diagnosed"
        )
    for part in pattern.split("+"):
        num_pairs = _pairs_looked_at(part.strip(), seqlen, heads)
        if num_pairs > MOST_PAIRS:
            raise ValueError(
                f"--seqlen {seqlen} and --heads {heads} are {num_pairs:,} pairs of tokens of "
                f"{part.strip()}, and at most {MOST_PAIRS:,} are looked at"
            )

    # As `parse_mask` checks them, with the names of the options.
    check_count("--seqlen", seqlen, 1)
    check_count("--heads", heads, 1)
    check_count("--seed", seed, -(2**63), 2**63 - 1)

    mask = parse_mask(pattern, seqlen=seqlen, block_size=size, heads=heads, seed=seed)
    table = Table(show_header=False, box=None)
    for name, value in diagnose(mask).items():
        table.add_row(name, value)
    show_table(table)
    for line in picture(mask):
        print(line)


def _pairs_looked_at(part: str, seqlen: int, heads: int) -> int:
    """Return how many pairs of tokens building one part of a pattern looks at one by one.

    It is 0 for a pattern that builds whole tiles.
    """
    name, _, values = part.partition(":")
    if name == "dilated":  # one mask for all heads, of pairs within a segment
        segment = values.split("/")[0]
        return seqlen * min(seqlen, int(segment)) if segment.isdecimal() else 0
    return seqlen * seqlen * heads if name in BY_PAIRS else 0


def diagnose(mask: BlockMask) -> dict[str, str]:
    """Return the properties of `mask` as text by name, ending with a verdict on skipping tiles."""
    from cs336_systems.attention.masks import MAX_LIST_DENSITY

    live = mask.num_full + mask.num_partial
    partial = 100 * mask.num_partial / max(1, live)
    if not live:
        verdict = "nothing is attended"
    elif mask.dense_form:
        verdict = (
            f"exactly {mask.dense_form}: flash_attention takes the dense kernel, without lists"
        )
    elif mask.packed_form:
        verdict = "long documents: flash_attention takes the packed kernels, without lists"
    elif not mask.num_dead:
        verdict = "0 % dead tiles, ideal 1.00×: skipping tiles gains nothing on this mask"
    elif mask.block_density < MAX_LIST_DENSITY:
        verdict = f"lists pay: block density below {MAX_LIST_DENSITY}"
    else:
        verdict = f"lists gain nothing: block density not below {MAX_LIST_DENSITY}"
    return {
        "shape (batch, heads, queries, keys)": str(mask.shape),
        "tile (queries, keys)": str(mask.block_size),
        "density (attended pairs)": f"{mask.density:.4f}",
        "block density (live tiles)": f"{mask.block_density:.4f}",
        "dead tiles": f"{mask.num_dead:,} of {mask.num_tiles:,}",
        "full tiles": f"{mask.num_full:,}",
        "partial tiles": f"{mask.num_partial:,} ({partial:.0f} % of the live ones read a mask)",
        "empty rows (queries without a key)": f"{mask.empty_rows:,}",
        "ideal speed-up (all tiles / live tiles)": f"{mask.ideal_speed_up:.2f}×",
        "memory of lists and token bits": f"{mask.num_bytes / 2**10:,.1f} KiB",
        "verdict": verdict,
    }


def picture(mask: BlockMask) -> list[str]:
    """Return the lines of a picture of the first head's tiles: █ full, ▒ partial, · dead.

    A mask with more than LARGEST_PICTURE tiles along a side gives no lines.
    """
    from cs336_systems.attention.masks.tiles import DEAD, FULL

    tiles = mask.lists.tile_map().tiles[0, 0]
    if max(tiles.shape) > LARGEST_PICTURE:
        return []
    marks = {DEAD: "·", FULL: "█"}  # any other number is the pattern of a partial tile
    return [
        "█ full, ▒ partial, · dead",
        *("".join(marks.get(kind, "▒") for kind in row) for row in tiles.tolist()),
    ]
