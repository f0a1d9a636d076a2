"""The masks that Transformers' models get from us: to their own code eager's, to our attention the
pairs themselves.

    mask = pairs_mask(pairs, dtype=torch.bfloat16)
    scores + mask               # what eager's mask gives: 0 where attended, the lowest number of the dtype elsewhere
    mask.pairs                  # what our attention reads: no (queries, keys) tensor of floats was made

A model may accept the name of our attention and compute its attention, or a part of it, with code
of its own. That code was written for eager's masks: it adds them to the scores. So a mask of ours
is eager's to every operation of PyTorch: the operation gets the floats, which are made at that
moment. Only our attention looks at the class, and needs no floats. No list of such models is
needed. A mask is never None where eager's is not: None means "causal" to `sdpa` and "every key" to
eager.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Methods that say something about a tensor without reading its elements. All others get eager's
# floats.
DESCRIPTIONS = {
    "__len__",
    "_is_view",
    "_is_zerotensor",
    "dim",
    "element_size",
    "is_complex",
    "is_conj",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "ndimension",
    "nelement",
    "numel",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
}


class EagerMask(Tensor):
    """A mask of (batch, 1, queries, keys) of eager's dtype that holds no elements until somebody
    reads them.

    Its subclasses say what is attended. The single element in memory carries shape, dtype and
    device. It is NaN, so that code which reads memory without PyTorch's knowledge does not take it
    for a mask.
    """

    def to_floats(self) -> Float[Tensor, "batch one queries keys"]:
        """Eager's mask: 0 where attended, the lowest number of the dtype elsewhere."""
        attended = self.attended()
        lowest = torch.finfo(self.dtype).min
        return torch.where(attended, torch.zeros((), dtype=self.dtype, device=self.device), lowest)

    def attended(self) -> Bool[Tensor, "batch one queries keys"]:
        raise NotImplementedError

    def moved(self, holder: Tensor) -> "EagerMask":
        """This mask with the dtype and the device of `holder`."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Describe the mask, move it, or let `func` have eager's floats."""
        kwargs = kwargs or {}
        name = func.__name__
        if name in DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        # an attribute: .shape, .device; but of .T or .data the elements would be read
        if name == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **kwargs)
            if not isinstance(found, Tensor) or func.__self__.__name__ == "_base":
                return found
        if name in ("to", "detach") and isinstance(args[0], EagerMask):
            with torch._C.DisableTorchFunctionSubclass():
                holder = func(*args, **kwargs)
            if holder is args[0]:
                return holder
            if holder.is_floating_point():
                return args[0].moved(holder)
        args, kwargs = torch.utils._pytree.tree_map(with_floats, (tuple(args), kwargs))
        return func(*args, **kwargs)


class CausalMask(EagerMask):
    """Query i attends the keys j <= i, from the top left; a single query attends every key.

    All of it is in the class and the shape, so that torch.compile can make one in the graph.
    """

    def attended(self) -> Bool[Tensor, "batch one queries keys"]:
        batch, _, queries, keys = self.shape
        attended = torch.ones(queries, keys, dtype=torch.bool, device=self.device)
        return (attended if queries == 1 else attended.tril()).expand(batch, 1, queries, keys)

    def moved(self, holder: Tensor) -> EagerMask:
        return holder.as_subclass(CausalMask)


class PairsMask(EagerMask):
    """The pairs of a bool tensor, in `pairs`."""

    pairs: Bool[Tensor, "batch one queries keys"]

    def attended(self) -> Bool[Tensor, "batch one queries keys"]:
        return self.pairs

    def moved(self, holder: Tensor) -> EagerMask:
        moved = holder.as_subclass(PairsMask)
        moved.pairs = self.pairs.to(holder.device)
        return moved


def causal_mask(shape: tuple[int, int, int, int], dtype: torch.dtype, device: Any) -> CausalMask:
    """The mask of a flag, of (batch, 1, queries, keys)."""
    return _holder(shape, dtype, device).as_subclass(CausalMask)


def pairs_mask(pairs: Bool[Tensor, "batch one queries keys"], dtype: torch.dtype) -> Tensor:
    """The mask of a bool tensor.

    In a graph of torch.compile, which makes no tensor with an attribute, eager's floats.
    """
    if torch.compiler.is_compiling():
        return torch.where(
            pairs, torch.zeros((), dtype=dtype, device=pairs.device), torch.finfo(dtype).min
        )
    mask = _holder(pairs.shape, dtype, pairs.device).as_subclass(PairsMask)
    mask.pairs = pairs
    return mask


def with_floats(value: Any) -> Any:
    """`value`, or eager's floats where it is a mask of ours."""
    return value.to_floats() if isinstance(value, EagerMask) else value


def _holder(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """A tensor of this shape with one element in memory."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
