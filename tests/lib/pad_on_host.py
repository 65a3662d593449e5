"""Padded copies of matrices on the host build: the kernel's own text, a lane a thread (``lanes.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.cuda.host.build import OF_FILE, Arena, HostRun, bytes_of, left_at
from tilestream.cuda.host.lanes import run_lanes
from tilestream.cuda.pad import NAME, WARPS, parameters, text


def padded_on_host(
    matrices: Sequence[Tensor], columns: int, begin: int = 0, options: HostRun | None = None
) -> list[Tensor]:
    """``cuda.pad.padded`` on contiguous CPU tensors, whose rows are NaN where nothing is written.

    Args:
        begin: elements that lie in front of each matrix, so that it starts on no 16 bytes.

    Raises:
        CompileError, HostTrap, HostRace: as ``build.run_on_host``.
    """
    arena = Arena()
    held = [arena.add(bytes_of(torch.cat([m.new_full((begin,), float("nan")), m.flatten()]))) for m in matrices]
    made = [m.new_full((len(m), columns), float("nan")) for m in matrices]
    out = [arena.add(bytes_of(m)) for m in made]
    at = {id(m): OF_FILE + place + 2 * begin for m, place in zip(matrices, held, strict=True)}
    at |= {id(m): OF_FILE + place for m, place in zip(made, out, strict=True)}
    packed = parameters(matrices, made, address=lambda t: at[id(t)])
    shape = (-(-sum(map(len, matrices)) // WARPS), 32 * WARPS, 0)
    raw, ended = run_lanes(text(len(matrices)), NAME, "PadParams", shape, arena, packed, options or HostRun())
    ended()
    return [left_at(raw, at, m) for at, m in zip(out, made, strict=True)]
