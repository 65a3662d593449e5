"""SAM's coordinate drops beside values that nobody dropped.

SAM's compiler drops coordinates whose fibers are empty, but leaves the values that were summed over those fibers in
their stream: they are 0, and one more than there are coordinates. Here the values decide instead: what is 0 is dropped
with its coordinate, and then each outer coordinate that has nothing left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tilestream.sparse.stream.graph import Node, Port


def aligned(nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """The nodes, with as many values as coordinates at every result and every drop of values."""
    found = dict(nodes)
    for node in nodes.values():
        if node.kind == "val_drop":
            _align_drop(found, node)
    for node in nodes.values():
        if node.kind == "write_val":
            _align_result(found, node)
    return _ordered(found)


def _align_drop(nodes: dict[str, Node], node: Node) -> None:
    """Where a drop took the empty fibers out of the coordinates alone, they go from the values too."""
    crd, val = node.input("crd"), node.input("val")
    maker = nodes[crd.node]
    if maker.kind == "crd_drop" and crd.port == "inner" and maker.name not in ancestors(nodes, val):
        name = f"{node.name}_values"
        nodes[name] = Node(name, "crd_drop", (("outer", maker.input("outer")), ("inner", val)), (), node.source)
        nodes[node.name] = replace(node, ins=(("crd", crd), ("val", Port(name, "inner"))))


def _align_result(nodes: dict[str, Node], writer: Node) -> None:
    mine = [n for n in nodes.values() if n.kind == "write_crd" and n.attr("tensor") == writer.attr("tensor")]
    levels = sorted(mine, key=lambda n: int(n.attr("level") or 0))
    val = writer.input("val")
    known = ancestors(nodes, val)
    if not levels or not any(x.port == "outer" and x.node not in known for x in _drops(nodes, levels[-1].input("crd"))):
        return
    inner: Port | None = None
    for level in reversed(levels):
        crd = _undropped(nodes, level.input("crd"), known)
        name = f"{level.name}_kept"
        kind, ports = ("crd_drop", ("outer", "inner")) if inner else ("val_drop", ("crd", "val"))
        nodes[name] = Node(name, kind, ((ports[0], crd), (ports[1], inner or val)), (), level.source)
        inner = Port(name, ports[0])
        nodes[level.name] = replace(level, ins=(("crd", inner),))
    nodes[writer.name] = replace(writer, ins=(("val", Port(f"{levels[-1].name}_kept", "val")),))


def _drops(nodes: Mapping[str, Node], stream: Port) -> Iterator[Port]:
    """The outputs of drops that coordinates went through, from the last."""
    while nodes[stream.node].kind == "crd_drop":
        yield stream
        stream = nodes[stream.node].input(stream.port)


def _undropped(nodes: Mapping[str, Node], stream: Port, known: set[str]) -> Port:
    """The coordinates before the drops that the values did not go through."""
    for dropped in _drops(nodes, stream):
        if dropped.node not in known:
            stream = nodes[dropped.node].input(dropped.port)
    return stream


def ancestors(nodes: Mapping[str, Node], stream: Port) -> set[str]:
    """Names of the nodes that a stream comes from."""
    found: set[str] = set()
    todo = [stream.node]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [source.node for _, source in nodes[name].ins]
    return found


def _ordered(nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """Every node behind those that it reads, without drops that nobody reads any more."""
    done: dict[str, Node] = {}

    def visit(name: str) -> None:
        if name not in done:
            for _, source in nodes[name].ins:
                visit(source.node)
            done[name] = nodes[name]

    for name in nodes:
        if nodes[name].kind not in ("crd_drop", "val_drop"):
            visit(name)
    return tuple(done.values())
