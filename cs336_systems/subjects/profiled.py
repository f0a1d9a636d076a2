"""Turn any case into a call to profile: a model's pass or step, or one attention call.

case = parse_case("xl", context=512, precision="bfloat16-autocast")    # a ModelCase
case = parse_case("1x16x4096x64", precision="bfloat16")                # an AttentionShape
prepared = prepare(case, "eager", "train_step", run)                   # profile prepared.call()
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from cs336_systems.config import (
    ATTENTION_NAMES,
    MODEL_SIZES,
    AttentionShape,
    FieldError,
    ModelCase,
    Precision,
    RunConfig,
    proxy_model,
)
from cs336_systems.inputs import attention_inputs
from cs336_systems.subjects.attention_passes import Passes
from cs336_systems.subjects.implementations import IMPLEMENTATIONS, build
from cs336_systems.subjects.model_steps import MODEL_MODES, TrainingStep

SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")
PRECISIONS = {
    "float32": Precision(),
    "bfloat16": Precision(parameters="bfloat16"),
    "float16": Precision(parameters="float16"),
    "bfloat16-autocast": Precision(autocast="bfloat16"),
    "float16-autocast": Precision(autocast="float16"),
}
ATTENTION_MODES = ("forward", "backward", "forward_backward")
MODEL_IMPLEMENTATIONS = ("eager", "compiled")
DEFAULT_BATCH = 4
PROXY = "-proxy"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A call to profile, with its set-up and the model whose modules may be annotated."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None  # set-up to run before each call
    model: nn.Module | None = None  # None: there is none, or hooks would change compiled code


def parse_case(
    text: str,
    *,
    implementation: str = "eager",
    mode: str = "forward_backward",
    precision: str = "float32",
    batch: int | None = None,
    context: int | None = None,
    attention: str = "reference",
    is_causal: bool = True,
) -> ModelCase | AttentionShape:
    """Return the case that `text` names: a model size or an attention shape `BxHxSxD`.

    Model sizes are such as `xl` and `small-proxy`. `batch` (4 by default), `context` and
    `attention` are for models only; a full mask, `is_causal=False`, is for shapes only. Raises
    ValueError for an unknown name, size or precision, and for an option, implementation or mode
    that this kind of case does not have.
    """
    shape = SHAPE.fullmatch(text)
    of = "of a model" if shape is None else "of an attention shape"
    for name, must_be, value, values in (
        ("precision", "must be", precision, PRECISIONS),
        ("attention", "must be", attention, ATTENTION_NAMES),
        (
            "implementation",
            f"{of} must be",
            implementation,
            MODEL_IMPLEMENTATIONS if shape is None else IMPLEMENTATIONS,
        ),
        ("mode", f"{of} must be", mode, MODEL_MODES if shape is None else ATTENTION_MODES),
    ):
        if value not in values:
            raise FieldError(name, f"{must_be} one of {', '.join(values)}, got {value!r}")

    # An attention shape.
    if shape is not None:
        if batch is not None or context is not None or attention != "reference":
            raise ValueError(
                "batch, context and attention are options of models, "
                f"and {text!r} is an attention shape"
            )
        if PRECISIONS[precision].autocast is not None:
            raise FieldError(
                "precision", f"of an attention shape must be a dtype, got {precision!r}"
            )
        batch, heads, seqlen, head_dim = map(int, shape.groups())
        return AttentionShape(
            batch=batch,
            heads=heads,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            head_dim=head_dim,
            is_causal=is_causal,
            dtype=PRECISIONS[precision].parameters,
        )

    # A model.
    size = text.removesuffix(PROXY)
    if size not in MODEL_SIZES:
        raise ValueError(
            f"case must be a model size ({', '.join(MODEL_SIZES)}, or one of them with {PROXY}) "
            f"or an attention shape BATCHxHEADSxSEQxHEAD_DIM, got {text!r}"
        )
    if not is_causal:
        raise ValueError(
            f"a full mask is an option of attention shapes, and {text!r} is a model size"
        )
    model = proxy_model(size) if text.endswith(PROXY) else MODEL_SIZES[size]
    if context is not None:
        model = replace(model, context_length=context)
    batch = DEFAULT_BATCH if batch is None else batch
    return ModelCase(model=model, batch=batch, attention=attention, precision=PRECISIONS[precision])


def prepare(
    case: ModelCase | AttentionShape, implementation: str, mode: str, run: RunConfig
) -> Prepared:
    """Build the implementation for `case` and return the call of `mode` to profile.

    Results are not checked against an oracle, since nothing is recorded. Raises Unsupported with
    the reason if the implementation does not exist for the case.
    """
    if isinstance(case, AttentionShape):
        return _attention(case, implementation, mode, run)
    step = TrainingStep(case, run)
    model = step.model
    if implementation == "compiled":  # hooks on its modules would change the compiled code
        step.model, model = torch.compile(model), None
    return Prepared(call=getattr(step, mode), before=step.reset, model=model)


def _attention(shape: AttentionShape, implementation: str, mode: str, run: RunConfig) -> Prepared:
    """Return the call of one attention pass on random inputs; a backward's graph is its set-up."""
    built = build(implementation, shape, run.device)
    passes = Passes(built, attention_inputs(shape, device=run.device, seed=run.seed))
    outputs: list[torch.Tensor] = []

    def call() -> object:
        """Run the forward, or forward and backward."""
        with built.context():
            return passes.forward() if mode == "forward" else passes.both()

    def make_graph() -> None:
        """Run a forward and keep its output with the graph."""
        with built.context():
            outputs[:] = [passes.output()]

    def backward() -> tuple[torch.Tensor, ...]:
        """Run the backward once and free its graph, whose memory compiled code may reuse."""
        return torch.autograd.grad(outputs.pop(), passes.leaves, passes.grad_output)

    return Prepared(call=backward, before=make_graph) if mode == "backward" else Prepared(call=call)
