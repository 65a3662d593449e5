"""A whole decode step of one sequence as one persistent kernel (``include/step.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

from tilestream.errors import InputError, QueueTimeout, TilestreamError
from tilestream.kernels.kernel import LOST, NO_ROW, Frame, Launchable, halves
from tilestream.kernels.operators.lanes import WORDS, text_of
from tilestream.kernels.parts.params import TIMEOUT_NS, Field, Struct, pointers
from tilestream.kernels.parts.source import BesideSource, Call, Space

NAME = "tilestream_step"
WARPS = 16
SLOT_BYTES = 2048
MOST_SLOTS = 8
SHARED_BYTES = 227 * 1024
MOST_CTAS = 1024
"""Of any GPU: each has a word of its own."""
SHARE, MOST_SPLITS = 128, 8
"""Positions of the cache that a CTA should have at least, and the most shares: who needs attention reads all of them."""
MOST_GROUP, MOST_LAYERS = 8, 256
STAGES = ("the QKV product", "attention", "the output projection", "gate and up", "the down projection", "the head")
NO_POSITION = 16

WEIGHTS = ("norm", "query", "key", "value", "query_norm", "key_norm", "output", "middle_norm", "gate", "up", "down")
"""Of a layer, in this order; without norms of heads those two are missing."""


@dataclass(frozen=True)
class Shape:
    """What a step's kernel is compiled for. Sizes are elements; ``positions`` are the cache's.

    Args:
        head_norms: whether every head of queries and keys has a norm. masked: whether scores have a mask added.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    features: int
    positions: int
    vocabulary: int
    head_norms: bool = False
    masked: bool = True

    @property
    def refusal(self) -> str:
        """Why there is no kernel; empty if there is one."""
        if self.features not in (64, 128, 256) or self.heads % self.key_heads or self.heads > MOST_GROUP * self.key_heads:
            return f"{self.heads} heads of {self.features} features over {self.key_heads} of keys"
        if self.width % 8 or self.hidden % 8 or self.layers > MOST_LAYERS:
            return f"{self.layers} layers of {self.width} and {self.hidden} features"
        return "" if self.slots >= 2 else "shared memory has no room for its rows"

    @property
    def splits(self) -> int:
        """Shares of the cache that a head's attention is cut into."""
        return max(1, min(MOST_SPLITS, -(-self.positions // SHARE), 128 // self.key_heads))

    @property
    def staged(self) -> int:
        """Floats of a staged row; attention puts its parts together in the same place."""
        group = self.heads // self.key_heads
        merge = WARPS * group * (self.features + 2)
        rows = (self.width, self.hidden, self.heads * self.features, merge, (group + 2) * self.features)
        return -(-max(rows) // 8) * 8

    @property
    def slots(self) -> int:
        """Pieces of weights that a warp has under way."""
        room = SHARED_BYTES - 8 * self.staged - 8 * WARPS
        return min(MOST_SLOTS, room // (WARPS * (SLOT_BYTES + 8)))

    @property
    def shared_bytes(self) -> int:
        return WARPS * self.slots * (SLOT_BYTES + 8) + 8 * self.staged + 8 * WARPS

    @property
    def words(self) -> int:
        """64-bit words of values on their way from CTA to CTA, of the layers of one parity."""
        query, sums = self.heads * self.features, self.splits * self.heads
        qkv = query + 2 * self.key_heads * self.features
        return 2 * self.width + qkv + self.splits * query // 2 + sums + sums % 2 + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Of all weights, which a step reads once."""
        query, keys = self.heads * self.features, self.key_heads * self.features
        layer = self.width * (2 * query + 2 * keys + 3 * self.hidden + 2)
        return 2 * (self.layers * layer + self.vocabulary * self.width + self.width)

    @property
    def hand_overs(self) -> int:
        """Values that all CTAs wait for, one after the other."""
        return 5 * self.layers


LAYER = Struct(
    "StepLayer", (*pointers(*WEIGHTS, type="const char*"), *pointers("keys", "values", type="char*")), declared=True
)


@cache
def argument(layers: int) -> Struct:
    """``StepParams``."""
    each = (
        Field(LAYER, "layers", layers),
        *pointers("row", "cos", "sin", "mask", "norm", "head", type="const char*"),
        Field("const long long*", "index", note="the position of the token"),
        Field("char*", "out", note="[VOCABULARY]"),
        Field("u64*", "words"),
        Field("u32*", "epochs", note="of each CTA: the tag of the last value"),
        Field("u64*", "record"),
        Field("float", "scale"),
        Field("float", "eps"),
        Field("float", "head_eps"),
    )
    return Struct("StepParams", each)


@dataclass(frozen=True)
class StepKernel(Launchable):
    """The kernel of a shape.

    Args:
        delays: CTAs wait now and then, each at other times, for tests.
        timeout_ns: bound of a wait.
    """

    shape: Shape
    delays: bool = False
    timeout_ns: int = TIMEOUT_NS
    persistent = True

    @property
    def frame(self) -> Frame:
        return Frame(1, "as many as SMs", 32 * WARPS, 1, 0, True, WORDS)

    @property
    def space(self) -> Space:
        return Space((("words", 16 * self.shape.words), ("epochs", 4 * MOST_CTAS)), frozenset({"words", "epochs"}))

    @property
    def source(self) -> BesideSource:
        return BesideSource(NAME, self.text, self.shape.shared_bytes)

    @property
    def text(self) -> str:
        s = self.shape
        numbers = {name.upper(): int(v) for name, v in asdict(s).items()}
        numbers |= {"SPLITS": s.splits, "SLOTS": s.slots, "STAGED": s.staged, "WORDS": s.words}
        numbers |= {"SHARED_BYTES": s.shared_bytes, "TIMEOUT": f"{self.timeout_ns}ull", "DELAYS": int(self.delays)}
        return text_of("step.cuh", argument(s.layers), numbers, "lanes.cuh")

    def grid(self, rows: int, sms: int) -> int:
        """A CTA an SM."""
        return sms

    def pack(self, source: BesideSource, call: Call) -> bytes:
        return argument(self.shape.layers).pack(**call.values, **call.at, record=call.dump)

    def error(self, words: Sequence[int]) -> TilestreamError:
        what = halves(words, 2)[1][0]
        if what == NO_POSITION:
            return InputError(self.describe(words), NO_ROW)
        return QueueTimeout(self.describe(words), LOST)

    def describe(self, words: Sequence[int]) -> str:
        what, where = halves(words, 2)[1]
        if what == NO_POSITION:
            return f"a decode step writes position {words[3]} of a cache of {words[2]}"
        layer, block = where >> 16, where & 0xFFFF
        return (
            f"decode step: CTA {block} waited for value {words[2]} that {STAGES[what]} of layer {layer} reads; "
            f"it has tag {words[3]}"
        )
