"""The kernels that the compiler can make of a chain, by the compiler's prediction: no choice is without a kernel."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tilestream.devices import Device
from tilestream.errors import PlanError
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.product.shared_tile import Tail
from tilestream.options import Options
from tilestream.plan.candidates import Candidate
from tilestream.plan.passes.share_tile import Split
from tilestream.plan.planner import proposals
from tilestream.studies.flashfuser.dataflow.chain import Chain
from tilestream.studies.flashfuser.generated import program, split_of
from tilestream.studies.flashfuser.pixels import APART, pipeline


@dataclass(frozen=True)
class Kernel:
    """A candidate of the planner that is one kernel, with its predicted microseconds, weights from DRAM.

    ``split``: how CTAs share a tile; None where none is shared.
    """

    candidate: Candidate
    pipeline: Pipeline
    predicted_us: float
    split: Split | None

    @property
    def in_order(self) -> bool:
        """Whether partial results are added in a fixed order, so that the same input gives the same bits."""
        return self.split is None or self.split.tail is not Tail.REDUCE_ADD

    def __str__(self) -> str:
        return self.candidate.name


@dataclass(frozen=True)
class Search:
    """What the compiler's search of ``chain`` found: all kernels that fuse it, the best predicted one first."""

    chain: Chain
    device: str
    kernels: tuple[Kernel, ...]
    seconds: float

    @property
    def best(self) -> Kernel:
        return self.kernels[0]

    @property
    def in_order(self) -> Kernel:
        """The best that adds in a fixed order."""
        return next(k for k in self.kernels if k.in_order)


def search(chain: Chain, device: Device) -> Search:
    """Every kernel for ``chain`` on ``device`` that ``effort="exhaustive"`` asks for, sums in any order among them.

    Raises:
        PlanError: no kernel fuses the chain; says why.
    """
    started = time.perf_counter()
    asked = program(chain) if chain.image is None else pipeline(chain)
    found = proposals(asked, chain.m, device, Options(effort="exhaustive", any_order=True))
    fused = [
        Kernel(c, c.pipeline, c.predicted_us, split_of(f"{c.strategy} {c.detail}", chain.m))
        for c in found
        if c.pipeline is not None and c.predicted_us is not None and c.usable and c.strategy not in APART
    ]
    if not fused:
        reasons = "; ".join(dict.fromkeys(f"{c.name}: {c.rejected}" for c in found if c.rejected))
        raise PlanError(f"no kernel of {device.name!r} fuses chain {chain.name!r} ({reasons})", "use two products")
    best_first = tuple(sorted(fused, key=lambda k: k.predicted_us))
    return Search(chain, device.name, best_first, time.perf_counter() - started)
