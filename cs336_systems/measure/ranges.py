"""Named ranges on a model's blocks and on the parts of its attention, by a context manager.

    with annotate(model):
        model(tokens).sum().backward()         # under torch.profiler, nsys or ncu

Every range is a `record_function` range, which torch.profiler shows, and on CUDA an NVTX range,
which NVIDIA's tools show. Modules are found by their names, so any model class can be annotated,
and nothing in its code changes:

- a block is an element of a ModuleList: `block:layers.3`;
- inside and outside of blocks, a module whose last name says what it is: `attention:layers.3.attn`,
  `feed_forward:layers.3.ffn`, `norm:ln_final`, `embedding:token_embeddings`, `head:lm_head`;
- in an attention module, the products of two activations divide its work: `attention.scores` is the
  first of them, `attention.values` the last, and what runs between (scale, mask, softmax) is
  `attention.softmax`. A fused attention, which has no such products, is `attention.fused`. Products
  with a parameter are projections and belong to no part.

Ranges cost host time: measure a step's wall clock without them. A range covers the forward pass;
`trace.py` follows autograd's sequence numbers to give the kernels of the backward pass to the range
of their forward.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import quote

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Role of a module by its last name; the first match counts.
ROLES: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"(self_?)?(attn|attention|mha)|.*_(attn|attention)"),
    "feed_forward": re.compile(r"ffn|mlp|ff|feed_?forward"),
    "norm": re.compile(r"(layer_?|rms_?)?(ln|norm)_?\w*|\w+_(layer_?)?norm"),
    "embedding": re.compile(r"\w*embeddings?|embed_\w+|wte|wpe"),
    "head": re.compile(r"(lm_)?head|unembed\w*"),
}
# Characters that `traceable` keeps.
PLAIN = "".join(chr(code) for code in range(32, 127) if chr(code) not in '"\\')
BLOCK = "block"
SCORES, SOFTMAX, VALUES, FUSED = (
    "attention.scores",
    "attention.softmax",
    "attention.values",
    "attention.fused",
)
ATTENTION_PARTS = (SCORES, SOFTMAX, VALUES, FUSED)
STEP = "profiled_step"  # encloses one repetition of what is profiled

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.matmul,
        torch.bmm,
        torch.einsum,
        torch.baddbmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.bmm,
    )
)


def traceable(name: str) -> str:
    """Return `name` with every character that a trace cannot hold escaped as in a URL.

    Escaped are `"`, the backslash, and every character outside printable ASCII. torch.profiler
    writes a double quote as it is, which ends the string in the JSON of its trace, and calls a
    range with any character beyond ASCII "unknown".

    >>> traceable('block:layers.a"b'), traceable("attention:é.attn")
    ('block:layers.a%22b', 'attention:%C3%A9.attn')
    """
    return quote(name, safe=PLAIN, errors="replace")


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Open a `record_function` range, and an NVTX range if CUDA is available, around the context.

    Both are called `traceable(name)`.
    """
    name = traceable(name)
    nvtx = torch.cuda.nvtx.range("{}", name) if torch.cuda.is_available() else nullcontext()
    with torch.profiler.record_function(name), nvtx:
        yield


def module_ranges(model: nn.Module) -> dict[str, str]:
    """Return the range of each module of `model` that gets one, by qualified name.

    A module inside one of the same role gets none: in `attn.norm` the norm counts, in
    `embeddings.word_embeddings` the outer one.
    """
    roles: dict[str, str] = {}
    for name, _ in model.named_modules():
        parent, _, last = name.rpartition(".")
        role = next(
            (role for role, pattern in ROLES.items() if pattern.fullmatch(last.lower())), None
        )
        if name and isinstance(model.get_submodule(parent), nn.ModuleList):
            roles[name] = BLOCK
        elif role is not None and roles.get(parent) != role:
            roles[name] = role
    return {name: traceable(f"{role}:{name}") for name, role in roles.items()}


class _Ranges(TorchFunctionMode):
    """The open ranges of modules and of attention's parts; the last opened is closed first.

    Parts are told apart by watching the torch functions that run inside of attention modules.
    """

    def __init__(self) -> None:
        super().__init__()
        # (the module that opened it, or this object for a part; its name; its context)
        self.open: list[tuple[object, str, AbstractContextManager[None]]] = []

    def enter(self, owner: object, name: str) -> None:
        """Open the range `name` for `owner`."""
        context = named_range(name)
        context.__enter__()
        self.open.append((owner, name, context))

    def leave(self, owner: object) -> None:
        """Close the range of `owner`, if it has one, and the ranges that are still open inside it.

        An exception leaves inner ranges open.
        """
        while any(candidate is owner for candidate, *_ in self.open):
            self.open.pop()[2].__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not any(
            name.startswith("attention:") for _, name, _ in self.open
        ):
            return func(*args, **kwargs)

        # Fused attention: PyTorch's, or a registered operator such as this package's.
        registered = isinstance(func, torch._ops.OpOverload) and "attention" in func.name()
        if func is F.scaled_dot_product_attention or registered:
            with named_range(FUSED):
                return func(*args, **kwargs)

        if func not in PRODUCTS or not _of_two_activations(tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        # The first product is the scores and opens the softmax, which the second one ends.
        first = not any(owner is self for owner, *_ in self.open)
        self.leave(self)
        with named_range(SCORES if first else VALUES):
            result = func(*args, **kwargs)
        if first:
            self.enter(self, SOFTMAX)
        return result


def _of_two_activations(arguments: list[Any]) -> bool:
    """Return whether two batches of matrices are multiplied, none a parameter or its 2-D view."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return len(tensors) == 2 and all(
        x.ndim >= 3 and not isinstance(x, nn.Parameter) for x in tensors
    )


@contextmanager
def annotate(model: nn.Module) -> Iterator[dict[str, str]]:
    """Put ranges on the modules of `model` and on the parts of its attention, inside the context.

    Yields the range of each annotated module by name (see `module_ranges`). Ranges are closed also
    if the forward raises, and hooks are removed when the context ends. Raises ValueError if no
    module has a name that says what it is.
    """
    names = module_ranges(model)
    if not names:
        raise ValueError(
            f"model must have modules to annotate: none of {type(model).__name__} "
            f"is in a ModuleList or is named like {', '.join(ROLES)}"
        )

    ranges = _Ranges()
    handles: list[Any] = []
    for name, range_name in names.items():
        module = model.get_submodule(name)
        enter, leave = partial(ranges.enter, module, range_name), partial(ranges.leave, module)
        handles.append(
            module.register_forward_pre_hook(lambda *_, enter=enter: enter(), prepend=True)
        )
        # always_call: also after a forward that raised (an out-of-memory). Otherwise the next step
        # would nest in this one.
        handles.append(
            module.register_forward_hook(lambda *_, leave=leave: leave(), always_call=True)
        )

    with ranges:
        try:
            yield names
        finally:
            for handle in handles:
                handle.remove()
            for owner, *_ in reversed(ranges.open[:]):
                ranges.leave(owner)
