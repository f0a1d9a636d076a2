# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The life of a parameter
#
# Under fully sharded data parallelism no rank has the model. Each keeps some rows of every weight, and borrows the rest
# for as long as a layer runs. This notebook watches two ranks do it: who keeps what, when a weight becomes whole, when
# it is given up again, what memory that takes, and what it would take for models that no single GPU holds.
#
# It needs no GPU: the two ranks are processes of this machine that talk through gloo. What it runs is imported from
# `cs336_systems`.
#
# Each exercise has our answer, between `yours` and `to here`. Put yours in its place: the next cell says what is wrong.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from cs336_systems.analysis.memory_plan import fsdp_bytes
from cs336_systems.config import MODEL_SIZES, ModelConfig
from cs336_systems.distributed.fsdp.life import record_life, record_rows
from cs336_systems.distributed.spawn import run_ranks
from cs336_systems.notebook import check

config = ModelConfig(name="small", d_model=32, d_ff=88, num_layers=4, num_heads=2, vocab_size=61, context_length=16)

# %% [markdown]
# ## At rest: rows
#
# A weight of $R$ rows on $N$ ranks is cut into chunks of $\lceil R/N \rceil$ rows. 61 rows of the embedding on two
# ranks are 31 and 30: in an all-gather each rank sends 31, so that the padding arrives behind the last row, and the
# first 61 rows of what arrives are the weight. Norms are too small to be worth a message: every rank keeps them whole.

# %%
first, second = run_ranks(record_rows, 2, config)
for name in ("token_embeddings.weight", "layers.0.attn.q_proj.weight", "layers.0.ffn.w1.weight", "layers.0.ln1.weight"):
    print(f"{name:30} rank 0 keeps {first[name]!s:10} rank 1 keeps {second[name]}")
assert first["token_embeddings.weight"] == (31, 32) and second["token_embeddings.weight"] == (30, 32)

# %% [markdown]
# ### Exercise 1: shard and gather
#
# `shard` returns the rows that a rank keeps. `gather` gets what every rank keeps and returns the whole weight. A
# collective sends equally much from each rank: pad every shard to a whole chunk; the padding is cut off for you.


# %%
def shard(weight: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    # yours: chunks of ceil(rows / ranks) rows; the last ranks may have fewer, or none
    chunk = -(-len(weight) // num_ranks)
    return weight[rank * chunk : (rank + 1) * chunk]
    # to here


def gather(shards: list[torch.Tensor], num_rows: int) -> torch.Tensor:
    # yours: `padded`, each shard with rows of zeros up to the length of a chunk
    chunk = -(-num_rows // len(shards))
    padded = [torch.cat([rows, rows.new_zeros(chunk - len(rows), *rows.shape[1:])]) for rows in shards]
    # to here
    assert len({len(rows) for rows in padded}) == 1, "an all-gather sends equally much from each rank"
    return torch.cat(padded)[:num_rows]


# %%
kept = {rows: [len(shard(torch.zeros(rows, 2), rank, 4)) for rank in range(4)] for rows in (8, 61, 5)}
weight = torch.arange(10.0).view(5, 2)
check(
    (kept[8], [2, 2, 2, 2], "Eight rows divide evenly."),
    (kept[61], [16, 16, 16, 13], "Chunks are rounded up, and the last rank has what is left."),
    (kept[5], [2, 2, 1, 0], "With chunks of two rows, nothing is left for the fourth rank."),
    (gather([weight[:3], weight[3:]], 5).tolist(), weight.tolist(), "The padding belongs behind the last row."),
    (gather([weight[:2], weight[2:4], weight[4:], weight[5:]], 5).tolist(), weight.tolist(), "A rank may keep no row."),
)

# %% [markdown]
# ## Gathered, used, freed, reduced
#
# `record_life` trains two steps on two ranks and writes down what happens to each unit in the second. The first step
# teaches the order of the units. From then on a unit's gather starts when the unit two before it has completed.

# %%
tokens = torch.randint(config.vocab_size, (4, config.context_length + 1), generator=torch.Generator().manual_seed(0))
events = run_ranks(record_life, 2, config, tokens)[0]
for number, event in enumerate(events):
    print(f"{number:3}  {event.what:9}{event.unit:18} gathered now: {', '.join(event.gathered) or 'nothing'}")

# %% [markdown]
# Read it as a story. The embedding and the first block are gathered at once. When the embedding has run it is freed,
# and the gather of the second block starts: it travels while the first block computes. So it goes on, to the head. The
# last block and the head stay: the backward begins with them. Then everything runs in the other direction, each block
# gathered once more, because a linear layer needs its weight to turn the gradient of its output into that of its input.
# When all gradients of a unit have arrived they are reduced: averaged over the ranks, half of the rows to each.

# %%
units = list(dict.fromkeys(event.unit for event in events))
marks = {"forward": "o", "backward": "s", "reduce": "v"}
figure, (above, below) = plt.subplots(2, 1, figsize=(10, 6), sharex=True, height_ratios=(3, 1))
for row, unit in enumerate(units):
    start = None
    for number, event in enumerate(events):
        if event.unit == unit and event.what == "gather":
            start = number
        elif event.unit == unit and event.what == "free" and start is not None:
            above.broken_barh([(start, number - start)], (row - 0.3, 0.6), color="#66a9d8")
            start = None
        elif event.unit == unit and event.what in marks:
            above.plot(number, row, marks[event.what], color="black")
above.set_yticks(range(len(units)), units)
above.set_title("Bars: the whole weight has memory. Circle: forward, square: backward, triangle: gradient reduced.")
below.step(range(len(events)), [event.gathered_bytes / 1024 for event in events], where="post")
below.set_ylabel("gathered (KiB)")
below.set_xlabel("event")
plt.show()

# %% [markdown]
# Never more than two units are whole: the one that computes and the one that travels.

# %%
most = max(len(event.gathered) for event in events)
print(f"at most {most} of {len(units)} units gathered at once; after the step: {events[-1].gathered or 'nothing'}")
assert most == 2 and events[-1].gathered == ()

# %% [markdown]
# ### Exercise 2: reduce-scatter
#
# After its backward each rank has a gradient of the *whole* weight, from its own part of the batch. Return what each
# rank needs of them: the mean over the ranks of the rows that it keeps.


# %%
def reduce_scatter(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    # yours: `gradients[rank]` is whole; the result's [rank] has that rank's rows
    mean = sum(gradients) / len(gradients)
    return [shard(mean, rank, len(gradients)) for rank in range(len(gradients))]
    # to here


# %%
gradients = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[3.0], [6.0], [9.0]])]
own = reduce_scatter(gradients)
check(
    ([len(rows) for rows in own], [2, 1], "Three rows on two ranks: the first keeps two."),
    (own[0].tolist(), [[2.0], [4.0]], "A mean, not a sum: each rank's loss is the mean of its own part."),
    (own[1].tolist(), [[6.0]], "The second rank keeps the last row."),
    (gradients[0].tolist(), [[1.0], [2.0], [3.0]], "Leave the ranks' own gradients as they were."),
)

# %% [markdown]
# ## Why it is worth it
#
# What a rank needs to train the handout's models on 4 sequences of 512 tokens with bfloat16 compute, float32 masters
# and checkpointed blocks, in closed form (`analysis/memory_plan.py`). The dotted line is one H200.

# %%
ranks = (1, 2, 4, 8)
for name in ("large", "xl", "10b", "8b"):
    model = replace(MODEL_SIZES[name], context_length=512)
    gib = [
        fsdp_bytes(model, 4, num_ranks=count, attention="sdpa", compute_dtype="bfloat16", checkpointing=True).peak
        / 2**30
        for count in ranks
    ]
    plt.plot(ranks, gib, "o-", label=name)
plt.axhline(139.8, linestyle=":", color="black")
plt.xscale("log", base=2)
plt.yscale("log")
plt.xticks(ranks, [str(count) for count in ranks])
plt.xlabel("ranks")
plt.ylabel("predicted peak of a rank (GiB)")
plt.legend()
plt.show()

# %% [markdown]
# The parts that shrink are parameters, gradients and both moments. Activations, the loss's temporaries and the gathered
# units do not: they set the floor that more ranks cannot lower.
