"""Building a model by its configuration: this package's, or the user's own "package.module:Class".

model = build_model(MODEL_SIZES["small"], attention="triton", device="cuda", seed=0)
spec = "my_package.model:MyTransformer"
model = build_model(MODEL_SIZES["small"], model_spec=spec, device="cuda")
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cs336_systems.config import ModelConfig
from cs336_systems.model.transformer import CONSTRUCTOR_ARGUMENTS, TransformerLM

SPEC_PATTERN = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")


def load_model_class(spec: str) -> type[nn.Module]:
    """Return the class named by `spec`, "package.module:Class".

    Raises ValueError if `spec` is malformed, its module cannot be imported or has no such class, or
    the class is not a torch.nn.Module whose constructor takes `CONSTRUCTOR_ARGUMENTS` by keyword.
    """
    match = SPEC_PATTERN.fullmatch(spec)
    if match is None:
        raise ValueError(f'model must be named "package.module:Class", got {spec!r}')
    module_name, class_name = match["module"], match["name"]
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # Importing runs the user's code, which may raise anything.
        raise ValueError(
            f"model {spec!r}: cannot import {module_name!r} ({type(error).__name__}: {error}); "
            f"is it installed or on PYTHONPATH?"
        ) from error
    if not hasattr(module, class_name):
        raise ValueError(f"model {spec!r}: module {module_name!r} has no attribute {class_name!r}")
    model_class = getattr(module, class_name)
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise ValueError(f"model {spec!r}: {class_name!r} is not a subclass of torch.nn.Module")
    if not _accepts(model_class, CONSTRUCTOR_ARGUMENTS):
        raise ValueError(
            f"model {spec!r}: the constructor of {class_name!r} must accept the keyword arguments "
            f"{', '.join(CONSTRUCTOR_ARGUMENTS)}"
        )
    return model_class


def build_model(
    config: ModelConfig,
    *,
    attention: str = "reference",
    model_spec: str | None = None,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Return a model of `config`'s shape with initial weights drawn on `device` from `seed`.

    `model_spec` names the user's own class (see `load_model_class`); `attention` other than
    "reference" is passed to it only if its constructor has a parameter of that name (**kwargs is
    none), and is refused otherwise. Weights are drawn in the default dtype and then converted, so
    that a bfloat16 model is the rounded float32 model of the same seed; different devices draw
    different weights. The caller's random state is left as it was. Raises ValueError on a bad
    argument.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, got {dtype}")
    model_class = TransformerLM if model_spec is None else load_model_class(model_spec)
    arguments = {name: getattr(config, name) for name in CONSTRUCTOR_ARGUMENTS}
    parameter = inspect.signature(model_class).parameters.get("attention")
    if parameter is not None and parameter.kind is not parameter.VAR_KEYWORD:
        arguments["attention"] = attention
    elif attention != "reference":
        raise ValueError(
            f"model {model_spec!r} brings its own attention: its constructor has no argument "
            f"'attention' to choose {attention!r}"
        )
    device = torch.device(device)
    with _seeded(device, seed), device:
        model = model_class(**arguments)
    return model.to(device=device, dtype=dtype)  # moves what the user's constructor put elsewhere


def _accepts(model_class: type[nn.Module], names: tuple[str, ...]) -> bool:
    """Return whether the constructor of `model_class` can be called with exactly these keywords."""
    if model_class.__init__ is nn.Module.__init__:  # declared (*args, **kwargs), but takes none
        return False
    try:
        inspect.signature(model_class).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the CPU's and `device`'s generators inside the context, and restore them afterwards.

    torch.manual_seed would reseed every GPU, of which fork_rng restores only those it is told.
    """
    cuda_indices = []
    if device.type == "cuda":
        cuda_indices.append(torch.cuda.current_device() if device.index is None else device.index)
    with torch.random.fork_rng(devices=cuda_indices):
        torch.default_generator.manual_seed(seed)
        for index in cuda_indices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
