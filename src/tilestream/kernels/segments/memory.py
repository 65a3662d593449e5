"""C++ of where a lane's elements lie in tensors, and of loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod

from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.parts.text import block, loop
from tilestream.kernels.segments.layout import LANE_BYTES, Layout
from tilestream.kernels.segments.model import Place, Read


@dataclass(frozen=True)
class Access:
    """How a lane's elements of one row of a tensor are loaded or stored.

    Attributes:
        count: elements of a lane.
        packed: vectors of neighbouring elements, so that words hold two of 16 bits.
    """

    at: Layout
    read: Read

    @property
    def dtype(self) -> str:
        return self.read.tensor.dtype

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def count(self) -> int:
        return self.at.count(self.read.axes)

    @property
    def by_vector(self) -> bool:
        """Whether a lane has one element a vector."""
        return 0 < len(self.read.axes) and set(self.read.axes) <= set(self.at.p.space.prefix)

    @property
    def packed(self) -> bool:
        """Whether neighbours in a vector are neighbours in the row: all inner axes, one behind the other."""
        if not self.read.axes or self.by_vector:
            return False
        return all(self._stride(a) == self._inner_after(a) for a in self.at.p.space.inner)

    @property
    def per_word(self) -> int:
        return 2 if self.packed and self.bytes == 2 and self.at.vector > 1 else 1

    @property
    def words(self) -> int:
        """Registers of a lane's elements as they are loaded."""
        return self.count // self.per_word

    @property
    def width(self) -> int:
        """Elements of a row, constants and sliced columns included."""
        return prod(self._sizes)

    @property
    def row_bytes(self) -> int:
        return self.width * self.bytes

    @property
    def at_once(self) -> int:
        """Bytes of one load of a vector: what all of its places are multiples of."""
        places = [self.at.vector, self.width, self._constant, *(self._stride(a) for a in self.read.axes[:-1])]
        places += [self.at.p.space.run] if self.at.p.space.runs > 1 else []
        step = gcd(*places) * self.bytes
        return min(step & -step, LANE_BYTES)

    @property
    def _sizes(self) -> list[int]:
        axes = self.read.tensor.axes
        return [a.size or 1 for a in axes[len(axes) - len(self.read.columns) :]]

    def _stride(self, axis: str) -> int:
        """Elements from one position of an axis to the next; 0 where the tensor has it not."""
        sizes = self._sizes
        return sum(prod(sizes[d + 1 :]) for d, c in enumerate(self.read.columns) if axis in c.axes)

    def _inner_after(self, axis: str) -> int:
        inner = self.at.p.space.inner
        return prod(self.at.p.space.sizes[a] for a in inner[inner.index(axis) + 1 :])

    @property
    def _constant(self) -> int:
        sizes = self._sizes
        return sum(c.offset * prod(sizes[d + 1 :]) for d, c in enumerate(self.read.columns))

    def coordinate(self, axis: str) -> str:
        """C++ of the position of element ``i`` of vector ``r`` along an axis."""
        space = self.at.p.space
        if axis in space.prefix:
            after = prod(space.sizes[a] for a in space.prefix[space.prefix.index(axis) + 1 :])
            return _part("t.run(r)", after, 0 if axis == space.prefix[0] else space.sizes[axis])
        inner = "(t.inner(r) + i)"
        return _part(inner, self._inner_after(axis), 0 if axis == space.inner[0] else space.sizes[axis])

    def place(self) -> str:
        """C++ of the element of a row that vector ``r`` begins with, or, where it is not packed, of element ``i``."""
        terms = [] if not self._constant else [str(self._constant)]
        inner = self.at.p.space.inner
        if self.packed:
            terms += [f"{self.coordinate(a)} * {self._stride(a)}" for a in self.read.axes if a not in inner]
            terms.append("t.inner(r)")
        else:
            terms += [f"{self.coordinate(a)} * {self._stride(a)}" for a in self.read.axes]
        return " + ".join(terms) or "0"

    def load(self, words: str, row: str) -> list[str]:
        """Statements that load a row, C++ of whose number is given, to ``words``."""
        number = self.read.number
        start = f"(const char*)p.tensors[{number}]"
        rows = self.read.place is not Place.FIXED
        lines = [f"const char* const from = {start}" + (f" + (u64){row} * p.strides[{number}];" if rows else ";")]
        if self.packed:
            each = self.at.vector // self.per_word
            one = f"fetch<{self.at_once}, {self.at.vector * self.bytes}>"
            line = f"{one}({words} + r * {each}, from + {self.bytes} * ({self.place()}), t.there(r));"
            lines += loop("r", self.at.vectors, [line])
        else:
            one = f"fetch<{self.bytes}, {self.bytes}>"
            place = f"from + {self.bytes} * ({self.place()})"
            lines += self._each(lambda n, there: f"{one}({words} + {n}, {place}, {there});")
        return block("", lines)

    def store(self, values: str, row: str, alone: str) -> list[str]:
        """Statements that store ``values``; ``alone``: C++ of whether this lane's team does."""
        number, dtype = self.read.number, self.dtype
        start = f"char* const to = (char*)p.tensors[{number}] + (u64){row} * {self.row_bytes}ull;"
        missing = [a for a in self.at.p.space.axes if a not in self.read.axes]
        first = [f"{self.coordinate(a)} == 0" for a in missing if a in self.at.p.space.prefix]
        if self.packed:
            each = self.at.vector // self.per_word
            put = f"put<{self.at_once}, {self.at.vector * self.bytes}>"
            stored = [
                f"u32 words[{each}];",
                f"pack_words<{dtype}, {self.at.vector}, {self.per_word}>(words, {values} + r * {self.at.vector});",
                f"{put}(to + {self.bytes} * ({self.place()}), words);",
            ]
            lines = loop("r", self.at.vectors, block(f"if ({' && '.join(['t.there(r)', *first])})", stored))
        else:
            by_vector = (
                ["t.inner(r) == 0", *first] if self.by_vector else [f"{self.coordinate(a)} == 0" for a in missing]
            )
            only = by_vector if self.read.axes else ["t.lane == 0"]
            put = f"put_one<{dtype}>(to + {self.bytes} * ({self.place()}), {values}"

            def one(n: str, there: str) -> str:
                return f"if ({' && '.join(c for c in (there, *only) if c != 'true')}) {put}[{n}]);"

            lines = self._each(one)
        return block(f"if ({alone})" if alone else "", [start, *lines])

    def _each(self, one: Callable[[str, str], str]) -> list[str]:
        """A statement for every element of a lane: of its place among them, and C++ of whether it exists."""
        if not self.read.axes:
            return [one("0", "true")]
        if self.by_vector:
            return loop("r", self.at.vectors, [one("r", "t.there(r)")])
        inner = loop("i", self.at.vector, [one(f"r * {self.at.vector} + i", "t.there(r)")])
        return loop("r", self.at.vectors, inner)

    def unpacked(self, target: str, words: str) -> str:
        """The statement that makes floats of loaded words."""
        return f"unpack<{self.dtype}, {self.count}, {self.per_word}>({target}, {words});"


def _part(of: str, over: int, within: int) -> str:
    text = of if over == 1 else f"{of} / {over}"
    return text if not within else f"{text} % {within}"
