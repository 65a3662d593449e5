"""Whether a feed-forward block on many rows is one launch, or its layers are left to be looked at one by one."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.graph.region import Region
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Transport
from tilestream.options import Options
from tilestream.plan import margins, planner
from tilestream.plan.candidates import fallback_of, prediction_of
from tilestream.plan.passes.segments import body, cut


def as_one_launch(region: Region, options: Options, device: Device) -> bool:
    """Whether some kernel of the whole block may beat a library's kernels, as far as predictions tell.

    Where none can, on few tiles of rows most of all, a layer by itself still may: its activation or its residual, which
    a library leaves to a kernel behind, is its epilogue. So it may where its layers one by one are predicted to take
    far less. A strategy by name is asked of the block.
    """
    if options.strategy != "auto":
        return True
    made = planner.proposals(region.program, region.rows, device, options)
    fallback = fallback_of(made)
    best = min((prediction_of(c) for c in made if c.pipeline is not None), default=None)
    if best is None or fallback.predicted_us is None:
        return True
    return best <= min(margins.HOPELESS * fallback.predicted_us, _by_layers_us(region, options, device) / margins.APART)


def _by_layers_us(region: Region, options: Options, device: Device) -> float:
    """The same of both layers, each as one launch or as a library's kernels; what is in front is a kernel by itself."""
    parts = body(region.program)
    first, *_, last = parts.linears()
    made = cut(parts, [c for c in (first, last) if c], Transport.DRAM, "")
    of_each = (planner.proposals(p, region.rows, device, options) for p in cut_at_dram(made))
    return sum(min(map(prediction_of, each)) for each in of_each)
