"""The features that a node's lanes share out: all sized axes of a ragged pipeline, in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tilestream.errors import VerifyError
from tilestream.ir.axes import At
from tilestream.ir.pipeline import Pipeline, Tile

REMEDY = "leave it to the operators that it is made of"


@dataclass(frozen=True)
class Space:
    """Sized axes, outermost first. What lies along ``prefix`` alone (heads) is alike in all lanes of a run.

    Attributes:
        names: of every axis of the pipeline, the axis of the space that it is; axes of one position are left out.
    """

    axes: tuple[str, ...]
    prefix: tuple[str, ...]
    sizes: Mapping[str, int]
    names: Mapping[str, str]

    @property
    def runs(self) -> int:
        """Runs of neighbouring elements: heads; one where nothing is alike along a part of them."""
        return prod(self.sizes[a] for a in self.prefix)

    @property
    def run(self) -> int:
        """Elements of a run."""
        return prod(self.sizes[a] for a in self.inner)

    @property
    def inner(self) -> tuple[str, ...]:
        return self.axes[len(self.prefix) :]

    def axes_of(self, tile: Tile) -> tuple[str, ...]:
        """Those of a tile."""
        return tuple(self.names[a.name] for a in tile.axes if a.name in self.names)

    def column(self, at: At) -> At:
        """A coordinate in the space's names; one of a single position is no axis."""
        return replace(at, axes=tuple(self.names[a] for a in at.axes if a in self.names))


def space_of(p: Pipeline, nodes: str, edges: str) -> Space:
    """The space of a plain ragged pipeline.

    Raises:
        VerifyError: its tiles' axes have no common order.
    """
    tiles = p.tiles()
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.get(name, name) != name:
            name = parent[name]
        return name

    def same(own: str, other: str) -> None:
        rows = {root(own), root(other)} & {nodes, edges}
        if rows and root(own) != root(other):
            raise VerifyError(f"pipeline {p.name!r} reads along {own!r} what lies along {other!r}", REMEDY)
        parent[root(other)] = root(own)

    for op in p.stages[0].ops:
        for v in op.views[: len(op.tiles)]:
            for own, at in zip(tiles[v.of].axes, v.at or (), strict=False):
                if at.axes:
                    same(own.name, at.axes[0])
    sizes = {a.name: a.size for t in tiles.values() for a in t.axes if a.size not in (None, 1)}
    names = {name: root(name) for name in (*sizes, *parent) if sizes.get(root(name))}
    used = [tuple(names[a.name] for a in t.axes if a.name in names) for t in tiles.values()]
    axes = max(used, key=lambda each: (prod(sizes[a] or 1 for a in each), len(each)), default=())
    names |= _alike(p, names, [each for each in used if len(each) == len(axes)], axes, sizes)
    used = [tuple(names.get(a, a) for a in each) for each in used]
    for each in used:
        if tuple(a for a in axes if a in each) != each:
            raise VerifyError(
                f"pipeline {p.name!r} has tiles along {', '.join(each)} and along {', '.join(axes) or 'nothing'}",
                REMEDY,
            )
    prefixes = [each for each in used if each and each != axes and each == axes[: len(each)]]
    prefix = max(prefixes, key=len, default=())
    return Space(axes, prefix, {a: sizes[a] or 1 for a in axes}, names)


def _alike(
    p: Pipeline,
    names: Mapping[str, str],
    used: Sequence[tuple[str, ...]],
    axes: tuple[str, ...],
    sizes: Mapping[str, Any],
) -> dict[str, str]:
    """Further names of the axes of the space: keys and values of attention have features of their own, as many of each.
    Where no op has both axes, lanes that share the one out share the other out as well."""
    met = [{names[a] for a in op.mentions if a in names} for op in p.stages[0].ops]
    apart = {
        own: other
        for each in used
        for own, other in zip(each, axes, strict=True)
        if own not in axes and sizes[own] == sizes[other] and not any({own, other} <= both for both in met)
    }
    return {name: apart[root] for name, root in names.items() if root in apart}
