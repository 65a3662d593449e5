"""Compiled loops in parts, one a thread, on the threads that PyTorch computes with.

PyTorch's threads are those of the OpenMP library that it was loaded with. Its entry ``GOMP_parallel`` runs a function
of one pointer on them, so that a matrix product and the loops around it share the same threads. Without that library
the loops run in the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types

from tilestream.sparse.cpu.registers import instruction

_MANY = 1 << 60
"""Elements of an array whose size the loops know by themselves."""


@cache
def _openmp() -> Any:
    """The OpenMP library with GNU's entries that is loaded already, or None."""
    for name in ("libgomp.so.1", "libgomp.dylib", "libomp.dylib"):
        try:
            found = ctypes.CDLL(name)
            start, which, many = found.GOMP_parallel, found.omp_get_thread_num, found.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        llvmlite.binding.add_symbol("tilestream_part", ctypes.cast(which, ctypes.c_void_p).value)
        llvmlite.binding.add_symbol("tilestream_parts", ctypes.cast(many, ctypes.c_void_p).value)
        return found
    return None


@instruction
def _pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), code


def threads() -> int:
    """How many threads the loops run on: as many as PyTorch computes with."""
    return torch.get_num_threads() if _openmp() is not None else 1


class Parts:
    """A nest of loops ``function(part, parts, *arrays, *sizes)``, compiled; ``parallel``: for several threads.

    ``dtypes`` are those of the arrays, all flat. Called with their addresses and the sizes.
    """

    def __init__(self, function: Callable[..., None], dtypes: Sequence[type], sizes: int, parallel: bool) -> None:
        openmp = _openmp()
        self.parallel = parallel and openmp is not None
        self._start: Any = openmp.GOMP_parallel if openmp is not None else None
        inner = njit(error_model="numpy", fastmath={"contract", "reassoc"}, nogil=True)(function)
        space: dict[str, Any] = {
            "nest": inner,
            "carray": vars(numba)["carray"],
            "pointer": _pointer,
            "many": _MANY,
            "int64": np.int64,
        }
        space |= {f"kind{n}": kind for n, kind in enumerate(dtypes)}
        given = [f"carray(pointer(data[{n}]), many, kind{n})" for n in range(len(dtypes))]
        given += [f"data[{len(dtypes) + n}]" for n in range(sizes)]
        part, parts = "0", "1"
        if self.parallel:
            space["which"] = types.ExternalFunction("tilestream_part", types.int32())
            space["many_"] = types.ExternalFunction("tilestream_parts", types.int32())
            part, parts = "int64(which())", "int64(many_())"
        text = f"def entry(at):\n    data = carray(pointer(at), {len(given)}, int64)\n"
        text += f"    nest({', '.join((part, parts, *given))})\n"
        exec(text, space)
        self._entry = cfunc(types.void(types.intp), error_model="numpy")(space["entry"])
        self._call = self._entry.ctypes

    def __call__(self, data: Any, ways: int) -> None:
        """Run on ``data``, a ctypes array of the addresses and sizes, on at most ``ways`` threads."""
        if self.parallel:
            self._start(self._entry.address, ctypes.addressof(data), ways, 0)
        else:
            self._call(ctypes.addressof(data))
