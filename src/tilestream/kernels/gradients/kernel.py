"""The two families of gradients: stationary sums, and backward chains that have them beside their products by rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.costs import ClosedForm, LaunchCost
from tilestream.kernels.gradients import backward, stationary
from tilestream.kernels.gradients.backward.cost import cost as backward_cost
from tilestream.kernels.gradients.backward.emit import emit as emit_backward
from tilestream.kernels.gradients.stationary.argument import pack
from tilestream.kernels.gradients.stationary.cost import cost as stationary_cost
from tilestream.kernels.gradients.stationary.emit import THREADS
from tilestream.kernels.gradients.stationary.emit import emit as emit_stationary
from tilestream.kernels.kernel import Footprint, Frame, Kernel, halves
from tilestream.kernels.parts.params import LINE_BYTES
from tilestream.kernels.parts.source import Call, KernelSource, Space

WORDS = 6
"""64-bit words of ``struct Dump`` (roles.cuh), of which a launch without queues writes no flags."""


class GradientKernel(Kernel):
    """A kernel whose CTAs sum over rows that they share out, and then add up partial sums through the L2."""

    needs_rows = False
    """The gradient of an empty batch is zero, and is written."""

    @property
    @abstractmethod
    def schedules(self) -> Sequence[stationary.StationarySum | backward.BackwardChain | backward.WideChain]:
        """Of every stage; raises ``VerifyError``."""

    def check(self) -> None:
        assert self.schedules

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        s = next(s for s in self.schedules if s.stage.name == stage.name)
        return Footprint(s.shared_bytes, s.registers, s.footprint)

    @cached_property
    def frame(self) -> Frame:
        ctas = sum(s.ctas for s in self.schedules)
        return Frame(ctas, f"{' + '.join(str(s.ctas) for s in self.schedules)} = {ctas}", THREADS, words=WORDS)

    @cached_property
    def space(self) -> Space:
        """A line of flags of each CTA, and partial sums."""
        partials = sum(s.workspace_bytes for s in self.schedules)
        return Space((("flags", self.frame.ctas * LINE_BYTES), ("partials", partials)), frozenset(("flags",)))

    def pack(self, source: KernelSource, call: Call) -> bytes:
        return pack(source, call)

    def describe(self, words: Sequence[int]) -> str:
        (_, stage), (sm, cta), (peer, _) = halves(words, 3)
        s = self.schedules[stage]
        return (
            f"pipeline {self.launch.name!r}, stage {s.stage.name!r} ({s.where or 'no source line'}):"
            f" CTA {cta} on SM {sm} waited too long for the partial sums of CTA {peer}, one of {s.splits} that share"
            f" out the rows: expected launch {words[3]}, found {words[4]}"
        )


class StationaryKernel(GradientKernel):
    """Stages that sum products over the rows, side by side."""

    family = "stationary sum"
    closed_form = ClosedForm("stationary sums", 0.09, "21 launches of training steps that had no part in the fit")

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return stationary.is_stationary(launch)

    @property
    def schedules(self) -> Sequence[stationary.StationarySum]:
        return stationary.builds(self.launch)

    def cost(self, rows: int, device: Device) -> LaunchCost:
        made = stationary_cost(self.launch, rows, device)
        parts = {"tensor": max(made.flops_s, made.longest_s), "dram": made.dram_s, "l2": made.l2_s}
        limit = max(parts, key=lambda k: parts[k])
        return LaunchCost(
            self.launch.name, (), parts["tensor"], made.dram_s, made.l2_s, made.exchange_s, made.total_s, limit
        )

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        return emit_stationary(self.launch)


class BackwardKernel(GradientKernel):
    """One stage that has products by rows and sums of products over the rows."""

    family = "backward chain"
    closed_form = ClosedForm("backward chains", 0.21, "four chains of layers 64 wide, 16,384 and 262,144 rows")

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return backward.is_backward(launch)

    @property
    def schedules(self) -> Sequence[backward.BackwardChain | backward.WideChain]:
        return (backward.build(self.launch),)

    def cost(self, rows: int, device: Device) -> LaunchCost:
        made = backward_cost(self.launch, rows, device)
        work = max(made.flops_s, made.shared_s + made.lanes_s)
        limit = "dram" if made.dram_s > work else "work of the SMs"
        return LaunchCost(self.launch.name, (), work, made.dram_s, 0.0, made.exchange_s, made.total_s, limit)

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        return emit_backward(self.launch)
