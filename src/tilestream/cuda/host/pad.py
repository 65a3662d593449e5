"""Padded copies of matrices on the host build: the kernel's own text, a lane a thread (``lanes.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.cuda.host.build import (
    Arena,
    HostRun,
    bytes_of,
    check_ended,
    left_at,
    run_file,
    run_program,
)
from tilestream.cuda.host.lanes import compiled
from tilestream.cuda.pad import NAME, WARPS, parameters, text

ENTRY_BYTES = 32
"""Of a ``PadMatrix``, which begins with two addresses."""


def padded_on_host(
    matrices: Sequence[Tensor], columns: int, begin: int = 0, options: HostRun | None = None
) -> list[Tensor]:
    """``cuda.pad.padded`` on contiguous CPU tensors, whose rows are NaN where nothing is written.

    Args:
        begin: elements that lie in front of each matrix, so that it starts on no 16 bytes.

    Raises:
        CompileError, HostTrap, HostRace: as ``build.run_on_host``.
    """
    how = options or HostRun()
    program = compiled(text(len(matrices)), NAME, "PadParams", how)
    arena = Arena()
    held = [arena.add(bytes_of(torch.cat([m.new_full((begin,), float("nan")), m.flatten()]))) for m in matrices]
    made = [m.new_full((len(m), columns), float("nan")) for m in matrices]
    out = [arena.add(bytes_of(m)) for m in made]
    packed = bytearray(parameters(matrices, out))
    places = [ENTRY_BYTES * n + 8 * k for n in range(len(matrices)) for k in range(2)]
    addresses = [at for pair in zip((at + 2 * begin for at in held), out, strict=True) for at in pair]
    for place, at in zip(places, addresses, strict=True):
        packed[place : place + 8] = at.to_bytes(8, "little")
    words = [arena.add(bytes(packed)), len(places), *places]
    numbers = map(str, (-(-sum(map(len, matrices)) // WARPS), 32 * WARPS, 0))
    done, raw = run_file(arena, words, lambda path: run_program([str(program), str(path), *numbers], NAME, how))
    check_ended(NAME, done)
    return [left_at(raw, at, m) for at, m in zip(out, made, strict=True)]
