"""Whether a feed-forward block on many rows is one launch, or its layers are left to be looked at one by one."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.graph.region import Region
from tilestream.options import Options
from tilestream.plan import margins, planner
from tilestream.plan.candidates import fallback_of, prediction_of


def as_one_launch(region: Region, options: Options, device: Device) -> bool:
    """Whether some kernel of the whole block may beat a library's kernels, as far as predictions tell.

    Where none can, on few tiles of rows most of all, a layer by itself still may: its activation or its residual, which
    a library leaves to a kernel behind, is its epilogue. A strategy by name is asked of the block.
    """
    if options.strategy != "auto":
        return True
    made = planner.proposals(region.program, region.rows, device, options)
    fallback = fallback_of(made)
    best = min((prediction_of(c) for c in made if c.pipeline is not None), default=None)
    return best is None or fallback.predicted_us is None or best <= margins.HOPELESS * fallback.predicted_us
