"""One workload of a reproduction, and as plain data: bytes and floors, the paper's choice, ours, and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilestream.devices import Device
from tilestream.ir.text import show
from tilestream.studies.flashfuser import paper
from tilestream.studies.flashfuser.ablation import Ablation
from tilestream.studies.flashfuser.dataflow.chain import Chain
from tilestream.studies.flashfuser.dataflow.volumes import Candidates, printed
from tilestream.studies.flashfuser.pixels import Pixels, pixels_json
from tilestream.studies.flashfuser.search import minmax
from tilestream.studies.flashfuser.search.kernels import Search


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        papers: the best few by the paper's rules and cost, by mapping of the gate (``none`` without one), each with
            the seconds that it took to find.
        ours: the compiler's search over its kernels; None if it has none for the chain.
        pixels: of convolutions, as row streams, by number of images.
        timed: measured, warm microseconds: ``ours_us`` and ``best_other_us``, ``source``; None where nobody has.
    """

    workload: paper.Workload
    papers: dict[str, tuple[minmax.Found, float]]
    ours: Search | None
    ablation: Ablation | None
    timed: dict[str, Any] | None
    pixels: tuple[Pixels, ...] = ()

    @property
    def saved(self) -> float:
        """Share of the DRAM bytes of two kernels that one saves at best."""
        chain = self.workload.chain
        return 1 - chain.fused_bytes / chain.unfused_bytes


def workload_json(r: Row, device: Device) -> dict[str, Any]:
    """One workload as plain data: bytes and floors, the paper's choice, ours, and times."""
    chain = r.workload.chain
    made: dict[str, Any] = {
        "key": r.workload.key,
        "model": r.workload.model,
        "family": r.workload.family,
        "sizes": {a: chain.size(a) for a in "mnkl"},
        "fused_bytes": chain.fused_bytes,
        "unfused_bytes": chain.unfused_bytes,
        "saved": r.saved,
        "floor_us": chain.fused_bytes / device.dram_bytes_per_s * 1e6,
        "unfused_floor_us": chain.unfused_bytes / device.dram_bytes_per_s * 1e6,
        "papers_search_seconds": paper.SEARCH_SECONDS.get(r.workload.key, (None, None))[0],
        "papers_choice": [_papers(name, chain, found, s) for name, (found, s) in r.papers.items()],
        "timed": r.timed,
    }
    if r.pixels:
        made["pixels"] = pixels_json(r.pixels)
    if r.ours is not None:
        best = r.ours.best
        made["ours"] = {
            "kernel": str(best),
            "predicted_us": best.predicted_us,
            "in_order_us": r.ours.in_order.predicted_us,
            "in_order_kernel": str(r.ours.in_order),
            "candidates": len(r.ours.kernels),
            "seconds": r.ours.seconds,
            "pipeline": show(best.pipeline),
        }
    if r.ablation is not None:
        a = r.ablation
        made["predicted"] = {
            "unfused_us": a.unfused,
            "middles": {str(k): v for k, v in a.middles.items()},
            "tails": {str(k): v for k, v in a.tails.items()},
            "random_us": a.random,
        }
    return made


def _papers(name: str, chain: Chain, found: minmax.Found, seconds: float) -> dict[str, Any]:
    made: dict[str, Any] = {"gate": name, "legal": found.legal, "tied": found.tied, "seconds": seconds}
    if not found.top:
        return {**made, "schedule": None}
    first = found.top[0]
    c, t = first.flow.cluster, first.flow.tiles
    return made | {
        "schedule": str(first.flow.schedule),
        "cluster": [c.m, c.n, c.k, c.l],
        "tiles": [t.m, t.n, t.k, t.l],
        "us": first.seconds * 1e6,
        "limit": first.limit,
        "bytes": first.volumes,
        "printed_bytes": sum(printed(chain, Candidates.of(chain, first.flow)).values()),
    }
