"""What the kernel of a decode step is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

WARPS = 16
"""Of a CTA."""
SLOT_BYTES = 2048
"""Of a piece of a row of weights."""
MOST_SLOTS = 8
SHARED_BYTES = 227 * 1024
SHARE, MOST_SPLITS = 128, 8
"""Positions of the cache that a CTA should have at least, and the most shares: who needs attention reads all."""
MOST_GROUP, MOST_LAYERS = 8, 256

WEIGHTS = ("norm", "query", "key", "value", "query_norm", "key_norm", "output", "middle_norm", "gate", "up", "down")
"""Of a layer, in this order; without norms of heads those two are missing."""
HEAD_NORMS = ("query_norm", "key_norm")


@dataclass(frozen=True)
class Shape:
    """What a step's kernel is compiled for. Sizes are elements; ``positions`` are the cache's.

    Args:
        head_norms: whether every head of queries and keys has a norm. masked: whether scores have a mask added.
        warps: of a CTA, a power of two.
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

    @property
    def refusal(self) -> str:
        """Why there is no kernel; empty if there is one."""
        if (
            self.features not in (64, 128, 256)
            or self.heads % self.key_heads
            or self.heads > MOST_GROUP * self.key_heads
        ):
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
        merge = self.warps * group * (self.features + 2)
        rows = (self.width, self.hidden, self.heads * self.features, merge, (group + 2) * self.features)
        return -(-max(rows) // 8) * 8

    @property
    def slots(self) -> int:
        """Pieces of weights that a warp has under way."""
        room = SHARED_BYTES - 8 * self.staged - 8 * self.warps
        return min(MOST_SLOTS, room // (self.warps * (SLOT_BYTES + 8)))

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.slots * (SLOT_BYTES + 8) + 8 * self.staged + 8 * self.warps

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
    def least_ctas(self) -> int:
        """CTAs that attention alone needs at once."""
        return self.key_heads * self.splits

    @property
    def hand_overs(self) -> int:
        """Values that all CTAs wait for, one after the other."""
        return 5 * self.layers


def names_of(head_norms: bool) -> list[str]:
    """The weights that a layer has."""
    return [name for name in WEIGHTS if head_norms or name not in HEAD_NORMS]


def shape_of(
    row: Tensor, cos: Tensor, mask: Tensor | None, weights: Sequence[Tensor], caches: Sequence[Tensor]
) -> Shape:
    """What the operands of a step say."""
    layers = len(caches) // 2
    head_norms = (len(weights) - 2) // layers == len(WEIGHTS)
    first = dict(zip(names_of(head_norms), weights, strict=False))
    features = cos.numel()
    return Shape(
        layers=layers,
        width=row.numel(),
        hidden=first["gate"].shape[0],
        heads=first["query"].shape[0] // features,
        key_heads=caches[0].shape[1],
        features=features,
        positions=caches[0].shape[2],
        vocabulary=weights[-1].shape[0],
        head_norms=head_norms,
        masked=mask is not None,
    )
