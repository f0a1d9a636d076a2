"""Every model class of the installed Transformers, tiny and random, under our attention and under
`eager`.

    for folder in model_folders():
        for model_class in model_classes(folder):
            verdict = compare_with_eager(model_class, "cs336_reference")

Nothing here names a model: configs shrink by the names of their fields, inputs follow from the
signature of `forward`. A class that cannot be had so is "unbuilt", with the reason.
"""

import copy
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

BATCH, LENGTH, SAMPLES, FRAMES, NEW = 2, 12, 4000, 40, 3
LARGEST = 30_000_000  # parameters: what does not shrink is not built
TOLERANCE = 1e-4  # of float32, of the largest element; eager's softmax is in float32 everywhere
GRADIENT_TOLERANCE = 1e-3
PADDINGS = ("", "right", "left")
TASK = r"For[A-Z](?!ausalLM|onditionalGeneration)|LMHead"
REFUSAL = re.compile(r"\(\w+( of [\w-]+)?\)$")  # who was refused: the module and its model's type

# How an integer of a config becomes small: the first pattern that is its whole name. It never
# grows.
SIZES = [
    (r".*vocab_size", 64),
    (r"(num|n)_.*experts_per_tok|.*top_k.*|moe_topk|num_selected_experts", 2),
    (r"(n|num|moe_num).*experts.*", 4),
    (r"n_group|topk_group|num_expert_group.*", 1),
    (r".*head_dim|.*d_head|.*head_size|d_kv|.*rope.*dim|rotary.*|.*rot_dim", 8),
    (r".*heads?", 4),
    (r".*_layers?|depth|num_blocks", 2),
    (r".*intermediate.*|ffn.*|.*ffn_dim|d_ff|n_inner|mlp_dim", 64),
    (r".*hidden_size|d_model|n_embd|.*embedding_size|d_embed|width|channels|.*_dim|dim", 32),
    (r".*(image|img|input|crop)_size", 32),
    (r".*patch_size", 8),
    (r".*lora_rank", 16),
    (r"n_positions|n_ctx|.*max_.*(len|length|positions|embeddings).*", 128),
    (r".*window.*|local_attention|.*chunk_size", 8),
]


class Verdict(NamedTuple):
    """What became of a class: "equal", "refused", "different", "broken" or "unbuilt", and why."""

    outcome: str
    reason: str
    calls: int = 0  # of our attention


# Classes


def model_folders() -> list[str]:
    """The modules with models, as "llama.modeling_llama"."""
    root = Path(importlib.import_module("transformers.models").__file__ or "").parent
    return [f"{path.parent.name}.{path.stem}" for path in sorted(root.glob("*/modeling_*.py"))]


def ways_to_call(folders: list[str]) -> list[list[str]]:
    """The modules with one set of arguments to attention functions and of functions that make
    masks, for each set.

    Models that share both are handed the same things by us and hand the same things to us.
    """
    root = Path(importlib.import_module("transformers.models").__file__ or "").parent
    ways: dict[Any, list[str]] = {}
    for folder in folders:
        source = (root / (folder.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        calls = re.findall(r"= attention_interface\((.*?)\n +\)", source, re.DOTALL)
        arguments = frozenset(
            name for call in calls for name in re.findall(r"^ +(\w+)=", call, re.MULTILINE)
        )
        masks = frozenset(re.findall(r"\bcreate_\w*masks?\w*(?=\()", source))
        ways.setdefault((arguments, masks, "ALL_ATTENTION_FUNCTIONS" in source), []).append(folder)
    return list(ways.values())


def model_classes(folder: str) -> Iterator[Any]:
    """The classes of a module that can be called; none where it needs a package that is not
    installed.

    Those named for a task other than generation, as BertForTokenClassification, are left out: they
    are a layer on top of a class that is not.
    """
    transformers = importlib.import_module("transformers")
    try:
        module = importlib.import_module(f"transformers.models.{folder}")
    except ImportError:
        return
    for found in list(vars(module).values()):
        if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel):
            is_own = found.__module__ == module.__name__ and found.config_class is not None
            if (
                is_own
                and found.forward is not nn.Module.forward
                and not re.search(TASK, found.__name__)
            ):
                yield found


# A tiny model


def tiny_config(config_class: Any) -> Any:
    """The default config with every size cut by SIZES, no dropout, and at most two layers of each
    kind.
    """
    default = config_class()
    changes: dict[str, Any] = {}
    for name in config_class.sub_configs or {}:
        inner = getattr(default, name, None)
        if inner is not None:
            changes[name] = tiny_config(type(inner))
    for name, value in vars(default).items():
        if name in changes or name.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, int) and value > 0:
            changes[name] = small(name, value, default)
        elif isinstance(value, float) and re.search("drop", name):
            changes[name] = 0.0
    kinds = {
        name: list(dict.fromkeys(vars(default).get(name) or ()))
        for name in ("layer_types", "mlp_layer_types")
    }
    if any(kinds.values()):
        layers = max(2, *map(len, kinds.values()))
        changes["num_hidden_layers"] = layers
        changes |= {name: (found * layers)[:layers] for name, found in kinds.items() if found}
    return config_class(**changes)


def small(name: str, value: int, default: Any) -> int:
    """A size of a config, cut."""
    if re.search("layers|depth", name) and value in (len(each) for each in lists_of(default)):
        return value  # it counts the entries of a list
    if re.search(r"token_(id|index)$", name):
        return min(value, 60)
    if re.fullmatch(r".*(key_value_heads|kv_heads)", name):
        queries = getattr(default, name.replace("key_value", "attention"), None)
        return min(value, 4 if queries == value else 2)
    return min([value, *[size for pattern, size in SIZES if re.fullmatch(pattern, name)][:1]])


def lists_of(config: Any) -> list[Any]:
    """The lists of a config, but those of layer types, which are cut."""
    return [
        value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and not name.endswith("layer_types")
    ]


def build(model_class: Any, config: Any, implementation: str) -> Any:
    return model_class._from_config(
        copy.deepcopy(config), attn_implementation=implementation
    ).eval()


def draw_weights(model: nn.Module) -> None:
    """Weights that keep the size of what they are applied to: with Transformers' own, attention is
    nearly uniform.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn / parameter[0].numel() ** 0.5)


# Its inputs


def possible_inputs(model: Any, padding: str) -> Iterator[dict[str, Any]]:
    """Inputs that the signature of `forward` suggests: text, speech, features or hidden states;
    then with an image.
    """
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    config = model.config
    text = config.get_text_config()
    given: dict[str, Any] = {}
    length = LENGTH
    if "input_ids" in names:
        most = min(getattr(text, "vocab_size", None) or 64, 64) - 4
        given["input_ids"] = torch.randint(5, max(most, 6), (BATCH, length), generator=generator)
        if "decoder_input_ids" in names:
            given["decoder_input_ids"] = given["input_ids"][:, 2:]
        if "bbox" in names:
            given["bbox"] = (
                torch.randint(0, 30, (BATCH, length, 4), generator=generator).sort(-1).values
            )
    elif "input_values" in names:
        length = SAMPLES
        given["input_values"] = torch.randn(BATCH, length, generator=generator)
    elif "input_features" in names:
        length = FRAMES
        bins = next(
            (
                getattr(config, name)
                for name in ("num_mel_bins", "feature_size")
                if hasattr(config, name)
            ),
            80,
        )
        given["input_features"] = torch.randn(BATCH, length, bins, generator=generator)
        if hasattr(config, "max_source_positions"):
            length = 2 * config.max_source_positions
            given["input_features"] = torch.randn(BATCH, bins, length, generator=generator)
    elif "pixel_values" not in names:
        name = next(
            (name for name in ("hidden_states", "inputs_embeds", "x") if name in names), None
        )
        if name:
            given[name] = torch.randn(
                BATCH, length, getattr(config, "hidden_size", 32), generator=generator
            )
    if "attention_mask" in names and given:
        given["attention_mask"] = torch.ones(BATCH, length, dtype=torch.long)
        if padding:
            part = slice(0, length // 3) if padding == "left" else slice(-(length // 3), None)
            given["attention_mask"][0, part] = 0
    if "use_cache" in names:
        given["use_cache"] = False
    if given.keys() - {"use_cache"}:
        yield given
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", 32) or 32
        sides = (size, size) if isinstance(size, int) else tuple(size)
        channels = (
            getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        )
        yield given | {"pixel_values": torch.randn(BATCH, channels, *sides, generator=generator)}


def with_other_padding(given: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with something else where the mask has zeros."""
    mask = given.get("attention_mask")
    changed = dict(given)
    for name, value in given.items():
        if mask is None or name in ("attention_mask", "bbox") or not isinstance(value, Tensor):
            continue
        if value.shape[:2] == mask.shape:
            is_padding = mask.view(*mask.shape, *[1] * (value.ndim - 2)) == 0
            changed[name] = torch.where(is_padding, value - 1, value)
    return changed


# The comparison


def outputs_of(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """The floats that a forward returns; some draw noise or choose patches at random."""
    torch.manual_seed(3)
    output = model(**given)
    found = tree_leaves(dict(output) if hasattr(output, "items") else output)
    return [each for each in found if isinstance(each, Tensor) and each.is_floating_point()]


def what_padding_leaves(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """The outputs, NaN in each element that changes with the contents of the padding: nothing is
    promised of those.
    """
    found = outputs_of(model, given)
    again = outputs_of(model, with_other_padding(given))
    nothing = float("nan")
    return [
        torch.where((one - other).abs() <= 1e-5 * other.abs().max(), one, nothing)
        if one.numel()
        else one
        for one, other in zip(found, again)
    ]


def distance(found: list[Tensor], expected: list[Tensor], floor: float = 1e-6) -> float:
    """The largest difference, of the largest element of its tensor but at least `floor`, where
    `expected` is finite.
    """
    worst = 0.0 if len(found) == len(expected) else float("inf")
    for one, other in zip(found, expected):
        judged = other.isfinite()
        if one.shape != other.shape:
            return float("inf")
        if judged.any():
            apart = (one - other)[judged].abs().max() / other[judged].abs().max().clamp_min(floor)
            worst = max(worst, apart.item() if apart.isfinite() else float("inf"))
    return worst


def gradients(model: Any, given: dict[str, Any], judged: list[Tensor]) -> list[Tensor]:
    """The parameters' gradients of a weighted sum of the outputs that are judged."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros(())
    for output, known in zip(outputs_of(model, given), judged):
        weights = torch.randn(output.shape, generator=generator)
        if output.requires_grad and known.isfinite().any():
            total = total + (output * weights)[known.isfinite()].sum()
    if not total.requires_grad:
        return []
    total.backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def generated(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """The logits of NEW tokens, with a cache."""
    prompt = {name: given[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return list(
        model.generate(**prompt, **options, return_dict_in_generate=True, output_logits=True).logits
    )


def compare_with_eager(
    model_class: Any, name: str, calls: list[str], *, thoroughly: bool = False
) -> Verdict:
    """Build `model_class` twice and compare, padded at either side and not; `thoroughly` with
    gradients and a cache.

    `calls` is what our attention appends to when it is called.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = tiny_config(model_class.config_class)
            with torch.device("meta"):
                size = sum(
                    each.numel() for each in build(model_class, config, "eager").parameters()
                )
            if size > LARGEST:
                return Verdict("unbuilt", f"{size} parameters")
            eager = build(model_class, config, "eager")
            draw_weights(eager)
            inputs, expected = {}, {}
            for padding in PADDINGS:
                inputs[padding], expected[padding] = first_that_runs(eager, padding)
        except Exception as error:  # noqa: BLE001  whatever a config of our making does to a model
            return Verdict("unbuilt", f"{type(error).__name__}: {error}"[:200])
        if not expected[""]:
            return Verdict("unbuilt", "no output of floats")
        return judge(model_class, config, eager, inputs, expected, name, calls, thoroughly)


def first_that_runs(eager: Any, padding: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The first of the possible inputs that eager takes, and its outputs."""
    failure: Exception = ValueError("forward has no input that we know")
    for given in possible_inputs(eager, padding):
        try:
            with torch.no_grad():
                return given, what_padding_leaves(eager, given)
        except Exception as error:  # noqa: BLE001  these were not inputs for this model
            failure = error
    raise failure


def judge(
    model_class: Any,
    config: Any,
    eager: Any,
    inputs: Any,
    expected: Any,
    name: str,
    calls: list[str],
    thoroughly: bool,
) -> Verdict:
    """Run the class under our name and say how it compares."""
    calls.clear()
    try:
        ours = build(model_class, config, name)
        ours.load_state_dict(eager.state_dict())
        apart = {}
        with torch.no_grad():
            for padding in PADDINGS:
                apart[padding] = distance(outputs_of(ours, inputs[padding]), expected[padding])
        if thoroughly:
            found = gradients(ours, inputs["right"], expected["right"])
            wanted = gradients(eager, inputs["right"], expected["right"])
            # A gradient that is 0 but for rounding has no digits of its own.
            largest = max((each.abs().max().item() for each in wanted), default=0.0)
            apart["gradients"] = (
                distance(found, wanted, floor=1e-3 * largest) * TOLERANCE / GRADIENT_TOLERANCE
            )
            if (
                model_class.can_generate()
                and {"input_ids", "attention_mask"} <= inputs["left"].keys()
            ):
                apart["cached"] = distance_of_generated(ours, eager, inputs["left"])
    except Exception as error:  # noqa: BLE001  refused, or a fault that the caller reports
        is_refusal = isinstance(error, (TypeError, ValueError)) and REFUSAL.search(str(error))
        # Transformers' own refusal
        is_unknown = isinstance(error, (KeyError, ValueError)) and name in str(error)
        return Verdict(
            "refused" if is_refusal or is_unknown else "broken",
            f"{type(error).__name__}: {error}"[:300],
        )
    outcome = "equal" if max(apart.values()) <= TOLERANCE else "different"
    return Verdict(
        outcome, str({case: f"{value:.1e}" for case, value in apart.items()}), len(calls)
    )


def distance_of_generated(ours: Any, eager: Any, given: dict[str, Any]) -> float:
    try:
        expected = generated(eager, given)
    except Exception:  # noqa: BLE001  it has to be given more than tokens
        return 0.0
    return distance(generated(ours, given), expected)
