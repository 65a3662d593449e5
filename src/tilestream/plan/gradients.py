"""Weight and bias gradients of many rows as stationary sums: a stage a layer, the SMs dealt out among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from tilestream.devices import Device
from tilestream.errors import PlanError
from tilestream.ir.axes import ROWS, Axis, Level, Loop, Spread, along
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.gradients.layouts import COLUMNS, GROUPS
from tilestream.kernels.gradients.model import MOST_CHUNKS

STRATEGY = "stationary"
LIBRARY_SHARE = 0.6
"""Of the tensor cores' rate, what a library reaches where rows are what is summed (H200, 256 x 256: 0.45 to 0.6)."""
STEP_BYTES = 4096
"""What a slot costs beside its bytes, in bytes: barriers and an instruction's latency. Assumed, not fitted."""


@dataclass(frozen=True)
class Gradient:
    """``weight[out, k] = dY.T X`` and, where ``bias`` is a name, ``bias[out] = sum of dY``: of one linear layer.

    Attributes:
        gradient, input: names of dY [rows, out] and X [rows, k]; ``dtype`` is theirs.
        weight_dtype, bias_dtype: that the results are rounded to.
    """

    gradient: str
    input: str
    weight: str
    out: int
    k: int
    bias: str = ""
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    bias_dtype: str = "bf16"
    source: str = ""

    @property
    def groups(self) -> tuple[int, int]:
        """Warpgroups along out, where it has columns for two, else along k, where they need two."""
        if self.out > COLUMNS:
            return GROUPS, 1
        return 1, GROUPS if self.k > MOST_CHUNKS * COLUMNS else 1

    @property
    def parts(self) -> tuple[int, int]:
        """CTAs that a block each of the gradient takes: 128 x 256, or 64 x 512."""
        along_out, along_k = self.groups
        return ceil(self.out / (along_out * COLUMNS)), ceil(self.k / (along_k * MOST_CHUNKS * COLUMNS))


def weight_gradients(name: str, layers: Sequence[Gradient], device: Device) -> Pipeline:
    """All of ``layers`` in one launch.

    Splits of the rows are dealt out one by one to the layer whose CTAs have most to read: all end at about one time.

    Raises:
        PlanError: the layers' blocks alone are more than the device has SMs; says how many each needs.
    """
    needed = [prod(layer.parts) for layer in layers]
    if sum(needed) > device.sms:
        raise PlanError(
            f"gradients {name!r} need {' + '.join(map(str, needed))} = {sum(needed)} blocks of 128 x 256 >"
            f" {device.sms} SMs of {device.name}",
            "give them in several launches, or leave wide layers to the library",
        )
    splits, left = [1] * len(layers), device.sms - sum(needed)
    while True:
        by_load = sorted(range(len(layers)), key=lambda i: -_slot_bytes(layers[i]) / splits[i])
        first = by_load[0]
        if needed[first] > left:
            break
        splits[first], left = splits[first] + 1, left - needed[first]
    tensors: dict[str, Tensor] = {}
    stages = []
    for n, (layer, split) in enumerate(zip(layers, splits, strict=True)):
        stage, made = _stage(n, layer, split)
        stages.append(stage)
        tensors |= {t.name: t for t in made if t.name not in tensors}
    return Pipeline(name, tuple(tensors.values()), tuple(stages), strategy=STRATEGY)


def _slot_bytes(layer: Gradient) -> int:
    """What a CTA reads for 64 rows."""
    (along_out, along_k), (_, k_parts) = layer.groups, layer.parts
    chunks = along_out + along_k * ceil(ceil(layer.k / COLUMNS) / (k_parts * along_k))
    return TILE_ROWS * COLUMNS * chunks * DTYPE_BYTES[layer.dtype] + STEP_BYTES


def _stage(n: int, layer: Gradient, splits: int) -> tuple[Stage, tuple[Tensor, ...]]:
    """The stage of layer ``n``, and its tensors. What two layers read has the axes of the first."""
    out, k = Axis(f"o{n}", layer.out), Axis(f"k{n}", layer.k)
    rows = ROWS.name
    dy, x = Tile(f"dy@{n}", (ROWS, out), layer.dtype), Tile(f"x@{n}", (ROWS, k), layer.dtype)
    dw, db = Tile(f"dw@{n}", (out, k), "f32"), Tile(f"db@{n}", (out,), "f32")
    made = [
        TileOp("load", dy, (), (along(layer.gradient, (rows, out.name)),), source=layer.source),
        TileOp("load", x, (), (along(layer.input, (rows, k.name)),), source=layer.source),
        TileOp("product", dw, (along(dy.name, (rows, out.name)), along(x.name, (rows, k.name))), source=layer.source),
        TileOp("store", None, (along(dw.name, (out.name, k.name)),), (along(layer.weight, (out.name, k.name)),)),
    ]
    tensors = [
        Tensor(layer.gradient, Role.INPUT, (ROWS, out), layer.dtype),
        Tensor(layer.input, Role.INPUT, (ROWS, k), layer.dtype),
        Tensor(layer.weight, Role.OUTPUT, (out, k), layer.weight_dtype),
    ]
    if layer.bias:
        made += [
            TileOp("sum", db, (along(dy.name, (rows, out.name)),), source=layer.source),
            TileOp("store", None, (along(db.name, (out.name,)),), (along(layer.bias, (out.name,)),)),
        ]
        tensors.append(Tensor(layer.bias, Role.OUTPUT, (out,), layer.bias_dtype))
    directions = (
        (Level.GRID, layer.parts[0], out.name), (Level.GRID, layer.parts[1], k.name), (Level.GRID, splits, rows),
        (Level.WARPGROUP, layer.groups[0], out.name), (Level.WARPGROUP, layer.groups[1], k.name),
    )  # fmt: skip
    mesh = tuple(Spread(level, size, (axis,)) for level, size, axis in directions if size > 1)
    return Stage(f"layer{n}", tuple(made), (Loop(rows, TILE_ROWS),), mesh), tuple(tensors)


def library(layers: Sequence[Gradient], rows: int, device: Device) -> Counts:
    """The same by a library: a product a layer whose rows it splits, a kernel that adds up what comes of them, and a
    sum that reads dY once more."""
    made = []
    for layer in layers:
        rate, size = LIBRARY_SHARE * device.tensor_flops[layer.dtype], DTYPE_BYTES[layer.dtype]
        product = (
            Amount("tensor", 2 * rows * layer.out * layer.k, rate),
            Amount("dram", rows * (layer.out + layer.k) * size, device.dram_bytes_per_s),
        )
        launches = Amount("launch", 2 * device.launch_s)
        made.append(Counts(layer.weight, (Counts("product", product, max), launches, bias([layer], rows, device))))
    return Counts("kernels of a library", tuple(made))


def bias(layers: Sequence[Gradient], rows: int, device: Device) -> Amount:
    """The least that sums of their own take for the biases: dY read once."""
    read = sum(rows * layer.out * DTYPE_BYTES[layer.dtype] for layer in layers if layer.bias)
    return Amount("dram", read, device.dram_bytes_per_s)
