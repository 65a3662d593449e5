"""The family of shared tiles: one tile of rows that CTAs of the whole grid share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil

from tilestream.devices import Device
from tilestream.kernels.costs import ClosedForm, Counts
from tilestream.kernels.kernel import Frame, halves
from tilestream.kernels.parts.source import Part
from tilestream.kernels.product.block import PANEL
from tilestream.kernels.product.kernel import ProductKernel
from tilestream.kernels.product.shared_tile.code import SharedTileCode
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.kernels.product.shared_tile.model import SharedTile, build
from tilestream.kernels.shape import KernelShape

WAITED_FOR = ("the cleared result", "columns of the middle", "a partial result", "rows of the operand")


class SharedTileKernel(ProductKernel[SharedTile]):
    """The kernel of a launch of one stage whose tile CTAs share. More rows than it has tiles for take several launches,
    unless its CTAs are alone: then a launch has as many as there are tiles, and they need not be resident at once."""

    shape = KernelShape.SHARED_TILE
    build, code = build, SharedTileCode
    family = "shared tile"
    closed_form = ClosedForm("shared tiles", 0.07, "generated kernels of 1 to 512 rows, fitted and not")
    starts_early = True

    def clusters(self, limit: int) -> tuple[int, int]:
        s = self.within(limit)
        return s.ctas // s.cluster, s.cluster

    def cost(self, rows: int, device: Device) -> Counts:
        return shared_tile_cost(self.within(device.shared_bytes_per_cta), rows, device)

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

    def describe(self, words: Sequence[int]) -> str:
        s = self.schedule
        (_, phase), (cta, peer), (sm, _) = halves(words, 3)
        return (
            f"pipeline {self.launch.name!r}: CTA {cta} of {s.ctas} ({s.groups} groups of {s.columns}) on SM {sm} waited"
            f" too long for {WAITED_FOR[phase]} of CTA {peer}: expected launch {words[3]}, found {words[4]}"
        )

    def hosted(self, rows: int, sanitize: bool) -> str:
        """A row in front of a layer is made by many warps there, which are no threads on the host."""
        if self.schedule.block.before:
            return "the host build runs a shared tile with nothing in front of its first layer"
        if sanitize and self.schedule.tile_rows < PANEL:
            rows_of = self.schedule.tile_rows
            return f"products of {PANEL} rows read behind a tile of {rows_of}, in rows that nobody stores"
        return super().hosted(rows, sanitize)
