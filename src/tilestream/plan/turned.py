"""Weights that kernels read only from copies made before a call: those that lie ``[in, out]``, as in Hugging Face's
GPT-2, and those whose bf16 parts are multiplied (``ir.float32``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tilestream.graph.lowering import PARTS
from tilestream.graph.region import Region
from tilestream.graph.rewrites.aligned_rows import PER_16_BYTES
from tilestream.graph.sizes import hint
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline
from tilestream.kernels.coefficients.shared_tile import H200_GENERATED
from tilestream.options import Options
from tilestream.plan.candidates import Candidate

WEIGHT_BYTES_PER_S = 0.13e12
"""Of a weight that is turned: 64 CTAs (``kernels/operators/turn.py``), each 2 KB a microsecond, the time of a load and
a store that wait for each other. An assumption: nothing but small weights was timed."""


@dataclass(frozen=True)
class Turned:
    """Names of a region's weights that are copied, and the microseconds that this takes: all are in one launch, side by
    side, so it is those of the largest. ``as_they_lie``: whether bulk copies could read them all where they are."""

    weights: tuple[str, ...] = ()
    us: float = 0.0
    as_they_lie: bool = False


NONE = Turned()


def turned(region: Region, options: Options) -> Turned:
    """What is copied before each call of ``region``: nothing where the user says that weights are constant, or it has
    none."""
    if options.constant_weights or region.program.ragged:
        return NONE
    given = [n.meta["val"] for n in region.graph.graph.nodes if n.op == "placeholder"]
    found, sizes, as_they_lie = [], [], True
    for operand in region.parameters:
        tensor, fake = region.program.tensor(operand.tensor), given[operand.index]
        if len(tensor.shape) != 2 or fake.dim() < 2:
            continue
        outer, inner = (hint(s) for s in fake.stride()[-2:])
        if ("t",) in operand.steps:
            outer, inner = inner, outer
        if (inner != 1 and outer == 1) or operand.steps[-1:] == PARTS:
            found.append(operand.tensor)
            sizes.append(DTYPE_BYTES[tensor.dtype] * prod(tensor.shape))
            begins = [step[1] for step in operand.steps if step[0] == "rows"]
            aligned = not any(int(n) % PER_16_BYTES for n in (inner, *begins))
            as_they_lie &= operand.steps[-1:] != PARTS and aligned
    return Turned(tuple(found), 1e6 * copies_s(sizes), as_they_lie) if found else NONE


def lying(program: Pipeline, weights: Sequence[str]) -> Pipeline:
    """``program`` that reads ``weights`` as they lie, by columns."""
    return replace(program, tensors=tuple(replace(t, by_columns=t.name in weights) for t in program.tensors))


def reads_them(candidate: Candidate) -> bool:
    """Whether its pipeline reads such weights as they lie, without a copy."""
    return candidate.pipeline is not None and any(t.by_columns for t in candidate.pipeline.tensors)


def copies_s(sizes: Sequence[int]) -> float:
    """Seconds of the launch that turns weights of so many bytes each, side by side; none where there is none."""
    return H200_GENERATED.gap_s + max(sizes) / WEIGHT_BYTES_PER_S if sizes else 0.0
