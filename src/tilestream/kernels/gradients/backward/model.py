"""What a backward chain takes of an SM: accumulators in registers, weights, tiles and rings in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import TILE_ROWS, Pipeline, Role, Stage
from tilestream.ir.plain import by_rows, plain
from tilestream.kernels.gradients.backward.chain import Chain, Layer
from tilestream.kernels.stream.layout import CHUNK, SHARED_LIMIT
from tilestream.kernels.stream.model import ceil_to
from tilestream.kernels.stream.places import REGISTER_LIMIT

GROUPS = 2
"""Consumer warpgroups of a CTA, each with tiles of its own."""
WIDEST = 64
"""Columns of a layer: one chunk of shared memory, one product of a warpgroup."""
ACCUMULATORS, OPERAND, OVERHEAD = 32, 16, 40
"""Registers a thread: of a product of 64 columns, and of slopes for it where they are kept; of the next one's left
operand; of addresses and temporaries."""
MOST_SLOTS, LEAST_SLOTS = 12, 4
MADE = 2
"""Inputs of layers that a warpgroup makes of what is loaded, in turns, for the same reason as below."""
TILES = 4
"""Of each warpgroup: gradients of three layers in turns, and dX. A warp that runs ahead writes what the sums of two
layers ago have read, which all warps know to be over: they met since."""
ONES_BYTES = 1024
BULK_BYTES = 16
LAYER_BYTES = 7 * TILE_ROWS * 128
"""That a layer moves through shared memory for a tile: its input is written, and read by the sum and by the slope; dY
is written, and read by the sum; and what two products read of their other operands."""


@dataclass(frozen=True)
class Held:
    """A sum that a warpgroup keeps in registers: dW of a layer, turned where that takes fewer, or db.

    Attributes:
        tensor: where it goes. blocks: of eight columns. turned: whether rows of it are columns of X. first: of its
            partial sums, in fours of floats. chunk: of 64 columns, that it begins at. groups: warpgroups that have 64
            rows of it each.
    """

    layer: int
    tensor: str
    dtype: str
    blocks: int
    turned: bool
    is_bias: bool
    first: int
    chunk: int = 0
    groups: int = 1

    @property
    def fours(self) -> int:
        """Of floats, that all groups leave of it."""
        return 128 * self.blocks * self.groups


@dataclass(frozen=True)
class Divided:
    """A chain as one stage of CTAs that divide the rows.

    Attributes:
        slots: of a ring. held: the sums that stay in registers.
    """

    stage: Stage
    chain: Chain
    splits: int
    slots: int
    held: tuple[Held, ...]

    @property
    def dtype(self) -> str:
        return self.chain.dtype

    @property
    def ctas(self) -> int:
        return self.splits

    @property
    def fours(self) -> int:
        """Partial sums of a CTA, in fours of floats."""
        return self.held[-1].first + self.held[-1].fours

    @property
    def workspace_bytes(self) -> int:
        return self.ctas * self.fours * 16

    @property
    def where(self) -> str:
        """The user's line."""
        return self.chain.layers[0].source

    @property
    def streams(self) -> tuple[tuple[str, ...], ...]:
        """Tensors that come through the ring: the gradient, then of each layer its input and what its slope reads."""
        return ((self.chain.gradient,), *map(read, self.chain.layers))

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(layer.weight for layer in self.chain.layers if layer.weight)


@dataclass(frozen=True)
class BackwardChain(Divided):
    """One stage: CTAs of two warpgroups, a tile of 64 rows each, that divide the rows.

    Attributes:
        slots: of each warpgroup's ring, 64 rows of one tensor each. held: its sums, in the order of the layers.
        odd: streams whose rows bulk copies cannot address.
    """

    odd: tuple[str, ...]

    @property
    def registers(self) -> int:
        """A consumer thread."""
        return _registers(self.held, self.chain.layers)

    @property
    def ring(self) -> int:
        """Offset of the first warpgroup's ring, behind the weights."""
        return len(self.weights) * CHUNK

    @property
    def tiles(self) -> int:
        """Offset of the gradients that a warpgroup makes: three in turns, and dX on its way out."""
        return self.ring + GROUPS * self.slots * CHUNK

    @property
    def made(self) -> int:
        """Offset of the layers' inputs that a warpgroup makes."""
        return self.tiles + GROUPS * TILES * CHUNK

    @property
    def ones(self) -> int:
        return self.made + _made_bytes(self.chain.layers)

    @property
    def bars(self) -> int:
        return self.ones + ONES_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.bars + 16 * (GROUPS * self.slots + 1)

    @property
    def shares(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sums that each warpgroup adds up for both: about half."""
        return _shares(self.held)

    @property
    def step_bytes(self) -> int:
        """What a tile of each warpgroup moves through an SM's shared memory."""
        return GROUPS * len(self.chain.layers) * LAYER_BYTES

    @property
    def footprint(self) -> tuple[tuple[str, int], ...]:
        """Shared memory by name."""
        return (
            ("weights", self.ring),
            (f"{GROUPS} rings of {self.slots} x {TILE_ROWS} rows", GROUPS * self.slots * CHUNK),
            ("gradients", GROUPS * TILES * CHUNK),
            ("inputs made again", self.ones - self.made),
            ("ones and barriers", self.shared_bytes - self.ones),
        )


def read(layer: Layer) -> tuple[str, ...]:
    """Tensors that a layer takes through the ring, each once."""
    beside = (tensor for _, tensor in (*layer.sources, *layer.streams))
    return tuple(dict.fromkeys((*([layer.input] if layer.input else []), *beside)))


def is_backward(pipeline: Pipeline) -> bool:
    """Whether the only stage has products row by row and products over the rows that its loop streams, side by side."""
    if by_rows(pipeline) or pipeline.queues or len(pipeline.stages) != 1:
        return False
    (stage,) = plain(pipeline).stages
    if [loop.axis for loop in stage.loops] != [ROWS.name]:
        return False
    over_rows = [ROWS.name in sums(op) for op in stage.ops if op.kind == "product" and op.out is not None]
    return any(over_rows) and not all(over_rows)


def room(layers: Sequence[Layer], pipeline: Pipeline) -> tuple[tuple[Held, ...], int]:
    """What a warpgroup holds of layers up to ``WIDEST`` wide, and how many slots its ring has.

    Raises:
        VerifyError: the sums are more than the registers hold, or shared memory has no room; with the arithmetic.
    """
    where, held = layers[0].source, _held(layers, pipeline)
    check_registers(held, _registers(held, layers), where)
    fixed = (sum(1 for x in layers if x.weight) + GROUPS * TILES) * CHUNK + _made_bytes(layers) + ONES_BYTES + 64
    slots = min(MOST_SLOTS, (SHARED_LIMIT - fixed) // (GROUPS * (CHUNK + 16)))
    given = max(sum(2048 * held[n].blocks for n in share) for share in _shares(held))
    least = max(LEAST_SLOTS, 1 + 2 * max(len(read(x)) for x in layers), ceil(given / CHUNK))
    if slots < least:
        raise VerifyError(
            f"{where}: {fixed} bytes of weights and gradients leave {slots} < {least} slots of {CHUNK} bytes a"
            " warpgroup",
            "cut the chain",
        )
    return held, slots


def _made_bytes(layers: Sequence[Layer]) -> int:
    return GROUPS * MADE * CHUNK if any(x.makes for x in layers) else 0


def check_registers(held: Sequence[Held], registers: int, where: str) -> None:
    """Refuse what a consumer thread has no registers for.

    Raises:
        VerifyError: with the arithmetic.
    """
    if registers > REGISTER_LIMIT:
        parts = " + ".join(str(4 * h.blocks) for h in held)
        raise VerifyError(
            f"{where}: sums of {parts} + {registers - sum(4 * h.blocks for h in held)} registers a thread ="
            f" {registers} > {REGISTER_LIMIT}",
            "cut the chain",
        )


def _held(layers: Sequence[Layer], pipeline: Pipeline) -> tuple[Held, ...]:
    found: list[Held] = []
    for n, layer in enumerate(layers):
        out, k = (ceil_to(size, 8) // 8 for size in (layer.out, layer.k))
        found.append(_next(found, n, layer.weight_gradient, min(out, k), out < k, False, pipeline))
        if layer.bias_gradient:
            found.append(_next(found, n, layer.bias_gradient, 1, False, True, pipeline))
    return tuple(found)


def _next(
    before: list[Held], layer: int, tensor: str, blocks: int, turned: bool, is_bias: bool, pipeline: Pipeline
) -> Held:
    first = before[-1].first + before[-1].fours if before else 0
    assert pipeline.tensor(tensor).role is Role.OUTPUT
    return Held(layer, tensor, pipeline.tensor(tensor).dtype, blocks, turned, is_bias, first)


def _shares(held: tuple[Held, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first: list[int] = []
    second: list[int] = []
    size = [0, 0]
    for n, h in enumerate(held):
        lighter = 0 if size[0] <= size[1] else 1
        (first, second)[lighter].append(n)
        size[lighter] += h.blocks
    return tuple(first), tuple(second)


def _registers(held: tuple[Held, ...], layers: Sequence[Layer]) -> int:
    slope = ACCUMULATORS if any(x.slope for x in layers) else 0
    return sum(4 * h.blocks for h in held) + ACCUMULATORS + slope + OPERAND + OVERHEAD
