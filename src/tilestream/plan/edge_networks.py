"""Whether a network of edges takes in the sums of what it makes, by predictions; a GPU times it as any region."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.devices import Device
from tilestream.graph.ragged.edge_networks import Joined
from tilestream.graph.region import Region
from tilestream.graph.selection import Cut
from tilestream.graph.sizes import hint
from tilestream.ir.pipeline import DTYPE_BYTES, Role
from tilestream.kernels.coefficients import sums_by_index
from tilestream.options import Options
from tilestream.plan import planner, ragged
from tilestream.plan.candidates import FALLBACK, Candidate


def pays(joined: Joined, options: Options, device: Device) -> bool:
    """Whether the best kernel of a network with its sums is predicted to be faster than the best of it without them,
    the library's among them, and a kernel for the sums."""
    whole = [c for c in _candidates(joined.cut.region, options, device) if c.strategy != FALLBACK]
    if options.target == "reference":
        return any(c.pipeline is not None for c in whole)
    apart = _best(_candidates(joined.network.region, options, device))
    together = _best(whole)
    if together is None or apart is None:
        return together is not None
    return together + _left_us(joined, device) < apart + _sums_us(joined, options, device)


def with_networks(cuts: Sequence[Cut], joined: Sequence[Joined]) -> tuple[Cut, ...]:
    """``cuts`` with networks that take in their sums in the place of what they were."""
    instead = {id(each.network): each.cut for each in joined}
    gone = {id(cut) for each in joined for cut in each.around}
    return tuple(instead.get(id(cut), cut) for cut in cuts if id(cut) not in gone)


def _candidates(region: Region, options: Options, device: Device) -> Sequence[Candidate]:
    return planner.proposals(region.program, region.rows, device, options)


def _best(candidates: Sequence[Candidate]) -> float | None:
    return min((c.predicted_us for c in candidates if c.predicted_us is not None), default=None)


def _left_us(joined: Joined, device: Device) -> float:
    """Of a kernel for what is left at nodes: it reads the sums and something beside them, and writes as much."""
    if not joined.left:
        return 0.0
    moved = 3 * sum(out.meta["val"].element_size() * hint(out.meta["val"].numel()) for out in joined.cut.outputs)
    return 1e6 * (device.launch_s + device.ramp_s + moved / device.dram_bytes_per_s)


def _sums_us(joined: Joined, options: Options, device: Device) -> float:
    """Of the kernels that make the sums where the network does not."""
    if joined.around:
        plans = [ragged.plan(cut.region, device, options) for cut in joined.around]
        return sum(p.chosen.predicted_us or 0.0 for p in plans)
    program, rows = joined.network.region.program, joined.network.region.rows
    (edge,) = {t.features * DTYPE_BYTES[t.dtype] for t in program.by_role(Role.OUTPUT)}
    return len(joined.cut.outputs) * (sums_by_index.SUM_US + rows * edge / sums_by_index.SUM_BYTES_PER_US)
