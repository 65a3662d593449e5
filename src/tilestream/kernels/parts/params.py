"""A kernel's argument, described once: the C++ struct and its bytes are both made from the same fields."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

MAP, POINTER = "TensorMap", "*"
PLAIN = {"u64": ("Q", 8), "long long": ("q", 8), "int": ("i", 4), "u32": ("I", 4), "float": ("f", 4)}
"""``struct``'s letter and the bytes of each C++ type; pointers are the ending ``*``."""
MAP_BYTES, MAP_ALIGNMENT = 128, 64

LINE_BYTES = 128
"""Of a line of the L2: flags that different CTAs write have one each."""

TIMEOUT_NS = 1_000_000_000
"""Bound of a wait for a flag: less than that of a barrier, so that who waited for whom is known."""


class Where(NamedTuple):
    """A tensor in device memory: its address, the distance of its rows in elements, and how many there are."""

    address: int
    stride: int
    rows: int


@dataclass(frozen=True)
class Field:
    """A member of a struct. ``count``: elements of an array; None is a single value. ``note``: a comment behind it."""

    type: str | Struct
    name: str
    count: int | None = None
    note: str = ""

    @property
    def declaration(self) -> str:
        type_ = self.type.name if isinstance(self.type, Struct) else self.type
        of = "" if self.count is None else f"[{self.count}]"
        return f"{type_} {self.name}{of};" + (f"  // {self.note}" if self.note else "")


@dataclass(frozen=True)
class Struct:
    """A C++ struct of plain fields, laid out as the compilers lay it out on both machines.

    ``pack`` takes a value for each field: an integer or float, the bytes of a tensor map, a mapping for a struct, and a
    sequence of those for an array.
    """

    name: str
    fields: tuple[Field, ...]
    declared: bool = True
    """False: a header declares it."""

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The declarations of the fields."""
        return tuple(field.declaration for field in self.fields)

    @property
    def text(self) -> str:
        """The whole struct, and those that its fields are of."""
        inner = dict.fromkeys(f.type.text for f in self.fields if isinstance(f.type, Struct) and f.type.declared)
        own = [f"struct {self.name} {{", *(f"  {line}" for line in self.lines), "};"]
        return "\n".join([*inner, *own])

    @property
    def size(self) -> int:
        return self._packer.size

    def pack(self, **values: Any) -> bytes:
        """The bytes of the struct.

        Raises:
            ValueError: a field has no value, a value no field, or an array has another number of elements.
        """
        return self._packer.pack(*self._flat(values))

    @cached_property
    def alignment(self) -> int:
        return max(_layout(field.type)[1] for field in self.fields)

    @cached_property
    def format(self) -> str:
        """``struct``'s format, gaps included, without a byte order."""
        made, at = "", 0
        for field in self.fields:
            letters, alignment, size = _layout(field.type)
            gap = -at % alignment
            count = 1 if field.count is None else field.count
            made += "x" * gap + letters * count
            at += gap + size * count
        return made + "x" * (-at % self.alignment)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(field.name for field in self.fields)

    @cached_property
    def _packer(self) -> struct.Struct:
        return struct.Struct("<" + self.format)

    def _flat(self, values: Mapping[str, Any]) -> Iterator[Any]:
        if values.keys() != self._names:
            wrong = sorted(values.keys() ^ self._names)
            raise ValueError(f"struct {self.name} and the values given to it differ in {', '.join(wrong)}")
        for field in self.fields:
            given = [values[field.name]] if field.count is None else values[field.name]
            if len(given) != (1 if field.count is None else field.count):
                raise ValueError(f"{self.name}.{field.name} has {field.count} elements, and {len(given)} are given")
            for one in given:
                yield from field.type._flat(one) if isinstance(field.type, Struct) else (one,)


def pointers(*names: str, type: str = "void*", notes: Mapping[str, str] | None = None) -> tuple[Field, ...]:
    """Single pointers of one type."""
    return tuple(Field(type, name, note=(notes or {}).get(name, "")) for name in names)


def at_least_one(values: Sequence[Any], other: Any = 0) -> Sequence[Any]:
    """``values``, or one ``other``: C++ has no empty arrays."""
    return values or [other]


def _layout(type_: str | Struct) -> tuple[str, int, int]:
    """Letters of a value's format, its alignment and its size."""
    if isinstance(type_, Struct):
        return type_.format, type_.alignment, type_.size
    if type_ == MAP:
        return f"{MAP_BYTES}s", MAP_ALIGNMENT, MAP_BYTES
    letter, size = ("Q", 8) if type_.endswith(POINTER) else PLAIN[type_]
    return letter, size, size
