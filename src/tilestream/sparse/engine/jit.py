"""How the engine's functions are compiled: once each, whatever constants they are given, and into their callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """``numba.njit`` of a function that only compiled code calls.

    Left alone, numba compiles a function anew for every constant argument, and gives each one wrappers for Python: that
    is most of the time that the engine takes to compile.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    compiled: Any = njit(**options)(function)
    resolve = compiled.get_call_template
    compiled.get_call_template = lambda args, kws: resolve(tuple(types.unliteral(x) for x in args), kws)
    return cast(F, compiled)
