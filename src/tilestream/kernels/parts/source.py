"""What a family says of one launch: text for the compiler, memory, and what the kernel's argument is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.parts.params import LINE_BYTES, TIMEOUT_NS, Struct, Where
from tilestream.kernels.parts.tensor_maps import Encode


@dataclass(frozen=True)
class Space:
    """Device memory of a launch besides its tensors: parts by name, each of whole lines, one behind the other.

    ``zeros``: parts that are zero before the first launch; in the others anything may lie.
    """

    parts: tuple[tuple[str, int], ...]
    zeros: frozenset[str]

    @property
    def total(self) -> int:
        return sum(_lines(size) for _, size in self.parts)

    def at(self, address: int) -> dict[str, int]:
        """The address of each part of a space at ``address``."""
        starts = accumulate((_lines(size) for _, size in self.parts), initial=address)
        return {name: start for (name, _), start in zip(self.parts, starts, strict=False)}


class Part(NamedTuple):
    """``rows`` rows of a call, from row ``first`` of ``total`` on: those of one launch. ``phase``: of a kernel that is
    launched again for what must wait for all of its CTAs, the number of launches before."""

    first: int
    rows: int
    total: int
    phase: int = 0


class Call(NamedTuple):
    """What a kernel's argument is made of. Made at every call of an operator: a dataclass would take 1 us more.

    Attributes:
        where: the tensors of the pipeline.
        at: addresses of the parts of its ``Space``.
        dump: address of the record that an expired wait leaves; 0 for none.
        stamps: address of the stamps, and room for how many, of a kernel that has them.
        values: of an operator's kernel, what its argument holds.
    """

    where: Mapping[str, Where]
    at: Mapping[str, int]
    dump: int
    part: Part
    encode: Encode
    timeout_ns: int = TIMEOUT_NS
    stamps: tuple[int, int] = (0, 0)
    values: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class BesideSource:
    """Source text of a kernel without warps of its own kinds, so that there are no registers to split."""

    name: str
    text: str
    shared_bytes: int = 0
    register_splits: tuple[tuple[int, int], ...] = ((0, 0),)


@dataclass(frozen=True)
class KernelSource:
    """Source text of one launch, for the compiler: ``register_splits`` are the (consumer, loader) registers to try.

    Attributes:
        params: the kernel's argument.
        tables: what its family's packer reads beside the schedule.
    """

    pipeline: Pipeline
    text: str
    shared_bytes: int
    params: Struct
    register_splits: tuple[tuple[int, int], ...]
    tables: Any = None
    stamped: bool = False

    @property
    def name(self) -> str:
        return kernel_name(self.pipeline)


def kernel_name(pipeline: Pipeline) -> str:
    """What the kernel of a launch is called in C++."""
    return "tilestream_" + re.sub(r"\W", "_", pipeline.name)


def _lines(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES
