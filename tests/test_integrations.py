"""Hugging Face Transformers with our attention: the same logits, gradients and generated tokens as its own SDPA.

The models are tiny and random; nothing is downloaded. On the CPU they run in float64 through `reference`, so that a
wrong mask, scale or head cannot hide in rounding, and through the other back ends in float32.
"""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.attention import BlockMask
from cs336_systems.integrations import transformers as integration
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
    """The same random model twice, with SDPA and with ours. Each has its config: Transformers writes into it."""
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
    monkeypatch.setattr(BlockMask, "from_dense", lambda mask: made.append(mask.shape) or right(mask))
    return made


# The same results


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_gradients_are_those_of_sdpa(hf, model, padding):
    theirs, ours = (each.double() for each in model_pair(hf, model, "reference"))
    batch = token_batch(padding)
    found, expected = logits_and_gradients(ours, batch), logits_and_gradients(theirs, batch)
    assert worst(found, expected) < 1e-12
    assert min(gradient.abs().max().item() for gradient in expected[1:]) > 1e-9  # a check of zeros would say nothing


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted where there is no GPU")
@pytest.mark.parametrize("backend", ["auto", "tiled", "triton"])
def test_every_back_end_serves_it(hf, backend):
    theirs, ours = model_pair(hf, "grouped", backend)
    for padding in ("", "left"):
        batch = token_batch(padding)
        assert worst(logits_and_gradients(ours, batch), logits_and_gradients(theirs, batch)) < 2e-6


def test_the_check_rejects_a_lost_mask_and_a_wrong_scale(hf, monkeypatch):
    """What registering without a mask function does, and what ignoring `scaling` would: neither is in the noise."""
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
            model(batch["input_ids"], attention_mask=batch["attention_mask"])[0][batch["attention_mask"] == 1]
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
    """One query against many keys, or several that are not the first: the causal mask is bottom right there."""
    (expected, logits), (found, our_logits) = (
        generated(model.double(), token_batch(padding), **options) for model in model_pair(hf, "window", "reference")
    )
    assert expected.shape[1] == LENGTH + NEW
    assert torch.equal(expected, found)
    assert (logits - our_logits).abs().max() < 1e-12


def test_torch_compile_gives_the_same_logits(hf, monkeypatch):
    """Compiled layers each read the mask: what a CUDA graph has overwritten looks like the tensor of the last call."""
    theirs, ours = model_pair(hf, "grouped", "tiled")
    made = count_masks(monkeypatch)
    compiled = torch.compile(ours, backend="eager")  # traced; what a compiler makes of it is not ours
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


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("padding", "backend"), [("", "triton"), ("left", "triton"), ("", "hopper")])  # has no masks
def test_bfloat16_on_a_gpu_is_as_near_to_float64_as_sdpa(hf, padding, backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper kernels run on compute capability 9.0")
    theirs, ours = model_pair(hf, "grouped", backend, hidden_size=256, num_attention_heads=4)
    batch = {name: tensor.cuda() for name, tensor in token_batch(padding, length=300).items()}
    exact = logits_and_gradients(theirs.cuda().double(), batch)
    sdpa, found = (logits_and_gradients(model.cuda().bfloat16(), batch) for model in (theirs, ours))
    for one, other, target in zip(found, sdpa, exact):  # norms: they add up what all elements are off by
        assert (one - target).norm() <= 1.5 * (other - target).norm() + 1e-6 * target.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["", "left"])
def test_generating_on_a_gpu_gives_sdpa_s_logits(hf, padding):
    batch = {name: tensor.cuda() for name, tensor in token_batch(padding).items()}
    logits, ours = (generated(model.cuda(), batch)[1] for model in model_pair(hf, "window", "triton"))
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
        ({"s_aux": torch.ones(2)}, ValueError, "s_aux must be None, got Tensor: .* attention sinks"),
        ({"position_bias": torch.ones(1)}, ValueError, "position_bias must be None, got Tensor: .* a bias on the"),
        ({"head_mask": torch.ones(2)}, ValueError, "head_mask must be None, got Tensor: .* a mask of heads"),
        ({"cache": object()}, ValueError, "cache must be None, got object: there is no support for a paged cache"),
        ({"sliding_window": 3}, ValueError, "attention_mask must hold the window of 3 among 4 keys, got None"),
        (
            {"cu_seq_lens_k": torch.tensor([0, 2, 4])},
            ValueError,
            "attention_mask must keep the 2 documents of cu_seq_lens_k apart, got None: give the model",
        ),
        ({"mask": [True]}, TypeError, "attention_mask must be a bool tensor or None, got list"),
        ({"mask": torch.zeros(1, 1, 4, 4)}, ValueError, "attention_mask must be of dtype bool.*got torch.float32"),
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


def test_arguments_that_change_nothing_pass():
    expected, weights = call()
    found, _ = call(position_ids=torch.arange(4)[None], use_cache=True, softcap=None, sliding_window=4, dropout=0.0)
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
    batch["attention_mask"] = torch.zeros(2, 1, LENGTH, LENGTH)
    with pytest.raises(ValueError, match="attention_mask must be of dtype bool"):
        ours(**batch)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": 3}, TypeError, "name must be a str, got int"),
        ({"name": "sdpa"}, ValueError, "name must be an identifier without eager, sdpa, flash.*got 'sdpa'"),
        ({"name": "our_flash"}, ValueError, "name must be an identifier without .*got 'our_flash'"),
        ({"name": "owner/kernel"}, ValueError, "name must be an identifier without .*got 'owner/kernel'"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, .*got 'cuda'"),
    ],
)
def test_a_name_or_back_end_that_cannot_be_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        register(**arguments)


def test_registering_says_that_transformers_is_missing_or_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    importlib.reload(integration)  # importing needs it not
    with pytest.raises(ImportError, match=r"not installed: pip install -e '\.\[hf\]' in the repository, as docs"):
        integration.register()
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.50.0"))
    with pytest.raises(ImportError, match="transformers must be of version 4.53 or later, got 4.50.0"):
        integration.register()
