"""The family of gradients: sums over the rows, alone or beside a chain's products by rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Role, Stage
from tilestream.kernels.costs import ClosedForm, Counts
from tilestream.kernels.gradients.cost import cost
from tilestream.kernels.gradients.emit import THREADS, emit
from tilestream.kernels.gradients.model import Schedule, builds, is_chain, is_gradients
from tilestream.kernels.kernel import Footprint, Frame, Kernel, halves
from tilestream.kernels.parts.params import LINE_BYTES, MAP_BYTES
from tilestream.kernels.parts.source import Call, KernelSource, Space
from tilestream.kernels.parts.tensor_maps import MatrixMap

WORDS = 6
"""64-bit words of ``struct Dump`` (roles.cuh), of which a launch without queues writes no flags."""
SUMS = ClosedForm("stationary sums", 0.09, "21 launches of training steps that had no part in the fit")
CHAINS = ClosedForm("backward chains", 0.21, "four chains of layers 64 wide, 16,384 and 262,144 rows")


class GradientKernel(Kernel):
    """A kernel whose CTAs sum over rows that they share out, and then add up partial sums through the L2."""

    family = "gradients"
    needs_rows = False
    """The gradient of an empty batch is zero, and is written."""

    def __init__(self, launch: Pipeline) -> None:
        super().__init__(launch)
        self.closed_form = CHAINS if is_chain(launch) else SUMS

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return is_gradients(launch)

    @property
    def schedules(self) -> Sequence[Schedule]:
        """Of every stage; raises ``VerifyError``."""
        return builds(self.launch)

    def check(self) -> None:
        assert self.schedules

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        s = next(s for s in self.schedules if s.stage.name == stage.name)
        return Footprint(s.shared_bytes, s.layout.registers, s.footprint)

    def cost(self, rows: int, device: Device) -> Counts:
        return cost(self.launch, rows, device)

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        return emit(self.launch)

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
        (tensors, pointers), where, rows = source.tables, call.where, call.part.rows
        maps = []
        for name in tensors:
            (address, stride, _), tensor = where[name], source.pipeline.tensor(name)
            height = tensor.shape[0] if tensor.role is Role.PARAMETER else rows
            # The kernel reads nothing where there are no rows, and there is no tensor map of none.
            sizes = (tensor.features, height, stride * DTYPE_BYTES[tensor.dtype], TILE_ROWS)
            maps.append(call.encode(MatrixMap(tensor.dtype, address, *sizes)) if rows else bytes(MAP_BYTES))
        written = [where[name] for name in pointers]
        return source.params.pack(
            maps=maps or [bytes(MAP_BYTES)], pointers=[w.address for w in written],
            strides=[w.stride for w in written], flags=call.at["flags"], dump=call.dump, limit_ns=call.timeout_ns,
            partials=call.at["partials"], rows=rows,
        )  # fmt: skip

    def describe(self, words: Sequence[int]) -> str:
        (_, stage), (sm, cta), (peer, _) = halves(words, 3)
        s = self.schedules[stage]
        where = s.chain.layers[0].sum.source or "no source line"
        return (
            f"pipeline {self.launch.name!r}, stage {s.stage.name!r} ({where}):"
            f" CTA {cta} on SM {sm} waited too long for the partial sums of CTA {peer}, one of {s.splits} that share"
            f" out the rows: expected launch {words[3]}, found {words[4]}"
        )
