"""Elementwise code has one emitter: fragments of streams, pairs of products and gradients, rows of a norm in front."""

from __future__ import annotations

import ast
import re

import pytest
from gpu_pipelines import NAMED
from places import PACKAGE
from shared_tiles import Ffn

from tilestream import cuda
from tilestream.ir.axes import View
from tilestream.ir.pipeline import Tile, TileOp
from tilestream.kernels.families import kernel_of
from tilestream.kernels.parts.element import Elements, Pairs, both
from tilestream.plan.passes.share_tile import Split, share_tile

X = Tile.of("x", 64, "f32")


def op(kind: str, name: str, *ins: str, vector: str = "") -> TileOp:
    return TileOp(kind, Tile.of(name, 64, "f32"), ins, (vector,) if vector else ())


def test_no_family_of_tiles_asks_for_the_snippets_of_tile_ops():
    """Edges of segments lie in loops over arrays, which are no tiles."""
    families = [PACKAGE / "kernels" / name for name in ("stream", "product", "gradients")]
    found = set()
    for path in (p for folder in families for p in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if "tilestream.kernels.parts.snippets" in modules:
            found.add(path.stem)
    assert not found


def test_values_are_named_once_and_fetched_once():
    asked = []

    class Fetched(Pairs):
        def fetched(self, tile: str) -> tuple[str, ...]:
            asked.append(tile)
            return both(f"{tile}[e]")

    made = Fetched({}, {View("b"): both("b[e]")})
    made.run([op("load", "y"), op("add", "s", "x", "x"), op("add", "t", "s", "x"), op("mul", "u", "t", vector="b")])
    assert asked == ["x"]
    assert made.taken() == [
        "const float v0[2] = {add(x[0], x[0]), add(x[1], x[1])};",
        "const float v1[2] = {add(v0[0], x[0]), add(v0[1], x[1])};",
        "const float v2[2] = {mul(v1[0], b[0]), mul(v1[1], b[1])};",
    ]
    assert made.value("u") == ("v2[0]", "v2[1]") and made.taken() == []


def test_pairs_have_no_rows_to_reduce():
    with pytest.raises(NotImplementedError, match="sum wants whole rows"):
        Pairs({"x": both("x[e]")}).run([op("sum", "s", "x")])


def test_a_norm_is_the_same_ops_in_a_fragment_and_in_a_row():
    """Calls of the functions of tile ops, in order; sums of rows are each layout's own."""
    calls = re.compile(r"\b(sub|square|mul|add|rsqrt_)\(")

    def told(text: str, begin: str) -> list[str]:
        return calls.findall(text[text.index(begin) :])

    block = Ffn(512, 256, 256, norm="layer")
    row = kernel_of(share_tile(block.program(), Split(4, 8))).source().text
    row = row[: row.index("static TS_DEV void prefetch")]
    (stream,) = cuda.sources(NAMED["reductions"]())
    in_row = told(row, "void before(")
    assert in_row[:5] == ["mul", "sub", "square", "mul", "add"] and "rsqrt_" in in_row
    assert {"mul", "sub", "square", "add", "rsqrt_"} <= set(told(stream.text, "void consume("))


def test_a_way_to_lie_says_all_that_differs():
    assert Elements.__abstractmethods__ == {"computed", "reduced"}
