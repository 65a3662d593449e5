"""A whole decode step as one persistent kernel (``include/step.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

from tilestream.errors import InputError, QueueTimeout, TilestreamError
from tilestream.kernels.kernel import LOST, NO_ROW, Frame, Launchable, halves
from tilestream.kernels.operators.lanes import WORDS, text_of
from tilestream.kernels.parts.params import TIMEOUT_NS, Field, Struct, pointers
from tilestream.kernels.parts.source import BesideSource, Call, Space
from tilestream.kernels.step.form import ACTIVATIONS, Form
from tilestream.kernels.step.shape import Shape

NAME = "tilestream_step"
MOST_CTAS = 1024
"""Of any GPU: each has a word of its own."""
BIASES = ("query", "", "output", "gate", "down", "head")
"""The weight of each stage's bias."""
STAGES = ("the QKV product", "attention", "the output projection", "gate and up", "the down projection", "the head")
NO_POSITION = 16

EVERYTHING = Form(norm="layer", head_norms=True, biased=("query", "output", "gate", "down", "head"))
"""Has all weights that there are."""

LAYER = Struct(
    "StepLayer",
    (
        *pointers(*EVERYTHING.weights, type="const char*"),
        *pointers("keys", "values", type="char*"),
        Field("long long*", "length", note="the token's place"),
    ),
)


@cache
def argument(layers: int) -> Struct:
    """``StepParams``."""
    each = (
        Field(LAYER, "layers", layers),
        *pointers("row", "cos", "sin", "mask", *EVERYTHING.last, type="const char*"),
        Field("char*", "out", note="[BATCH, VOCABULARY]"),
        Field("u64*", "words"),
        Field("u32*", "epochs", note="of each CTA: the tag of the last value"),
        Field("u64*", "record"),
        Field("float*", "rows", note="the residual, of whoever has its rows"),
        Field("u64*", "stamps", note="of each CTA, layer and stage: three times in ns"),
        Field("int", "turn_step", note="from a sequence's cosines to the next one's"),
        Field("int", "mask_step"),
        Field("int", "counted", note="whether lengths grow by one"),
        Field("float", "scale"),
        Field("float", "times", note="what blocks add to the residual is multiplied by it"),
        Field("float", "eps"),
        Field("float", "head_eps"),
    )
    return Struct("StepParams", each)


@dataclass(frozen=True)
class StepKernel(Launchable):
    """The kernel of a shape.

    Args:
        delays: CTAs wait now and then, each at other times, for tests.
        stamps: each CTA notes when its stages begin, have their values and end.
        timeout_ns: bound of a wait.
    """

    shape: Shape
    delays: bool = False
    stamps: bool = False
    timeout_ns: int = TIMEOUT_NS
    persistent = True

    @property
    def frame(self) -> Frame:
        threads = 32 * (self.shape.warps + 1)
        return Frame(1, "as many as SMs", threads, 1, 0, True, WORDS, host_lanes=threads)

    @property
    def space(self) -> Space:
        s = self.shape
        parts = (("words", 16 * s.words), ("epochs", 4 * MOST_CTAS), ("rows", 4 * s.batch * s.width))
        return Space(parts, frozenset({"words", "epochs"}))

    @property
    def source(self) -> BesideSource:
        return BesideSource(NAME, self.text, self.shape.shared_bytes)

    @property
    def text(self) -> str:
        s = self.shape
        form = s.form
        numbers = {name.upper(): v for name, v in asdict(s).items() if name != "form"}
        numbers |= {name.upper(): getattr(form, name) for name in ("head_norms", "gated", "turned", "parallel")}
        numbers |= {
            "ROTARY": s.rotary,
            "ACTIVATION": ACTIVATIONS.index(form.activation),
            "BY_HEADS": form.qkv == "heads",
        }
        numbers |= {"LAYER_NORMS": form.norm == "layer", "PLUS_ONE": form.norm == "rms_plus_one"}
        numbers |= {"BIASED": sum(1 << n for n, of in enumerate(BIASES) if of in form.biased)}
        numbers = {name: int(v) for name, v in numbers.items()}
        numbers |= {"SPLITS": s.splits, "SLOTS": s.slots, "SLOT": s.slot_bytes, "CHUNK": s.most_columns}
        numbers |= {"ATTENTION": s.attention, "BUFFERS": s.buffers, "WORDS": s.words}
        numbers |= {"DELAYS": int(self.delays), "STAMPS": int(self.stamps)}
        numbers |= {"NO_ROPE": f"{sum(1 << n for n in form.no_rope)}ull"}
        numbers |= {"SHARED_BYTES": s.shared_bytes, "TIMEOUT": f"{self.timeout_ns}ull"}
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
            f"decode step: CTA {block} waited for word {words[2]} that {STAGES[what]} of layer {layer} reads; "
            f"it has tag {words[3]}"
        )
