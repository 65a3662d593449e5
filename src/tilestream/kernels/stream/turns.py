"""How an epilogue's pass goes over its columns, a turn at a time: what it loads first, and whether turns are a loop."""

from __future__ import annotations

from tilestream.ir.tileops import OPS
from tilestream.kernels.stream.model import Phase, Place, Schedule, Step


def ahead(schedule: Schedule, step: Step, phase: Phase) -> tuple[str, ...]:
    """Streams of which a lane loads all pairs of a turn before it computes the first, as words of the operands' dtype.

    Loads and stores of shared memory keep their order, so that pairs would else go one after another, each as long as a
    load, its special functions and a store: 150 cycles.
    """
    special = any(OPS[n.kind].transcendental for n in phase.nodes)
    if not special or schedule.dtype == "f32" or schedule.loop_of(step) is not None:
        return ()
    return tuple(t for t in phase.streams if schedule.streams[t].dtype == schedule.dtype)


def looped(schedule: Schedule, step: Step, phase: Phase) -> bool:
    """Whether the turns of a pass that loads ahead are a loop: registers have no index, so those of one that works on a
    fragment or on tiles in registers are unrolled. A softplus of 256 columns is 540 instructions so, and not 2,160."""
    used = {i for n in phase.nodes for i in n.ins} | {i for op in phase.reduces for i in op.ins}
    used |= {sink.tile for sink in phase.sinks}
    bases = {schedule.views.get(tile, (tile, 0))[0] for tile in used}
    in_registers = any(schedule.places.get(tile) is Place.REGISTERS for tile in bases)
    in_registers |= any(sink.kind == "registers" for sink in phase.sinks)
    fragment = bool(phase.keep) or step.held_before(phase) in used
    return bool(ahead(schedule, step, phase)) and not in_registers and not fragment
