"""How candidates are made of a region's program: which passes, and with what, under each strategy.

Those for few rows, which depend on how many there are, have a file of their own: ``few_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.verify import WIDEST
from tilestream.kernels.product.block import MOST_ROWS
from tilestream.kernels.product.finder import is_block, is_projection
from tilestream.kernels.product.tiled_block.model import is_tileable
from tilestream.options import Options
from tilestream.plan.passes import forms, settings
from tilestream.plan.passes.cleaning import merge_common_ops, order_memory_ops, remove_dead_ops
from tilestream.plan.passes.cuts import cut_vertical, split_bulk, split_columns, split_spatial
from tilestream.plan.passes.tile_block import tile_block
from tilestream.plan.passes.verified import Pass, verified

KERNEL_A_LAYER = "bulk"
IN_PLACE = "wide layers in place"
HALF = "half of the SMs"
FEW_LAUNCHES = 2.0
"""An H200's L2 fills the shared memory of its 132 SMs in 3.4 us, which is 1.4 of its launches; an A100's takes 1.6."""
COLUMNS = (64, 128)
"""Of a layer that is spread over SMs, those that one of them makes."""


@dataclass(frozen=True)
class Recipe:
    """How one candidate is made: the splitting pass, steps of room in its queues, placements by preference, products
    in flight, whether weights stay where they fit, and which part of the SMs it runs on: all, a half. Where tiles are
    ``dealt`` over the grid, the splitting pass says all of it."""

    strategy: str
    split: Callable[..., Pipeline]
    steps: int = 2
    detail: str = ""
    dims: tuple[int, ...] = (0, 1)
    in_flight: int = 2
    resident: bool = True
    parts: int = 1
    dealt: bool = False

    def passes(self, device: Device) -> tuple[Pass, ...]:
        """What turns a program into this candidate, in order; the last one raises where it is not legal."""
        return (*self.cut(device), *self.behind_cut(device, None))

    @property
    def cut_key(self) -> Hashable:
        """Equal for recipes that cut a program in the same way."""
        if isinstance(self.split, partial):
            return self.parts, self.split.func, self.split.args, tuple(sorted(self.split.keywords.items()))
        return self.parts, self.split

    def cut(self, device: Device) -> tuple[Pass, ...]:
        """The passes as far as the one that cuts the program into stages, which searches for the best cuts."""
        cleaned = remove_dead_ops, merge_common_ops, *(() if self.dealt else (order_memory_ops,))
        return *cleaned, partial(self.split, device=self._on(device))

    def behind_cut(self, device: Device, queue_depth: int | None) -> tuple[Pass, ...]:
        """The passes that say how the stages run."""
        device = self._on(device)
        if self.dealt:  # there are no queues, and no weights that stay
            return (partial(verified, device=device),)
        return (
            partial(settings.choose_placement, device=device, dims=self.dims),
            partial(settings.choose_residency, device=device, resident=self.resident),
            partial(settings.choose_in_flight, in_flight=self.in_flight),
            partial(settings.balance, device=device),
            partial(settings.set_queue_depth, steps=self.steps, depth=queue_depth),
            partial(verified, device=device),
        )

    def _on(self, device: Device) -> Device:
        """The part of a device that the candidate is made for."""
        return device if self.parts == 1 else device.with_sms(device.sms // self.parts)


def recipes(program: Pipeline, options: Options, device: Device) -> list[Recipe]:
    """What is tried under ``options.strategy``: with ``auto``, everything, but queues of one depth, and no layers by
    columns, which were faster than vertical for few rows of wide layers, and never than Inductor."""
    linears = sum(op.kind == "linear" for stage in program.stages for op in stage.ops)
    several = sorted({1, 2, max(1, linears // 4), max(1, linears // 2)})
    spatial = [
        Recipe(
            "spatial",
            partial(split_spatial, layers_per_stage=layers),
            steps,
            f"{layers} layer{'s' * (layers > 1)} a stage, {steps} steps a queue",
        )
        for layers in several
        for steps in ((2, 4) if options.strategy == "spatial" and options.queue_depth is None else (2,))
        if layers < max(linears, 2)
    ]
    chunked = partial(cut_vertical, form=forms.chunk_hidden)
    every = {
        "vertical": [
            Recipe("vertical", cut_vertical),
            Recipe("vertical", cut_vertical, detail="one product in flight", in_flight=1),
            Recipe("vertical", cut_vertical, detail="weights streamed", resident=False),
            Recipe("vertical", cut_vertical, detail="tiles by columns", dims=(1,)),
            Recipe("vertical", chunked, detail="hidden layers by chunks"),
            *_in_place(program),
            *_direct(program),
        ],
        "spatial": [*spatial, *(_by_columns(program) if options.strategy == "spatial" else ())],
        KERNEL_A_LAYER: [Recipe(KERNEL_A_LAYER, split_bulk)],
    }
    for name in ("vertical", "spatial"):
        every[name] += _on_half(every[name], device)
    if options.strategy != "auto":
        return every.get(options.strategy, [])  # shared tiles depend on the rows: ``proposals`` has them
    return [recipe for group in every.values() for recipe in group]


def _by_columns(program: Pipeline) -> list[Recipe]:
    """Every layer on several SMs, each with its part of the columns."""
    widest = max((op.out.features for s in program.stages for op in s.ops if op.kind == "linear" and op.out), default=0)
    return [
        Recipe(
            "spatial",
            partial(split_columns, columns=columns),
            detail=f"layers by {columns} columns, tiles by {'columns' if dims[0] else 'rows'}",
            dims=dims,
        )
        for columns in COLUMNS
        for dims in ((1,), (0,))
        if widest > columns
    ]


def _on_half(made: Sequence[Recipe], device: Device) -> list[Recipe]:
    """The same on half of the SMs, where filling the memory of each takes the L2 more than ``FEW_LAUNCHES`` launches: a
    kernel that the memory bounds loses nothing by that. No GPU that exists has as many."""
    if device.sms * device.shared_bytes_per_cta <= FEW_LAUNCHES * device.launch_s * device.l2_shared_bytes_per_s:
        return []
    return [replace(r, parts=2, detail=", ".join(filter(None, (r.detail, HALF)))) for r in made]


def _direct(program: Pipeline) -> list[Recipe]:
    """Rows through an index as registers of who computes with them, where there are any."""
    if not any(op.index for stage in program.stages for op in stage.ops):
        return []
    split = partial(cut_vertical, form=forms.load_directly)
    return [
        Recipe("vertical", split, detail="rows loaded directly", dims=(0,)),
        Recipe("vertical", split, detail="rows loaded directly, weights streamed", dims=(0,), resident=False),
    ]


def _in_place(program: Pipeline) -> list[Recipe]:
    """Layers that no fragment holds, by blocks of their columns."""
    made = [op.out for s in program.stages for op in s.ops if op.kind == "linear" and op.out is not None]
    if all(tile.features <= WIDEST[0] for tile in made):
        return []
    split = partial(cut_vertical, form=forms.hold_columns)
    return [
        Recipe("vertical", split, detail=IN_PLACE),
        Recipe("vertical", split, detail=f"{IN_PLACE}, one product in flight", in_flight=1),
    ]


TILED = Recipe("vertical", tile_block, detail="wide layers as tiles over the grid", dealt=True)
"""The candidate for a feed-forward block, or one layer, on many rows that is too wide for a row stream: tiles."""


def tiled(program: Pipeline, rows: int, options: Options) -> list[Recipe]:
    """``TILED`` where ``program`` is a block or a layer on many rows whose result no fragment holds; else none.

    Narrower results are sums that stay in registers (``plan.passes.forms.chunk_hidden``).
    """
    if options.strategy not in ("auto", TILED.strategy) or rows <= MOST_ROWS:
        return []
    if not is_block(program) or (is_projection(program) and not is_tileable(program)):
        return []
    stored = [op.ins[0] for op in program.stages[0].ops if op.kind == "store"]
    return [TILED] if any(program.tiles()[t].features > WIDEST[0] for t in stored) else []
