"""What a call gives and what a module owns, as the loops hold it: nothing is copied that is there already."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.cpu.held import Held, Pattern, Stored, flat, pattern, stored
from tilestream.sparse.einsum import Declared
from tilestream.sparse.program import Program, Value
from tilestream.sparse.storage import Format, SparseTensor, from_torch, plain, prune


@dataclass(frozen=True)
class _Kept:
    """What was packed for a tensor, while its memory holds the same; ``parts`` keep that memory from being reused."""

    parts: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    made: Any

    def fits(self, parts: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> bool:
        return (
            len(self.parts) == len(parts)
            and self.versions == versions
            and all(
                a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
                for a, b in zip(self.parts, parts, strict=True)
            )
        )


class Binding:
    """Inputs and constants of a program by name. ``arrays``: names of those that the loops read as dense arrays.

    Dense tensors of the call's type are taken as they are. A sparse tensor is sorted and packed when its indices are
    other memory, or another version of it, than in the call before; its values are read in every call. What has to be
    packed by its values, a dense tensor in a compressed format or a mask, is packed again when these changed. Memory
    that is changed behind PyTorch's back (``.data``, NumPy) has no new version.
    """

    def __init__(self, program: Program, arrays: Collection[str]) -> None:
        self.program, self.arrays = program, arrays
        self._kept: dict[str, _Kept] = {}
        self._made: dict[str, _Kept] = {}
        self._checked: list[Pattern] = []
        self._constants: dict[tuple[str, torch.dtype], Held] = {}

    def dtype(self, inputs: tuple[Value, ...]) -> torch.dtype:
        """What a call computes in: float32 where everything that it is given and owns fits that, else float64."""
        given = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not given:
            given = [x for x in self.program.owned.values() if x.is_floating_point()]
        narrow = bool(given) and all(x.dtype in (torch.float32, torch.float16, torch.bfloat16) for x in given)
        owned = any(x.dtype == torch.float64 for x in self.program.owned.values())
        return torch.float32 if narrow and not owned else torch.float64

    def bind(self, inputs: tuple[Value, ...], dtype: torch.dtype) -> dict[str, Held]:
        """
        Raises:
            SparseError: inputs that are not those of the program.
        """
        program = self.program
        given = program.free(tuple(plain(x) for x in inputs)) or program.inputs
        if len(given) != len(program.names):
            raise SparseError(
                f"{len(given)} inputs for {len(program.names)} ({', '.join(program.names)})", "pass them as to compile"
            )
        have = {name: self._constant(name, dtype) for name in program.constants}
        for name, value in zip(program.names, given, strict=True):
            declared = program.einsums.inputs[name]
            if not isinstance(value, torch.Tensor | SparseTensor):
                raise SparseError(f"input {name!r} is a {type(value).__name__}", "give a tensor")
            if tuple(value.shape) != declared.shape:
                raise SparseError(
                    f"input {name!r} has shape {tuple(value.shape)}, not {declared.shape}", "compile it anew"
                )
            have[name] = self._held(name, value, declared, dtype)
        if inputs and program.unbroken:
            self._check(have)
        return have

    def _check(self, have: dict[str, Held]) -> None:
        """Hold masks against what the program was compiled for, once for each pattern."""
        masks = {name: held for name, held in have.items() if isinstance(held, Stored)}
        patterns = [held.pattern for held in masks.values()]
        if len(patterns) != len(self._checked) or any(a is not b for a, b in zip(patterns, self._checked, strict=True)):
            self.program.check_unbroken({name: held.tensor(name) for name, held in masks.items()})
            self._checked = patterns

    def _constant(self, name: str, dtype: torch.dtype) -> Held:
        if name in self.program.owned:
            return self._held(name, self.program.owned[name], self.program.einsums.inputs[name], dtype)
        if (name, dtype) not in self._constants:
            made = self.program.constants[name]
            self._constants[name, dtype] = flat(made, dtype) if name in self.arrays else stored(made, dtype)
        return self._constants[name, dtype]

    def _held(self, name: str, value: Value, declared: Declared, dtype: torch.dtype) -> Held:
        if isinstance(value, SparseTensor):
            value = prune(value) if name in self.program.pruned else value
            return flat(value, dtype) if name in self.arrays else stored(value, dtype)
        value = value.detach()
        if value.is_complex():
            raise SparseError(f"tensor {name!r} of complex numbers", "use its real and imaginary parts")
        if name in self.arrays:
            return (value if value.layout == torch.strided else value.to_dense()).to("cpu", dtype).contiguous()
        value = value.cpu()
        if value.layout == torch.sparse_coo:
            value = value.coalesce()
        elif value.layout != torch.strided and value.layout not in _ENTRIES:
            value = value.to_sparse_coo().coalesce()  # blocks
        if value.layout == torch.strided or name in self.program.pruned:
            return self._packed(name, value, declared.format, dtype)
        found = self._pattern(name, value, declared.format)
        if found is None:
            return self._packed(name, value, declared.format, dtype)
        return Stored(found, _entries(value).to(dtype))

    def _pattern(self, name: str, value: torch.Tensor, form: Format | None) -> Pattern | None:
        """The pattern of a sparse tensor whose values are all kept; None where two of them share a coordinate."""
        parts = _ENTRIES[value.layout](value)
        versions = _versions(parts)
        kept = self._kept.get(name)
        if kept is None or not versions or not kept.fits(parts, versions):
            numbers = torch.arange(1.0, _entries(value).numel() + 1, dtype=torch.float64)
            made = from_torch(name, _with_values(value, numbers), form)
            alone = int((made.values != 0).sum()) == len(numbers)
            kept = _Kept(parts, versions, Pattern(made) if alone else None)
            self._kept[name] = kept
        return kept.made

    def _packed(self, name: str, value: torch.Tensor, form: Format | None, dtype: torch.dtype) -> Stored:
        """A tensor whose entries depend on its values."""
        parts = (value,) if value.layout == torch.strided else (*_ENTRIES[value.layout](value), _entries(value))
        versions = _versions(parts)
        kept = self._made.get(name)
        if kept is None or not versions or not kept.fits(parts, versions):
            made = from_torch(name, value, form)
            made = prune(made) if name in self.program.pruned else made
            kept = _Kept(parts, versions, (pattern(made), torch.from_numpy(made.values.reshape(-1))))
            self._made[name] = kept
        found, values = kept.made
        return Stored(found, values.to(dtype))


def _versions(parts: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """How often each was written; nothing for tensors of inference mode, which do not count."""
    return () if any(x.is_inference() for x in parts) else tuple(x._version for x in parts)


def _coo(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (value._indices(),)


def _rows(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return value.crow_indices(), value.col_indices()


def _columns(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return value.ccol_indices(), value.row_indices()


_ENTRIES = {torch.sparse_coo: _coo, torch.sparse_csr: _rows, torch.sparse_csc: _columns}
"""By layout, the tensors that say where the entries are."""


def _entries(value: torch.Tensor) -> torch.Tensor:
    """The values of the entries, [n]."""
    return (value._values() if value.layout == torch.sparse_coo else value.values()).reshape(-1)


def _with_values(value: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The same entries with other values."""
    if value.layout == torch.sparse_coo:
        numbers = numbers.reshape(value._values().shape)
        return torch.sparse_coo_tensor(
            value._indices(), numbers, value.shape, is_coalesced=True, check_invariants=False
        )
    make = torch.sparse_csr_tensor if value.layout == torch.sparse_csr else torch.sparse_csc_tensor
    first, second = _ENTRIES[value.layout](value)
    return make(first, second, numbers, value.shape, check_invariants=False)
