"""CUDA source of a backward chain whose warpgroups share the sums."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import jinja2

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.gradients.backward import Layer, WideChain
from tilestream.kernels.gradients.backward.body import PAD, epilogue, make
from tilestream.kernels.gradients.backward.model import read
from tilestream.kernels.gradients.backward.sums import width, write
from tilestream.kernels.gradients.backward.wide import COLUMNS, TILES, chunks
from tilestream.kernels.gradients.stationary.emit import THREADS, Operands, argument
from tilestream.kernels.parts.mma import mixed, of_columns
from tilestream.kernels.parts.source import KernelSource, kernel_name
from tilestream.kernels.parts.templating import template
from tilestream.kernels.stream.layout import CHUNK
from tilestream.kernels.stream.model import ceil_to
from tilestream.kernels.stream.places import REGISTER_SPLITS


def emit(pipeline: Pipeline, s: WideChain) -> KernelSource:
    """Generate the kernel of a pipeline whose only stage is ``s``."""
    maps = _maps(s)
    pointers = tuple(dict.fromkeys(h.tensor for h in s.held))
    params = argument(maps, pointers)
    text = _template().render(
        name=kernel_name(pipeline), pipeline=pipeline, threads=THREADS, s=s, params=params,
        loads=[(maps.index(tensor), column, 0) for tensor, column in s.loads],
        boxes=[(maps.index(weight), column, row) for weight, column, row in s.weight_boxes],
        has_bias=any(h.is_bias for h in s.held), width=width(s.fours, s.ctas), body=_body(s, maps), leaves=_leaves(s),
        writes=[
            write(h, s.chain.layers[h.layer], pointers.index(h.tensor), group)
            for h in s.held
            for group in range(h.groups)
        ],
        mma=[
            *(of_columns(s.dtype, *p) for p in sorted({(h.blocks, not h.is_bias) for h in s.held})),
            *([mixed(s.dtype, 8)] if s.weights else []),
        ],
    )  # fmt: skip
    text = re.sub(r"\n{3,}", "\n\n", text)
    splits = tuple(r for r in REGISTER_SPLITS if r[0] >= s.registers) or REGISTER_SPLITS[-1:]
    return KernelSource(pipeline, text, s.shared_bytes, params, splits, Operands(maps, pointers))


def _maps(s: WideChain) -> tuple[str, ...]:
    streams = dict.fromkeys(name for names in s.streams for name in names)
    return (*streams, *s.weights, *([s.chain.result] if s.chain.result else []))


def _leaves(s: WideChain) -> list[str]:
    """What a warpgroup leaves: its 64 rows of a sum, or nothing of one that has no more than the first one's."""
    made = []
    for n, h in enumerate(s.held):
        mine = f"partials + {4 * h.first}"
        if h.groups == 1:
            made.append(f"if (g == 0) leave_own(s{n}, {mine});")
        else:
            made.append(f"leave_own(s{n}, {mine} + g * {512 * h.blocks});")
    return made


def _body(s: WideChain, maps: tuple[str, ...]) -> str:
    """The text inside the loop over pairs of tiles.

    Chunk by chunk of a layer's dX: the product, a part of the layer's sums, and the epilogue beside these. Behind the
    first product the sums of the layer before are over, in this warpgroup. When both have met behind the last chunk,
    each has the other's rows.
    """
    lines = _takes("dy", chunks(s.chain.layers[0].out), "u32")
    lines += ["u32 dy1 = dy0;"] if chunks(s.chain.layers[0].out) == 1 and s.tile_chunks > 1 else []
    boxes, unreleased = 0, chunks(s.chain.layers[0].out)  # of weights; slots that products under way may still read
    for n, layer in enumerate(s.chain.layers):
        names = {tensor: f"x{n}_{k}_" for k, tensor in enumerate(read(layer))}
        wide = chunks(layer.k)
        lines += [line for name in names.values() for line in _takes(name, wide, "const u32")]
        lines.append(f"// {layer.source}")
        taken = wide * len(names)
        x = names[layer.input] if layer.input else f"x{n}_"
        made = _makes(s, layer, names, x) if layer.makes else []
        if not layer.weight:
            sums = [line for c in range(max(wide, chunks(layer.out))) for line in _sums(s, n, x, c)]
            lines += ["mma_wait<0>();", "named_sync(BOTH_GROUPS, 256);", *made] if made else []
            lines += ["mma_fence();", *sums, "mma_commit();", "mma_wait<0>();"]
            lines += ["in.release();"] * (unreleased + taken)
            continue
        for c in range(wide):
            met = _meets(s, n, unreleased if n else 0) if c == 0 else []
            lines += _product(layer, n, c, boxes + c * chunks(layer.out))
            behind = [*sums, "mma_commit();", "mma_wait<1>();"] if (sums := _sums(s, n, x, c)) else ["mma_wait<0>();"]
            lines += ["mma_wait<1>();", *met, *made, "mma_fence();", *behind] if made and c == 0 else [*behind, *met]
            at = {tensor: f"{name}{c} + own" for tensor, name in names.items()}
            lines += epilogue(layer, f"acc{n}_{c}", 8, at, f"{_tile(n, c)} + own")
        boxes += wide * chunks(layer.out)
        unreleased = taken + (0 if n else unreleased)
        lines.append("fence_async_shared();")
        if n < len(s.chain.layers) - 1:
            lines.append("named_sync(BOTH_GROUPS, 256);")
            lines += [f"dy{c} = {_tile(n, c)};" for c in range(wide)]
        else:
            lines += [*_stores(maps.index(s.chain.result), n, wide), "mma_wait<0>();", *["in.release();"] * unreleased]
    return "\n".join(PAD + line for line in lines)


def _tile(n: int, c: int) -> str:
    """Where chunk ``c`` of the gradient that layer ``n`` makes is."""
    return f"Wide<S>::tile(smem, {n % TILES}, {c})"


def _product(layer: Layer, n: int, c: int, box: int) -> list[str]:
    """64 columns of dY times the weight, whose boxes for them begin at ``box``."""
    second = "dy1" if chunks(layer.out) > 1 else "dy0"
    depth = ceil_to(layer.out, 16) // 16
    return [
        f"Fragment<8> acc{n}_{c};",
        f"clear(acc{n}_{c});",
        "mma_fence();",
        f"times_weight<T, {depth}>(acc{n}_{c}, dy0 + own, {second} + own, smem + {box * CHUNK});",
        "mma_commit();",
    ]


def _stores(result: int, n: int, wide: int) -> list[str]:
    """dX of a warpgroup's rows, if there are any."""
    lines = ["named_sync(GROUP_BARRIER + g, 128);", "if (group_leader() && pair * PAIR_ROWS + g * ROWS < p.rows) {"]
    for c in range(wide):
        to = f"&p.maps[{result}], {COLUMNS * c}, pair * PAIR_ROWS + g * ROWS"
        lines += [f"  tma_store({to}, {_tile(n, c)} + own, EVICT_FIRST);", "  store_commit();"]
    return [*lines, "}"]


def _meets(s: WideChain, n: int, unreleased: int) -> list[str]:
    """When the sums of the layer before are over in this warpgroup: what they read is given back. What both read is
    overwritten when both are there: the place of an input, and of a gradient that this pair's sums have read, or,
    once a pair, the one's before. dX is copied out by its own warpgroup."""
    stores = s.chain.result and n < TILES and n % TILES == (len(s.chain.layers) - 1) % TILES
    both = n != 1 or s.chain.layers[n].makes
    return [
        *["in.release();"] * unreleased,
        *(["if (group_leader()) store_wait_read<0>();"] if stores else []),
        *(["named_sync(BOTH_GROUPS, 256);"] if both else ["named_sync(GROUP_BARRIER + g, 128);"] if stores else []),
    ]


def _makes(s: WideChain, layer: Layer, names: Mapping[str, str], x: str) -> list[str]:
    """The layer's input, when nobody reads the one before it any more; then both warpgroups' rows of it are there."""
    lines: list[str] = []
    for c in range(chunks(layer.k)):
        lines.append(f"const u32 {x}{c} = smem + {s.made} + {c} * SLOT_BYTES;")
        at = {tensor: f"{name}{c} + own" for tensor, name in names.items()}
        lines += make(layer, 8, at, f"{x}{c} + own")
    return [*lines, "fence_async_shared();", "named_sync(BOTH_GROUPS, 256);"]


def _takes(name: str, count: int, kind: str) -> list[str]:
    return [line for c in range(count) for line in (f"{kind} {name}{c} = in.take();", "in.advance();")]


def _sums(s: WideChain, n: int, x: str, c: int) -> list[str]:
    """Of layer ``n`` what is added beside the product of chunk ``c``: columns of the same chunk, or all, by chunk 0."""
    made = []
    layer = s.chain.layers[n]
    left = "(g == 0 ? dy0 : dy1)" if chunks(layer.out) > 1 else "dy0"
    for k, held in enumerate(s.held):
        if held.layer != n or held.chunk != c:
            continue
        if held.is_bias:
            made.append(f"add_pair_rows<T>(s{k}, {left}, smem + S::ONES);")
        elif held.turned:
            made.append(f"add_pair<T>(s{k}, g == 0 ? {x}0 : {x}1, dy{held.chunk});")
        else:
            made.append(f"add_pair<T>(s{k}, {left}, {x}{held.chunk});")
    return made


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return template("wide_backward.cu.j2")
