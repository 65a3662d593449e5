"""A stationary sum's CUDA source: what is alike among its stages as kinds, each stage as a line of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import jinja2

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.gradients.stationary import StationarySum, builds
from tilestream.kernels.parts.mma import of_columns
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers
from tilestream.kernels.parts.source import KernelSource, kernel_name
from tilestream.kernels.parts.templating import template
from tilestream.kernels.stream.places import REGISTER_SPLITS

THREADS = 384
MOST_PARTIALS = 2**31 - 1
"""Partial results are counted in fours of floats by 32 bits."""


@dataclass(frozen=True)
class Kind:
    """Constants of stages with the same code (``struct Kind`` of the template)."""

    dtype: str
    weight_dtype: str
    bias_dtype: str
    out_groups: int
    k_groups: int
    chunks: int
    slots: int
    left_bulk: bool
    right_bulk: bool
    bars: int
    ones: int


@dataclass(frozen=True)
class SumEntry:
    """A stage's line in the kernel's table (``struct Sum`` of stationary.cuh)."""

    kind: int
    first: int
    ctas: int
    out: int
    k: int
    out_parts: int
    k_parts: int
    splits: int
    left: int
    right: int
    left_rows: int
    right_rows: int
    weight: int
    bias: int
    partials: int


class Operands(NamedTuple):
    """What the packer reads: what bulk copies read or write, [rows, features] or weights, and what goes otherwise."""

    maps: tuple[str, ...]
    pointers: tuple[str, ...]


def argument(maps: Sequence[str], written: Sequence[str]) -> Struct:
    """``Params`` of a kernel with tensor maps of ``maps`` and pointers to ``written``."""
    each = (
        Field(MAP, "maps", max(len(maps), 1)),
        Field("void*", "pointers", len(written)),
        Field("long long", "strides", len(written)),
        *pointers("flags", type="u64*"),
        *pointers("dump", type="Dump*"),
        Field("u64", "limit_ns"),
        *pointers("partials", type="float*"),
        Field("int", "rows"),
    )
    return Struct("Params", each)


def emit(pipeline: Pipeline) -> KernelSource:
    """Generate the kernel of a pipeline whose stages are stationary sums: all run side by side.

    Raises:
        VerifyError: from the schedule, naming the user's line; or partial results are more than 32 bits count.
    """
    schedules = builds(pipeline)
    maps = [n for s in schedules for n, bulk in zip((s.sums.left, s.sums.right), s.bulk, strict=True) if bulk]
    odd = [n for s in schedules for n, bulk in zip((s.sums.left, s.sums.right), s.bulk, strict=True) if not bulk]
    results = [n for s in schedules for n in (s.sums.weight, s.sums.bias) if n]
    maps, written = list(dict.fromkeys(maps)), list(dict.fromkeys([*odd, *results]))
    kinds = list(dict.fromkeys(_kind(s) for s in schedules))
    entries: list[SumEntry] = []
    first, partials = 0, 0
    for s in schedules:
        entries.append(_entry(s, kinds.index(_kind(s)), first, partials, maps, written))
        first += s.ctas
        partials += s.workspace_bytes // 16
    if partials > MOST_PARTIALS:
        what = f"pipeline {pipeline.name!r} has {partials} x 16 bytes of partial results > {MOST_PARTIALS} x 16"
        raise VerifyError(what, "use fewer splits")
    products = {(s.dtype, 8 * s.chunks, True) for s in schedules} | {(s.dtype, 1, False) for s in schedules}
    params = argument(maps, written)
    text = _template().render(
        name=kernel_name(pipeline), pipeline=pipeline, threads=THREADS, kinds=kinds, sums=entries, params=params,
        mma=[of_columns(*p) for p in sorted(products)],
    )  # fmt: skip
    text = re.sub(r"\n{3,}", "\n\n", text)
    registers = max(s.registers for s in schedules)
    splits = tuple(r for r in REGISTER_SPLITS if r[0] >= registers) or REGISTER_SPLITS[-1:]
    shared = max(s.shared_bytes for s in schedules)
    return KernelSource(pipeline, text, shared, params, splits, Operands(tuple(maps), tuple(written)))


def _kind(s: StationarySum) -> Kind:
    return Kind(
        s.dtype, s.weight_dtype, s.bias_dtype, *s.groups, s.chunks, s.slots, *s.bulk, s.bars, s.ones
    )  # fmt: skip


def _entry(s: StationarySum, kind: int, first: int, partials: int, maps: list[str], written: list[str]) -> SumEntry:
    left, right = s.sums.left, s.sums.right
    assert s.ctas == prod(s.parts) * s.splits
    return SumEntry(
        kind, first, s.ctas, *s.sums.sizes, *s.parts, s.splits,
        maps.index(left) if s.bulk[0] else -1, maps.index(right) if s.bulk[1] else -1,
        -1 if s.bulk[0] else written.index(left), -1 if s.bulk[1] else written.index(right),
        written.index(s.sums.weight), written.index(s.sums.bias) if s.sums.bias else -1, partials,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return template("stationary.cu.j2")
