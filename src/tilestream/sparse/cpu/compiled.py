"""A region of a program as something that runs: a product of PyTorch, or nests of loops that numba compiled."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from numba import njit

from tilestream.errors import SparseError
from tilestream.sparse.cpu.functions import exp, exp32, power
from tilestream.sparse.cpu.held import Held, Stored
from tilestream.sparse.cpu.interpreted import INTERPRETED, divided, quietly
from tilestream.sparse.cpu.kernels import product, sum_rows
from tilestream.sparse.cpu.nests import Nests
from tilestream.sparse.cpu.products import is_product
from tilestream.sparse.cpu.threads import Parts, threads
from tilestream.sparse.engine.kernels.arithmetic import rounded
from tilestream.sparse.fusion import Leaf, Op
from tilestream.sparse.region import Region

FEW = 1 << 13
"""Elements of a result that one thread makes by itself: to wake another takes longer."""
_NUMBER = re.compile(r"(?<![\w.])\d+\.\d*(?:e[-+]?\d+)?|math\.(?:inf|nan)")


class Matmul:
    """A region that is one product of two dense matrices, or a batch of them: a call of PyTorch's library."""

    source = ""
    kept: tuple[str, ...] = ()

    def __init__(self, region: Region) -> None:
        assert region.fused is not None
        ((self.name, op),) = region.fused.roots.items()
        self.left, self.right = (leaf.tensor for leaf in op.operands if isinstance(leaf, Leaf))
        self.order, one, other = op.indices, *(leaf.indices for leaf in op.operands)
        letters = {index: chr(ord("a") + n) for n, index in enumerate(region.fused.sizes)}
        terms = ["".join(letters[i] for i in x) for x in (one, other, op.indices)]
        self.text = f"{terms[0]},{terms[1]}->{terms[2]}"
        self.source = f"# torch.einsum({self.text!r}, {self.left}, {self.right})"
        # both [rows, inner] and [inner, columns], as they are or transposed
        self.flips: tuple[bool, bool, bool] | None = None
        if len(one) == len(other) == len(op.indices) == 2:
            swapped = op.indices[0] in other
            first, second = (other, one) if swapped else (one, other)
            if op.indices[0] in first and op.indices[1] in second:
                self.flips = swapped, first[0] != op.indices[0], second[1] != op.indices[1]

    def run(self, have: Mapping[str, Held], _: torch.dtype) -> dict[str, torch.Tensor]:
        left, right = have[self.left], have[self.right]
        assert isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        if self.flips is None:
            return {self.name: torch.einsum(self.text, left, right).contiguous()}
        swapped, turn, turned = self.flips
        left, right = (right, left) if swapped else (left, right)
        return {self.name: torch.mm(left.t() if turn else left, right.t() if turned else right)}


class Loops:
    """A region as nests of loops, one a result. ``compiled`` False leaves them to Python."""

    def __init__(self, region: Region, arrays: Collection[str], free: Collection[str], shapes: Any, compiled: bool):
        self.nests = Nests(region, arrays, free)
        self.name, self.shapes, self.compiled = region.name, shapes, compiled
        self.source = self.nests.source()
        self.arguments = tuple(self.nests.arguments)
        self.results = tuple(region.outputs)
        self.sizes = tuple(self.nests.fused.sizes[index] for index in self.nests.sizes)
        self._parts: dict[torch.dtype, list[Callable[[Any, int], None]]] = {}
        self._orders = {
            argument: tuple(int(d) for d in argument[1][6:].split(",") if d)
            for argument in self.arguments
            if argument[0] in arrays
        }

    def run(self, have: Mapping[str, Held], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The results, dense; what the loops read is in ``have``."""
        given = self._given(have)
        made = {name: torch.empty(self.shapes[name], dtype=dtype) for name in self.results}
        if not self.compiled:
            self._interpret(given, made, dtype)
            return made
        if dtype not in self._parts:
            self._parts[dtype] = self._compile(dtype)
        addresses = [x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr() for x in (*given, *made.values())]
        data = (ctypes.c_int64 * (len(addresses) + len(self.sizes)))(*addresses, *self.sizes)
        ways = threads()
        for parts in self._parts[dtype]:
            parts(data, ways)
        return made

    def _given(self, have: Mapping[str, Held]) -> list[torch.Tensor | np.ndarray]:
        found: list[torch.Tensor | np.ndarray] = []
        views: dict[str, tuple[Any, torch.Tensor]] = {}
        for argument in self.arguments:
            tensor, array = argument
            if argument in self._orders:
                held, order = have[tensor], self._orders[argument]
                assert isinstance(held, torch.Tensor)
                found.append(held if order == tuple(range(held.ndim)) else held.permute(order).contiguous())
                continue
            if tensor not in views:
                name, form = self.nests.forms[tensor]
                held = have[name]
                assert isinstance(held, Stored)
                views[tensor] = held.view(form)
            levels, values = views[tensor]
            if array == "values":
                found.append(values)
                continue
            level = levels[int(array[3:])]
            one = level.seg if array.startswith("seg") else level.crd
            assert one is not None
            found.append(one)
        return found

    def _functions(self, dtype: torch.dtype, text: str) -> list[Callable[..., None]]:
        real = np.float32 if dtype == torch.float32 else np.float64
        space: dict[str, Any] = {"np": np, "math": math, "find": find, "product": product, "sum_rows": sum_rows}
        space |= {"real": real, "exp": exp32 if real is np.float32 else exp, "power": power, "rounded": rounded}
        space |= {} if self.compiled else INTERPRETED
        exec(compile(text if self.compiled else divided(text), f"<{self.name}>", "exec"), space)
        made = [space[f"nest_{n}"] for n in range(len(self.results))]
        return made if self.compiled else [quietly(one) for one in made]

    def _compile(self, dtype: torch.dtype) -> list[Callable[[Any, int], None]]:
        real = np.float32 if dtype == torch.float32 else np.float64
        # a number of the text is a float64, and what is computed with one would be
        text = _NUMBER.sub(r"real(\g<0>)", self.source) if real is np.float32 else self.source
        kinds = [np.int64 if array.startswith(("seg", "crd")) else real for _, array in self.arguments]
        kinds += [real] * len(self.results)
        return [
            Parts(function, kinds, len(self.sizes), wide and math.prod(self.shapes[name]) >= FEW)
            for function, wide, name in zip(
                self._functions(dtype, text), self.nests.parallel, self.results, strict=True
            )
        ]

    def _interpret(self, given: list[Any], made: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """The same in Python; a nest that could run in parts does so one part after the other."""
        arrays = [x if isinstance(x, np.ndarray) else x.reshape(-1).numpy() for x in (*given, *made.values())]
        for function, parallel in zip(self._functions(dtype, self.source), self.nests.parallel, strict=True):
            for part in range(3 if parallel else 1):
                function(part, 3 if parallel else 1, *arrays, *self.sizes)


def compiled_region(
    region: Region, arrays: Collection[str], free: Collection[str], shapes: Any, compiled: bool
) -> Matmul | Loops:
    """
    Raises:
        SparseError: a region in blocks, or an order that loops cannot have.
    """
    if region.fused is None or region.graph.block > 1:
        raise SparseError(f"region {region.name!r} in blocks", "use block=1 for the CPU")
    roots = list(region.fused.roots.values())
    if compiled and len(roots) == 1 and _is_matmul(roots[0], arrays):
        return Matmul(region)
    return Loops(region, arrays, free, shapes, compiled)


def _is_matmul(op: Op, arrays: Collection[str]) -> bool:
    dense = all(isinstance(one, Leaf) and one.tensor in arrays for one in op.operands)
    return dense and is_product(arrays, op)


@njit(error_model="numpy")
def find(crd: np.ndarray, first: int, last: int, wanted: int) -> int:
    """Where a coordinate is in a fiber, or -1."""
    end = last
    while first < last:
        middle = (first + last) // 2
        if crd[middle] < wanted:
            first = middle + 1
        else:
            last = middle
    return first if first < end and crd[first] == wanted else -1
