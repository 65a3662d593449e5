"""What the kernel of a decode step is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilestream.kernels.step.form import LLAMA, Form

WARPS = 8
"""Of a CTA, that multiply; one more loads weights."""
TILE, DEPTH = 8, 32
"""Rows of a product that a CTA has at once; columns that a warp multiplies at once."""
MOST_BATCH, MOST_SLOTS = 32, 32
SHARED_BYTES = 227 * 1024
SHARE, MOST_SPLITS = 64, 8
"""Positions of the cache that a CTA should have at least, and the most shares: who needs attention reads all."""
MOST_GROUP, MOST_LAYERS = 8, 128
MOST_TOLD = 64
"""Layers of which a kernel is told apart whether heads are rotated: a bit of a word each."""
ROTATED, FEWEST_ROTATED = 32, 16
"""Features of a head that are rotated: so many lanes times anything, or half as many; other halves are lanes' apart."""


@dataclass(frozen=True)
class Shape:
    """What a step's kernel is compiled for. Sizes are elements; ``positions`` are the cache's.

    Args:
        masked: whether scores have a mask added. warps: of a CTA, a power of two. batch: sequences.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    features: int
    positions: int
    vocabulary: int
    masked: bool = True
    warps: int = WARPS
    batch: int = 1
    form: Form = LLAMA

    @property
    def rotary(self) -> int:
        """Features of a head that are rotated."""
        return int(self.features * self.form.rotary)

    @property
    def refusal(self) -> str:
        """Why there is no kernel; empty if there is one."""
        if (
            self.features not in (64, 128, 256)
            or self.heads % self.key_heads
            or self.heads > MOST_GROUP * self.key_heads
        ):
            return f"{self.heads} heads of {self.features} features over {self.key_heads} of keys"
        if self.rotary % ROTATED and self.rotary != FEWEST_ROTATED:
            return f"a rotary embedding of {self.rotary} features of a head"
        if max(self.form.no_rope, default=0) >= MOST_TOLD:
            return f"a layer behind the first {MOST_TOLD} without the others' rotary embedding"
        if self.form.turned and (self.form.qkv != "parts" or self.form.gate_up):
            return "weights [inputs, outputs] whose parts lie otherwise than GPT-2's"
        if self.form.gate_up and "gate" in self.form.biased:
            return "gate and up in one weight, with biases"
        if self.batch > MOST_BATCH:
            return f"{self.batch} sequences, and a step has {MOST_BATCH} at most"
        if self.width % DEPTH or self.hidden % DEPTH or self.layers > MOST_LAYERS:
            return f"{self.layers} layers of {self.width} and {self.hidden} features"
        return "" if self.slots >= 2 else "shared memory has no room for its rows"

    @property
    def splits(self) -> int:
        """Shares of the cache that a head's attention is cut into."""
        return max(1, min(MOST_SPLITS, -(-self.positions // SHARE), 128 // (self.key_heads * self.batch)))

    @property
    def most_columns(self) -> int:
        """Of a piece, whose values of all sequences are in registers."""
        return 256 if self.batch <= 8 else 128

    def columns(self, width: int) -> int:
        """Of the pieces of a row of ``width``: each warp has as many pieces, one unless it were too large."""
        each = -(-width // (self.warps * self.most_columns))
        return -(-width // (self.warps * each * DEPTH)) * DEPTH

    def pitch(self, width: int) -> int:
        """Bytes of a row of a slot, which has a piece of every warp: 16 bytes of eight rows meet no bank twice."""
        return 2 * min(width, self.warps * self.columns(width)) + 16

    @property
    def slot_bytes(self) -> int:
        """Of eight rows of weights, or of eight positions of the cache at least."""
        rows = (self.pitch(n) for n in (self.width, self.hidden, self.heads * self.features))
        return TILE * max(*rows, 4 * self.features)

    @property
    def attention(self) -> int:
        """Bytes in which attention puts its parts together."""
        group = self.heads // self.key_heads
        given, parts = 2 * (group + 2) * self.features, 4 * self.warps * group * (self.features + 4)
        return given + parts

    @property
    def buffers(self) -> int:
        """Of warps' sums of a tile: with two nobody waits until those of the tile before are read."""
        return 2 if self.batch <= 8 else 1

    @property
    def beside(self) -> int:
        """Bytes of shared memory but for the ring: sums, norms' parts and limits of sequences too."""
        sums = 2 * self.warps * self.batch * TILE * 4
        parts = -(-self.width // self.columns(self.width))
        return self.attention + self.buffers * sums + 8 * self.batch * (2 * parts + 1) + 8

    @property
    def slots(self) -> int:
        """Of the ring of weights under way; each has two barriers."""
        return min(MOST_SLOTS, (SHARED_BYTES - self.beside) // (self.slot_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        return self.slots * (self.slot_bytes + 16) + self.beside

    @property
    def words(self) -> int:
        """64-bit words of values on their way from CTA to CTA, of the layers of one parity."""
        query = self.heads * self.features
        qkv = query + 2 * self.key_heads * self.features
        each = self.width + qkv + self.splits * query // 2 + self.hidden // 2
        return self.batch * (each + self.splits * query // 8)

    @property
    def weight_bytes(self) -> int:
        """Of all weights, which a step reads once."""
        query, keys = self.heads * self.features, self.key_heads * self.features
        layer = self.width * (2 * query + 2 * keys + (3 if self.form.gated else 2) * self.hidden + 2)
        return 2 * (self.layers * layer + self.vocabulary * self.width + self.width)

    @property
    def hand_overs(self) -> int:
        """Values that CTAs wait for, one after the other."""
        return (4 if self.form.parallel else 5) * self.layers


def sizes_of(s: Shape) -> dict[str, list[int]]:
    """Of the weights of a layer, and of ``head``, by name."""
    query, keys, form = s.heads * s.features, s.key_heads * s.features, s.form
    sizes = {
        "query": [query + 2 * keys if form.qkv else query, s.width], "key": [keys, s.width], "value": [keys, s.width],
        "output": [s.width, query], "gate": [2 * s.hidden if form.gate_up else s.hidden, s.width],
        "up": [s.hidden, s.width], "down": [s.width, s.hidden],
    }  # fmt: skip
    biases = {f"{name}_bias": [n] for name, (n, _) in sizes.items()} | {"head_bias": [s.vocabulary]}
    norms = {name: [s.width] for name in ("norm", "norm_bias", "middle_norm", "middle_norm_bias")}
    turned = {name: size[::-1] if form.turned else size for name, size in sizes.items()}
    heads = {"query_norm": [s.features], "key_norm": [s.features], "head": [s.vocabulary, s.width]}
    return turned | biases | norms | heads


def shape_of(
    row: Tensor, mask: Tensor | None, weights: Sequence[Tensor], caches: Sequence[Tensor], form: Form
) -> Shape:
    """What the operands of a step say."""
    _, key_heads, positions, features = caches[0].shape
    first = dict(zip(form.weights, weights, strict=False))
    rows = {name: first[name].shape[1 if form.turned else 0] for name in ("query", "gate")}
    return Shape(
        layers=len(caches) // 2,
        width=row.shape[-1],
        hidden=form.hidden(rows["gate"]),
        heads=form.heads(rows["query"], key_heads, features),
        key_heads=key_heads,
        features=features,
        positions=positions,
        vocabulary=weights[-2 if "head" in form.biased else -1].shape[0],
        masked=mask is not None,
        batch=row.shape[0],
        form=form,
    )
