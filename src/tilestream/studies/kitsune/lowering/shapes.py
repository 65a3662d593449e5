"""The dimensions of a graph's values, as its operators relate them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported
from tilestream.studies.kitsune.lowering.dims import Axes, Dims, Shape


@dataclass
class Shapes:
    """Dimensions by result.

    Attributes:
        frames: what a node that computes ranges over; ``features``: those of its dimensions that lie innermost.
        rows: dimensions that a node tells from others, though no result has them alone.
    """

    dims: Dims = field(default_factory=Dims)
    of: dict[tuple[fx.Node, int], Shape] = field(default_factory=dict)
    frames: dict[fx.Node, Shape] = field(default_factory=dict)
    features: dict[fx.Node, Axes] = field(default_factory=dict)
    rows: list[Shape] = field(default_factory=list)

    def read(self, node: object, index: int = 0) -> Shape:
        """Dimensions of an operand; one from outside gets its own.

        Raises:
            Unsupported: it is no tensor, or empty.
        """
        if not isinstance(node, fx.Node):
            raise Unsupported("an operand is not a tensor")
        if (node, index) not in self.of:
            self.of[node, index] = self.dims.new(sizes(node, index))
        return self.of[node, index]

    def make(self, node: fx.Node, shape: Shape, index: int = 0) -> None:
        """The dimensions of a result."""
        self.of[node, index] = shape

    def over(self, node: fx.Node, frame: Shape, features: Axes | None = None) -> None:
        """``node`` computes over ``frame``; its innermost dimension is the last unless given."""
        self.frames[node] = frame
        self.features[node] = (frame[-1] if frame else ()) if features is None else features

    def settle(self) -> None:
        """Make neighbours one (``Dims.coalesce``), when all nodes have been seen."""
        self.dims.coalesce([*self.of.values(), *self.frames.values(), *self.rows])

    def align(self, node: object, shape: Sequence[Axes], index: int = 0) -> None:
        """``node`` is an operand under ``shape``, from the last dimension on; those of size 1 broadcast."""
        for mine, theirs in zip(reversed(self.read(node, index)), reversed(shape), strict=False):
            if mine and theirs:
                self.dims.same([mine], [theirs])


def sizes(node: fx.Node, index: int = 0) -> tuple[int, ...]:
    """The shape of a result.

    Raises:
        Unsupported: it is no tensor, is empty, or has a size that is not known.
    """
    fake = node.meta.get("val")
    fake = fake[index] if isinstance(fake, list | tuple) else fake
    if not isinstance(fake, torch.Tensor):
        raise Unsupported("an operand is not a tensor")
    if not all(isinstance(d, int) for d in fake.shape):
        raise Unsupported("a size that is read at the call")
    if any(d < 1 for d in fake.shape):
        raise Unsupported("an empty tensor")
    return tuple(fake.shape)


def dims_of(dim: object, rank: int) -> list[int]:
    """Dimensions that an argument names, counted from the front; all of them where it names none."""
    named = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    return sorted(int(d) % max(rank, 1) for d in named) or list(range(rank))
