"""A kernel that a header holds: what it is compiled for, its argument, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilestream.errors import InputError, TilestreamError
from tilestream.kernels.kernel import NO_ROW, Frame, Launchable, halves
from tilestream.kernels.parts.params import Struct
from tilestream.kernels.parts.source import BesideSource, Call

WORDS = 4
"""64-bit words of the record that ``give_up`` of lanes.cuh leaves: claimed | what, where | rows | found."""
NoRow = Callable[[int, int, int, int], str]
"""Says of what, and where in it, an index names no row, how many rows there are, and what it is."""


@dataclass(frozen=True, eq=False)
class LaneKernel(Launchable):
    """Made once for each shape, and known by itself.

    Args:
        argument: what it takes; ``record`` among its fields is where it says why it gave up.
        told: what that says; None: it has none.
        second: CTAs along the grid's second axis.
        warpgroups: consumers of a CTA, besides its producer; 0: its warps are plain ones (lanes.cuh).
    """

    name: str
    text: str
    argument: Struct
    warps: int
    shared_bytes: int = 0
    persistent: bool = False
    told: NoRow | None = None
    second: int = 1
    warpgroups: int = 0

    @property
    def frame(self) -> Frame:
        threads, words = 32 * self.warps, WORDS if self.told is not None else 0
        lanes = 0 if self.warpgroups else threads
        return Frame(1, "as many as have work", threads, 1, self.warpgroups, False, words, self.second, lanes)

    @property
    def source(self) -> BesideSource:
        return BesideSource(self.name, self.text, self.shared_bytes)

    def grid(self, rows: int, sms: int) -> int:
        """As many CTAs as the call says that have work."""
        return rows

    def pack(self, source: BesideSource, call: Call) -> bytes:
        record = {} if self.told is None else {"record": call.dump}
        return self.argument.pack(**call.values, **record)

    def error(self, words: Sequence[int]) -> TilestreamError:
        return InputError(self.describe(words), NO_ROW)

    def describe(self, words: Sequence[int]) -> str:
        assert self.told is not None, "it leaves no record"
        return no_row(words, self.told)


def no_row(words: Sequence[int], told: NoRow) -> str:
    """What a record of ``give_up`` says."""
    return told(*halves(words, 2)[1], words[2], words[3])


def text_of(
    header: str,
    argument: Struct,
    defines: Mapping[str, Any] | None = None,
    before: str = "",
    products: Sequence[str] = (),
) -> str:
    """The source of a kernel that a header holds: what it is compiled for, its argument, the header.

    Args:
        before: another header, which the argument needs.
        products: of tensor cores (``parts.mma``); the host's machine has all of them.
    """
    lines = [f"#define {name} {value}" for name, value in (defines or {}).items()]
    if products:
        headers = [f'#include "{name}.cuh"' for name in ("ptx", "math", "tile")]
        lines = [*headers, *lines, "namespace ts {", "#ifndef TS_HOST", *products, "#endif", "}"]
    lines += [f'#include "{before}"'] if before else []
    return "\n".join([*lines, argument.text, f'#include "{header}"', ""])
