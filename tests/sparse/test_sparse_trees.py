"""Nodes on the streams of random trees, empty fibers anywhere: what comes out is the stream of the expected tree."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.sparse.run_spec import run_node
from tilestream.sparse.storage import Format, Level, SparseTensor
from tilestream.sparse.stream.graph import Node, Port
from tilestream.sparse.stream.tokens import DONE, stop

Tree = dict[int, Any]
"""Coordinates to subtrees; to values at the last level."""


def trees(levels: int) -> st.SearchStrategy[Tree]:
    below = st.integers(-3, 3).map(float) if levels == 1 else trees(levels - 1)
    return st.dictionaries(st.integers(0, 4), below, max_size=3)


def fibers(tree: Any, level: int) -> Any:
    """Nested lists of what is at a level: coordinates, or the values if the tree ends above it."""
    if not isinstance(tree, dict):
        return tree
    if level == 0:
        return sorted(tree)
    return [fibers(tree[c], level - 1) for c in sorted(tree)]


def stream(nested: Any, depth: int, values: bool = False) -> list[tuple[int, float]]:
    """The tokens of lists nested ``depth`` deep, without done."""
    if depth == 1:
        return [*((0, x) if values else (x, 0.0) for x in nested), (stop(0), 0.0)]
    out = [token for child in nested for token in stream(child, depth - 1, values)]
    return [*out[:-1], (stop(depth - 1), 0.0)]


def crd(tree: Tree, level: int) -> list[tuple[int, float]]:
    return [*stream(fibers(tree, level), level + 1), (DONE, 0.0)]


def val(tree: Tree, levels: int) -> list[tuple[int, float]]:
    return [*stream(fibers(tree, levels), levels, True), (DONE, 0.0)]


def node(kind: str, ins: list[str], **attrs: Any) -> Node:
    return Node(kind, kind, tuple((p, Port("given", p)) for p in ins), tuple(attrs.items()))


def merged(tree: Tree, depth: int) -> dict[tuple[int, ...], float]:
    """Sums by the path below the first level."""
    sums: dict[tuple[int, ...], float] = {}

    def visit(sub: Any, path: tuple[int, ...]) -> None:
        if not isinstance(sub, dict):
            sums[path[1:]] = sums.get(path[1:], 0.0) + sub
            return
        for c in sorted(sub):
            visit(sub[c], (*path, c))

    visit(tree, ())
    return sums


def nest(sums: dict[tuple[int, ...], float]) -> Tree:
    out: Tree = {}
    for path, value in sums.items():
        at = out
        for c in path[:-1]:
            at = at.setdefault(c, {})
        at[path[-1]] = value
    return out


def below(tree: Tree, levels: int, apply: Any) -> Any:
    """The tree with ``apply`` done to each subtree that is ``levels`` down."""
    return apply(tree) if levels == 0 else {c: below(sub, levels - 1, apply) for c, sub in tree.items()}


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 2))
def test_accumulators_of_every_order(data, order, outer):
    """``outer`` levels, then the reduced one, then ``order`` that are kept."""
    tree = data.draw(trees(outer + 1 + order))
    want = below(tree, outer, lambda sub: nest(merged(sub, order)))
    ins = {f"crd{i}": crd(tree, outer + order - i) for i in range(order + 1)} | {"val": val(tree, outer + order + 1)}
    got = run_node(node("spacc", list(ins), order=order), ins)
    assert got["val"] == val(want, outer + order)
    for i in range(order):
        assert got[f"crd{i}"] == crd(want, outer + order - 1 - i)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_reductions_that_are_told_their_coordinates(data, outer):
    tree = data.draw(trees(outer + 1))
    want = below(tree, outer, lambda sub: sum(sub[c] for c in sorted(sub)))
    ins = {"crd0": crd(tree, outer - 1), "val": val(tree, outer + 1)}
    got = run_node(node("spacc", list(ins), order=0), ins)["val"]
    assert got == val(want, outer)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 2))
def test_drops(data, outer):
    tree = data.draw(trees(outer + 1))
    want = below(tree, outer - 1, lambda sub: {c: x for c, x in sub.items() if x})
    ins = {"outer": crd(tree, outer - 1), "inner": crd(tree, outer)}
    got = run_node(node("crd_drop", list(ins)), ins)
    assert got == {"outer": crd(want, outer - 1), "inner": crd(want, outer)}


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_repeats_and_holds(data, outer):
    """Each coordinate once for each one below it: a repeat and a hold agree."""
    tree = data.draw(trees(outer + 1))
    upper, lower = crd(tree, outer - 1), crd(tree, outer)
    want = below(tree, outer - 1, lambda sub: {c: dict.fromkeys(range(len(x)), c) for c, x in sub.items()})
    held = [(int(x), 0.0) if t >= 0 else (t, 0.0) for t, x in val(want, outer + 1)]
    signal = run_node(node("repsig", ["in"]), {"in": lower})["sig"]
    assert run_node(node("repeat", ["in", "sig"]), {"in": upper, "sig": signal})["out"] == held
    assert run_node(node("crd_hold", ["outer", "inner"]), {"outer": upper, "inner": lower})["outer"] == held


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(2, 3), st.integers(0, 1), st.sampled_from(["intersect", "union"]))
def test_joiners_of_several_operands(data, operands, outer, kind):
    """Under the same outer coordinates, each operand has fibers of its own."""
    frame = data.draw(trees(outer)) if outer else None
    parts = [
        below(frame, outer, lambda _: data.draw(trees(1))) if outer else data.draw(trees(1)) for _ in range(operands)
    ]
    ins = {f"crd{i}": crd(part, outer) for i, part in enumerate(parts)}
    ins |= {f"in{i}": val(part, outer + 1) for i, part in enumerate(parts)}
    got = run_node(node(kind, list(ins)), ins)

    def meet(*subs: Tree) -> list[int]:
        keys = set.intersection(*map(set, subs)) if kind == "intersect" else set().union(*subs)
        return sorted(keys)

    fiber = [list(x) for x in zip(*(fibers(p, outer) if outer else [fibers(p, 0)] for p in parts), strict=True)]
    want = [meet(*(dict.fromkeys(f) for f in group)) for group in fiber]
    assert got["crd"] == [*stream(want if outer else want[0], outer + 1), (DONE, 0.0)]
    for i, part in enumerate(parts):
        subs = [part[c] for c in sorted(part)] if outer else [part]
        flat = [sub.get(c) for sub, keys in zip(subs, want, strict=True) for c in keys]
        seen = [None if t < 0 else x for t, x in got[f"out{i}"] if t >= -1]
        assert seen == flat


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 1))
def test_a_join_undoes_a_fork(data, ways, outer):
    """References are dealt out, two levels are scanned in each way, and every stream comes back as if none had been."""
    tree = data.draw(trees(outer + 3))
    levels, count = [], 1
    subs: list[Tree] = [tree]
    for _ in range(outer + 3):
        seg = np.cumsum([0, *map(len, subs)])
        levels.append(Level(5, seg, np.array([c for sub in subs for c in sorted(sub)], dtype=np.int64)))
        subs = [sub[c] for sub in subs for c in sorted(sub)]
        count = len(subs)
    shape = (5,) * len(levels)
    tensor = SparseTensor("A", shape, Format(("compressed",) * len(levels)), tuple(levels), np.zeros(count))

    def scan(level: int, ref: list) -> dict[str, list]:
        return run_node(node("scan", ["ref"], tensor="A", level=level), {"ref": ref}, tensor)

    ref = [(0, 0.0), (DONE, 0.0)]
    for level in range(outer + 1):
        ref = scan(level, ref)["ref"]
    first = scan(outer + 1, ref)
    second = scan(outer + 2, first["ref"])
    dealt = run_node(node("fork", ["in"], ways=ways), {"in": ref})
    firsts = [scan(outer + 1, dealt[f"out{p}"]) for p in range(ways)]
    seconds = [scan(outer + 2, x["ref"]) for x in firsts]
    for level, parts, want in (
        (0, [dealt[f"out{p}"] for p in range(ways)], ref),
        (1, [x["crd"] for x in firsts], first["crd"]),
        (2, [x["crd"] for x in seconds], second["crd"]),
    ):
        ins = {f"in{p}": part for p, part in enumerate(parts)} | {f"in{ways}": ref}
        assert run_node(node("join", list(ins), level=level, ordered=1), ins)["out"] == want
        if level == 0:
            ins = {f"in{p}": part for p, part in enumerate(parts)}
            assert run_node(node("join", list(ins), level=0), ins)["out"] == want
