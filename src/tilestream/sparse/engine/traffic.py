"""Joins the nodes of a graph that read and write tensors to a memory."""

from __future__ import annotations

import math

import numpy as np

from tilestream.sparse.engine import layout as at
from tilestream.sparse.engine.hbm import PART
from tilestream.sparse.engine.kernels import KINDS
from tilestream.sparse.engine.machine import Machine
from tilestream.sparse.memory import Memory
from tilestream.sparse.stream.graph import Node

_BATCH = 8
_APART = 1 << 36
"""Words between the starts of arrays in memory."""


def connect(machine: Machine, memory: Memory) -> int:
    """Give the clients of a memory their kernels and the arrays' places; address of the memory's row."""
    row = np.zeros(at.MEMORY_CELLS, dtype=np.int64)
    line = memory.burst // 4
    row[at.MODE] = at.SIMPLE if memory.kind == "simple" else at.BURSTS
    row[at.CHANNELS] = memory.channels
    row[at.COST] = math.ceil(PART * memory.burst * memory.channels / memory.bandwidth_bytes_per_cycle)
    row[at.DELAY], row[at.LINE_WORDS], row[at.OUTSTANDING] = memory.latency, line, memory.outstanding
    row[at.FREE_FROM] = machine.keep("memory channels", np.zeros(memory.channels, dtype=np.int64))
    row[at.WAITERS] = machine.keep("memory waiters", np.zeros(len(machine.nodes), dtype=np.int64))
    row[at.CYCLE] = -1
    row[at.SETS] = memory.scratchpad_bytes // (memory.burst * memory.ways)
    row[at.WAYS], row[at.HIT_DELAY] = memory.ways, memory.scratchpad_latency
    slots = max(1, int(row[at.SETS]) * memory.ways)
    row[at.LINES] = machine.keep("memory lines", np.full(slots, -1, dtype=np.int64))
    row[at.STAMPS] = machine.keep("memory stamps", np.zeros(slots, dtype=np.int64))
    address = machine.keep("memory", row)
    places: dict[tuple[str, int, str], int] = {}
    for i, node in enumerate(machine.graph.nodes):
        _client(machine, i, node, memory, places, address)
    return address


def _client(
    machine: Machine, i: int, node: Node, memory: Memory, places: dict[tuple[str, int, str], int], address: int
) -> None:
    row, simple, line = machine.nodes[i], memory.kind == "simple", memory.burst // 4
    name, level = str(node.attr("tensor")), int(node.attr("level") or 0)

    def place(what: str, at_level: int = level) -> int:
        found = places.setdefault((name, at_level, what), len(places))
        return found * (_APART + 61 * line)  # not all at the first channel, nor in the first set of the scratchpad

    if node.kind == "scan" and row[at.A]:
        kind = "scan_from_memory"
        row[at.FIRST_WORD], row[at.SECOND_WORD] = place("seg"), place("crd")
        row[at.P] = row[at.Q] = -1
    elif node.kind == "array":
        kind = "array_in_batches" if simple else "array_by_lines"
        row[at.FIRST_WORD] = place("values", 0)
        row[at.P] = machine.keep(f"held {i}", np.zeros(_BATCH, dtype=np.int64)) if simple else -1
    elif node.kind == "write_crd":
        kind = "write_to_memory"
        row[at.FIRST_WORD], row[at.SECOND_WORD] = place("crd"), place("seg")
        row[at.P] = _BATCH if simple else line
    elif node.kind == "write_val":
        kind = "write_to_memory"
        row[at.FIRST_WORD] = place("values", 0)
        row[at.A], row[at.P] = 1, machine.graph.block**2 if simple else line
    else:
        return
    row[at.KIND], row[at.MEM] = KINDS.index(kind), address
    row[at.FLIGHT] = machine.keep(f"flight {i}", np.zeros(memory.outstanding, dtype=np.int64))


def moved(machine: Machine, memory: Memory) -> dict[str, int]:
    """Transfers, scratchpad hits and bytes of a run; nothing where memory costs nothing."""
    if memory.kind == "none":
        return {}
    row = machine.kept["memory"]
    transfers = int(row[at.TRANSFERS])
    return {"transfers": transfers, "hits": int(row[at.HITS]), "bytes": transfers * memory.burst}
