"""Runs of a model's code on fake tensors: its memory is known without the machine that has it.

    with FakeTensorMode():
        # shapes and dtypes, no numbers
        model = fake_module(lambda: TransformerLM.from_config(config))
        autocast = torch.autocast("cpu", torch.bfloat16)
        with CudaAutocastRules(), AllocationRecorder("cuda") as recorder, autocast:
            model(tokens)

The fake tensors are CPU tensors: PyTorch runs autograd on fake CUDA tensors only where there is a
GPU. The differences of CUDA are put in by hand: the allocator's rounding and the kernels' own
temporaries (`timeline.py`), and here the functions that autocast computes in float32 there and not
on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cs336_systems.measure.saved import function_name

# https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32", as far as
# models use them.
CUDA_FLOAT32_FUNCTIONS = (
    "cumsum",
    "exp",
    "expm1",
    "layer_norm",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "norm",
    "pow",
    "prod",
    "reciprocal",
    "rsqrt",
    "softmax",
    "softplus",
    "sum",
)


def fake_module(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the module that `build` makes, its floating-point parameters fake and of `dtype`.

    Call it under a fake mode. The module is built on the meta device, so that no weight is drawn; a
    parameter shared by two modules stays one. Floating-point buffers are fake, too, and float32 or
    wider: the RoPE tables are never rounded.
    """
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("meta"):
        module = build()
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if id(tensor) not in fakes:
            made = torch.empty(
                tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        return fakes[id(tensor)]

    # Kept until the end: a freed tensor's id could be handed out again.
    originals = [
        tensor
        for one in module.modules()
        for tensor in (*one._parameters.values(), *one._buffers.values())
    ]
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is not None:
                one._parameters[name] = fake(parameter, dtype)  # type: ignore[assignment]
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = fake(buffer, torch.promote_types(dtype, torch.float32))
    del originals
    return module


class CudaAutocastRules(TorchFunctionMode):
    """Context in which autocast on CPU tensors computes in float32 what it does in float32 on CUDA.

    It must be on during backward, too, where checkpointing runs forwards again.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.is_autocast_enabled("cpu") and function_name(func) in CUDA_FLOAT32_FUNCTIONS:
            low = (torch.float16, torch.bfloat16)
            args = tuple(x.float() if isinstance(x, Tensor) and x.dtype in low else x for x in args)
        return func(*args, **(kwargs or {}))
