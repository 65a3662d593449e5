"""C++ of what a consumer warpgroup does with what the ring brings, step by step, and with its sums in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilestream.ir.pipeline import TileOp
from tilestream.kernels.gradients.chain import Layer
from tilestream.kernels.gradients.layouts import COLUMNS, GROUPS, NARROW_TILES, WIDE_TILES, Held, Kind, chunks, shares
from tilestream.kernels.gradients.model import Schedule
from tilestream.kernels.parts.element import Pairs, Value, both, registers
from tilestream.kernels.parts.mma import by_rows, mixed, of_columns
from tilestream.kernels.parts.text import block, indented
from tilestream.kernels.stream.layout import CHUNK
from tilestream.kernels.stream.model import ceil_to

OWN, BOTH = "named_sync(GROUP_BARRIER + g, 128);", "named_sync(BOTH_GROUPS, 256);"
RELEASE = "in.release();"


def body(s: Schedule, result: int) -> str:
    """The text of ``consume`` of a kind of stage; ``result``: the tensor map of dX."""
    held = s.layout.held
    narrow = s.layout.kind is Kind.NARROW
    splits = s.layout.rings
    step = f"{splits} * at.split + g" if splits > 1 else "at.split"
    stride = f"{splits} * at.stage.splits" if splits > 1 else "at.stage.splits"
    steps = _block(s) if s.layout.kind is Kind.BLOCKS else _Chain(s, result).steps()
    lines = [
        "const u32 own = (u32)g * CHUNK_BYTES;" if s.layout.kind is not Kind.BLOCKS else "",
        *(line for n, h in enumerate(held) for line in (f"Fragment<{h.blocks}> s{n};", f"clear(s{n});")),
        "Packed<8> a;" if narrow and s.weights else "",
        f"auto in = ring_of<S>(smem, {'g' if narrow else 0});",
        f"const int first = {step}, steps = steps_of<S>(p.rows);",
        "if (first < steps) bar_wait(weights_bar<S>(smem), 0);" if s.weights else "",
        "#pragma unroll 1",
        *block(f"for (int step = first; step < steps; step += {stride})", steps),
        "mma_wait<0>();" if s.layout.kind is Kind.BLOCKS else "",
        "if (group_leader()) store_wait<0>();" if s.chain.result else "",
        "float* const partials = partials_of(p, at, at.split);",
        *(_exchange(s) if narrow else [_leave(n, h) for n, h in enumerate(held)]),
    ]
    return "\n".join(indented(indented(line for line in lines if line)))


def products(s: Schedule) -> list[str]:
    """Specialisations of every product, each once."""
    sums = {(h.blocks, not h.is_bias) for h in s.layout.held}
    made = [of_columns(s.dtype, *p) for p in sorted(sums)]
    if s.layout.kind is Kind.NARROW:
        made += [by_rows(s.dtype, n) for n in sorted({_blocks(x) for x in s.chain.layers if x.weight})]
    return made + ([mixed(s.dtype, 8)] if s.layout.kind is Kind.WIDE and s.weights else [])


def _blocks(layer: Layer) -> int:
    """Of eight columns, that a narrow layer's dX has."""
    return ceil_to(layer.k, 16) // 8


def _sums(s: Schedule, n: int, x: str, chunk: int | None = None) -> list[str]:
    """What is added to the sums of layer ``n``, or to those of one chunk; ``x`` and ``dy`` with a chunk's number are
    operands.

    A warpgroup's 64 rows of a sum are columns of its own chunk of the left operand, where both have some.
    """
    lines = []
    for k, h in enumerate(s.layout.held):
        if h.layer != n or (chunk is not None and h.chunk != chunk):
            continue
        left, right = (x, "dy") if h.turned else ("dy", x)
        first = f"{left}0" if h.groups == 1 or h.across else f"(g == 0 ? {left}0 : {left}1)"
        tiles = s.layout.step_tiles
        lines.append(
            f"add_ones<T, {tiles}>(s{k}, {first}, smem + S::ONES);"
            if h.is_bias
            else f"add_rows<T, {tiles}>(s{k}, {first}, {right}{h.chunk});"
        )
    return lines


def _block(s: Schedule) -> list[str]:
    """The sum of one layer: products of a slot run on while the next one is waited for."""
    groups = s.layout.left
    across = s.layout.right // s.layout.groups if s.layout.held[0].across else 0
    sums = [f"s{n}" for n in range(len(s.layout.held))]
    left, ones = "dy0" if groups == 1 else "g == 0 ? dy0 : dy1", ["smem + S::ONES"] if len(sums) > 1 else []
    return [
        "const u32 dy0 = in.take();",
        "const u32 dy1 = dy0 + CHUNK_BYTES;" if groups > 1 else "",
        f"const u32 x0 = dy0 + {groups} * CHUNK_BYTES{f' + (u32)g * {across} * CHUNK_BYTES' if across else ''};",
        "in.advance();",
        "mma_fence();",
        f"add_rows<T, 1>({', '.join([*sums, left, 'x0', *ones])});",
        "mma_commit();",
        "mma_wait<1>();  // the products of the slot before are over",
        "if (step != first) in.release();",
    ]


class _Chain:
    """Layers of a chain, of narrow or of wide ones, chunk by chunk of a layer's dX.

    A layer's product with its weight is issued first, then its sums, which so run beside the epilogue. When the next
    layer's product is over, so are they: what they read is given back then. Narrow: no warp begins another tile before
    all are done with this one: it would overwrite what their sums read. Wide: when both warpgroups have met behind a
    layer's last chunk, each has the other's rows.
    """

    def __init__(self, s: Schedule, result: int) -> None:
        self.s, self.result = s, result
        self.layers = s.chain.layers
        self.narrow = s.layout.kind is Kind.NARROW
        self.meet = OWN if self.narrow else BOTH
        self.own = "" if self.narrow else " + own"  # in a slot
        self.taken = 0  # weights
        self.unreleased = 0  # slots that products under way may still read
        self.turn = 0  # inputs made

    def steps(self) -> list[str]:
        """The text inside the loop over steps."""
        first = chunks(self.layers[0].out)
        row = "step * ROWS" if self.narrow else f"(step * {GROUPS} + g) * ROWS"
        lines = [f"const int row = {row};" if self.s.chain.result else "", *_takes("dy", first, "u32")]
        if self.narrow and self.s.weights:
            lines.append("pack_chunk<T>(a, 0, dy0);")
        if first == 1 and self.s.layout.tile_chunks > 1:
            lines.append("u32 dy1 = dy0;")
        self.unreleased = first
        for n, layer in enumerate(self.layers):
            lines += self._layer(n, layer)
        return lines

    def _layer(self, n: int, layer: Layer) -> list[str]:
        names = {tensor: f"x{n}_{k}_" for k, tensor in enumerate(layer.read)}
        wide = chunks(layer.k)
        lines = [line for name in names.values() for line in _takes(name, wide, "const u32")]
        lines.append(f"// {layer.source}")
        x = names[layer.input] if layer.input else f"x{n}_"
        made = self._makes(n, layer, names, x) if layer.makes else []
        slots = wide * len(names)
        if not layer.weight:
            lines += ["mma_wait<0>();", BOTH] if made and not self.narrow else []
            lines += [*made, "mma_fence();", *_sums(self.s, n, x), "mma_commit();", "mma_wait<0>();"]
            return [*lines, *[RELEASE] * (self.unreleased + slots), *([OWN] if self.narrow else [])]
        is_last = n == len(self.layers) - 1
        for c in range(wide):
            sums = _sums(self.s, n, x, c)
            behind = [*sums, "mma_commit();", "mma_wait<1>();"] if sums else ["mma_wait<0>();"]
            before = self._before(n) if c == 0 else []
            lines += self._product(layer, n, c)
            if not made or c:
                lines += [*behind, *before]
            elif self.narrow:
                lines += [*made, "mma_fence();", *behind, *before]
            else:
                lines += ["mma_wait<1>();", *before, *made, "mma_fence();", *behind]
            at = {tensor: f"{name}{c}{self.own}" for tensor, name in names.items()}
            lines += self._epilogue(n, c, at, is_last)
        self.unreleased = slots + (0 if n else self.unreleased)
        lines.append("fence_async_shared();")
        if is_last:
            return [*lines, *self._stores(n, wide)]
        tail = " + own" if self.narrow else ""
        return [*lines, self.meet, *(f"dy{c} = {self._tile(n, c)}{tail};" for c in range(wide))]

    def _before(self, n: int) -> list[str]:
        """When the sums of the layer before are over in this warpgroup: what they read is given back. Of what is
        overwritten next, dX may still be on its way out, for its own warpgroup. Where both have read it, both are
        there: the place of an input, and of a gradient that this pair's sums have read, or, once a pair, the one's
        before."""
        released = [RELEASE] * (self.unreleased if n else 0)
        last = len(self.layers) - 1
        if self.narrow:
            return [*released, *(["if (group_leader()) store_wait_read<0>();", OWN] if n == last else [])]
        stores = self.s.chain.result and n < WIDE_TILES and n % WIDE_TILES == last % WIDE_TILES
        both = n != 1 or self.layers[n].makes
        return [
            *released,
            *(["if (group_leader()) store_wait_read<0>();"] if stores else []),
            *([BOTH] if both else [OWN] if stores else []),
        ]

    def _tile(self, n: int, c: int) -> str:
        """Where chunk ``c`` of the gradient that layer ``n`` makes is, of both warpgroups' rows; dX of narrow layers
        has a place of its own."""
        dx = NARROW_TILES - 1
        which = (dx if n == len(self.layers) - 1 else n % dx) if self.narrow else n % WIDE_TILES
        return f"smem + {self.s.at('gradients') + (which * self.s.layout.tile_chunks + c) * GROUPS * CHUNK}"

    def _product(self, layer: Layer, n: int, c: int) -> list[str]:
        """A chunk of dX: dY times the weight, whose boxes for its columns are side by side."""
        acc, box = f"acc{n}_{c}", f"smem + {self.taken * CHUNK}"
        self.taken += chunks(layer.out)
        second = "dy1" if chunks(layer.out) > 1 else "dy0"
        left = "a" if self.narrow else f"dy0 + own, {second} + own"
        return [
            f"Fragment<{_blocks(layer) if self.narrow else 8}> {acc};",
            f"clear({acc});",
            "mma_fence();",
            f"times_weight<T, {ceil_to(layer.out, 16) // 16}>({acc}, {left}, {box});",
            "mma_commit();",
        ]

    def _epilogue(self, n: int, c: int, at: Mapping[str, str], is_last: bool) -> list[str]:
        """The product, through the layer's ops, to the next dY: in shared memory, and, of narrow layers, packed."""
        layer, acc, slope = self.layers[n], f"acc{n}_{c}", f"slope{n}"
        values = {layer.product: acc} | ({layer.slope: slope} if layer.slope and self.narrow else {})
        ops = layer.along if len(values) > 1 else layer.ops
        wanted = {name for op in ops for name in op.ins}
        lines, made = _pair(ops, [x for x in layer.streams if x[0] in wanted], at, values)
        lines += [
            f"const u32 word = {_packed(made[layer.result])};",
            f"sts32(pair_addr<T>({self._tile(n, c)} + own, t, i, j), word);",
        ]
        lines += ["TS_REG(a, 2 * i + j) = word;"] if self.narrow and not is_last else []
        return _by_pairs(_blocks(layer) if self.narrow else 8, lines)

    def _makes(self, n: int, layer: Layer, names: Mapping[str, str], x: str) -> list[str]:
        """The layer's input, when nobody reads the one before it in its place any more; of narrow layers, whose slopes
        stay in registers, those as well. Then all who read it meet."""
        lines: list[str] = []
        slope = f"slope{n}" if layer.slope and self.narrow else ""
        own = [op for op in layer.ops if slope and op not in layer.along and op not in layer.makes]
        blocks = _blocks(layer) if self.narrow else 8
        for c in range(chunks(layer.k)):
            chunk = self.turn % self.s.layout.made * self.s.layout.made_chunks + c
            place = self.s.at("inputs") + chunk * GROUPS * CHUNK
            at = {tensor: f"{name}{c}{self.own}" for tensor, name in names.items()}
            inner, values = _pair((*layer.makes, *own), layer.sources, at, {})
            inner.append(f"sts32(pair_addr<T>({x}{c}{self.own}, t, i, j), {_packed(values[layer.x])});")
            lines.append(f"const u32 {x}{c} = smem + {place}{' + own' if self.narrow else ''};")
            if slope:
                lines.append(f"Fragment<{blocks}> {slope};")
                inner += [f"{to} = {text};" for to, text in zip(registers(slope), values[layer.slope], strict=True)]
            lines += _by_pairs(blocks, inner)
        self.turn += 1
        return [*lines, "fence_async_shared();", self.meet]

    def _stores(self, n: int, wide: int) -> list[str]:
        """dX of a warpgroup's rows, if there are any; then all sums are over."""
        copies = [
            line
            for c in range(wide)
            for line in (
                f"tma_store(&p.maps[{self.result}], {COLUMNS * c}, row, {self._tile(n, c)} + own, EVICT_FIRST);",
                "store_commit();",
            )
        ]
        lines = [OWN, *block("if (group_leader() && row < p.rows)", copies), "mma_wait<0>();"]
        return [*lines, *[RELEASE] * self.unreleased, *([OWN] if self.narrow else [])]


def _takes(name: str, count: int, kind: str) -> list[str]:
    return [line for c in range(count) for line in (f"{kind} {name}{c} = in.take();", "in.advance();")]


def _pair(
    ops: Sequence[TileOp], streams: Sequence[tuple[str, str]], at: Mapping[str, str], fragments: Mapping[str, str]
) -> tuple[list[str], dict[str, Value]]:
    """What a lane does with two neighbours (i, j): ``streams`` are read, then come ``ops``; and C++ of all tiles.

    Args:
        at: where the tensors of ``streams`` (tile, tensor) are. fragments: by tile, accumulators that hold it.
    """
    lines: list[str] = []
    values: dict[str, Value] = {}
    for k, (tile, fragment) in enumerate(fragments.items()):
        lines.append(f"const float f{k}[2] = {{{', '.join(registers(fragment))}}};")
        values[tile] = both(f"f{k}[e]")
    words: dict[str, Value] = {}
    for tile, tensor in streams:
        if tensor not in words:
            k = len(words)
            words[tensor] = both(f"r{k}[e]")
            lines.append(f"const u32 w{k} = lds32(pair_addr<T>({at[tensor]}, t, i, j));")
            lines.append(f"const float r{k}[2] = {{T::low(w{k}), T::high(w{k})}};")
        values[tile] = words[tensor]
    made = Pairs(values)
    made.run(ops)
    return [*lines, *made.lines], made.values


def _packed(value: Value) -> str:
    return f"T::pack({', '.join(value)})"


def _by_pairs(count: int, inner: Sequence[str]) -> list[str]:
    """A loop over a lane's pairs of a tile of so many blocks of eight columns."""
    return block("", [
        "TS_PASS", "TS_LANES {", "  const u32 t = TS_PASS_LANE;", "#pragma unroll",
        f"  for (int i = 0; i < {count}; ++i)", "#pragma unroll", "    for (int j = 0; j < 2; ++j) {",
        *indented(indented(indented(inner))), "    }", "}",
    ])  # fmt: skip


def _leave(n: int, h: Held) -> str:
    """What a warpgroup leaves: its part of a sum, or nothing of one that the first one has whole."""
    what, mine = "leave_column" if h.is_bias else "leave", f"partials + {4 * h.first}"
    if h.groups == 1:
        return f"if (g == 0) {what}(s{n}, {mine});"
    return f"{what}(s{n}, {mine} + g * {4 * h.part});"


def _exchange(s: Schedule) -> list[str]:
    """Each warpgroup gives the other what that one adds, and adds and leaves its own share."""
    gives: list[list[str]] = [[], []]
    leaves: list[list[str]] = [[], []]
    for owner, share in enumerate(shares(s.layout.held)):
        at = 0
        for h in share:
            n = s.layout.held.index(h)
            gives[1 - owner].append(f"give(s{n}, mine + {at});")
            what = "leave_column" if h.is_bias else "leave"
            leaves[owner] += [f"add_given(s{n}, others + {at});", f"{what}(s{n}, partials + {4 * h.first});"]
            at += 2048 * h.blocks
    ring = "smem + S::RING + (u32)({}) * S::SLOTS * CHUNK_BYTES"
    return [
        f"const u32 mine = {ring.format('g')}, others = {ring.format('1 - g')};",
        *block("if (g == 0)", gives[0]), *block("else", gives[1]), BOTH,
        *block("if (g == 0)", leaves[0]), *block("else", leaves[1]),
    ]  # fmt: skip
