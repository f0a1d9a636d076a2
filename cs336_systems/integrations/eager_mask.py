"""Masks for Transformers' models that hold bools and turn into eager's floats when they are read.

    mask = pairs_mask(pairs, dtype=torch.bfloat16)
    scores + mask       # adds eager's mask: 0 where attended, the dtype's lowest number elsewhere
    mask.pairs          # the bools that our attention reads; no tensor of floats was made

A model may accept the name of our attention and compute its attention, or a part of it, with code
of its own. That code was written for eager's masks: it adds them to the scores. So every operation
of PyTorch gets eager's floats for a mask of this module, which are made at that moment. Only our
attention looks at the class, and needs no floats. No list of such models is needed. A mask is never
None where eager's is not: None means "causal" to `sdpa` and "every key" to eager.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Methods that describe a tensor without reading its elements. All others get eager's floats.
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
    """A mask (batch, 1, queries, keys) of eager's dtype, whose floats are made when they are read.

    Its subclasses define what is attended. A single element in memory, expanded to the shape,
    carries dtype and device. It is NaN, so that code which reads memory without PyTorch's knowledge
    does not take it for a mask.
    """

    def to_floats(self) -> Float[Tensor, "batch one queries keys"]:
        """Return eager's mask: 0 where attended, the lowest number of the dtype elsewhere."""
        attended = self.attended()
        lowest = torch.finfo(self.dtype).min
        return torch.where(attended, torch.zeros((), dtype=self.dtype, device=self.device), lowest)

    def attended(self) -> Bool[Tensor, "batch one queries keys"]:
        """Return the mask as bools, True where attended."""
        raise NotImplementedError

    def moved(self, holder: Tensor) -> "EagerMask":
        """Return this mask with the dtype and the device of `holder`, whose memory it takes."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on the mask's description, on a moved mask, or on eager's floats.

        A method or attribute that reads no elements gets the mask as it is. `to` and `detach` give
        a mask again. All other operations of PyTorch get the floats.
        """
        kwargs = kwargs or {}
        name = func.__name__
        if name in DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs)

        # attributes such as .shape and .device; those that are tensors, .T or .data, read elements
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
    """The mask in which query i attends keys j <= i, from the top left; a single query all keys.

    Class and shape define it completely, so torch.compile can make one in the graph.
    """

    def attended(self) -> Bool[Tensor, "batch one queries keys"]:
        batch, _, queries, keys = self.shape
        attended = torch.ones(queries, keys, dtype=torch.bool, device=self.device)
        return (attended if queries == 1 else attended.tril()).expand(batch, 1, queries, keys)

    def moved(self, holder: Tensor) -> EagerMask:
        return holder.as_subclass(CausalMask)


class PairsMask(EagerMask):
    """The mask of a bool tensor, which it keeps in `pairs`, True where attended."""

    pairs: Bool[Tensor, "batch one queries keys"]

    def attended(self) -> Bool[Tensor, "batch one queries keys"]:
        return self.pairs

    def moved(self, holder: Tensor) -> EagerMask:
        moved = holder.as_subclass(PairsMask)
        moved.pairs = self.pairs.to(holder.device)
        return moved


def causal_mask(shape: tuple[int, int, int, int], dtype: torch.dtype, device: Any) -> CausalMask:
    """Return the causal mask of `shape`, which is (batch, 1, queries, keys)."""
    return _holder(shape, dtype, device).as_subclass(CausalMask)


def pairs_mask(pairs: Bool[Tensor, "batch one queries keys"], dtype: torch.dtype) -> Tensor:
    """Return the mask of a bool tensor, as a PairsMask.

    Under torch.compile return eager's floats: a graph makes no tensor with an attribute.
    """
    if torch.compiler.is_compiling():
        return torch.where(
            pairs, torch.zeros((), dtype=dtype, device=pairs.device), torch.finfo(dtype).min
        )
    mask = _holder(pairs.shape, dtype, pairs.device).as_subclass(PairsMask)
    mask.pairs = pairs
    return mask


def with_floats(value: Any) -> Any:
    """Return eager's floats if `value` is an EagerMask, else `value`."""
    return value.to_floats() if isinstance(value, EagerMask) else value


def _holder(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """Return a tensor of this shape with one element in memory, NaN."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
