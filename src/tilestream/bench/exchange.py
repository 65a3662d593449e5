"""A collective by itself in a kernel, many times over: what its time is taken with, and its values are checked by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from math import ceil

from tilestream.errors import VerifyError
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers
from tilestream.kernels.stream.layout import SHARED_LIMIT

BLOCK_BYTES = 2048
"""fp32 of 64 rows x 8 columns: tiles of sums are whole blocks."""
MOST_BLOCKS = 32
THREADS = 256
MOST_BOX_ROWS = 256


class Kind(StrEnum):
    """FlashFuser's primitives, their counterparts through the L2, and a cluster's barrier alone.

    ``GATHER_DSM`` and ``RING_DSM`` are its shuffle, each part sent to all or handed on around a ring; ``SCATTER_DSM``
    its reduce-scatter; ``ALL_ADD`` and ``ALL_MUL`` its all-exchange; ``ADD_MEMORY`` its inter-cluster reduce.
    """

    BARRIER = "barrier"
    GATHER_DSM = "gather_dsm"
    RING_DSM = "ring_dsm"
    GATHER_L2 = "gather_l2"
    SCATTER_DSM = "scatter_dsm"
    SCATTER_L2 = "scatter_l2"
    ALL_ADD = "all_add"
    ALL_MUL = "all_mul"
    ADD_MEMORY = "add_memory"


GATHERS = (Kind.GATHER_DSM, Kind.RING_DSM, Kind.GATHER_L2)
THROUGH_L2 = (Kind.GATHER_L2, Kind.SCATTER_L2, Kind.ADD_MEMORY)


@dataclass(frozen=True)
class Exchange:
    """``kind`` among ``peers`` CTAs, each of which has ``tile_bytes``: 16-bit parts of gathers, fp32 of sums.

    It is a ``compile.Source``: its text, for NVRTC and for the host build alike.

    Raises:
        VerifyError: a tile is no whole number of blocks, or does not fit shared memory, registers or a bulk copy.
    """

    kind: Kind
    peers: int
    tile_bytes: int

    def __post_init__(self) -> None:
        most = 32_768 if self.gathers else MOST_BLOCKS * BLOCK_BYTES
        unit = 1024 if self.gathers else BLOCK_BYTES
        if self.tile_bytes % unit or not unit <= self.tile_bytes <= most:
            raise VerifyError(f"a tile of {self.kind} has {self.tile_bytes} bytes", f"use {unit} to {most} by {unit}")
        if self.shared_bytes > SHARED_LIMIT:
            raise VerifyError(
                f"{self.kind} of {self.peers} x {self.tile_bytes} bytes takes {self.shared_bytes} > {SHARED_LIMIT}"
                " bytes of shared memory",
                "use smaller tiles or fewer CTAs",
            )

    @property
    def gathers(self) -> bool:
        return self.kind in GATHERS

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 1 if self.kind in THROUGH_L2 else self.peers

    @property
    def blocks(self) -> int:
        return 1 if self.gathers else self.tile_bytes // BLOCK_BYTES

    @property
    def received_bytes(self) -> float:
        """What a CTA takes in of the others in one exchange; of ``ADD_MEMORY``, what it adds, rounded to 16 bits."""
        others = self.peers - 1
        if self.kind is Kind.BARRIER:
            return 0.0
        if self.kind is Kind.ADD_MEMORY:
            return self.tile_bytes / 2
        return others * self.tile_bytes / (self.peers if self.kind in (Kind.SCATTER_DSM, Kind.SCATTER_L2) else 1)

    @property
    def error_bound(self) -> float:
        """What an element may be off, over the sum of its terms' magnitudes (``ALL_MUL``: over the product).

        Each of ``n`` roundings takes a factor of at most ``1 + u`` (Higham, Accuracy and Stability of Numerical
        Algorithms, 3.1): whatever the order, ``(1 + u)^n - 1``. fp32 in registers is rounded at all operations but the
        first, ``u = 2^-24``; ``ADD_MEMORY`` rounds each term to bf16 and then the sum at each addition but that to
        zero, ``u = 2^-8``.
        """
        if self.gathers or self.kind is Kind.BARRIER:
            return 0.0
        if self.kind is Kind.ADD_MEMORY:
            return (1 + 2.0**-8) ** self.peers - 1
        return (1 + 2.0**-24) ** (self.peers - 1) - 1

    @property
    def room_bytes(self) -> int:
        """Of shared memory that the exchange goes through, once."""
        return {
            Kind.BARRIER: 0,
            Kind.SCATTER_L2: 0,
            Kind.SCATTER_DSM: self.peers * ceil(self.blocks / self.peers) * BLOCK_BYTES,
            Kind.ADD_MEMORY: self.tile_bytes // 2,
        }.get(self.kind, self.peers * self.tile_bytes)

    @property
    def _stage(self) -> int:
        """Where an own part waits that goes through the L2: behind the rooms."""
        turns = self.kind in (Kind.SCATTER_DSM, Kind.ALL_ADD, Kind.ALL_MUL)
        return self.room_bytes * (2 if turns else 1)

    @property
    def _bars(self) -> int:
        return self._stage + (self.tile_bytes if self.kind is Kind.GATHER_L2 else 0)

    @property
    def shared_bytes(self) -> int:
        return self._bars + 8 * (self.peers + 2)

    @property
    def name(self) -> str:
        return f"tilestream_{self.kind}"

    @property
    def register_splits(self) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)

    @property
    def add_width(self) -> int:
        """Columns of a box that is added to memory."""
        return max(w for w in range(8, 65, 8) if 8 * self.blocks % w == 0)

    @property
    def text(self) -> str:
        constants = {
            "PEERS": self.peers, "BLOCKS": self.blocks, "ROOM_BYTES": self.room_bytes, "WIDTH": self.add_width,
        }  # fmt: skip
        words = {"PART": self.tile_bytes, "ROOM": 0, "STAGE": self._stage, "BARS": self._bars}
        lines = [f"  static constexpr int {name} = {value};" for name, value in constants.items()]
        lines += [f"  static constexpr u32 {name} = {value};" for name, value in words.items()]
        kernel = f"TS_CLUSTER_KERNEL({THREADS}, {self.cluster})" if self.cluster > 1 else f"TS_KERNEL({THREADS})"
        return "\n".join(
            [
                '#include "ptx.cuh"', '#include "math.cuh"', '#include "tile.cuh"', '#include "collectives.cuh"', "",
                "namespace ts {", PARAMS.text, "}", _loop(), "", "namespace ts {", "", "struct E {",
                f"  static constexpr Exchange KIND = {self.kind.name};", *lines, "};", "", "}  // namespace ts", "",
                f"{kernel} {self.name}(const TS_PARAM ts::Params p) {{", "  TS_SHARED(smem);",
                "  ts::run_exchange<ts::E>(p, smem);", "}", "",
            ]
        )  # fmt: skip

    def between_bytes(self, ctas: int) -> int:
        """Of memory that ``ctas`` CTAs exchange through: two turns; of ``ADD_MEMORY`` the sums, ``[64 rows a group,
        columns]`` in bf16."""
        return ctas // self.peers * self.tile_bytes // 2 if self.kind is Kind.ADD_MEMORY else 2 * ctas * self.tile_bytes

    def out_bytes(self, ctas: int) -> int:
        return ctas * self.tile_bytes * (self.peers if self.gathers else 1)


@lru_cache(maxsize=1)
def _loop() -> str:
    """``exchange.cuh``, which is a part of the kernel's text: no other kernel includes it."""
    return (files("tilestream.bench") / "exchange.cuh").read_text(encoding="utf-8").replace("#pragma once\n", "")


PARAMS = Struct(
    "Params",
    (
        Field(MAP, "map", note="of GATHER_L2: two times all parts, as rows of 128 bytes; of ADD_MEMORY: the sums"),
        Field("const float*", "tiles", note="of sums [CTAs, BLOCKS, 128 threads, 4]"),
        Field("const u32*", "parts", note="of gathers [CTAs, PART / 4]"),
        Field("void*", "out", note="sums as the tiles lie, of a CTA's own blocks or of all; parts [CTAs, PEERS, PART]"),
        Field("void*", "between", note="memory that is exchanged through: two times all parts, or all tiles"),
        *pointers("flags", type="u64*"),
        *pointers("dump", type="ExchangeDump*"),
        Field("u64", "limit_ns"),
        Field("int", "times"),
    ),
)


def params(
    e: Exchange, tensor_map: bytes, tiles: int, out: int, between: int, flags: int, dump: int, limit_ns: int, times: int
) -> bytes:
    """The bytes of ``Params``; ``tiles`` are parts of gathers, or tiles of sums."""
    return PARAMS.pack(
        map=tensor_map, tiles=0 if e.gathers else tiles, parts=tiles if e.gathers else 0, out=out, between=between,
        flags=flags, dump=dump, limit_ns=limit_ns, times=times,
    )  # fmt: skip


def map_sizes(e: Exchange, ctas: int) -> tuple[int, int, int, int, int]:
    """Columns, rows, bytes of a row, rows and columns of a box: of the one tensor map, over what is between."""
    if e.kind is Kind.ADD_MEMORY:
        return 8 * e.blocks, 64 * ctas // e.peers, 16 * e.blocks, 64, e.add_width
    return 64, 2 * ctas * e.tile_bytes // 128, 128, min(MOST_BOX_ROWS, e.tile_bytes // 128), 0
