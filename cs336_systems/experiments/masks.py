"""Beyond the handout: `dense_masks`, `block_sparse`, `dynamic_mask` and `dilated_attention`.

Each measures our path for a kind of mask beside what a library offers for it, in one run, on inputs that every
implementation shares. The baselines of ratios ("dense": no mask, or causal) are cells of the same problem.
"""

from __future__ import annotations

from collections.abc import Iterable

from cs336_systems.config import DTypeName, MaskCase, RunConfig
from cs336_systems.experiments.cells import Cell
from cs336_systems.experiments.mask_cells import mask_cell

# Documents of a packed sequence, in 32nds of it: 8 of them, the longest twice the mean, so that a padded batch is half
# padding.
DOCUMENTS = (8, 6, 5, 4, 3, 3, 2, 1)
SMALL_HEADS, SMALL_HEAD_DIM = 1, 32  # below handout scale, where kernels are interpreted
DENSE_LENGTHS = {"tiny": (128,), "smoke": (64, 128), "handout": (1024, 4096, 8192, 16384)}
DENSE_PEERS = ("sdpa_flash", "sdpa_cudnn")
ROW_DENSITIES = {"tiny": (0.5,), "smoke": (0.25, 0.5), "handout": (0.1, 0.3, 0.5, 0.7, 0.9)}
SUITE_DENSITIES = (0.05, 0.1, 0.2, 0.5, 1.0)
TOKEN_DENSITIES = {"tiny": (), "smoke": (0.1,), "handout": (0.1, 0.5)}
DYNAMIC = {"tiny": (128, 16), "smoke": (128, 16), "handout": (32768, 1024)}  # tokens, keys kept
DILATED = {"tiny": (128, (2,)), "smoke": (128, (2, 4)), "handout": (32768, (2, 4, 8))}  # tokens, rates


def dense_masks_cells(run: RunConfig) -> list[Cell]:
    """Full and causal, alone and by document (varlen), on packed sequences of one batch entry."""
    cells: list[Cell] = []
    for seqlen in DENSE_LENGTHS[run.scale]:
        documents = "document:" + ",".join(str(seqlen * share // sum(DOCUMENTS)) for share in DOCUMENTS)
        masks: tuple[str, ...] = ("full", "causal", documents, f"{documents}+causal")
        if run.scale == "smoke" and seqlen < DENSE_LENGTHS["smoke"][-1]:
            masks = masks[1::2]  # in a laptop's minutes the shorter length shows the causal ones
        for mask in masks if run.scale != "tiny" else masks[-1:]:
            case = _case(run, mask, seqlen, heads=64, head_dim=128)
            packed = mask.startswith("document")
            peers: tuple[str, ...] = ("sdpa_padded", "torch_varlen") if packed else DENSE_PEERS
            if run.scale == "handout" or (seqlen == DENSE_LENGTHS[run.scale][0] and mask == masks[-1]):
                peers = (*peers, "flex")  # compiles for each case, most of the problem's time on a laptop
            ours = ("triton",) if mask == "full" else ("triton", "triton_lists")
            for name in _names(run, ours, peers):
                cells.append(mask_cell("dense_masks", case, name, run, mask_time=packed and name == "triton_lists"))
    return cells


def block_sparse_cells(run: RunConfig) -> list[Cell]:
    """Random tiles by density, the dense case, random tokens; at handout scale also a long sequence by tile shape."""
    seqlen = {"tiny": 128, "smoke": 256, "handout": 16384}[run.scale]
    cells: list[Cell] = []

    def add(case: MaskCase, names: Iterable[str]) -> None:
        cells.extend(mask_cell("block_sparse", case, name, run) for name in names)

    for mask in ("full", *(f"random:{density:g}" for density in ROW_DENSITIES[run.scale])):
        peers = DENSE_PEERS if mask == "full" else ("sdpa_mask",)
        add(_case(run, mask, seqlen, heads=16, head_dim=128), _names(run, ("triton",), (*peers, "flex")))
    for density in TOKEN_DENSITIES[run.scale]:
        case = _case(run, f"tokens:{density:g}", seqlen, heads=16, head_dim=128)
        add(case, _names(run, ("triton",), ("sdpa_mask", "flex")))
    if run.scale == "handout":
        for blocks in ((128, 128), (64, 128), (128, 64), (64, 64)):
            for density in SUITE_DENSITIES:
                case = _case(run, f"random:{density:g}", 49152, heads=8, head_dim=128, blocks=blocks)
                add(case, ("triton", "flex"))
    return cells


def dynamic_mask_cells(run: RunConfig) -> list[Cell]:
    """Causal, the best keys shared by all queries (gathered), the best of each query (lists)."""
    seqlen, num_keys = DYNAMIC[run.scale]
    masks: dict[str, tuple[str, ...]] = {
        "causal": DENSE_PEERS,
        f"shared:{num_keys}+causal": ("sdpa_mask",),
        f"topk:{num_keys}": ("sdpa_mask", "flex"),
    }
    return [
        mask_cell(
            "dynamic_mask", case, name, run, mask_time=name.startswith("triton") and mask != "causal"
        )
        for mask, peers in masks.items()
        for case in [_case(run, mask, seqlen, heads=16, head_dim=128)]
        for name in _names(run, ("triton",), peers)
    ]  # fmt: skip


def dilated_attention_cells(run: RunConfig) -> list[Cell]:
    """One segment at growing rates against dense attention, full and causal."""
    seqlen, rates = DILATED[run.scale]
    cells = []
    for suffix, dense in (("", "full"), ("+causal", "causal")):
        if run.scale == "tiny" and suffix:
            continue
        masks = [dense, *(f"dilated:{seqlen}/{rate}{suffix}" for rate in rates)]
        for mask in masks:
            case = _case(run, mask, seqlen, heads=16, head_dim=64)
            peers = DENSE_PEERS if mask == dense else ("sdpa_mask",)
            cells += [mask_cell("dilated_attention", case, name, run) for name in _names(run, ("triton",), peers)]
    return cells


def _names(run: RunConfig, ours: tuple[str, ...], peers: tuple[str, ...]) -> tuple[str, ...]:
    """The implementations of a cell; below handout scale also the oracle itself and the tiled stage."""
    if run.scale == "handout":
        return (*ours, *peers)
    if run.scale == "tiny":
        return ("eager", *ours)
    return ("eager", "tiled", *ours, *peers)


def _case(
    run: RunConfig, mask: str, seqlen: int, *, heads: int, head_dim: int, blocks: tuple[int, int] = (128, 128)
) -> MaskCase:
    """A case of the handout's size, or of one that the interpreter can do; there in float32 and tiles of 64."""
    handout = run.scale == "handout"
    dtype: DTypeName = "bfloat16" if run.device == "cuda" else "float32"
    query_block, key_block = blocks if handout else (64, 64)
    return MaskCase(
        mask=mask,
        batch=1,
        heads=heads if handout else SMALL_HEADS,
        seqlen_q=seqlen,
        head_dim=head_dim if handout else SMALL_HEAD_DIM,
        dtype=dtype,
        query_block=query_block,
        key_block=key_block,
    )
