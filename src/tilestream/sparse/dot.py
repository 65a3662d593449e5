"""Stream graphs as SAM's DOT files: written so that SAM's tools read them, and read back exactly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tilestream.errors import SparseError
from tilestream.sparse.dot_text import parse, quote
from tilestream.sparse.graph import NODES, Graph, Node, Port, StreamType
from tilestream.sparse.sam import formats_of, graph_of
from tilestream.sparse.storage import Format
from tilestream.sparse.stream_types import stream_types

INTEGERS = ("level", "ways", "order", "unary", "ordered", "skip_empty")
TYPES = {
    "scan": "fiberlookup",
    "repsig": "repsiggen",
    "locate": "locator",
    "array": "arrayvals",
    "spacc": "spaccumulator",
    "crd_drop": "crddrop",
    "crd_hold": "crdhold",
    "val_drop": "valdrop",
    "write_crd": "fiberwrite",
    "write_val": "fiberwrite",
}
"""SAM's names of kinds; the others have their own."""

_COLOURS = {
    "scan": "green4",
    "array": "green2",
    "write_crd": "green3",
    "write_val": "green3",
    "repsig": "cyan3",
    "repeat": "cyan2",
    "intersect": "purple",
    "union": "purple",
    "crd_drop": "orange",
    "crd_hold": "orange",
    "val_drop": "orange",
}
_STYLES = {"crd": " style=dashed", "ref": " style=bold", "repsig": " style=dotted"}


@dataclass(frozen=True)
class DotGraph:
    """A graph read from DOT. ``formats``: those of its tensors, results included, as far as the file says them."""

    graph: Graph
    formats: Mapping[str, Format] = field(default_factory=dict)


def to_dot(graph: Graph, formats: Mapping[str, Format] | None = None) -> str:
    """The graph in SAM's dialect of DOT, which Graphviz draws too.

    Args:
        formats: of tensors and results; without one, levels are taken to be compressed and in the order of indices.
    """
    formats = dict(formats or {})
    index, types, hidden = index_names(graph), stream_types(graph), _hidden_roots(graph)
    by_name = {node.name: node for node in graph.nodes}
    comment = ",".join(f"{name}={_letters(format)}" for name, format in formats.items())
    lines = ["digraph SAM {", f"    comment={quote(comment)}"]
    lines += [f'    generator="tilestream" name={quote(graph.name)} block="{graph.block}"']
    for node in graph.nodes:
        if node.name in hidden:
            continue
        attrs = {**_attributes(by_name, node, index, formats), "kind": node.kind, "source": node.source}
        attrs |= {f"a_{name}": str(value) for name, value in node.attrs}
        for root in (by_name[stream.node] for _, stream in node.ins if stream.node in hidden):
            attrs |= {"root_node": root.name, **{f"r_{name}": str(value) for name, value in root.attrs}}
        # SAM's generator reads a node's attributes from its comment, whether it has a root among them.
        shown = ",".join(f"{k}={v}" for k, v in attrs.items() if v and not re.match(r"kind|source|root_node|[ar]_", k))
        look = f"color={_COLOURS.get(node.kind, 'brown')} shape=box style=filled"
        look = "shape=point style=invis" if node.kind == "broadcast" else look
        text = " ".join(f"{name}={quote(value)}" for name, value in attrs.items() if value)
        lines.append(f"    {quote(node.name)} [comment={quote(shown)} label={quote(_label(attrs))} {look} {text}]")
    for node in graph.nodes:
        for port, stream in node.ins:
            if stream.node in hidden:
                continue
            kind = types[stream]
            tag = _edge_tag(by_name, node, port, stream, index)
            label = f"{kind}_{tag}" if tag else str(kind)
            lines.append(
                f"    {quote(stream.node)} -> {quote(node.name)} [label={quote(label)}{_STYLES.get(kind, '')} "
                f"type={quote(kind)} comment={quote(tag)} out={quote(stream.port)} in={quote(port)}]"
            )
    return "\n".join([*lines, "}", ""])


def from_dot(text: str, name: str = "sam") -> DotGraph:
    """The graph of a DOT file: one that ``to_dot`` wrote, or one of SAM's compiler.

    In SAM's files, a reduction becomes a ``spacc`` of order 0 that is told which coordinates it reduces for, so that
    empty rows are right, and coordinates held for an accumulator are given to it as they were before.

    Raises:
        SparseError: text that is no DOT, or a node that has no counterpart here; names it.
    """
    dot = parse(text)
    if dot.attrs.get("generator") != "tilestream":
        return DotGraph(*graph_of(dot, name))
    nodes: list[Node] = []
    for node, attrs in dot.nodes.items():
        kind = attrs.get("kind", "")
        if kind not in NODES:
            raise SparseError(f"node {node!r} is of unknown kind {kind!r}", f"use one of: {', '.join(NODES)}")
        ins = [(a.get("in", ""), Port(src, a.get("out", ""))) for src, dst, a in dot.edges if dst == node]
        if root := attrs.get("root_node"):
            nodes.append(Node(root, "root", (), _given(attrs, "r_")))
            ins.insert(0, ("ref" if kind == "scan" else "in", Port(root, "ref")))
        nodes.append(Node(node, kind, tuple(ins), _given(attrs, "a_"), attrs.get("source", "")))
    block = int(dot.attrs.get("block", "1"))
    return DotGraph(Graph(dot.attrs.get("name", name), tuple(nodes), block), formats_of(dot))


def _given(attrs: Mapping[str, str], prefix: str) -> tuple[tuple[str, str | int | float], ...]:
    return tuple((k[2:], _value(k[2:], v)) for k, v in attrs.items() if k.startswith(prefix))


def _value(name: str, text: str) -> str | int | float:
    return int(text) if name in INTEGERS else float(text) if name == "scalar" else text


def _letters(format: Format) -> str:
    return "".join(x[0].replace("c", "s") for x in format.levels) + "".join(map(str, format.order)) or "none"


def _hidden_roots(graph: Graph) -> set[str]:
    """Roots that SAM does not draw: of one reader, which says ``root=true``."""
    readers = graph.consumers()
    ports = {n.name: readers.get(Port(n.name, "ref"), []) for n in graph.nodes if n.kind == "root"}
    return {name for name, found in ports.items() if len(found) == 1 and found[0][0].kind in ("scan", "repeat")}


def index_names(graph: Graph) -> dict[Port, str]:
    """The index variable (i, j, k, ...) of every coordinate stream: scans that meet in a joiner share one."""
    up: dict[Port, Port] = {}

    def find(stream: Port) -> Port:
        while stream in up:
            stream = up[stream]
        return stream

    def same(a: Port, b: Port) -> None:
        if find(a) != find(b):
            up[find(b)] = find(a)

    for node in graph.nodes:
        for out, source in _same_index(node):
            same(source, Port(node.name, out))
    names: dict[Port, str] = {}
    found: dict[Port, str] = {}
    for stream, kind in stream_types(graph).items():
        if kind is StreamType.CRD:
            leader = find(stream)
            names.setdefault(leader, _letter(len(names)))
            found[stream] = names[leader]
    return found


def _same_index(node: Node) -> Iterator[tuple[str, Port]]:
    ins = dict(node.ins)
    if node.kind in ("intersect", "union"):
        yield from (("crd", stream) for port, stream in node.ins if port.startswith("crd"))
    elif node.kind == "locate":
        yield "crd", ins["crd"]
    elif node.kind in ("crd_drop", "crd_hold"):
        yield from ((port, ins[port]) for port in node.outs)
    elif node.kind == "val_drop":
        yield "crd", ins["crd"]
    elif node.kind == "spacc":
        yield from ((port, ins[port]) for port in node.outs if port.startswith("crd"))
    elif node.kind in ("fork", "broadcast"):
        yield from ((port, ins["in"]) for port in node.outs)
    elif node.kind == "join":
        ways = [p for p in ins if p.startswith("in")][: -1 if node.attr("ordered") else None]
        yield from (("out", ins[p]) for p in ways)


def _letter(number: int) -> str:
    letters = "ijklmnopqrstuvwxyzabcdefgh"
    return letters[number % len(letters)] + (str(number // len(letters)) if number >= len(letters) else "")


def _attributes(
    by_name: Mapping[str, Node], node: Node, index: Mapping[Port, str], formats: Mapping[str, Format]
) -> dict[str, str]:
    """What SAM's own files say of a node."""
    op = str(node.attr("op", ""))
    attrs = {"type": TYPES.get(node.kind, node.kind)}
    if node.kind == "alu":
        attrs["type"] = "add" if op == "sub" and not node.attr("unary") else op
        attrs["sub"] = {"add": "0", "sub": "1"}.get(op, "") if not node.attr("unary") else ""
        attrs["rb_const"] = str(node.attr("scalar", ""))
    crds = {port: index.get(stream, "") for port, stream in node.ins}
    if node.kind in ("scan", "write_crd", "locate"):
        name, level = str(node.attr("tensor")), int(node.attr("level", 0) or 0)
        format = formats.get(name)
        attrs["index"] = crds.get("crd") or index.get(Port(node.name, "crd"), "")
        attrs |= {"tensor": name, "mode": str(format.order[level] if format else level)}
        attrs["format"] = format.levels[level] if format else "compressed"
        if node.kind == "write_crd":
            attrs["sink"] = "true"
    if node.kind in ("array", "write_val"):
        attrs["tensor"] = str(node.attr("tensor"))
        attrs |= {"mode": "vals", "sink": "true"} if node.kind == "write_val" else {}
    if node.kind in ("intersect", "union", "repsig"):
        attrs["index"] = crds.get("crd0") or crds.get("in", "")
    if node.kind in ("scan", "repeat"):
        attrs["root"] = str(any(by_name[s.node].kind == "root" for _, s in node.ins)).lower()
    if node.kind in ("crd_drop", "crd_hold"):
        attrs |= {"outer": crds["outer"], "inner": crds["inner"] or "val"}
    if node.kind == "val_drop":
        attrs |= {"outer": crds["crd"], "inner": "val"}
    if node.kind == "spacc":
        order = int(node.attr("order", 0) or 0)
        attrs |= {"order": str(order), **{f"in{i}": crds[f"crd{i}"] for i in range(order)}}
    return attrs


def _label(attrs: Mapping[str, str]) -> str:
    what = {"fiberlookup": "FiberLookup", "fiberwrite": "FiberWrite", "arrayvals": "Array Vals"}
    text = what.get(attrs["type"], attrs["type"])
    tensor = attrs.get("tensor", "") + (attrs["mode"] if attrs.get("mode", "vals") != "vals" else "")
    rest = " ".join(filter(None, (attrs.get("index", ""), tensor and f": {tensor}")))
    return f"{text} {rest}".strip().replace(" :", ":")


def _edge_tag(by_name: Mapping[str, Node], node: Node, port: str, stream: Port, index: Mapping[Port, str]) -> str:
    """The operand or the index that SAM writes on an edge."""
    maker = by_name[stream.node]
    if node.kind in ("intersect", "union") and port != "crd":
        return f"in-{_operand(by_name, node, port[len(port.rstrip('0123456789')) :])}"
    if node.kind in ("crd_drop", "crd_hold", "val_drop", "spacc") and port != "val":
        return index.get(stream, "")
    if maker.kind in ("intersect", "union") and stream.port != "crd":
        return f"out-{_operand(by_name, maker, stream.port[3:])}"
    return index.get(stream, "") if maker.kind in ("crd_drop", "crd_hold", "val_drop", "spacc") else ""


def _operand(by_name: Mapping[str, Node], node: Node, number: str) -> str:
    """The name of a joiner's operand: its tensor, or its number where two are of one tensor or of none."""
    names = []
    for port, stream in node.ins:
        if port.startswith("in"):
            maker = by_name[stream.node]
            while maker.kind in ("broadcast", "fork", "repeat"):
                maker = by_name[maker.input("in").node]
            names.append(str(maker.attr("tensor", "")))
    name = names[int(number)]
    return name if name and names.count(name) == 1 else f"t{number}"
