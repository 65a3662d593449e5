"""What the kernel of a decode step is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

WARPS = 8
"""Of a CTA, that multiply; one more loads weights."""
TILE, DEPTH = 8, 32
"""Rows of a product that a CTA has at once; columns that a warp multiplies at once."""
MOST_BATCH, MOST_SLOTS = 32, 32
SHARED_BYTES = 227 * 1024
SHARE, MOST_SPLITS = 64, 8
"""Positions of the cache that a CTA should have at least, and the most shares: who needs attention reads all."""
MOST_GROUP, MOST_LAYERS = 8, 128

WEIGHTS = ("norm", "query", "key", "value", "query_norm", "key_norm", "output", "middle_norm", "gate", "up", "down")
"""Of a layer, in this order; without norms of heads those two are missing."""
HEAD_NORMS = ("query_norm", "key_norm")
GPT2_WEIGHTS = (
    "norm", "norm_bias", "query", "query_bias", "output", "output_bias", "middle_norm", "middle_norm_bias", "gate",
    "gate_bias", "down", "down_bias",
)  # fmt: skip
"""Of a layer of GPT-2: LayerNorms, products [inputs, outputs] with biases; ``query`` has queries, keys and values."""
LAST, GPT2_LAST = ("norm", "head"), ("norm", "norm_bias", "head")
"""Behind those of layers."""


@dataclass(frozen=True)
class Shape:
    """What a step's kernel is compiled for. Sizes are elements; ``positions`` are the cache's.

    Args:
        head_norms: whether every head of queries and keys has a norm. masked: whether scores have a mask added.
        warps: of a CTA, a power of two. batch: sequences.
        gpt2: LayerNorms, biases, weights [inputs, outputs], GELU(tanh) without a gate, no rotary embedding.
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
    warps: int = WARPS
    batch: int = 1
    gpt2: bool = False

    @property
    def refusal(self) -> str:
        """Why there is no kernel; empty if there is one."""
        if (
            self.features not in (64, 128, 256)
            or self.heads % self.key_heads
            or self.heads > MOST_GROUP * self.key_heads
        ):
            return f"{self.heads} heads of {self.features} features over {self.key_heads} of keys"
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
        layer = self.width * (2 * query + 2 * keys + (2 if self.gpt2 else 3) * self.hidden + 2)
        return 2 * (self.layers * layer + self.vocabulary * self.width + self.width)

    @property
    def hand_overs(self) -> int:
        """Values that CTAs wait for, one after the other."""
        return 5 * self.layers


def names_of(head_norms: bool, gpt2: bool = False) -> list[str]:
    """The weights that a layer has."""
    return [name for name in (GPT2_WEIGHTS if gpt2 else WEIGHTS) if head_norms or name not in HEAD_NORMS]


def sizes_of(s: Shape) -> dict[str, list[int]]:
    """Of the weights of a layer, by name, and of ``head``."""
    query, keys = s.heads * s.features, s.key_heads * s.features
    qkv = query + 2 * keys if s.gpt2 else query
    sizes = {
        "query": [qkv, s.width], "key": [keys, s.width], "value": [keys, s.width], "output": [s.width, query],
        "gate": [s.hidden, s.width], "up": [s.hidden, s.width], "down": [s.width, s.hidden],
    }  # fmt: skip
    biases = {f"{name}_bias": [n] for name, (n, _) in sizes.items()}
    norms = {name: [s.width] for name in ("norm", "norm_bias", "middle_norm", "middle_norm_bias")}
    turned = {name: size[::-1] if s.gpt2 else size for name, size in sizes.items()}
    heads = {"query_norm": [s.features], "key_norm": [s.features], "head": [s.vocabulary, s.width]}
    return turned | biases | norms | heads


def shape_of(row: Tensor, mask: Tensor | None, weights: Sequence[Tensor], caches: Sequence[Tensor]) -> Shape:
    """What the operands of a step say."""
    layers, gpt2 = len(caches) // 2, weights[-2].shape == weights[-3].shape
    _, key_heads, positions, features = caches[0].shape
    each = (len(weights) - len(GPT2_LAST if gpt2 else LAST)) // layers
    head_norms = not gpt2 and each == len(WEIGHTS)
    first = dict(zip(names_of(head_norms, gpt2), weights, strict=False))
    return Shape(
        layers=layers,
        width=row.shape[-1],
        hidden=first["gate"].shape[1 if gpt2 else 0],
        heads=key_heads if gpt2 else first["query"].shape[0] // features,
        key_heads=key_heads,
        features=features,
        positions=positions,
        vocabulary=weights[-1].shape[0],
        head_norms=head_norms,
        masked=mask is not None,
        batch=row.shape[0],
        gpt2=gpt2,
    )
