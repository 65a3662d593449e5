"""From what the user typed to a program that can be compiled under any schedule: an einsum over files, or a module."""

from __future__ import annotations

import bz2
import copy
import gzip
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse
import torch

from tilestream.errors import OptionError, SparseError
from tilestream.sparse.frontend import compile
from tilestream.sparse.memory import NO_MEMORY, SIMPLE_HBM, Memory, hbm
from tilestream.sparse.program import Program, compile_einsum
from tilestream.sparse.reference import einsum
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format, SparseTensor, from_scipy, pack
from tilestream.sparse.timing import TIMINGS, Timing

CHECKED = 50_000_000  # elements up to which results are held against dense PyTorch
_COUNTED, _VECTOR = (1 << 63) - 1, 1 << 28  # elements of a matrix, and of a vector, which is dense
CORNER = 1_000  # rows and columns of the instance that is held against it otherwise


@dataclass(frozen=True)
class Target:
    """A program to be: ``make`` compiles it under a schedule, ``reference`` gives what dense PyTorch does.

    ``reference`` returns float64 tensors (or of the type that it is given, in which it then computes), or raises
    ``SparseError`` where a dense tensor would be too large.
    ``smaller`` gives an instance for which it is not, if there is one; ``oracle`` says what ``reference`` did.
    """

    name: str
    make: Callable[[Schedule], Program]
    inputs: tuple[Any, ...]
    reference: Callable[..., tuple[torch.Tensor, ...]]
    smaller: Callable[[], Target | None] = lambda: None
    oracle: Callable[[], str] = lambda: "dense PyTorch"


def load(target: str, operands: Sequence[Path] = (), formats: Sequence[str] = ()) -> Target:
    """``'ik,kj->ij'`` with Matrix Market files, or ``FILE.py:FUNCTION`` that returns (module, inputs).

    Args:
        formats: for an einsum, one an operand (``compressed,compressed``; ``:1,0`` behind it for column-major); for a
            module, ``NAME=FORMAT`` of inputs, parameters and buffers.

    Raises:
        OptionError: files for a module, or other formats than operands.
        SparseError: a file that is not Matrix Market, or a format that is none.
        CaptureError: no such file or function, or it did not return (module, inputs).
    """
    if "->" in target:
        return _einsum(target, operands, formats)
    if operands:
        cause = "files were given with a module" if ":" in target else f"{target!r} says no result"
        raise OptionError(cause, "files are operands of an einsum, as 'ik,kj->ij' B.mtx C.mtx")
    return _module(target, formats)


def _einsum(text: str, operands: Sequence[Path], formats: Sequence[str]) -> Target:
    terms = text.replace(" ", "").split("->")[0].split(",")
    if len(terms) != len(operands):
        raise OptionError(f"{text!r} takes {len(terms)} operands, {len(operands)} were given", "give a file an operand")
    if formats and len(formats) != len(operands):
        raise OptionError(
            f"{len(formats)} formats of {len(operands)} operands", "give --format once an operand, or not"
        )
    given = [parse_format(f) for f in formats] or [Format(("compressed",) * len(term)) for term in terms]
    names = _names(operands)
    matrices = [read(path) for path in operands]
    matrices = [_vector(m) if len(term) == 1 else m for m, term in zip(matrices, terms, strict=True)]
    return _product(text, text, names, matrices, given)


def _product(
    title: str,
    text: str,
    names: Sequence[str],
    matrices: Sequence[scipy.sparse.coo_matrix | np.ndarray],
    given: Sequence[Format],
) -> Target:
    def make(schedule: Schedule) -> Program:
        packed = [
            _pack(name, matrix, replace(form, block=schedule.block))
            for name, matrix, form in zip(names, matrices, given, strict=True)
        ]
        return compile_einsum(text, packed, schedule, names=names)

    left, result = text.replace(" ", "").split("->")
    sizes = dict(zip(left.replace(",", ""), [n for m in matrices for n in m.shape or ()], strict=False))
    shape = tuple(sizes.get(i, 1) for i in result)
    large = max(math.prod(shape), *(math.prod(m.shape or ()) for m in matrices)) > CHECKED

    def reference(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        if large and dtype != torch.float64:
            raise SparseError(f"an einsum of {max(shape, default=1):,} rows as a dense one", "compare in float64")
        if large:
            return (einsum(text, [_entries(m) for m in matrices], shape),)
        return (torch.einsum(text, *(torch.from_numpy(_dense(m)).to(dtype) for m in matrices)),)

    def smaller() -> Target:
        kept = [_corner(m) for m in matrices]
        return _product(f"the first {CORNER:,} of every index", text, names, kept, given)

    def oracle() -> str:
        return "sums over coordinates (dense tensors are too large)" if large else "dense PyTorch"

    return Target(title, make, (), reference, smaller, oracle)


def _entries(matrix: scipy.sparse.coo_matrix | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates and values of what is not 0."""
    if isinstance(matrix, np.ndarray):
        return np.argwhere(matrix), matrix[matrix != 0]
    return np.stack([matrix.row, matrix.col], axis=1).astype(np.int64), matrix.data


def _corner(matrix: scipy.sparse.coo_matrix | np.ndarray) -> scipy.sparse.coo_matrix | np.ndarray:
    """The first rows and columns of an operand."""
    if isinstance(matrix, np.ndarray):
        return matrix[tuple(slice(CORNER) for _ in matrix.shape)]
    rows, columns = matrix.shape or (0, 0)
    kept = (matrix.row < CORNER) & (matrix.col < CORNER)
    entries = matrix.data[kept], (matrix.row[kept], matrix.col[kept])
    return scipy.sparse.coo_matrix(entries, (min(rows, CORNER), min(columns, CORNER)))


def _module(target: str, formats: Sequence[str]) -> Target:
    from tilestream.apps.load import load as load_app

    named = {}
    for text in formats:
        name, sign, form = text.partition("=")
        if not sign:
            raise OptionError(f"--format {text!r} names no tensor", "write NAME=compressed,compressed")
        named[name] = parse_format(form)
    app = load_app(target)
    module, inputs = _in_type(app.module, torch.float64), _inputs_in(app.inputs, torch.float64)

    def make(schedule: Schedule) -> Program:
        return compile(module, *inputs, formats=named or None, schedule=schedule)

    def reference(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        narrow = dtype != torch.float64
        with torch.no_grad():
            made = _evaluated(_in_type(copy.deepcopy(module), dtype) if narrow else module, _inputs_in(inputs, dtype))
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    return Target(app.name, make, inputs, reference)


def _inputs_in(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def _in_type(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The module in another type of floats; PyTorch's own ``to`` does not take sparse parameters."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None and one.is_floating_point() and one.layout != torch.strided:
                made.setdefault(id(one), torch.nn.Parameter(one.detach().to(dtype), False))
                part._parameters[name] = made[id(one)]
    for part in module.modules():
        for one in part._parameters.values():
            if one is not None and one.is_floating_point() and one.layout == torch.strided:
                one.data = one.data.to(dtype)
        for name, one in part._buffers.items():
            if one is not None and one.is_floating_point():
                part._buffers[name] = one.to(dtype)
    return module


def _evaluated(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """What a module gives on dense inputs; on the sparse ones themselves where they are too large, or where it wants
    them sparse."""
    if any(x.layout != torch.strided and x.shape.numel() > CHECKED for x in inputs):
        return module(*inputs)
    try:
        return module(*[x if x.layout == torch.strided else x.to_dense() for x in inputs])
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return module(*inputs)


def read(path: Path) -> scipy.sparse.coo_matrix | np.ndarray:
    """A Matrix Market file; float64, sparse or dense as the file is.

    Raises:
        SparseError: no file, or one that is not Matrix Market.
    """
    if not path.is_file():
        raise SparseError(f"there is no file {str(path)!r}", "check the path")
    try:
        rows, columns, entries, form, kind, symmetry = scipy.io.mminfo(path)
        _check_size(path, int(rows), int(columns), int(entries), form, kind)
        if form == "array":
            _check_lines(path, int(rows), int(columns), symmetry)
        found = scipy.io.mmread(path)
    except (ValueError, OSError, OverflowError, MemoryError, TypeError) as error:
        why = str(error) or type(error).__name__
        raise SparseError(f"{path.name} is no Matrix Market file: {why}", "write it with scipy.io.mmwrite") from None
    if isinstance(found, np.ndarray):
        return found.astype(np.float64)
    coo = scipy.sparse.coo_matrix(found, dtype=np.float64)
    coo.sum_duplicates()
    return coo


def _check_size(path: Path, rows: int, columns: int, entries: int, form: str, kind: str) -> None:
    """What the file says of itself, before it is believed.

    Raises:
        SparseError: complex numbers, more entries than the file can hold, or more elements than 63 bits count.
    """
    if kind == "complex":
        raise SparseError(f"{path.name} holds complex numbers", "write real and imaginary parts to files of their own")
    if min(rows, columns, entries) < 0 or rows * columns > _COUNTED:
        raise SparseError(
            f"{path.name} says that it is {rows:,} x {columns:,}", "give sizes whose product fits 63 bits"
        )
    if path.suffix not in (".gz", ".bz2") and 2 * entries > path.stat().st_size:
        raise SparseError(
            f"{path.name} says that it has {entries:,} entries, and has {path.stat().st_size:,} bytes",
            "write it again with scipy.io.mmwrite",
        )


def _check_lines(path: Path, rows: int, columns: int, symmetry: str) -> None:
    """That a dense file has one number a line, and as many as it says: scipy's reader ends the process on others.

    Raises:
        ValueError: what it has instead.
    """
    opened = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="latin-1") as file:
        lines = [x for line in file if (x := line.split()) and not x[0].startswith("%")][1:]
    if symmetry != "general" and rows != columns:
        raise ValueError(f"a {symmetry} matrix of {rows} x {columns}")
    below = {"general": rows * columns, "skew-symmetric": rows * (rows - 1) // 2}.get(symmetry, rows * (rows + 1) // 2)
    if len(lines) != below or any(len(x) != 1 for x in lines):
        raise ValueError(f"{below} lines of one number were expected")


def _vector(matrix: scipy.sparse.coo_matrix | np.ndarray) -> scipy.sparse.coo_matrix | np.ndarray:
    """A matrix of one row or column as a vector: Matrix Market has no other."""
    if 1 not in (matrix.shape or ()):
        return matrix
    if math.prod(matrix.shape or ()) > _VECTOR:
        raise SparseError(f"a vector of {math.prod(matrix.shape or ()):,} elements", f"use at most {_VECTOR:,}")
    return _dense(matrix).reshape(-1)


def write(path: Path, result: torch.Tensor) -> None:
    """A matrix as Matrix Market; a vector or scalar becomes a matrix of one row.

    Raises:
        SparseError: a result of more than two indices.
    """
    if result.ndim > 2:
        raise SparseError(f"a result of {result.ndim} indices as Matrix Market", "write results of at most two")
    path.parent.mkdir(parents=True, exist_ok=True)
    if result.layout == torch.strided:
        matrix = scipy.sparse.coo_matrix(np.atleast_2d(result.detach().numpy()))
    else:
        stored = result.detach().to_sparse_coo().coalesce()
        at = stored.indices().numpy() if result.ndim == 2 else np.insert(stored.indices().numpy(), 0, 0, axis=0)
        shape = tuple(result.shape) if result.ndim == 2 else (1, *result.shape)
        matrix = scipy.sparse.coo_matrix((stored.values().numpy(), tuple(at)), shape)
    scipy.io.mmwrite(path, matrix)


def parse_format(text: str) -> Format:
    """``compressed,dense`` or, with the order of the indices that its levels hold, ``compressed,compressed:1,0``."""
    levels, _, order = text.partition(":")
    try:
        numbers = tuple(int(x) for x in order.split(",")) if order else ()
    except ValueError:
        raise SparseError(f"{order!r} is no order of indices", "write numbers, as compressed,compressed:1,0") from None
    return Format(tuple(x.strip() for x in levels.split(",")), numbers)


def parse_schedule(fuse: str, order: str, parallel: Sequence[str], block: int) -> Schedule:
    """The schedule that the command line's options say.

    ``fuse``: ``auto``, ``none``, ``all``, or regions of statements (``T0,T1/T2``). ``order``: indices (``i,k,j``) or
    the number of an enumerated order. ``parallel``: ``INDEX=FACTOR``.

    Raises:
        OptionError: an option that is not written so.
    """
    regions = fuse if fuse in ("auto", "none", "all") else tuple(tuple(r.split(",")) for r in fuse.split("/"))
    factors: dict[str, int] = {}
    for text in parallel:
        index, sign, factor = text.partition("=")
        if not (index and sign and factor.isdigit() and int(factor) > 0):
            raise OptionError(f"--parallel {text!r}", "write INDEX=FACTOR, as i=2")
        factors[index] = int(factor)
    chosen: Any = None
    if order.isdigit():
        chosen = int(order)
    elif order:
        chosen = tuple(x.strip() for x in order.split(","))
        if len(set(chosen)) != len(chosen) or "" in chosen:
            raise OptionError(f"--order {order!r}", "name each index once, as i,k,j, or give a number")
    return Schedule(fuse=regions, order=chosen, parallel=factors, block=block)


def parse_timing(text: str) -> Timing:
    """``comal`` or ``sam``: whose reductions and accumulators are timed.

    Raises:
        OptionError: another name.
    """
    if text not in TIMINGS:
        raise OptionError(f"--timing {text!r}", f"use {' or '.join(TIMINGS)}")
    return TIMINGS[text]


def parse_memory(text: str) -> Memory:
    """``none``, ``simple`` (the released code's HBM), or ``hbm`` with settings: ``hbm:channels=8,latency=40``.

    Raises:
        OptionError: another name, or a setting that is no number.
    """
    name, _, settings = text.partition(":")
    if name == "none" and not settings:
        return NO_MEMORY
    if name == "simple" and not settings:
        return SIMPLE_HBM
    if name != "hbm":
        raise OptionError(f"--memory {text!r}", "use none, simple, or hbm:channels=8,latency=40")
    known = inspect.signature(hbm).parameters
    values: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key.strip() not in known:
            raise OptionError(f"--memory has {setting!r}", f"settings of hbm are {', '.join(known)}")
        try:
            values[key.strip()] = float(value) if "." in value else int(value)
        except ValueError:
            raise OptionError(f"--memory has {setting!r}", "write settings as channels=8") from None
    return hbm(**values)


def _names(operands: Sequence[Path]) -> list[str]:
    """The files' stems as tensor names, each once."""
    names: list[str] = []
    for path in operands:
        base = "".join(c if c.isalnum() else "_" for c in path.stem) or "tensor"
        name, n = base, 1
        while name in names:
            name, n = f"{base}_{n}", n + 1
        names.append(name)
    return names


def _pack(name: str, matrix: scipy.sparse.coo_matrix | np.ndarray, form: Format) -> SparseTensor:
    if isinstance(matrix, np.ndarray):
        return pack(name, matrix, form)
    return from_scipy(name, matrix, form)


def _dense(matrix: scipy.sparse.coo_matrix | np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
