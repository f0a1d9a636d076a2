"""Storages that autograd saves for backward during a call, by the operation that saves them.

    saved = saved_tensors(lambda: block(x), parameters=block.parameters())
    sum(one.num_bytes for one in saved)            # bytes between forward and backward
    by_operation(saved)[:5]                        # the largest contributors

Works on real tensors of any device and on fake ones. A storage counts once, at the operation that
saved it first: the input of a linear layer that a norm saved as its output is not counted twice.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name

from cs336_systems.measure.timeline import with_line


class Saved(NamedTuple):
    """One storage kept for backward."""

    num_bytes: int
    # the function that saved it and its line: `softmax in attention/reference.py:62`
    operation: str


class _CurrentFunction(TorchFunctionMode):
    """Mode that knows which torch function runs when the hook of a saved tensor is called."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outer, self.name = self.name, function_name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = outer


def function_name(func: Any) -> str:
    """Return a torch function's bare name: `softmax` of torch.softmax, `mul` of Tensor.__mul__."""
    if isinstance(func, torch._ops.OpOverload):
        return func.overloadpacket.__name__
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    return name.rpartition(".")[2].strip("_")


def saved_tensors(
    call: Callable[[], object], *, parameters: Iterable[Tensor] = (), compiled: bool = False
) -> list[Saved]:
    """Return every storage that autograd saves during `call`, in the order of saving.

    Storages of `parameters` are left out. With `compiled`, `call` runs what torch.compile made
    (compile it before: the first call is not the code's own). Its operations are fused, so that a
    storage is called by dtype and shape. Without, `call` runs eagerly even if it was compiled,
    since the mode that watches the operations turns torch.compile off.
    """
    skipped = {_identity(parameter) for parameter in parameters}
    found: dict[int, Saved] = {}
    kept = []  # storages, so that no address is handed out twice
    current = _CurrentFunction()

    def pack(tensor: Tensor) -> Tensor:
        identity = _identity(tensor)
        if identity not in skipped and identity not in found:
            if compiled:
                operation = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            else:
                operation = with_line(current.name or "autograd.Function")
            found[identity] = Saved(tensor.untyped_storage().nbytes(), operation)
            kept.append(tensor.untyped_storage())
        # Detached: a tensor knows the graph that made it, and the graph keeps what this function
        # returns. A softmax's own output would keep itself alive for ever, in C++, where no garbage
        # collector looks.
        return tensor.detach()

    with (
        nullcontext() if compiled else current,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        result = call()
    del result
    return list(found.values())


def compiled_saved_tensors(module: nn.Module, x: Tensor) -> list[Saved]:
    """Return the storages that `module(x)` would save for backward under torch.compile.

    The graph of forward and backward is cut where the fewest bytes pass
    (min_cut_rematerialization_partition, with Inductor's decompositions); what crosses the cut is
    saved. Nothing is compiled or, on fake tensors, computed. Parameters and buffers of `module` and
    views of them do not count. `x` needs a gradient.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    forwards: list[fx.GraphModule] = []

    def partition(
        joint: fx.GraphModule, inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = min_cut_rematerialization_partition(
            joint, inputs, **{**options, "compiler": "inductor"}
        )
        forwards.append(halves[0])
        return halves

    # A shared parameter is in it once: it stays shared.
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    call = aot_function(
        lambda state, x: torch.func.functional_call(module, state, (x,)),
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    # functional_call takes a submodule that several modules share for several submodules, and would
    # leave its traced buffer in it: put all tensors back.
    tensors = [(one, dict(one._parameters), dict(one._buffers)) for one in module.modules()]
    try:
        call(state, x)
    finally:
        for one, one_parameters, one_buffers in tensors:
            one._parameters.update(one_parameters)
            one._buffers.update(one_buffers)
    return _crossing(forwards[-1], num_state=len(state))


def _crossing(forward: fx.GraphModule, num_state: int) -> list[Saved]:
    """Return the outputs of the forward graph behind the module's own, each storage once.

    Storages of the first `num_state` inputs are left out.
    """
    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    seen = {_identity(node.meta["val"]) for node in placeholders[:num_state]}
    saved = []
    for node in output.args[0][1:]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and _identity(value) not in seen:
            seen.add(_identity(value))
            operation = (
                "input" if node.op == "placeholder" else str(node.target).removeprefix("aten.")
            )
            saved.append(Saved(value.untyped_storage().nbytes(), operation))
    return saved


def by_operation(saved: Iterable[Saved]) -> list[tuple[str, int]]:
    """Return (operation, bytes) pairs summed over `saved`, the largest first."""
    sums: Counter[str] = Counter()
    for one in saved:
        sums[one.operation] += one.num_bytes
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))


def _identity(tensor: Tensor) -> int:
    """Return a number that is the same for two tensors of one storage.

    It also works for storages without memory (a fake tensor's address is 0).
    """
    return tensor.untyped_storage()._cdata
