"""Tensors as the loops hold them between regions: dense ones as PyTorch's memory, sparse ones as a pattern and values.

A pattern, where the entries are, is sorted and packed once; another call with the same pattern only takes its values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tilestream.sparse.storage import Format, Level, SparseTensor, repack, to_coo


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where the entries of a sparse tensor are; ``tensor`` has their numbers, from 1, as its values. ``views``: by
    format the levels, and which entry is at each position: 0 for none; None for each in its order."""

    tensor: SparseTensor
    views: dict[Format, tuple[tuple[Level, ...], torch.Tensor | None]] = field(default_factory=dict)

    def view(self, form: Format) -> tuple[tuple[Level, ...], torch.Tensor | None]:
        if form not in self.views:
            made = repack(self.tensor, form)
            numbers = np.rint(made.values.reshape(-1)).astype(np.int64)
            same = len(numbers) == self.tensor.nnz and bool((numbers == np.arange(1, len(numbers) + 1)).all())
            self.views[form] = made.levels, None if same else torch.from_numpy(numbers)
        return self.views[form]


def pattern(tensor: SparseTensor) -> Pattern:
    """The pattern of a stored tensor, its values left out."""
    numbers = np.arange(1.0, tensor.values.size + 1).reshape(tensor.values.shape)
    return Pattern(replace(tensor, values=numbers))


@dataclass(frozen=True, eq=False)
class Stored:
    """A sparse tensor: a pattern, and the values of its entries, [n], in the pattern's order."""

    pattern: Pattern
    values: torch.Tensor

    def view(self, form: Format) -> tuple[tuple[Level, ...], torch.Tensor]:
        """Levels and values in a format that the loops read."""
        levels, numbers = self.pattern.view(form)
        if numbers is None:
            return levels, self.values.contiguous()
        return levels, torch.cat([self.values.new_zeros(1), self.values]).index_select(0, numbers)

    def tensor(self, name: str) -> SparseTensor:
        """The same as the rest of the package has it, in float64."""
        return replace(self.pattern.tensor, name=name, values=self.values.double().numpy())


Held = torch.Tensor | Stored
"""A dense tensor is contiguous, in the order of its dimensions."""


def stored(tensor: SparseTensor, dtype: torch.dtype) -> Stored:
    """A tensor of the package as the loops hold it."""
    return Stored(pattern(tensor), torch.from_numpy(tensor.values.reshape(-1)).to(dtype))


def flat(tensor: SparseTensor, dtype: torch.dtype, fill: float = 0.0) -> torch.Tensor:
    """A tensor of the package as a dense one; ``fill`` where nothing is stored."""
    if "compressed" not in tensor.format.levels and tensor.format.order == tuple(range(len(tensor.shape))):
        return torch.from_numpy(np.ascontiguousarray(tensor.values).reshape(tensor.shape)).to(dtype)
    made = np.full(tensor.shape, fill)
    coordinates, values = to_coo(tensor)
    made[tuple(coordinates.T)] = values
    return torch.from_numpy(made).to(dtype)


def as_tensor(name: str, held: Held) -> SparseTensor:
    """What is held as a tensor of the package, in float64."""
    if isinstance(held, Stored):
        return held.tensor(name)
    shape = tuple(held.shape)
    levels = tuple(Level(size) for size in shape)
    return SparseTensor(name, shape, Format(("dense",) * len(shape)), levels, held.double().reshape(-1).numpy())
