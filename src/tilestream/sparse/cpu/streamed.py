"""A region whose result is too large for an array: it runs as streams, and the result stays sparse."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from tilestream.sparse.cpu.held import Held, as_tensor, flat, stored
from tilestream.sparse.program import Program
from tilestream.sparse.region import Region


class Streamed:
    """``arrays``: names of what other regions read as dense arrays."""

    def __init__(self, program: Program, region: Region, arrays: Collection[str]) -> None:
        self.program, self.region, self.arrays = program, region, arrays
        self.source = f"# {region.name} runs as streams"

    def run(self, have: Mapping[str, Held], dtype: torch.dtype) -> dict[str, Held]:
        names = dict.fromkeys(n for n, _ in self.region.inputs.values() if isinstance(n, str))
        made = self.program.stream(self.region, {n: as_tensor(n, have[n]) for n in names})
        fills = self.region.fills
        return {n: flat(t, dtype, fills.get(n, 0.0)) if n in self.arrays else stored(t, dtype) for n, t in made.items()}
