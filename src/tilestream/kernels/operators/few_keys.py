"""Attention over few keys: its sizes, and what it computes on axes. Two kernels have it: ``short_attention``, a warp
for 16 queries, and ``head_attention``, a warpgroup for 64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.read import axes, program, tensors

TILE = 16
"""Queries of a warp at a time."""
SHARED = 232_448
"""Bytes of shared memory of an SM, and of a CTA at most."""
MOST_TERMS = 2
"""Of what is added to scores: a bias and a mask."""
START = 2000.0
"""Cycles of a launch until the first heads are in shared memory: as ``head_attention``'s others."""


@dataclass(frozen=True)
class Attention:
    """An attention of ``batches`` sequences.

    Args:
        features: of a head, one of ``FEATURES``. keys: at most ``MOST_KEYS``.
        period: sequences from one to the next that has the same added to its scores; divides ``batches``.
        terms: of what is added. paired: two keys of each are a word.
        safe: a row that keeps nothing is zero; else no number.
    """

    batches: int
    heads: int
    queries: int
    keys: int
    features: int
    dtype: str = "bf16"
    period: int = 1
    terms: int = 0
    paired: bool = False
    safe: bool = True

    @property
    def tiles(self) -> int:
        """Of queries of a head."""
        return ceil(self.queries / TILE)

    @property
    def turns(self) -> int:
        """Sequences with the same added to their scores."""
        return self.batches // self.period


def pipeline(a: Attention, terms: Sequence[Sequence[int]], scale: float) -> Pipeline:
    """What the kernel computes, on axes: sequences are ``turns`` of ``period``.

    Args:
        terms: shapes [period or 1, heads or 1, queries or 1, keys or 1] of what is added.
    """
    sizes = {"i": a.turns, "w": a.period, "h": a.heads, "q": a.queries, "k": a.keys, "f": a.features}
    known = axes(" ".join(f"{name}={size}" for name, size in sizes.items()))
    views = [f"T{n}[{','.join(x for x, size in zip('whqk', shape, strict=True) if size > 1)}]"
             for n, shape in enumerate(terms)]  # fmt: skip
    ops = ["s[i,w,h,q,k]:f32 = product Q[i,w,q,h,f] K[i,w,k,h,f]", f"t[i,w,h,q,k]:f32 = mul s scalar={scale!r}"]
    ops += [f"t{n}[i,w,h,q,k]:f32 = add {f't{n - 1}' if n else 't'} {view}" for n, view in enumerate(views)]
    ops += [f"y[i,w,h,q,f] = product {f't{len(views) - 1}' if views else 't'} V[i,w,k,h,f] combine=softmax"]
    text = "\n".join([*ops, "y -> Y[i,w,q,h,f]"])
    given = f"Q[i,w,q,h,f] K[i,w,k,h,f] V[i,w,k,h,f] {' '.join(views)} >Y[i,w,q,h,f]"
    loops = (Loop("i", 1), Loop("w", 1), Loop("h", 1), Loop("q", TILE))
    stage = Stage("attention", program(text, known), loops, (Spread(Level.GRID, 1, ("w", "h", "i")),))
    return Pipeline("short attention", tensors(given, known), (stage,))
