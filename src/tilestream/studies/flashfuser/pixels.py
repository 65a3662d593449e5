"""Convolution chains as row streams: pixels are rows, taps loads. What the planner predicts, by number of images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilestream.devices import Device
from tilestream.errors import PlanError
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.ir.taps import Window, im2col
from tilestream.options import Options
from tilestream.plan.candidates import Candidate
from tilestream.plan.planner import plan
from tilestream.studies.flashfuser.dataflow.chain import Chain

IMAGES = (1, 32)
DTYPE = "bf16"
APART = ("fallback", "bulk")
"""Strategies of a kernel a convolution."""


@dataclass(frozen=True)
class Pixels:
    """One chain over some images: the best kernel that fuses it, and two kernels, microseconds by the cost model.

    ``kernel`` is empty where none can hold the chain. ``floor_us``: of the tensor cores and of DRAM, the larger.
    ``timed``: measured, as ``measured.pixels`` has it; None where nobody has.
    """

    images: int
    rows: int
    kernel: str
    predicted_us: float | None
    apart_us: float | None
    floor_us: float
    timed: dict[str, Any] | None = None


def pipeline(chain: Chain, bulk: bool = True) -> Pipeline:
    """The chain with ReLU between its convolutions, as a region's program; ``x``, ``first``, ``second`` and ``y``."""
    image = chain.image
    assert image is not None
    taps, pad = image.taps, image.taps // 2
    window = Window(image.height, image.width, (taps, taps), padding=(pad, pad))
    loads: tuple[TileOp, ...]
    if image.taps == 1:
        x = Tensor.of("x", Role.INPUT, (chain.k,), DTYPE)
        loads = (TileOp("load", Tile.of("taps", chain.k, DTYPE), (), ("x",)),)
    else:
        x = Tensor.pictures("x", image.height, image.width, image.channels, DTYPE)
        loads = im2col(x, window, bulk)
    taken = loads[-1].out
    assert taken is not None
    tensors = (
        x,
        Tensor.of("first", Role.PARAMETER, (chain.n, chain.k), DTYPE),
        Tensor.of("second", Role.PARAMETER, (chain.l, chain.n), DTYPE),
        Tensor.of("y", Role.OUTPUT, (chain.l,), DTYPE),
    )
    ops = (
        *loads,
        TileOp("linear", Tile.of("c", chain.n, DTYPE), (taken.name,), ("first",)),
        TileOp("relu", Tile.of("h", chain.n, DTYPE), ("c",)),
        TileOp("linear", Tile.of("e", chain.l, DTYPE), ("h",), ("second",)),
        TileOp("store", None, ("e",), ("y",)),
    )
    return Pipeline(chain.name, tensors, (Stage.of("all", ops),))


def predicted(chain: Chain, images: int, device: Device) -> Pixels:
    """What the planner makes of a chain over ``images`` images, without a measurement."""
    rows = images * chain.m
    flops = images * chain.flops / device.tensor_flops[DTYPE]
    size = DTYPE_BYTES[DTYPE] * (images * (chain.source + chain.m * chain.l) + chain.n * (chain.k + chain.l))
    floor_us = max(flops, size / device.dram_bytes_per_s) * 1e6
    try:
        found = plan(pipeline(chain), rows, device, Options(measure=False)).candidates
    except PlanError:
        return Pixels(images, rows, "", None, None, floor_us)
    fused = _best([c for c in found if c.strategy not in APART])
    apart = _best([c for c in found if c.strategy in APART])
    return Pixels(
        images,
        rows,
        fused.name if fused is not None else "",
        fused.predicted_us if fused is not None else None,
        apart.predicted_us if apart is not None else None,
        floor_us,
    )


def _best(candidates: list[Candidate]) -> Candidate | None:
    timed = [c for c in candidates if c.predicted_us is not None and not c.rejected]
    return min(timed, key=lambda c: c.predicted_us or 0.0, default=None)


def pixels_json(found: tuple[Pixels, ...]) -> list[dict[str, Any]]:
    return [asdict(p) for p in found]
