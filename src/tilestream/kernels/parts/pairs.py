"""Which pairs of queries and keys a mask keeps: index arithmetic as a list of instructions, which travels as text."""

from __future__ import annotations

import json
from dataclasses import dataclass

OPS = {
    "constant": "{}",
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "floor_divide": "ts::floor_divide({}, {})",
    "remainder": "ts::remainder({}, {})",
    "neg": "-{}",
    "abs": "({0} < 0 ? -{0} : {0})",
    "minimum": "({0} < {1} ? {0} : {1})",
    "maximum": "({0} > {1} ? {0} : {1})",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}",
    "bitwise_xor": "{} ^ {}",
    "bitwise_not": "~{}",
    "logical_not": "!{}",
    "where": "({} ? {} : {})",
}
"""C++ of each operator, over integers of 64 bits; bool is 0 and 1. All but ``constant`` are called as in torch."""
LOAD = "load"
"""An element of a tensor: its number, then an index for each of its dimensions."""
AXES = ("b", "h", "q", "k")
"""Operands that an instruction may name: batch, head, query and key; ``v3`` is the result of instruction 3."""
ELEMENTS = {
    "torch.bool": "unsigned char",
    "torch.uint8": "unsigned char",
    "torch.int8": "signed char",
    "torch.int16": "short",
    "torch.int32": "int",
    "torch.int64": "long long",
}
MOST_INDICES = 4

Instruction = tuple[str | int, ...]


@dataclass(frozen=True)
class PairMask:
    """A name and its operands for each instruction; the last one's result says whether a pair is kept."""

    instructions: tuple[Instruction, ...]

    @property
    def text(self) -> str:
        return json.dumps(self.instructions)

    @classmethod
    def of(cls, text: str) -> PairMask:
        return cls(tuple(tuple(one) for one in json.loads(text)))

    @property
    def reads(self) -> int:
        """Tensors that are read, numbered from zero."""
        return 1 + max((int(i[1]) for i in self.instructions if i[0] == LOAD), default=-1)

    def names(self, axis: str) -> bool:
        """Whether an axis has a part in it."""
        return any(axis in i[1:] for i in self.instructions)

    def code(self, dtypes: tuple[str, ...]) -> str:
        """``struct Mask`` of mask_tiles.cuh, which reads tensors of ``dtypes``."""
        lines = [f"    const long long v{k} = {self._value(i, dtypes)};" for k, i in enumerate(self.instructions)]
        axes = ", ".join(f"long long {axis}" for axis in AXES)
        head = f"  static TS_DEV bool keeps(const MaskTilesParams& p, {axes}) {{"
        return "\n".join(["struct Mask {", head, *lines, f"    return v{len(lines) - 1} != 0;", "  }", "};"])

    def _value(self, instruction: Instruction, dtypes: tuple[str, ...]) -> str:
        name, *operands = instruction
        if name != LOAD:
            return OPS[str(name)].format(*operands)
        read, *indices = operands
        at = [4 * int(read) + k for k in range(len(indices))]
        each = zip(indices, at, strict=True)
        steps = [f"{i if i in AXES else f'ts::index_of({i}, p.sizes[{k}])'} * p.strides[{k}]" for i, k in each]
        return f"ts::element<{ELEMENTS[dtypes[int(read)]]}>(p.read[{read}], {' + '.join(steps) or '0'})"

    @property
    def band(self) -> tuple[int, int] | None:
        """What ``band`` was given to make it; else None."""
        bounds = [i[2] for i in self.instructions[1:3] if len(i) == 3 and isinstance(i[2], int)]
        return (bounds[0], -bounds[1]) if len(bounds) == 2 and band(bounds[0], -bounds[1]) == self else None


EVERY = 2**29
"""Of keys: more than there are."""


def band(before: int, after: int) -> PairMask:
    """A query keeps so many keys before the one at its place, that one, and so many after it."""
    return PairMask((("sub", "q", "k"), ("le", "v0", before), ("ge", "v0", -after), ("bitwise_and", "v1", "v2")))


DENSE = PairMask(((LOAD, 0, *AXES),))
"""That of a bool tensor [batch, heads, queries, keys]."""
