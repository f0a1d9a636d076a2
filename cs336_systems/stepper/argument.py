"""A tensor that a kernel gets: which element an address belongs to, and who has touched it.

`runs` keeps sets of elements short: a tile of a matrix is one run, repeated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# where an address lies
WITHIN = 0  # the argument
BESIDE = 1  # elsewhere in its storage
OUTSIDE = 2  # beyond its storage
LARGEST_START = 1 << 18  # elements of a tensor whose values are kept

Run = list[int]  # [start, length, distance, count]: `count` stretches of `length`, `distance` apart


class Argument:
    """One pointer argument of a launch, with the marks that the programs leave on its elements."""

    def __init__(self, number: int, name: str, tensor: torch.Tensor) -> None:
        self.number = number
        self.name = name
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.shape = list(tensor.shape)
        self.strides = list(tensor.stride())
        self.num_elements = tensor.numel()

        storage = tensor.untyped_storage()
        self.first_byte = storage.data_ptr()
        self.end_byte = self.first_byte + storage.nbytes()

        # Marks: by element, the program that stored it last, and how often it was loaded.
        self.stored_by = np.full(self.num_elements, -1, np.int64)
        self.num_loads = np.zeros(self.num_elements, np.int64)

        # What the tensor held before the launch, in row-major order.
        self.start: np.ndarray[Any, Any] | None = None
        if self.num_elements <= LARGEST_START:
            self.start = tensor.detach().float().cpu().numpy().ravel().copy()

    def holds(self, addresses: np.ndarray[Any, Any]) -> bool:
        """Return whether all of some addresses lie in this argument's storage."""
        return bool(((self.first_byte <= addresses) & (addresses < self.end_byte)).all())

    def elements_at(
        self, addresses: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the row-major numbers of the elements at byte addresses, and where each lies.

        An address out of bounds has the number that the element would have if the tensor went on:
        negative before its start. The second array holds WITHIN, BESIDE or OUTSIDE.
        """
        addresses = addresses.astype(np.int64)
        item = self.tensor.element_size()
        offset = (addresses - self.address) // item
        within = (addresses - self.address) % item == 0
        numbers = np.zeros(addresses.shape, np.int64)

        # Take the index of each dimension off the offset, from the largest stride down.
        sizes = [1, *np.cumprod(self.shape[:0:-1]).tolist()][::-1]  # elements of an index step
        dims = [d for d, n in enumerate(self.shape) if n > 1 and self.strides[d] > 0]
        dims.sort(key=lambda d: -self.strides[d])
        for dim in dims:
            index = offset // self.strides[dim]
            offset = offset - index * self.strides[dim]
            within &= (index >= 0) & (index < self.shape[dim])
            numbers += index * sizes[dim]
        within &= offset == 0
        if not dims or self.strides[dims[-1]] == 1:
            numbers += np.where(within, 0, offset)

        in_storage = (self.first_byte <= addresses) & (addresses + item <= self.end_byte)
        place = np.where(within, WITHIN, np.where(in_storage, BESIDE, OUTSIDE))
        return numbers, place


def runs(elements: np.ndarray[Any, Any]) -> list[Run]:
    """Return a set of element numbers as few runs, in order."""
    elements = np.unique(elements)
    if not elements.size:
        return []
    cuts = np.flatnonzero(np.diff(elements) != 1) + 1
    starts = elements[np.r_[0, cuts]].tolist()
    lengths = np.diff(np.r_[0, cuts, elements.size]).tolist()

    found: list[Run] = []
    for start, length in zip(starts, lengths):
        if found and found[-1][1] == length:
            first, _, distance, count = found[-1]
            if count == 1 or start == first + distance * count:
                distance = start - first if count == 1 else distance
                found[-1] = [first, length, distance, count + 1]
                continue
        found.append([start, length, 0, 1])
    return found


def elements_of(listed: list[Run]) -> list[int]:
    """Return the element numbers of runs, in order."""
    return [
        first + step * distance + place
        for first, length, distance, count in listed
        for step in range(count)
        for place in range(length)
    ]
