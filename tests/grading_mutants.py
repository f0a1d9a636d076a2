"""Wrong solutions made from tests/solutions/minimal.py by a few replacements, with what says so.

`MUTANTS[name].source()` is the file of adapters; `check` has to fail on it, with a message that
begins
with `message`.
"""

from dataclasses import dataclass
from pathlib import Path

MINIMAL = (Path(__file__).resolve().parent / "solutions/minimal.py").read_text()


@dataclass(frozen=True)
class Mutant:
    """What a wrong solution replaces in the minimal one, and how the grade tells it."""

    check: str
    message: str
    replaced: tuple[tuple[str, str], ...]

    def source(self) -> str:
        source = MINIMAL
        for old, new in self.replaced:
            assert source.count(old) == 1, f"{source.count(old)} times in minimal.py: {old}"
            source = source.replace(old, new)
        return source


SAVED = "        ctx.save_for_backward(q, k, v, output, lse)\n        ctx.is_causal = is_causal\n"
TILES = "        for i in range(0, q.shape[1], TILE):\n"
FREED = "layer.register_forward_hook(lambda *_, s=own: s.free())"
GATHERED = """\
            parts = list(self.whole.data.chunk(dist.get_world_size()))
            self.gathering = dist.all_gather(parts, self.rows.to(self.whole.dtype), async_op=True)
"""
REDUCED = """\
        self.shards[weight].free()
        own = torch.empty_like(weight)
        parts = list(gradient.chunk(dist.get_world_size()))
        self.works.append((dist.reduce_scatter(own, parts, async_op=True), own, weight))
"""
FINISHED = """\
            work.wait()
            weight.grad = own / dist.get_world_size()
"""

MUTANTS = {
    # Attention
    "triton_is_pytorch": Mutant(
        "flash_forward.triton_calls_a_fused_kernel",
        "the forward launches no Triton kernel",
        (("    import triton\n", "    return FlashPyTorch\n    import triton\n"),),
    ),
    "triton_multiplies_in_pytorch": Mutant(
        "flash_forward.triton_calls_a_fused_kernel",
        "the forward computes mm in PyTorch, not in its kernel",
        (
            (
                "                q,\n                k,\n                v,\n                output,",
                "                q @ torch.eye(d),\n                k,\n                v,\n                output,",
            ),
        ),
    ),
    "plain_softmax": Mutant(
        "flash_forward.pytorch_works_by_tiles",
        "a tensor of shape (1, 512, 512) is made for 512 queries and 512 keys",
        (
            (
                "        output, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])\n",
                "        scores = q @ k.transpose(-2, -1) * scale\n"
                "        output, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)\n",
            ),
            (TILES, "        for i in ():\n"),
        ),
    ),
    "softmax_of_whole_rows": Mutant(
        "flash_forward.pytorch_works_by_tiles",
        "the forward calls _softmax, which needs whole rows of scores",
        (
            (
                TILES,
                TILES
                + "            scores = q[:, i : i + TILE] @ k.transpose(-2, -1) * scale\n"
                + "            output[:, i : i + TILE] = scores.softmax(-1) @ v\n"
                + "            lse[:, i : i + TILE] = scores.exp().sum(-1).log()\n"
                + "            continue\n",
            ),
        ),
    ),
    "keeps_p_on_ctx": Mutant(
        "flash_backward.pytorch_keeps_no_matrix_of_scores",
        "328,704 bytes are alive between forward and backward of 256 queries and 256 keys",
        (
            (
                SAVED,
                SAVED
                + "        ctx.p = torch.exp(q @ k.transpose(-2, -1) * scale - lse[..., None])\n",
            ),
        ),
    ),
    "flag_without_a_default": Mutant(
        "flash_forward.triton_causal_flag_is_optional",
        "TypeError: ",
        (
            (
                "        def forward(ctx, q, k, v, is_causal=False):\n            q, k",
                "        def forward(ctx, q, k, v, is_causal):\n            q, k",
            ),
        ),
    ),
    "longer_tiles_than_lengths": Mutant(
        "flash_forward.pytorch_short_lengths",
        "RuntimeError: ",
        (("TILE = 16\n", "TILE = 64\n"),),
    ),
    "unscaled_scores": Mutant(
        "flash_forward.pytorch_output",
        "O is wrong by 3.5 in 128 of 128 rows, first in row 0, at most 1.1e-05 is allowed (2 x 128 "
        "queries x 128 keys x 64, not causal), as if the scores were not scaled by 1/sqrt(d)",
        (
            (
                "@ k[:, j : j + TILE].transpose(-2, -1) * scale",
                "@ k[:, j : j + TILE].transpose(-2, -1)",
            ),
        ),
    ),
    "sum_without_its_logarithm": Mutant(
        "flash_forward.pytorch_saves_one_log_sum_exp",
        "the log-sum-exp saved with is_causal=False is wrong by 5, at most 0.001 is allowed, as if the "
        "sum were added to the maximum without its logarithm",
        (
            (
                "lse[:, i : i + TILE] = maximum + torch.log(total)",
                "lse[:, i : i + TILE] = maximum + total",
            ),
        ),
    ),
    "backward_without_the_mask": Mutant(
        "flash_backward.triton_causal_gradients",
        "dQ is wrong by 2.4e+02 in 127 of 128 rows, first in row 0, at most 1.2e-05 is allowed (2 x 128 "
        "queries x 128 keys x 64, causal), as if the causal mask were missing in the backward",
        (("    if ctx.is_causal:\n", "    if False:\n"),),
    ),
    "store_out_of_bounds": Mutant(
        "flash_forward.triton_calls_a_fused_kernel",
        "the process died (SIGSEGV): a load or store out of bounds?",
        (
            (
                "        tl.store(lse_ptr + batch * num_queries + rows,",
                "        tl.store(lse_ptr + (batch * num_queries + rows) * 1_000_000_000,",
            ),
        ),
    ),
    # Data parallelism
    "ddp_averages_twice": Mutant(
        "ddp_overlap_individual_parameters.equals_one_process",
        "last.bias differs by 0.048 from one process's after step 1, as if gradients were averaged twice",
        (
            (
                "            parameter.grad /= dist.get_world_size()\n        self.works.clear()\n\n\ndef get_ddp(",
                "            parameter.grad /= dist.get_world_size() ** 2\n        self.works.clear()\n\n\n"
                "def get_ddp(",
            ),
        ),
    ),
    # Sharded optimizer
    "later_groups_on_every_rank": Mutant(
        "optimizer_state_sharding.adds_parameter_groups",
        "after add_param_group the ranks together keep AdamW's state 1.",
        (
            (
                "if self.owners[p] == dist.get_rank()]",
                "if self.owners[p] == dist.get_rank() or self.inner is not None]",
            ),
        ),
    ),
    "closure_dropped": Mutant(
        "optimizer_state_sharding.passes_the_closure_on",
        "last.bias differs by ",
        (("self.inner.step(closure, **kwargs)", "self.inner.step(**kwargs)"),),
    ),
    "keywords_dropped": Mutant(
        "optimizer_state_sharding.passes_keywords_of_a_step_on",
        "last.bias differs by ",
        (("self.inner.step(closure, **kwargs)", "self.inner.step(closure)"),),
    ),
    # FSDP
    "fsdp_leaves_embeddings_whole": Mutant(
        "fsdp.shards_every_weight",
        "a rank holds 61% of the weights of Linear and Embedding layers after wrapping, not 50%",
        (('type(x).__name__ in ("Linear", "Embedding")', 'type(x).__name__ == "Linear"'),),
    ),
    "fsdp_keeps_views": Mutant(
        "fsdp.frees_gathered_weights",
        "in the forward 10.",
        (("[rank].clone()", "[rank]"),),
    ),
    "fsdp_keeps_weights_for_the_backward": Mutant(
        "fsdp.gathers_again_for_the_backward",
        "the backward gathers 0 of 16 layers: gathered weights are kept from the forward",
        ((FREED, FREED.replace("s.free()", "None")),),
    ),
    "fsdp_never_frees_in_the_forward": Mutant(
        "fsdp.frees_gathered_weights",
        "in the forward 16.",
        ((FREED, FREED.replace("s.free()", "None")),),
    ),
    "fsdp_frees_in_finish": Mutant(
        "fsdp.frees_gathered_weights",
        "behind the backward 16.",
        (
            (REDUCED, REDUCED.replace("].free()", "].weight.data = self.shards[weight].rows")),
            (FINISHED, FINISHED + "            self.shards[weight].free()\n"),
        ),
    ),
    "fsdp_keeps_whole_gradients": Mutant(
        "fsdp.keeps_no_whole_gradients",
        "after the synchronization 8.",
        (
            (
                "dist.reduce_scatter(own, parts, async_op=True), own, weight",
                "dist.all_reduce(gradient, async_op=True), parts[dist.get_rank()], weight",
            ),
            (
                FINISHED,
                FINISHED.replace("own / dist.get_world_size()", "own.div_(dist.get_world_size())"),
            ),
        ),
    ),
    "fsdp_sends_float32": Mutant(
        "fsdp.communicates_in_the_compute_dtype",
        "32 of 32 gathers of weights send float32",
        (
            (
                GATHERED,
                "            parts = [torch.empty_like(self.rows) for _ in range(dist.get_world_size())]\n"
                "            dist.all_gather(parts, self.rows)\n"
                "            self.whole.data.copy_(torch.cat(parts))\n",
            ),
        ),
    ),
    "fsdp_never_overlaps": Mutant(
        "fsdp.communicates_while_it_computes",
        "every collective is waited for before the next layer computes: pass async_op=True",
        (
            (GATHERED, GATHERED.replace("self.gathering = ", "").replace(", async_op=True", "")),
            (REDUCED, REDUCED.replace(", async_op=True", "")),
            (FINISHED, FINISHED.replace("            work.wait()\n", "")),
        ),
    ),
    "fsdp_gathers_all_at_once": Mutant(
        "fsdp.gathers_at_most_two_layers_ahead",
        "16 of 16 layers are gathered before layer 1 runs, at most 2 may be",
        (
            (
                "    def finish_gradient_synchronization(self):\n        for work, own, weight",
                "    def forward(self, *args, **kwargs):\n"
                "        for shard in self.shards.values():\n"
                "            shard.start_gather()\n"
                "        return self.module(*args, **kwargs)\n\n"
                "    def finish_gradient_synchronization(self):\n        for work, own, weight",
            ),
        ),
    ),
    "fsdp_reduces_in_finish": Mutant(
        "fsdp.reduces_gradients_in_the_backward",
        "0 gradients of 16 layers are sent while the backward runs",
        (
            (
                "        self.works.append((dist.reduce_scatter(own, parts, async_op=True), own, weight))\n",
                "        self.works.append(((own, parts), own, weight))\n",
            ),
            (FINISHED, FINISHED.replace("work.wait()", "dist.reduce_scatter(*work)")),
        ),
    ),
}
