"""What reading and writing tensors costs: memory models, for the fast engine.

A node that reads or writes a tensor sends requests. All requests of a graph meet in one memory, which serves them in
order of time. Repeats, accumulators and dense levels need no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilestream.errors import SparseError


@dataclass(frozen=True)
class Memory:
    """A memory model; ``NO_MEMORY``, ``SIMPLE_HBM`` and ``hbm()`` are three.

    Attributes:
        kind: ``"none"``: tensors are there at once. ``"simple"``: the released code's model: words of 4 bytes, dealt
            to the channels in turn whatever their address; a client waits for what it asked for. ``"hbm"``: bursts,
            mapped to channels by address, with several in flight for each client.
        channels: how many work side by side.
        bandwidth_bytes_per_cycle: of all channels together.
        latency: cycles from the end of a transfer to its arrival.
        burst: bytes a transfer moves.
        outstanding: transfers that a client may have in flight.
        scratchpad_bytes: an on-chip cache in front of the channels, of ``ways`` ways, least recently used first out;
            0: none. Reads that hit cost ``scratchpad_latency`` cycles and no bandwidth; writes go through.

    Raises:
        SparseError: a number that no memory has.
    """

    kind: Literal["none", "simple", "hbm"] = "none"
    channels: int = 8
    bandwidth_bytes_per_cycle: float = 16.0
    latency: int = 16
    burst: int = 4
    outstanding: int = 1
    scratchpad_bytes: int = 0
    scratchpad_latency: int = 2
    ways: int = 8

    def __post_init__(self) -> None:
        if self.kind not in ("none", "simple", "hbm"):
            raise SparseError(f"memory of kind {self.kind!r}", "use none, simple or hbm")
        for name in ("channels", "latency", "burst", "outstanding", "scratchpad_latency", "ways"):
            if getattr(self, name) < 1:
                raise SparseError(f"memory with {name}={getattr(self, name)}", "use 1 or more")
        if self.burst % 4:
            raise SparseError(f"bursts of {self.burst} bytes", "use a multiple of 4, the bytes of a word")
        if self.bandwidth_bytes_per_cycle <= 0:
            raise SparseError(f"a bandwidth of {self.bandwidth_bytes_per_cycle}", "use more than 0 bytes a cycle")
        if self.scratchpad_bytes and self.scratchpad_bytes < self.burst * self.ways:
            raise SparseError(
                f"a scratchpad of {self.scratchpad_bytes} bytes holds no set of {self.ways} bursts",
                f"use {self.burst * self.ways} bytes or more, or 0 for none",
            )


NO_MEMORY = Memory()
"""Tensors are there at once."""

SIMPLE_HBM = Memory("simple", channels=8, bandwidth_bytes_per_cycle=16.0, latency=16, burst=4)
"""The released code's: 8 channels, a word of each every 2 cycles, 16 cycles later; 16 bytes a cycle at best.

Compressed scanners ask for the two bounds of a segment, then for coordinates 8 at a time, which leave together when
they have come; arrays ask for 8 values, or for those before a stop; coordinate writers write 8 at a time, value
writers one. (FuseFlow's artifact, ``hbm_context.rs``; the paper's text says Ramulator 2.0.)
"""


def hbm(
    *,
    channels: int = 16,
    bandwidth_bytes_per_cycle: float = 256.0,
    latency: int = 100,
    burst: int = 64,
    scratchpad_bytes: int = 0,
    outstanding: int = 64,
    scratchpad_latency: int = 2,
    ways: int = 8,
) -> Memory:
    """A memory of these numbers: see ``Memory``.

    A client keeps the burst that it used last, so that a stream of neighbours costs a transfer a burst. Scanners wait
    for the bounds of a segment; coordinates, values and what is written stream, up to ``outstanding`` at a time.
    """
    return Memory(
        "hbm", channels, bandwidth_bytes_per_cycle, latency, burst, outstanding, scratchpad_bytes,
        scratchpad_latency, ways,
    )  # fmt: skip
