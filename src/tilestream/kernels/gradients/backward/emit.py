"""A backward chain's CUDA source."""

from __future__ import annotations

import re
from functools import lru_cache

import jinja2

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.gradients.backward import BackwardChain, WideChain, build
from tilestream.kernels.gradients.backward.body import body, maps
from tilestream.kernels.gradients.backward.emit_wide import emit as emit_wide
from tilestream.kernels.gradients.backward.model import TILES
from tilestream.kernels.gradients.backward.sums import width, write
from tilestream.kernels.gradients.stationary.emit import THREADS, Operands, argument
from tilestream.kernels.parts.mma import by_rows, of_columns
from tilestream.kernels.parts.source import KernelSource, kernel_name
from tilestream.kernels.parts.templating import template
from tilestream.kernels.stream.model import ceil_to
from tilestream.kernels.stream.places import REGISTER_SPLITS


def emit(pipeline: Pipeline) -> KernelSource:
    """Generate the kernel of a pipeline whose only stage is a backward chain.

    Raises:
        VerifyError: from the schedule, naming the user's line.
    """
    s = build(pipeline)
    if isinstance(s, WideChain):
        return emit_wide(pipeline, s)
    tensors = maps(s)
    pointers = (*(h.tensor for h in s.held), *s.odd)
    streams = [_stream(name, tensors, pointers, pipeline) for names in s.streams for name in names]
    gives, leaves = _exchange(s)
    params = argument(tensors, pointers)
    text = _template().render(
        name=kernel_name(pipeline), pipeline=pipeline, threads=THREADS, s=s, params=params, streams=streams,
        first_weight=tensors.index(s.weights[0]) if s.weights else 0, has_bias=any(h.is_bias for h in s.held),
        tiles=TILES, width=width(s.fours, s.ctas), body=body(s), gives=gives, leaves=leaves,
        writes=[write(h, s.chain.layers[h.layer], n) for n, h in enumerate(s.held)], mma=_products(s),
    )  # fmt: skip
    text = re.sub(r"\n{3,}", "\n\n", text)
    splits = tuple(r for r in REGISTER_SPLITS if r[0] >= s.registers) or REGISTER_SPLITS[-1:]
    return KernelSource(pipeline, text, s.shared_bytes, params, splits, Operands(tensors, pointers))


def _stream(name: str, maps: tuple[str, ...], pointers: tuple[str, ...], pipeline: Pipeline) -> tuple[int, int, int]:
    """A line of the table of streams: ``struct Stream`` of backward.cuh."""
    map_of = maps.index(name) if name in maps else -1
    return map_of, pointers.index(name) if map_of < 0 else -1, pipeline.tensor(name).features


def _products(s: BackwardChain) -> list[str]:
    """Specialisations of every product, each once."""
    sums = {(h.blocks, not h.is_bias) for h in s.held}
    rows = {ceil_to(layer.k, 16) // 8 for layer in s.chain.layers if layer.weight}
    return [
        *(of_columns(s.dtype, blocks, columns) for blocks, columns in sorted(sums)),
        *(by_rows(s.dtype, blocks) for blocks in sorted(rows)),
    ]


def _exchange(s: BackwardChain) -> tuple[list[list[str]], list[list[str]]]:
    """What each warpgroup gives the other, and what it adds and leaves."""
    gives: list[list[str]] = [[], []]
    leaves: list[list[str]] = [[], []]
    for owner, held in enumerate(s.shares):
        at = 0
        for n in held:
            h = s.held[n]
            gives[1 - owner].append(f"give(s{n}, mine + {at});")
            leaves[owner].append(f"leave(s{n}, others + {at}, partials + {4 * h.first});")
            at += 2048 * h.blocks
    return gives, leaves


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return template("backward.cu.j2")
