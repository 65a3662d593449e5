"""Where C and the partial E of a block live: registers, then shared memory, then the cluster's, then the L2, then DRAM.

FlashFuser's greedy placement (section V, Algorithm 1): as much as fits at each level. What is held follows from the
schedule as in ``ir.derive.held``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilestream.devices import Device
from tilestream.ir.axes import Level
from tilestream.studies.flashfuser.dataflow.chain import ACCUMULATOR, ELEMENT, Chain
from tilestream.studies.flashfuser.dataflow.volumes import Candidates, Counts

LEVELS = ("registers", "shared", "dsm", "l2", "dram")

ACCUMULATOR_REGISTERS = 192
"""Of a consumer thread's 240, what accumulators may take; operands, addresses and the epilogue have the others."""

CONSUMERS = 256
"""Threads of two consumer warpgroups."""

STAGES = 2
"""The least depth of the ring that operands are streamed through: one stage is multiplied, one loaded."""


@dataclass(frozen=True)
class Places:
    """Bytes of a block's C and partial E at each level, the bytes of its ring, and whether all of that is on chip."""

    c: dict[str, Counts]
    e: dict[str, Counts]
    ring: Counts
    ring_fits: Counts

    def on_chip(self) -> Counts:
        """Nothing lives in the L2 or in DRAM, and the ring fits: the paper's rule 5 with DSM the lowest level."""
        spilled = sum(part[level] for part in (self.c, self.e) for level in ("l2", "dram"))
        return self.ring_fits & (np.asarray(spilled) == 0)


def held_c(chain: Chain, at: Candidates) -> Counts:
    """Bytes of C that a block holds for later: it lives on outside of a loop of M or N that the second product's loop
    over L stands around."""
    return ELEMENT * _visited(at, "mn", "l")


def held_e(at: Candidates) -> Counts:
    """Bytes of accumulators of E: all of M and L that is visited within one round of the loop over N."""
    return ACCUMULATOR * _visited(at, "ml", "n")


def running_c(at: Candidates) -> Counts:
    """Bytes of accumulators of C while it is summed: whole along M and N where K's loop stands around theirs."""
    return ACCUMULATOR * _visited(at, "mn", "k")


def _visited(at: Candidates, axes: str, outer: str) -> Counts:
    """Elements of a tensor of ``axes`` that one round of the loop over ``outer`` visits."""
    loops = at.schedule.loops
    made = at.tiles[axes[0]] * at.tiles[axes[1]]
    for axis in axes:
        if axis in loops and outer in loops and loops.index(outer) < loops.index(axis):
            made = made * at.trips[axis]
    return made


def ring_bytes(at: Candidates) -> Counts:
    """The least ring of a block: ``STAGES`` steps of A and B, or of D (C is there)."""
    return STAGES * ELEMENT * at.tiles["k"] * (at.tiles["m"] + np.maximum(at.tiles["n"], at.tiles["l"]))


def places(chain: Chain, at: Candidates, device: Device) -> Places:
    """Greedy: each tensor takes what is left at a level before it goes on to the next, partial E first."""
    ring = ring_bytes(at)
    shared = device.shared_bytes_per_cta - ring
    blocks = at.cluster["m"] * at.cluster["n"] * at.cluster["k"]
    peers = blocks - 1 if device.clusters and Level.CLUSTER in (at.middle, at.tail) else 0
    room: dict[str, Counts] = {
        "registers": ACCUMULATOR_REGISTERS * CONSUMERS * ACCUMULATOR - running_c(at) * _while_summing(at),
        "shared": shared,
        "dsm": shared * peers,
        "l2": device.l2_bytes / at.blocks,
        "dram": np.inf,
    }
    room = {level: np.maximum(0, free) for level, free in room.items()}
    e = _deal(held_e(at), room)
    room = {level: free - e[level] for level, free in room.items()}
    # C is an operand of the second product: it is read from shared memory
    c = _deal(held_c(chain, at), {**room, "registers": 0})
    return Places(c, e, ring, shared >= 0)


def _while_summing(at: Candidates) -> Counts:
    """Whether C is being summed while E is held: N is a loop of more than one round."""
    return np.asarray(at.rounds("n")) > 1


def _deal(need: Counts, room: dict[str, Counts]) -> dict[str, Counts]:
    dealt, left = {}, need
    for level in LEVELS:
        dealt[level] = np.minimum(left, room[level])
        left = left - dealt[level]
    return dealt
