"""Sparse PyTorch models as fused streaming dataflow graphs, run and timed token by token (FuseFlow)."""

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
