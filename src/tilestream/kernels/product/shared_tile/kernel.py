"""The family of shared tiles: one tile of rows that CTAs of the whole grid share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.plain import plain
from tilestream.kernels.costs import ClosedForm, LaunchCost
from tilestream.kernels.kernel import Footprint, Frame, Kernel, halves
from tilestream.kernels.parts.mma import specialisation
from tilestream.kernels.parts.source import Call, KernelSource, Part, Space
from tilestream.kernels.product.shared_tile.block import PANEL
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.kernels.product.shared_tile.emit import emit
from tilestream.kernels.product.shared_tile.model import SharedTile, build
from tilestream.kernels.product.shared_tile.params import pack, space
from tilestream.kernels.shape import KernelShape, shape_of
from tilestream.kernels.stream.layout import SHARED_LIMIT

WAITED_FOR = ("the cleared result", "columns of the middle", "a partial result", "rows of the operand")


class SharedTileKernel(Kernel):
    """The kernel of a launch of one stage whose tile CTAs share. More rows than it has tiles for take several launches,
    unless its CTAs are alone: then a launch has as many as there are tiles, and they need not be resident at once."""

    family = "shared tile"
    closed_form = ClosedForm("shared tiles", 0.07, "generated kernels of 1 to 512 rows, fitted and not")
    starts_early = True

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return shape_of(launch) is KernelShape.SHARED_TILE

    def within(self, limit: int) -> SharedTile:
        """Its schedule within ``limit`` bytes of shared memory; raises as ``model.build``."""
        written = plain(self.launch)
        return build(written.stages[0], written, limit)

    @cached_property
    def schedule(self) -> SharedTile:
        return self.within(SHARED_LIMIT)

    def check(self) -> None:
        self.within(SHARED_LIMIT)

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        s = self.within(limit)
        return Footprint(s.shared_bytes, s.registers, s.parts)

    def clusters(self, limit: int) -> tuple[int, int]:
        s = self.within(limit)
        return s.ctas // s.cluster, s.cluster

    def cost(self, rows: int, device: Device) -> LaunchCost:
        made = shared_tile_cost(self.within(device.shared_bytes_per_cta), rows, device)
        loads, exchange = made.loads_s, made.phases.exchange
        return LaunchCost(self.launch.name, (), loads, made.dram_s, loads, exchange, made.total_s, made.limit)

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        return emit(self.launch)

    @cached_property
    def frame(self) -> Frame:
        s = self.schedule
        told = f"{s.row_tiles} x {s.groups} x {s.columns} = {s.ctas}"
        return Frame(s.ctas, told, s.threads, s.cluster, s.warpgroups, not s.alone)

    def grid(self, rows: int, sms: int) -> int:
        return self.schedule.launched(rows)

    def parts(self, rows: int) -> list[Part]:
        s = self.schedule
        most = max(rows, 1) if s.alone else s.row_tiles * s.tile_rows
        return [Part(first, min(most, rows - first), rows) for first in range(0, ceil(rows / most) * most, most)]

    @cached_property
    def space(self) -> Space:
        return space(self.schedule)

    def pack(self, source: KernelSource, call: Call) -> bytes:
        return pack(source, call)

    def describe(self, words: Sequence[int]) -> str:
        s = self.schedule
        (_, phase), (cta, peer), (sm, _) = halves(words, 3)
        return (
            f"pipeline {self.launch.name!r}: CTA {cta} of {s.ctas} ({s.groups} groups of {s.columns}) on SM {sm} waited"
            f" too long for {WAITED_FOR[phase]} of CTA {peer}: expected launch {words[3]}, found {words[4]}"
        )

    def hosted(self, rows: int, sanitize: bool) -> str:
        """What is in front of a layer exchanges values between lanes, which are no threads there."""
        s = self.schedule
        if s.block.before or len(self.parts(rows)) > 1:
            return "the host build runs one launch of a block with nothing in front of its first layer"
        if sanitize and s.tile_rows < PANEL:
            return f"products of {PANEL} rows read behind a tile of {s.tile_rows}, in rows that nobody stores"
        return ""

    def host_text(self, text: str) -> str:
        s = self.schedule
        share = 16 if s.halves else 8
        for blocks in {s.middle_columns // share, s.out_columns // share} - {0}:
            text = text.replace(specialisation(s.block.dtype, blocks).strip(), "")
        return text
