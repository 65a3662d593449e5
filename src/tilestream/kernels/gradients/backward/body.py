"""C++ of what a warpgroup does with one tile of a backward chain, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilestream.ir.pipeline import TileOp
from tilestream.kernels.gradients.backward import BackwardChain, Layer
from tilestream.kernels.gradients.backward.model import MADE, TILES, read
from tilestream.kernels.parts.snippets import expression
from tilestream.kernels.stream.layout import CHUNK
from tilestream.kernels.stream.model import ceil_to

PAD = "    "
RESULT = TILES - 1
"""The tile of dX."""


def body(s: BackwardChain) -> str:
    """The text inside the loop over tiles.

    A layer's product with its weight is issued first, then its sums, which so run beside the epilogue. When the next
    layer's product is over, so are they: what they read is given back then. No warp begins another tile before all are
    done with this one: it would overwrite what their sums read.
    """
    lines = ["u32 dy = in.take();", "in.advance();", "pack_chunk<T>(a, 0, dy);"]
    taken, unreleased, turn = 0, 1, 0  # weights; slots that products under way may still read; inputs made
    for n, layer in enumerate(s.chain.layers):
        names = {tensor: f"x{n}_{k}" for k, tensor in enumerate(read(layer))}
        lines += [line for name in names.values() for line in (f"const u32 {name} = in.take();", "in.advance();")]
        lines.append(f"// {layer.source}")
        x = names[layer.input] if layer.input else f"x{n}"
        slope = f"slope{n}" if layer.slope else ""
        made = make(layer, ceil_to(layer.k, 16) // 8, names, x, slope) if layer.makes else []
        if made:
            where = f"const u32 {x} = smem + {s.made} + (u32)(g * {MADE} + {turn % MADE}) * CHUNK_BYTES;"
            made = [where, *made, "fence_async_shared();", "named_sync(GROUP_BARRIER + g, 128);"]
            turn += 1
        sums = _sums(s, n, x)
        if not layer.weight:
            lines += [*made, "mma_fence();", *sums, "mma_commit();", "mma_wait<0>();"]
            lines += ["in.release();"] * (unreleased + len(names))
            lines.append("named_sync(GROUP_BARRIER + g, 128);")
            continue
        last = n == len(s.chain.layers) - 1
        blocks = ceil_to(layer.k, 16) // 8
        lines += [
            f"Fragment<{blocks}> acc{n};",
            f"clear(acc{n});",
            "mma_fence();",
            f"times_weight<T, {ceil_to(layer.out, 16) // 16}>(acc{n}, a, smem + {taken * CHUNK});",
            "mma_commit();",
            *([*made, "mma_fence();"] if made else []),
            *sums,
            "mma_commit();",
            "mma_wait<1>();",
        ]
        lines += ["in.release();"] * unreleased if n else []
        unreleased = len(names) + (0 if n else unreleased)
        taken += 1
        if last:
            lines += ["if (group_leader()) store_wait_read<0>();", "named_sync(GROUP_BARRIER + g, 128);"]
        to = RESULT if last else n % RESULT
        lines += [
            f"dy = Chain<S>::tile(smem, g, {to});",
            *epilogue(layer, f"acc{n}", blocks, names, "dy", slope, not last),
        ]
        lines += ["fence_async_shared();", "named_sync(GROUP_BARRIER + g, 128);"]
        if last:
            lines.append("if (group_leader()) {")
            lines.append(f"  tma_store(&p.maps[{_result_map(s)}], 0, tile * ROWS, dy, EVICT_FIRST);")
            lines += ["  store_commit();", "}", "mma_wait<0>();"]
            lines += ["in.release();"] * unreleased
            lines.append("named_sync(GROUP_BARRIER + g, 128);")
    return "\n".join(PAD + line for line in lines)


def _result_map(s: BackwardChain) -> int:
    return maps(s).index(s.chain.result)


def maps(s: BackwardChain) -> tuple[str, ...]:
    """Tensors that bulk copies address: what streams in, each once, the weights, and dX."""
    streams = dict.fromkeys(name for names in s.streams for name in names if name not in s.odd)
    return (*streams, *s.weights, *([s.chain.result] if s.chain.result else []))


def _sums(s: BackwardChain, n: int, x: str) -> list[str]:
    made = []
    for k, held in enumerate(s.held):
        if held.layer != n:
            continue
        if held.is_bias:
            made.append(f"add_rows<T>(s{k}, dy, smem + S::ONES);")
        else:
            left, right = (x, "dy") if held.turned else ("dy", x)
            made.append(f"add_tile<T>(s{k}, {left}, {right});")
    return made


def epilogue(
    layer: Layer, acc: str, blocks: int, names: Mapping[str, str], to: str, slope: str = "", keeps: bool = False
) -> list[str]:
    """``acc``, through the layer's ops, to the next dY: in shared memory at ``to``, and, if it ``keeps`` it, packed.

    ``slope``: an accumulator with the layer's slopes, where ``make`` left them.
    """
    values = {layer.product: _registers(acc)} | ({layer.slope: _registers(slope)} if slope else {})
    ops = layer.along if slope else layer.ops
    wanted = {name for op in ops for name in op.ins}
    inner = _lines(ops, [s for s in layer.streams if s[0] in wanted], names, values)
    low, high = values[layer.result]
    inner += [f"const u32 word = T::pack({low}, {high});", f"sts32(pair_addr<T>({to}, t, i, j), word);"]
    inner += ["TS_REG(a, 2 * i + j) = word;"] if keeps else []
    return _by_pairs(blocks, inner)


def make(layer: Layer, blocks: int, names: Mapping[str, str], to: str, slope: str = "") -> list[str]:
    """A layer's input, of what it is made of: in shared memory at ``to``; and its slopes, if ``slope`` is a name."""
    values: dict[str, tuple[str, str]] = {}
    beside = [op for op in layer.ops if slope and op not in layer.along and op not in layer.makes]
    inner = _lines((*layer.makes, *beside), layer.sources, names, values)
    low, high = values[layer.x]
    inner.append(f"sts32(pair_addr<T>({to}, t, i, j), T::pack({low}, {high}));")
    inner += [f"{a} = {b};" for a, b in zip(_registers(slope), values[layer.slope], strict=True)] if slope else []
    return [*([f"Fragment<{blocks}> {slope};"] if slope else []), *_by_pairs(blocks, inner)]


def _registers(fragment: str) -> tuple[str, str]:
    """A lane's two neighbours (i, j) in an accumulator."""
    first = f"TS_REG({fragment}, 4 * i + 2 * j"
    return f"{first})", f"{first} + 1)"


def _lines(
    ops: Sequence[TileOp],
    streams: Sequence[tuple[str, str]],
    names: Mapping[str, str],
    values: dict[str, tuple[str, str]],
) -> list[str]:
    """What a lane does with two neighbours of a tile: loads of ``streams``, then ``ops``, which adds to ``values``."""
    inner: list[str] = []
    words: dict[str, str] = {}
    for tile, tensor in streams:
        if tensor not in words:
            words[tensor] = f"w{len(words)}"
            inner.append(f"const u32 {words[tensor]} = lds32(pair_addr<T>({names[tensor]}, t, i, j));")
        values[tile] = (f"T::low({words[tensor]})", f"T::high({words[tensor]})")
    for k, op in enumerate(ops):
        inner += _op(op, k, values)
    return inner


def _by_pairs(blocks: int, inner: Sequence[str]) -> list[str]:
    """A loop over a lane's pairs of a tile of so many blocks of eight columns."""
    return [
        "{", "  TS_PASS", "  TS_LANES {", "    const u32 t = TS_PASS_LANE;", "#pragma unroll",
        f"    for (int i = 0; i < {blocks}; ++i)", "#pragma unroll", "      for (int j = 0; j < 2; ++j) {",
        *(f"        {line}" for line in inner), "      }", "  }", "}",
    ]  # fmt: skip


def _op(op: TileOp, k: int, values: dict[str, tuple[str, str]]) -> list[str]:
    assert op.out is not None
    made = []
    for column in range(2):
        text = expression(op, [values[name][column] for name in op.ins])
        made.append(f"const float v{k}_{column} = {text};")
    values[op.out.name] = (f"v{k}_0", f"v{k}_1")
    return made
