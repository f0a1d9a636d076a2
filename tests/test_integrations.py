"""Hugging Face Transformers with our attention: the same logits, gradients and generated tokens as
its own SDPA.

The models are tiny and random; nothing is downloaded. On the CPU they run in float64 through
`reference`, so that a wrong mask, scale or head cannot hide in rounding, and through the other back
ends in float32.
"""

import importlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.attention import BlockMask
from cs336_systems.integrations import transformers as integration
from cs336_systems.integrations.eager_mask import CausalMask, causal_mask, pairs_mask
from cs336_systems.integrations.transformers import attention_forward, register
from tests.covered import ATTENTION

COVERS = (*ATTENTION, "cs336_systems/integrations")
TOKENS, LENGTH, NEW = 64, 21, 8
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MODELS = {  # what is special about each: config class and its options
    "heads": ("LlamaConfig", {}),
    "grouped": ("LlamaConfig", {"num_key_value_heads": 2}),
    "one_kv_head_and_biases": ("Qwen2Config", {"num_key_value_heads": 1}),
    "window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 8}),
}


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


def model_pair(hf: Any, model: str, backend: str, **options: Any) -> tuple[Any, Any]:
    """The same random model twice, with SDPA and with ours. Each has its config: Transformers
    writes into it.
    """
    config, special = MODELS[model]
    pair = []
    for name in ("sdpa", register(f"cs336_{backend}", backend=backend)):
        torch.manual_seed(0)
        sizes = getattr(hf, config)(**SIZES | special | options)
        pair.append(hf.AutoModelForCausalLM.from_config(sizes, attn_implementation=name).eval())
    for theirs, ours in zip(*(model.parameters() for model in pair)):
        assert torch.equal(theirs, ours)
    return pair[0], pair[1]


def token_batch(padding: str, length: int = LENGTH) -> dict[str, Tensor]:
    """Two sequences, the first five tokens shorter where there is `padding`."""
    torch.manual_seed(1)
    mask = torch.ones(2, length, dtype=torch.long)
    if padding:
        mask[0, slice(0, 5) if padding == "left" else slice(-5, None)] = 0
    ids = torch.randint(TOKENS, (2, length))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def logits_and_gradients(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Logits where there are tokens, then the gradient of each parameter."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    mask = batch.get("attention_mask")
    logits = output.logits if mask is None else output.logits[mask == 1]
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected) > 1
    return max((one - other).abs().max().item() for one, other in zip(found, expected))


def count_masks(monkeypatch) -> list[torch.Size]:
    """The shapes of the masks that are cut into tiles from now on."""
    made: list[torch.Size] = []
    right = BlockMask.from_dense
    monkeypatch.setattr(
        BlockMask, "from_dense", lambda mask: made.append(mask.shape) or right(mask)
    )
    return made


# The same results


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_gradients_are_those_of_sdpa(hf, model, padding):
    theirs, ours = (each.double() for each in model_pair(hf, model, "reference"))
    batch = token_batch(padding)
    found, expected = logits_and_gradients(ours, batch), logits_and_gradients(theirs, batch)
    assert worst(found, expected) < 1e-12
    # a check of zeros would say nothing
    assert min(gradient.abs().max().item() for gradient in expected[1:]) > 1e-9


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are interpreted where there is no GPU"
)
@pytest.mark.parametrize("backend", ["auto", "tiled", "triton"])
def test_every_back_end_serves_it(hf, backend):
    theirs, ours = model_pair(hf, "grouped", backend)
    for padding in ("", "left"):
        batch = token_batch(padding)
        assert worst(logits_and_gradients(ours, batch), logits_and_gradients(theirs, batch)) < 2e-6


def test_the_check_rejects_a_lost_mask_and_a_wrong_scale(hf, monkeypatch):
    """What registering without a mask function does, and what ignoring `scaling` would: neither is
    in the noise.
    """
    theirs, ours = (each.double() for each in model_pair(hf, "grouped", "reference"))
    batch = token_batch("left")
    expected = logits_and_gradients(theirs, batch)
    right = integration.flash_attention
    for wrong in ({"block_mask": None, "is_causal": True}, {"scale": 0.3}):
        broken = lambda *qkv, mistake=wrong, **given: right(*qkv, **given | mistake)  # noqa: E731
        monkeypatch.setattr(integration, "flash_attention", broken)
        assert worst(logits_and_gradients(ours, batch), expected) > 1e-5


def test_packed_documents_do_not_see_each_other(hf):
    """Position ids that start again begin a document: logits are those of each document alone."""
    _, ours = (each.double() for each in model_pair(hf, "grouped", "reference"))
    ids, lengths = token_batch("")["input_ids"][:1], (8, 13)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = [ours(input_ids=document).logits for document in ids.split(lengths, dim=1)]
    assert (packed - torch.cat(alone, dim=1)).abs().max() < 1e-12


@pytest.mark.parametrize("padding", ["", "right"])
def test_an_encoder_attends_both_ways(hf, padding):
    hidden = []
    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    for name in ("sdpa", register("cs336_reference", backend="reference")):
        torch.manual_seed(0)
        config = hf.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = hf.AutoModel.from_config(config, attn_implementation=name).double()
        batch = token_batch(padding)
        hidden.append(
            model(batch["input_ids"], attention_mask=batch["attention_mask"])[0][
                batch["attention_mask"] == 1
            ]
        )
    assert (hidden[0] - hidden[1]).abs().max() < 1e-12


def generated(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """The prompts with NEW tokens each, and the logits of those."""
    output = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=NEW, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 8}, {"num_beams": 2}],
    ids=["growing_cache", "static_cache", "prompt_in_pieces", "beams"],
)
def test_generating_with_a_cache_is_that_of_sdpa(hf, padding, options):
    """One query against many keys, or several that are not the first: the causal mask is bottom
    right there.
    """
    (expected, logits), (found, our_logits) = (
        generated(model.double(), token_batch(padding), **options)
        for model in model_pair(hf, "window", "reference")
    )
    assert expected.shape[1] == LENGTH + NEW
    assert torch.equal(expected, found)
    assert (logits - our_logits).abs().max() < 1e-12


def test_torch_compile_gives_the_same_logits(hf, monkeypatch):
    """Compiled layers each read the mask: what a CUDA graph has overwritten looks like the tensor
    of the last call.
    """
    theirs, ours = model_pair(hf, "grouped", "tiled")
    made = count_masks(monkeypatch)
    # traced; what a compiler makes of it is not ours
    compiled = torch.compile(ours, backend="eager")
    batch = token_batch("left")
    real = batch["attention_mask"] == 1
    assert (compiled(**batch).logits - theirs(**batch).logits)[real].abs().max() < 2e-6
    assert len(made) == SIZES["num_hidden_layers"]


def test_layers_share_the_tiles_of_a_mask(hf, monkeypatch):
    _, ours = model_pair(hf, "grouped", "reference")
    made = count_masks(monkeypatch)
    ours(**token_batch(""))
    assert made == []  # a flag says it
    ours(**token_batch("left"))
    assert made == [(2, 1, LENGTH, LENGTH)]


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_is_written_to_is_read_again(inference):
    with torch.inference_mode(inference):
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        query = torch.randn(1, 2, 4, 16)
        first, _ = call(query=query, mask=mask)
        mask[..., 3] = False
        second, _ = call(query=query, mask=mask)
        expected, _ = call(query=query, mask=mask.clone())
    assert not torch.equal(first, second)
    assert torch.equal(second, expected)


# Masks are eager's to everybody else


def causal_model(hf: Any, kind: str, implementation: Any, **options: Any) -> Any:
    """A random model in float64. Its weights are larger than Transformers draws them: attention is
    far from uniform.
    """
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**options)
    model = (
        hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    return model


BLOOM = {"vocab_size": TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}
CODEGEN = {
    "vocab_size": TOKENS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 8,
    "n_positions": 64,
}


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize(
    ("kind", "options"), [("Bloom", BLOOM), ("CodeGen", CODEGEN)], ids=["bloom", "codegen"]
)
def test_a_model_with_attention_code_of_its_own_computes_what_eager_computes(
    hf, kind, options, padding
):
    """Bloom got None for its causal mask and saw the future; CodeGen added True and False to its
    scores.
    """
    expected = causal_model(hf, kind, "eager", **options)
    for name in (
        register("cs336_reference", backend="reference"),
        register("cs336_auto", backend="auto"),
    ):
        ours = causal_model(hf, kind, name, **options)
        batch = token_batch(padding)
        # Bloom's own rows without a key are NaN: its bias leaves no number as low as eager's mask.
        for found, wanted in zip(
            logits_and_gradients(ours, batch), logits_and_gradients(expected, batch)
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_such_a_model_has_its_causal_mask_under_torch_compile_too(hf):
    expected, ours = (causal_model(hf, "Bloom", name, **BLOOM) for name in ("eager", register()))
    batch = token_batch("")
    del batch["attention_mask"]
    compiled = torch.compile(ours, backend="eager")
    assert (compiled(**batch).logits - expected(**batch).logits).abs().max() < 1e-12


@pytest.mark.parametrize("is_given", [False, True])
def test_torch_compile_takes_a_causal_mask_that_is_made_in_the_graph_or_given(is_given):
    """A flag for our attention, floats for all other code, and no break of the graph."""

    def scores_and_kind(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, bool]:
        if mask is None:
            mask = causal_mask((2, 1, 4, 4), scores.dtype, scores.device)
        return scores + mask, isinstance(mask, CausalMask)

    scores = torch.randn(2, 3, 4, 4)
    mask = causal_mask((2, 1, 4, 4), scores.dtype, "cpu") if is_given else None
    found, is_flag = torch.compile(scores_and_kind, backend="aot_eager", fullgraph=True)(
        scores, mask
    )
    assert is_flag
    assert torch.equal(
        found.softmax(-1), scores.masked_fill(torch.ones(4, 4).tril() == 0, -torch.inf).softmax(-1)
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("padding", ["", "left"])
def test_gradient_checkpointing_gives_the_same_gradients(hf, padding, reentrant):
    theirs, ours = (each.double() for each in model_pair(hf, "grouped", "reference"))
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batch = token_batch(padding)
    assert (
        worst(logits_and_gradients(ours.train(), batch), logits_and_gradients(theirs, batch))
        < 1e-12
    )


MASKS = {
    "causal": lambda: causal_mask((2, 1, 4, 5), torch.float32, "cpu"),
    "pairs": lambda: pairs_mask(torch.ones(2, 1, 4, 5, dtype=torch.bool).tril(), torch.float32),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_is_eager_s_to_every_operation(kind):
    mask, scores = MASKS[kind](), torch.randn(2, 3, 4, 5)
    floats = torch.zeros(2, 1, 4, 5).masked_fill(
        torch.ones(4, 5).tril() == 0, torch.finfo(torch.float32).min
    )
    assert (mask.shape, mask.dtype, mask.device) == (floats.shape, floats.dtype, floats.device)
    assert len(mask) == 2 and mask.is_floating_point()
    query, keys = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 5, 16)
    sdpa = partial(nn.functional.scaled_dot_product_attention, query, keys, keys)
    for found, expected in [
        (scores + mask, scores + floats),
        (mask + scores, floats + scores),
        (mask[:, :, :, :3], floats[:, :, :, :3]),
        (torch.cat([mask, mask]), torch.cat([floats, floats])),
        (mask.bool(), floats.bool()),
        (mask.to(torch.int64), floats.to(torch.int64)),
        (mask.mT, floats.mT),
        (mask.data, floats),
        (torch.where(mask == 0, scores[:, :1], 0.0), torch.where(floats == 0, scores[:, :1], 0.0)),
        (sdpa(attn_mask=mask), sdpa(attn_mask=floats)),
    ]:
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_that_is_moved_is_still_a_mask(kind):
    """As accelerate does between devices, FSDP between dtypes and a checkpoint to detach: kernels
    need no floats.
    """
    mask = MASKS[kind]()
    assert mask.to("cpu") is mask
    low = mask.to(torch.float16)
    assert type(low) is type(mask.detach()) is type(mask)
    assert torch.equal(low.to_floats() == 0, mask.to_floats() == 0)
    assert low.to_floats().min() == torch.finfo(torch.float16).min


def test_memory_that_is_read_without_pytorch_is_no_mask():
    """A C++ extension gets the storage and none of our code: NaN is seen, and 0 would be a mask
    that is lost.
    """
    for make in MASKS.values():
        with torch._C.DisableTorchFunctionSubclass():
            assert make().untyped_storage().nbytes() == 4 and torch.isnan(make()).all()


def test_a_mask_of_floats_is_its_pairs():
    query = torch.randn(2, 2, 4, 16)
    pairs = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    expected, _ = call(query=query, mask=pairs)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for lowest in (torch.finfo(dtype).min, -torch.inf):
            floats = torch.zeros(pairs.shape, dtype=dtype).masked_fill(~pairs, lowest)
            assert torch.equal(call(query=query, mask=floats)[0], expected)


def test_a_value_head_dim_of_its_own_is_served(hf):
    """Latent attention (DeepSeek) has values of another head dim than its keys."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, 6, 24, dtype=torch.float64)
    for value_dim in (16, 32):
        value = torch.randn(1, 4, 6, value_dim, dtype=torch.float64)
        found, _ = attention_forward(nn.Module(), query, key, value, None, backend="reference")
        expected = nn.functional.scaled_dot_product_attention(query, key, value)
        torch.testing.assert_close(found, expected.transpose(1, 2))


# Learnable sinks


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, pairs: Tensor) -> Tensor:
    """The definition: a softmax over the scores and one column more for each head, whose weight is
    dropped.
    """
    scores = (q @ k.repeat_interleave(2, 1).mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~pairs, -torch.inf)
    column = sinks[None, :, None, None].expand(len(q), -1, q.shape[2], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    return weights @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("masked", ["causal", "pairs"])
def test_sinks_and_their_gradient_are_those_of_a_softmax_with_a_column_more(masked, backend):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v, sinks = make(2, 4, 9, 16), make(2, 2, 9, 16), make(2, 2, 9, 16), make(4)
    pairs = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    if masked == "pairs":
        pairs[0, :, :, :3] = False  # three queries have no key: the sink takes all
    mask = (
        causal_mask((2, 1, 9, 9), q.dtype, "cpu")
        if masked == "causal"
        else pairs_mask(pairs, q.dtype)
    )
    found, _ = attention_forward(nn.Module(), q, k, v, mask, s_aux=sinks, backend=backend)
    expected = sink_attention(q, k, v, sinks, pairs).transpose(1, 2)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights).sum(), (q, k, v, sinks))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v, sinks))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for one, other in zip(ours, theirs):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_gpt_oss_is_equal_to_eager_with_its_sinks(hf, padding):
    """It was refused: `s_aux` must be None."""
    options = SIZES | {
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    ours = register("cs336_reference", backend="reference")
    models = [causal_model(hf, "GptOss", name, **options) for name in ("eager", ours)]
    for model in models:
        model.set_experts_implementation("eager")  # the other one takes no float64
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.sinks.data = torch.linspace(-1, 1 + number, 4, dtype=torch.float64)
    batch = token_batch(padding)
    expected, found = (logits_and_gradients(model, batch) for model in models)
    assert worst(found, expected) < 1e-10
    sinks = [
        each.grad.abs().min()
        for name, each in models[1].named_parameters()
        if name.endswith("sinks")
    ]
    assert len(sinks) == 2 and min(sinks) > 1e-9
    logits, ours = (generated(model, token_batch("left"))[1] for model in models)
    assert (logits - ours).abs().max() < 1e-10


# On a GPU


@pytest.mark.gpu
# has no masks
@pytest.mark.parametrize(
    ("padding", "backend"), [("", "triton"), ("left", "triton"), ("", "hopper")]
)
def test_bfloat16_on_a_gpu_is_as_near_to_float64_as_sdpa(hf, padding, backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper kernels run on compute capability 9.0")
    theirs, ours = model_pair(hf, "grouped", backend, hidden_size=256, num_attention_heads=4)
    batch = {name: tensor.cuda() for name, tensor in token_batch(padding, length=300).items()}
    exact = logits_and_gradients(theirs.cuda().double(), batch)
    sdpa, found = (logits_and_gradients(model.cuda().bfloat16(), batch) for model in (theirs, ours))
    # norms: they add up what all elements are off by
    for one, other, target in zip(found, sdpa, exact):
        assert (one - target).norm() <= 1.5 * (other - target).norm() + 1e-6 * target.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["", "left"])
def test_generating_on_a_gpu_gives_sdpa_s_logits(hf, padding):
    batch = {name: tensor.cuda() for name, tensor in token_batch(padding).items()}
    logits, ours = (
        generated(model.cuda(), batch)[1] for model in model_pair(hf, "window", "triton")
    )
    assert (logits - ours).abs().max() < 1e-3  # float32, on tensor cores


# What is not supported


def call(query: Tensor | None = None, mask: Any = None, **arguments: Any) -> tuple[Tensor, None]:
    """`attention_forward` as a layer with four queries and as many keys calls it."""
    query = torch.ones(1, 2, 4, 16) if query is None else query
    return attention_forward(nn.Module(), query, query, query, mask, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dropout": 0.1}, ValueError, "dropout must be 0, got 0.1: set the model's attention_dropout to 0"),
        ({"output_attentions": True}, ValueError, "output_attentions must be False, got True: the weights are never"),
        ({"softcap": 30.0}, ValueError, "softcap must be None, got float: there is no support for capped scores"),
        ({"s_aux": torch.ones(3)}, ValueError, r"s_aux must have shape \(2,\), a sink for each head, got \(3,\)"),
        ({"is_causal": True}, ValueError, "attention_mask must be given where is_causal is True, got None"),
        ({"position_bias": torch.ones(1)}, ValueError, "position_bias must be None, got Tensor: .* a bias on the"),
        ({"head_mask": torch.ones(2)}, ValueError, "head_mask must be None, got Tensor: .* a mask of heads"),
        ({"cache": object()}, ValueError, "cache must be None, got object: there is no support for a paged cache"),
        ({"sliding_window": 3}, ValueError, "attention_mask must hold the window of 3 among 4 keys, got None"),
        (
            {"cu_seq_lens_k": torch.tensor([0, 2, 4])},
            ValueError,
            "attention_mask must keep the 2 documents of cu_seq_lens_k apart, got None: give the model",
        ),
        ({"mask": [True]}, TypeError, "attention_mask must be a tensor or None, got list"),
        ({"mask": torch.zeros(1, 1, 4, 4).long()}, ValueError, "attention_mask must be of dtype bool.*got torch.int64"),
        ({"mask": torch.full((1, 1, 4, 4), 0.5)}, ValueError, "attention_mask must be of bools.* got 0.5: there is no"),
        ({"mask": torch.full((1, 1, 4, 4), torch.nan)}, ValueError, "attention_mask must be of bools.* got nan: there"),
        (
            {"mask": torch.ones(1, 4, dtype=torch.bool)},
            ValueError,
            r"attention_mask must have shape \(1 or 1, 2 or 1, 4 or 1, 4 or 1\), got \(1, 4\)",
        ),
        (
            {"mask": torch.ones(1, 1, 4, 5, dtype=torch.bool)},
            ValueError,
            r"attention_mask must have shape .* got \(1, 1, 4, 5\)",
        ),
        ({"backend": "hopper"}, ValueError, "backend 'hopper' cannot be used"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_would_be_wrong_is_refused(arguments, error, message):
    query = torch.ones(1, 2, 4, 16, dtype=torch.float64)
    with pytest.raises(error, match=message):
        call(query=query, **arguments)


def test_a_refusal_names_the_module_and_its_model():
    module = nn.Linear(1, 1)
    module.config = SimpleNamespace(model_type="llama")
    query = torch.ones(1, 2, 4, 16)
    with pytest.raises(ValueError, match=r"softcap must be None.* \(Linear of llama\)$"):
        attention_forward(module, query, query, query, None, softcap=30.0)


def test_arguments_that_change_nothing_pass():
    expected, weights = call()
    found, _ = call(
        position_ids=torch.arange(4)[None],
        use_cache=True,
        softcap=None,
        sliding_window=4,
        dropout=0.0,
    )
    assert weights is None and expected.shape == (1, 4, 2, 16)
    assert torch.equal(found, expected)


def test_a_mask_may_be_the_same_for_all_queries():
    query = torch.randn(2, 2, 4, 16)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)[:, None, None]
    expected, _ = call(query=query, mask=mask.expand(2, 1, 4, 4).contiguous())
    found, _ = call(query=query, mask=mask)
    assert torch.equal(found, expected)
    assert torch.equal(found[1], call(query=query, is_causal=False)[0][1])


def test_a_model_that_drops_out_or_adds_a_mask_says_so(hf):
    _, ours = model_pair(hf, "heads", "reference", attention_dropout=0.1)
    batch = token_batch("")
    ours(**batch)  # an evaluation drops nothing
    with pytest.raises(ValueError, match="dropout must be 0, got 0.1"):
        ours.train()(**batch)
    ours.eval()
    with pytest.raises(ValueError, match="output_attentions must be False"):
        ours(**batch, output_attentions=True)
    batch["attention_mask"] = torch.full((2, 1, LENGTH, LENGTH), 0.5)
    with pytest.raises(
        ValueError, match="attention_mask must be of bools.* there is no support for a bias"
    ):
        ours(**batch)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": 3}, TypeError, "name must be a str, got int"),
        (
            {"name": "sdpa"},
            ValueError,
            "name must be an identifier without eager, sdpa, flash.*got 'sdpa'",
        ),
        ({"name": "our_flash"}, ValueError, "name must be an identifier without .*got 'our_flash'"),
        (
            {"name": "owner/kernel"},
            ValueError,
            "name must be an identifier without .*got 'owner/kernel'",
        ),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, .*got 'cuda'"),
    ],
)
def test_a_name_or_back_end_that_cannot_be_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        register(**arguments)


def test_registering_says_that_transformers_is_missing_or_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    importlib.reload(integration)  # importing needs it not
    with pytest.raises(
        ImportError, match=r"not installed: pip install -e '\.\[hf\]' in the repository, as docs"
    ):
        integration.register()
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.50.0"))
    with pytest.raises(
        ImportError, match="transformers must be of version 4.53 or later, got 4.50.0"
    ):
        integration.register()
