"""Tables, figures and sentences of the mask experiments: dense_masks, block_sparse, dynamic_mask, dilated_attention.

All rest on `with_masks`, the frame with what names a mask (family, tiles, density) in columns, and on `against_dense`,
which sets each time beside that of the dense case of its length: the faster of our dense kernels and SDPA's flash, so
that a slow dense path of ours flatters nothing. Beside a speed-up stands what skipping can give at most: the tiles of
the dense case over the live ones of the mask, and the same of attended pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd

from cs336_systems.accounting import ATTENTION_FLOPS_PER_PAIR, tflops_per_s
from cs336_systems.report.comparisons import compared, real, same_run
from cs336_systems.report.frames import MODE_TITLES, OURS, select, tuples, variants
from cs336_systems.report.markdown import Cells, factor, number, plain
from cs336_systems.report.points import POINT, Plot, points
from cs336_systems.report.sections import Section, groups, pivot, present_modes, section

FAMILIES = (  # in the order of tables; the name before the colon of a pattern, and whether causal is joined to it
    "full", "causal", "varlen full", "varlen causal", "random tiles", "random tokens", "shared keys", "keys per query",
    "dilated", "dilated causal",
)  # fmt: skip
FAMILY_OF = {
    "full": "full", "causal": "causal", "document": "varlen full", "document+causal": "varlen causal",
    "random": "random tiles", "tokens": "random tokens", "shared+causal": "shared keys", "topk": "keys per query",
    "dilated": "dilated", "dilated+causal": "dilated causal",
}  # fmt: skip
CAUSAL_FAMILIES = ("causal", "varlen causal", "shared keys", "keys per query", "dilated causal")
DENSE = (OURS, "sdpa_flash")  # whose faster one is "dense"
IDEAL = "tile-count ideal"
LENGTH = "sequence length (tokens)"
SMALL_PRINT = "Dense is the faster of our dense kernels and SDPA's flash on the same shape without the mask."


def with_masks(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with the columns family, pattern, blocks, pairs (density), live (block density), and TFLOP/s by pairs."""
    cases = [json.loads(case) for case in frame["case"]]
    patterns = [str(case.get("mask", "")) for case in cases]
    frame = frame.assign(
        family=[_family(pattern) for pattern in patterns],
        pattern=[_short(pattern) for pattern in patterns],
        blocks=[f"{case.get('query_block')}×{case.get('key_block')}" for case in cases],
        number=[_number(pattern) for pattern in patterns],
    )
    for column, quantity in (("pairs", "density"), ("live", "block_density")):
        known = frame[(frame["quantity"] == quantity) & (frame["status"] == "ok")]
        frame[column] = frame["case"].map(known.drop_duplicates("case").set_index("case")["median"])
    frame["tflops"] = [_tflops(row) for row in tuples(frame)]
    rank = [f"{FAMILIES.index(row.family) if row.family in FAMILIES else len(FAMILIES):02d}" for row in tuples(frame)]
    keys = ["seqlen", "mask_rank", "number", "blocks"]
    return frame.assign(mask_rank=rank).sort_values(keys, kind="stable", ignore_index=True)


def against_dense(frame: pd.DataFrame, mode: str) -> pd.DataFrame:
    """Times in `mode`, with dense_ms and dense_label of the dense case of the same shape, ratio, ideal and pairs_ideal.

    Causal families are set against causal attention, the others against full; of the same run, or else of the run that
    dense_run names. NaN where either was not timed.
    """
    order = ["seqlen", "mask_rank", "number", "blocks"]
    rows = select(frame, "time", mode).sort_values(order, kind="stable", ignore_index=True)
    rows = rows.assign(base=["causal" if family in CAUSAL_FAMILIES else "full" for family in rows["family"]])
    found = []
    for row in tuples(rows):
        same = rows[(rows["heads"] == row.heads) & (rows["head_dim"] == row.head_dim) & (rows["dtype"] == row.dtype)]
        dense = same[(same["family"] == row.base) & (same["seqlen"] == row.seqlen)]
        timed = real(dense[dense["implementation"].isin(DENSE)]).sort_values("median", kind="stable")
        fastest: Any = next(iter(sorted(tuples(timed), key=lambda dense: not same_run(dense, row))), None)
        usable = fastest is not None and row.status == "ok" and not row.interpreted and row.median > 0
        pairs, live = (dense[name].iloc[0] if len(dense) else float("nan") for name in ("pairs", "live"))
        found.append(
            {
                "dense_ms": fastest.median if fastest is not None else float("nan"),
                "dense_label": fastest.label if fastest is not None else "",
                "ratio": fastest.median / row.median if usable else float("nan"),
                "dense_run": fastest.commit[:10] if usable and not same_run(fastest, row) else "",
                "ideal": live / row.live if row.live else float("nan"),
                "pairs_ideal": pairs / row.pairs if row.pairs else float("nan"),
            }
        )
    return pd.concat([rows, pd.DataFrame(found, index=rows.index)], axis=1)


# Tables


def dense_masks_tables(frame: pd.DataFrame) -> list[Section]:
    """Times and TFLOP/s by mask, length and implementation, a section for each mode; what building the mask costs."""
    frame = with_masks(frame)
    found = []
    for value, unit in (("tflops", "TFLOP/s"), ("median", "ms")):
        for mode in present_modes(frame):
            rows = select(frame, "time", mode)
            name = mode if value == "tflops" else f"ms.{mode}"
            title = f"{MODE_TITLES[mode]} ({unit}), {_shape(frame)}"
            found.append(pivot(name, title, rows, ["seqlen", "family"], value=value))
    build = frame[frame["quantity"] == "mask_time"]
    if len(build):
        found.append(pivot("mask_time", "Time to build the mask's lists (ms)", build, ["seqlen", "family"]))
    return found


def block_sparse_tables(frame: pd.DataFrame) -> list[Section]:
    """Against dense by density, a section for each mode; the long sequence by tile shape."""
    frame = with_masks(frame)
    short, suite = _suite(frame)
    found = [_against_section(mode, short, mode) for mode in present_modes(short)]
    for mode in present_modes(suite):
        rows = select(suite, "time", mode)
        title = f"{MODE_TITLES[mode]} (TFLOP/s), {_shape(suite)}"
        found.append(pivot(f"suite.{mode}", title, rows, ["blocks", "pattern"], value="tflops"))
    return found


def against_dense_tables(frame: pd.DataFrame) -> list[Section]:
    """Against dense, a section for each mode; what choosing the keys costs, where it was timed; peak memory."""
    frame = with_masks(frame)
    found = [_against_section(mode, frame, mode) for mode in present_modes(frame)]
    for quantity, title in (
        ("mask_time", "Time to choose keys and build lists (ms)"),
        ("peak_memory", "Peak memory, forward + backward (MiB)"),
    ):
        rows = frame[frame["quantity"] == quantity]
        if len(rows):
            found.append(pivot(quantity, title, rows, ["pattern"]))
    return found


def _against_section(name: str, frame: pd.DataFrame, mode: str) -> Section:
    rows = against_dense(frame, mode)
    keys = ["pattern", *variants(rows, ("blocks",)), "label"]
    cells = Cells()
    lines = []
    for row in tuples(rows):
        speed_up = factor(row.ratio) + " †" * bool(row.dense_run) if row.ratio == row.ratio else "–"
        densities = [f"{100 * share:.4g} %" if share == share else "–" for share in (row.pairs, row.live)]
        ideals = [factor(row.pairs_ideal), factor(row.ideal)]
        lines.append([
            *(plain(getattr(row, key)) for key in keys), *densities, *ideals,
            cells.time(row), cells.text(row, "tflops") if row.status == "ok" else "–", speed_up,
        ])  # fmt: skip
    if runs := sorted({*rows["dense_run"]} - {""}):
        cells.remark(f"†: dense attention was timed in another run ({', '.join(f'`{run}`' for run in runs)})")
    for base in groups(rows.dropna(subset=["dense_ms"]), ["base"]):
        first = tuples(base)[0]
        cells.remark(f"dense for {first.base}: {first.dense_label}, {number(first.dense_ms)} ms")
    header = [
        "mask", *(["tiles"] if "blocks" in keys else []), "implementation", "pairs", "live tiles", "ideal by pairs",
        "ideal by tiles", "time (ms)", "TFLOP/s", "over dense",
    ]  # fmt: skip
    title = f"{MODE_TITLES[mode]} against dense attention, {_shape(frame)}"
    return section(name, title, header, lines, len(keys), cells)


# Figures


def dense_masks_plots(frame: pd.DataFrame) -> list[Plot]:
    """TFLOP/s against length with the peers, a panel for each mask."""
    frame = with_masks(frame)
    found = []
    for mode in present_modes(frame):
        rows = select(frame, "time", mode)
        marks = points(rows, panel=["family"], series="label", style="implementation", x="seqlen")
        found.append(
            Plot(
                name=mode,
                title=f"Attention {MODE_TITLES[mode]} on {_device(frame)}\n{_shape(frame)}",
                kind="lines",
                data=_as_rates(marks, rows),
                x_label=LENGTH,
                y_label="speed (TFLOP/s)",
            )
        )
    return found


def block_sparse_plots(frame: pd.DataFrame) -> list[Plot]:
    """Speed-up over dense against density with the ideal; TFLOP/s against density by tile shape."""
    frame = with_masks(frame)
    short, suite = _suite(frame)
    found = [
        _speed_up_plot(mode, short[short["family"].isin(("full", "random tiles"))], "number", "density")
        for mode in present_modes(short)
    ]
    for mode in present_modes(suite):
        rows = select(suite, "time", mode)
        marks = points(rows, panel=["blocks"], series="label", style="implementation", x="number")
        found.append(
            Plot(
                name=f"suite_{mode}",
                title=f"Block-sparse {MODE_TITLES[mode]} on {_device(frame)}\n{_shape(suite)}, by tile shape",
                kind="lines",
                data=_as_rates(marks, rows),
                x_label="density",
                y_label="useful speed (TFLOP/s)",
            )
        )
    return found


def dynamic_mask_plots(frame: pd.DataFrame) -> list[Plot]:
    """Time by mask and implementation, a figure for each mode."""
    frame = with_masks(frame)
    return [
        Plot(
            name=mode,
            title=f"Dynamic masks, {MODE_TITLES[mode]} on {_device(frame)}\n{_shape(frame)}",
            kind="bars",
            data=points(select(frame, "time", mode), panel=(), series="label", style="implementation", x="pattern"),
            x_label="mask",
            y_label="time (ms)",
            notes=("Gathering shared keys includes choosing them; the lists of each query's keys were built before.",),
        )
        for mode in present_modes(frame)
    ]


def dilated_attention_plots(frame: pd.DataFrame) -> list[Plot]:
    """Speed-up over dense against the rate, full and causal."""
    frame = with_masks(frame)
    return [_speed_up_plot(mode, frame, "number", "dilation rate") for mode in present_modes(frame)]


def _speed_up_plot(mode: str, frame: pd.DataFrame, x: str, x_label: str) -> Plot:
    """Speed-up over dense of each implementation of the masks that have a number, and the ideal."""
    rows = against_dense(frame, mode)
    rows = rows[rows["number"].notna()]
    by_pairs = x_label == "dilation rate"
    panel = ["base"] if by_pairs and rows["base"].nunique() > 1 else []
    marks = points(rows, panel=panel, series="label", style="implementation", x=x)
    marks["y"] = list(rows["ratio"])
    marks["low"] = list(rows["ratio"] * rows["median"] / rows["quartile_high"])
    marks["high"] = list(rows["ratio"] * rows["median"] / rows["quartile_low"])
    marks["drawn"] &= marks["y"].notna()
    cases = rows.drop_duplicates("case")
    ideal = points(cases, panel=panel, series="label", style="implementation", x=x)
    name = "ideal by pairs" if by_pairs else IDEAL
    ideal = ideal.assign(series=name, style="ideal", status="ok", message="")
    ideal["y"] = list(cases["pairs_ideal" if by_pairs else "ideal"])
    ideal[["low", "high"]] = float("nan")
    ideal["drawn"] = ideal["y"].notna()
    return Plot(
        name=f"speed_up_{mode}",
        title=f"{MODE_TITLES[mode].capitalize()}: speed-up over dense attention on {_device(frame)}\n{_shape(frame)}",
        kind="lines",
        data=pd.concat([marks, ideal], ignore_index=True)[list(POINT)],
        x_label=x_label,
        y_label="time dense / time",
        notes=(SMALL_PRINT,),
    )


def _as_rates(marks: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """`marks` of times with TFLOP/s in their place: a rate is inverse to its time."""
    rates = rows["tflops"]
    marks = marks.assign(
        y=list(rates),
        low=list(rates * rows["median"] / rows["quartile_high"]),
        high=list(rates * rows["median"] / rows["quartile_low"]),
    )
    marks["drawn"] &= marks["y"].notna()
    return marks


# Sentences


def dense_masks_answer(frame: pd.DataFrame) -> list[str]:
    """For each mask the best peer at the longest length; packing against padding."""
    frame = with_masks(frame)
    said = []
    for mode in ("forward", "backward"):
        rows = real(select(frame, "time", mode))
        longest = rows[rows["seqlen"] == rows["seqlen"].max()]
        for cases in groups(longest, ["family"]):
            ours = tuples(cases[cases["implementation"] == OURS])
            peers = cases[~cases["label"].str.startswith(OURS) & ~cases["label"].isin(("eager", "tiled"))]
            by_time = tuples(peers.sort_values("median", kind="stable"))
            beside = [row for row in by_time if ours and same_run(row, ours[0])]
            if beside:
                peer = beside[0]
                said.append(
                    f"{ours[0].family.capitalize()}, S={plain(ours[0].seqlen)}, {MODE_TITLES[mode]}: {OURS} reaches "
                    f"{number(ours[0].tflops, 3)} TFLOP/s, {factor(peer.median / ours[0].median)} the speed of the "
                    f"fastest peer, {peer.label}."
                )
            padded = [row for row in beside if row.implementation == "sdpa_padded"]
            if padded:
                said.append(
                    f"Packed documents are {factor(padded[0].median / ours[0].median)} as fast as the padded batch "
                    f"({ours[0].family}, S={plain(ours[0].seqlen)}, {MODE_TITLES[mode]})."
                )
    return said


def block_sparse_answer(frame: pd.DataFrame) -> list[str]:
    """Speed-up by density with its ideal, random tokens, the peers, the rate at low density."""
    frame = with_masks(frame)
    short, suite = _suite(frame)
    said = []
    for mode in ("forward", "backward"):
        if mode not in present_modes(frame):
            continue
        rows = against_dense(short, mode)
        ours = rows[(rows["implementation"] == OURS) & rows["ratio"].notna()]
        sparse = tuples(ours[ours["family"] == "random tiles"])
        if sparse:
            listed = ", ".join(f"{factor(row.ratio)} at {plain(row.number)} ({factor(row.ideal)})" for row in sparse)
            said.append(
                f"{MODE_TITLES[mode].capitalize()} over dense ({sparse[0].dense_label}, "
                f"{number(sparse[0].dense_ms)} ms) by density, the tile-count ideal in brackets: {listed}."
            )
        for row in tuples(ours[ours["family"] == "random tokens"]):
            said.append(
                f"Random tokens of density {plain(row.number)}: {100 * (1 - row.live):.3g} % dead tiles, ideal "
                f"{factor(row.ideal)}; {MODE_TITLES[mode]} takes {number(row.median)} ms, {factor(row.ratio)} the "
                f"speed of dense ({row.kernel or 'kernel not named'})."
            )
        for name in ("flex", "sdpa_mask"):
            said += _against_peer(frame, mode, name)
        rates = real(select(suite, "time", mode))
        rates = rates[rates["implementation"] == OURS]
        for blocks in groups(rates, ["blocks"]):
            by_density = {row.number: row for row in tuples(blocks)}
            if {0.1, 1.0} <= set(by_density) and same_run(by_density[0.1], by_density[1.0]):
                share = by_density[0.1].tflops / by_density[1.0].tflops
                said.append(
                    f"Tiles of {by_density[0.1].blocks} at S={plain(by_density[0.1].seqlen)}, {MODE_TITLES[mode]}: "
                    f"{number(by_density[0.1].tflops, 3)} useful TFLOP/s at density 0.1, {share:.2f} of the rate at 1."
                )
    return said


def dynamic_mask_answer(frame: pd.DataFrame) -> list[str]:
    """What gathering gains over causal attention, and what lists for each query's keys could."""
    frame = with_masks(frame)
    said = []
    for mode in present_modes(frame):
        rows = against_dense(frame, mode)
        for row in tuples(
            rows[(rows["implementation"] == OURS) & rows["ratio"].notna() & (rows["family"] != "causal")]
        ):
            said.append(
                f"{row.family.capitalize()} ({row.pattern}), {MODE_TITLES[mode]}: {number(row.median)} ms against "
                f"{number(row.dense_ms)} ms of causal attention ({row.dense_label}), {factor(row.ratio)}; by pairs "
                f"{factor(row.pairs_ideal)} would be possible, by skipping tiles {factor(row.ideal)}."
            )
    for row in tuples(frame[(frame["quantity"] == "mask_time") & (frame["status"] == "ok")]):
        said.append(f"Choosing the keys of {row.pattern} and building the lists takes {number(row.median)} ms.")
    return said


def dilated_attention_answer(frame: pd.DataFrame) -> list[str]:
    """Time by rate as a share of dense."""
    frame = with_masks(frame)
    said = []
    for mode in present_modes(frame):
        rows = against_dense(frame, mode)
        rows = rows[(rows["implementation"] == OURS) & rows["ratio"].notna() & rows["number"].notna()]
        for cases in groups(rows, ["base"]):
            listed = ", ".join(f"{1 / row.ratio:.2f} at rate {plain(row.number)}" for row in tuples(cases))
            first = tuples(cases)[0]
            said.append(
                f"{MODE_TITLES[mode].capitalize()}, {first.base}, S={plain(first.seqlen)}: of dense attention's time "
                f"({first.dense_label}, {number(first.dense_ms)} ms) {listed}."
            )
    return said


def _against_peer(frame: pd.DataFrame, mode: str, name: str) -> list[str]:
    """How ours compares with `name` on the same masks."""
    pairs = tuples(compared(select(frame, "time", mode), slow=name, fast=OURS).sort_values("ratio", kind="stable"))
    if not pairs:
        return []
    worst, best = pairs[0], pairs[-1]
    return [
        f"Against {name} on the same masks ({len(pairs)}), {MODE_TITLES[mode]}: {factor(worst.ratio)} "
        f"({worst.pattern}) to {factor(best.ratio)} ({best.pattern}) its speed."
    ]


def _suite(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The cases with a dense one of their length, and the others: the long sequence by tile shape."""
    lengths = frame[frame["family"] == "full"]["seqlen"].unique()
    beside = frame["seqlen"].isin(lengths if len(lengths) else frame["seqlen"].unique())
    return frame[beside], frame[~beside]


def _family(pattern: str) -> str:
    first, *others = pattern.split("+")
    return FAMILY_OF.get("+".join([first.partition(":")[0], *others]), pattern)


def _short(pattern: str) -> str:
    """A pattern without the lengths of its documents."""
    first, *others = pattern.split("+")
    return "+".join(["documents" if first.startswith("document:") else first, *others])


def _number(pattern: str) -> float:
    """The density, the rate of dilation or the number of keys of a pattern; NaN if it has none."""
    name, _, argument = pattern.split("+")[0].partition(":")
    text = argument.rpartition("/")[2]
    if name not in ("random", "tokens", "dilated", "topk", "shared"):
        return float("nan")
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _tflops(row: Any) -> float:
    """TFLOP/s by the attended pairs of the mask that ran; NaN for anything but a time."""
    if row.quantity != "time" or row.status != "ok" or not row.median > 0 or row.mode not in ATTENTION_FLOPS_PER_PAIR:
        return float("nan")
    pairs = row.pairs * row.seqlen**2 * row.batch * row.heads
    return tflops_per_s(ATTENTION_FLOPS_PER_PAIR[row.mode] * pairs * row.head_dim, row.median)


def _shape(frame: pd.DataFrame) -> str:
    """What all cases have in common: `bfloat16, batch 1, heads 16, S=16384, d=128`."""
    columns = (("dtype", "{}"), ("batch", "batch {}"), ("heads", "heads {}"), ("seqlen", "S={}"), ("head_dim", "d={}"))
    return ", ".join(
        text.format(plain(frame[name].iloc[0])) for name, text in columns if frame[name].nunique(dropna=False) == 1
    )


def _device(frame: pd.DataFrame) -> str:
    return str(frame["device"].iloc[0])


MASK_CASES: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("dense_masks", "block_sparse", "dynamic_mask", "dilated_attention"), ("MaskCase",)
)
MASK_TABLES: dict[str, Callable[[pd.DataFrame], list[Section]]] = {
    "dense_masks": dense_masks_tables,
    "block_sparse": block_sparse_tables,
    "dynamic_mask": against_dense_tables,
    "dilated_attention": against_dense_tables,
}
MASK_PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {
    "dense_masks": dense_masks_plots,
    "block_sparse": block_sparse_plots,
    "dynamic_mask": dynamic_mask_plots,
    "dilated_attention": dilated_attention_plots,
}
MASK_ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "dense_masks": dense_masks_answer,
    "block_sparse": block_sparse_answer,
    "dynamic_mask": dynamic_mask_answer,
    "dilated_attention": dilated_attention_answer,
}
