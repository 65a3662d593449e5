"""Stream graphs as SAM's DOT files: written so that SAM's tools read them, and read back exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilestream.errors import SparseError
from tilestream.sparse.dot.names import SamNames, word
from tilestream.sparse.dot.sam import formats_of, graph_of
from tilestream.sparse.dot.text import parse, quote
from tilestream.sparse.storage import Format
from tilestream.sparse.stream.graph import NODES, Graph, Node, Port
from tilestream.sparse.stream.types import stream_types

INTEGERS = ("level", "ways", "order", "unary", "ordered", "skip_empty")

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
    names, types, hidden = SamNames(graph, formats), stream_types(graph), _hidden_roots(graph)
    number = {name: str(n) for n, name in enumerate(x.name for x in graph.nodes if x.name not in hidden)}
    first = sorted(formats, key=lambda name: name not in graph.results())  # SAM names the result first
    lines = ["digraph SAM {", f"    comment={quote(','.join(f'{word(x)}={_letters(formats[x])}' for x in first))}"]
    kept = ";".join(f"{name}={_letters(format)}" for name, format in formats.items())
    lines += [f'    generator="tilestream" name={quote(graph.name)} block="{graph.block}" formats={quote(kept)}']
    for node in graph.nodes:
        if node.name in hidden:
            continue
        attrs = {k: v for k, v in names.attributes(node).items() if v}
        # SAM's generator reads a node's attributes from its comment.
        look = f"comment={quote(','.join(f'{k}={v}' for k, v in attrs.items()))} label={quote(names.label(attrs))} "
        look += f"color={_COLOURS.get(node.kind, 'brown')} shape=box style=filled"
        look = 'comment="type=broadcast" shape=point style=invis' if node.kind == "broadcast" else look
        ours = {"node": node.name, "kind": node.kind, "source": node.source}
        ours |= {f"a_{name}": str(value) for name, value in node.attrs}
        for root in (names.nodes[stream.node] for _, stream in node.ins if stream.node in hidden):
            ours |= {"root_node": root.name, **{f"r_{name}": str(value) for name, value in root.attrs}}
        if over := _over(node):
            ours |= {"over_node": over.node, "over_port": over.port}
        text = " ".join(f"{name}={quote(value)}" for name, value in (attrs | ours).items() if value)
        lines.append(f"    {number[node.name]} [{look} {text}]")
    for node in graph.nodes:
        for port, stream in node.ins:
            if stream.node in hidden or stream == _over(node):
                continue
            kind, tag = types[stream], names.tag(node, port, stream)
            label = f"{kind}_{tag}" if tag else str(kind)
            lines.append(
                f"    {number[stream.node]} -> {number[node.name]} [label={quote(label)}{_STYLES.get(kind, '')} "
                f"type={quote(kind)} comment={quote(tag)} out={quote(stream.port)} in={quote(port)}]"
            )
    return "\n".join([*lines, "}", ""])


def _over(node: Node) -> Port | None:
    """What a ``spacc`` of order 0 reduces for: SAM's reduction is not told, so that no edge of its shows it."""
    return node.input("crd0") if node.kind == "spacc" and not node.attr("order") else None


def from_dot(text: str, name: str = "sam") -> DotGraph:
    """The graph of a DOT file: one that ``to_dot`` wrote, or one of SAM's compiler.

    In SAM's files, a reduction becomes a ``spacc`` of order 0 that is told which coordinates it reduces for, so that
    empty rows are right, and coordinates held for an accumulator are given to it as they were before.

    Raises:
        SparseError: text that is no DOT, or a node that has no counterpart here; names it.
    """
    try:
        return _read(text, name)
    except (ValueError, KeyError, IndexError) as error:
        raise SparseError(f"the graph has an attribute that is not read: {error}", "write it as to_dot does") from error


def _read(text: str, name: str) -> DotGraph:
    dot = parse(text)
    if dot.attrs.get("generator") != "tilestream":
        return DotGraph(*graph_of(dot, name))
    nodes: list[Node] = []
    named = {number: attrs.get("node", number) for number, attrs in dot.nodes.items()}
    for number, attrs in dot.nodes.items():
        kind, node = attrs.get("kind", ""), named[number]
        if kind not in NODES:
            raise SparseError(f"node {node!r} is of unknown kind {kind!r}", f"use one of: {', '.join(NODES)}")
        ins = [(a.get("in", ""), Port(named[src], a.get("out", ""))) for src, dst, a in dot.edges if dst == number]
        if over := attrs.get("over_node"):
            ins.insert(0, ("crd0", Port(over, attrs.get("over_port", ""))))
        if root := attrs.get("root_node"):
            nodes.append(Node(root, "root", (), _given(attrs, "r_")))
            ins.insert(0, ("ref" if kind == "scan" else "in", Port(root, "ref")))
        nodes.append(Node(node, kind, tuple(ins), _given(attrs, "a_"), attrs.get("source", "")))
    block = int(dot.attrs.get("block", "1"))
    formats = formats_of(dot.attrs.get("formats", ""), ";")
    return DotGraph(Graph(dot.attrs.get("name", name), tuple(nodes), block), formats)


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
