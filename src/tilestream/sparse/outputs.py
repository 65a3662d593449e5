"""What a program gives back: tensors as the module has them, dense, or sparse where they are too large for that."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from tilestream.errors import SparseError
from tilestream.sparse.storage import SparseTensor, to_coo, to_torch

LARGEST = 1 << 27
"""Elements (1 GiB of float64) up to which a result is a strided tensor."""


@dataclass(frozen=True)
class OutputView:
    """An output of a module: dimension ``d`` is dimension ``dims[d]`` of ``tensor``; None: of size 1 or expanded."""

    tensor: str
    dims: tuple[int | None, ...]
    shape: tuple[int, ...]


def output(view: OutputView, tensor: SparseTensor, fill: float) -> torch.Tensor:
    """An output as the module gives it: float64, strided up to ``LARGEST`` elements, else COO of what is stored.

    Raises:
        SparseError: a result beyond ``LARGEST`` that is not 0 where it stores nothing, or stores too much.
    """
    if math.prod(view.shape) > LARGEST and "compressed" in tensor.format.levels:
        return _sparse(view, tensor, fill)
    return spread(view, filled(tensor, fill))


def filled(tensor: SparseTensor, fill: float) -> torch.Tensor:
    """A stored tensor, float64 and strided. ``fill``: what is not stored stands for."""
    if not fill:
        return to_torch(tensor)
    coordinates, values = to_coo(tensor)
    dense = torch.full(tensor.shape, fill, dtype=torch.float64)
    dense[tuple(torch.from_numpy(coordinates.T))] = torch.from_numpy(values)
    return dense


def spread(view: OutputView, dense: torch.Tensor) -> torch.Tensor:
    """A tensor of the program, strided, as the module gives it."""
    kept = tuple(size for size, dim in zip(view.shape, view.dims, strict=True) if dim is not None)
    if tuple(dense.shape) != kept and all(dim is None or dim == n for n, dim in enumerate(view.dims)):
        return dense.reshape(view.shape)
    dense = dense.permute([dim for dim in view.dims if dim is not None])
    for at, dim in enumerate(view.dims):
        if dim is None:
            dense = dense.unsqueeze(at)
    return dense.expand(view.shape)


def _sparse(view: OutputView, tensor: SparseTensor, fill: float) -> torch.Tensor:
    repeated = [size for size, dim in zip(view.shape, view.dims, strict=True) if dim is None]
    coordinates, values = to_coo(tensor)
    if fill or len(values) * math.prod(repeated) > LARGEST:
        what = f"is {fill:g} where it stores nothing" if fill else "is expanded"
        raise SparseError(f"a result of shape {view.shape} that {what}", "reduce it, or return what it is made of")
    at = np.indices(repeated).reshape(len(repeated), math.prod(repeated)).T
    whole = np.concatenate([np.repeat(coordinates, len(at), axis=0), np.tile(at, (len(coordinates), 1))], axis=1)
    rest = iter(range(len(tensor.shape), whole.shape[1]))
    whole = whole[:, [next(rest) if dim is None else dim for dim in view.dims]]
    numbers = torch.from_numpy(np.repeat(values, len(at)))
    return torch.sparse_coo_tensor(torch.from_numpy(whole.T.copy()), numbers, view.shape, check_invariants=True)
