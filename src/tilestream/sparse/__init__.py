"""Sparse PyTorch models as fused streaming dataflow graphs, run and timed token by token (FuseFlow)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilestream.sparse.frontend import compile
    from tilestream.sparse.program import Program, ProgramResult, compile_einsum
    from tilestream.sparse.region import Region
    from tilestream.sparse.schedule import Schedule
    from tilestream.sparse.storage import (
        Format,
        SparseTensor,
        compressed,
        dense,
        from_coo,
        from_scipy,
        from_torch,
        pack,
        repack,
        to_coo,
        to_torch,
    )

__all__ = [
    "Format",
    "Program",
    "ProgramResult",
    "Region",
    "Schedule",
    "SparseTensor",
    "compile",
    "compile_einsum",
    "compressed",
    "dense",
    "from_coo",
    "from_scipy",
    "from_torch",
    "pack",
    "repack",
    "to_coo",
    "to_torch",
]

_HOMES = {"compile": "frontend", "Program": "program", "ProgramResult": "program", "compile_einsum": "program"}
_HOMES |= {"Region": "region", "Schedule": "schedule"}


def __getattr__(name: str) -> Any:
    """Loaded when first used: the command line's help needs none of it."""
    if name in __all__:
        return getattr(import_module(f"tilestream.sparse.{_HOMES.get(name, 'storage')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
