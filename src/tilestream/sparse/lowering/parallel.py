"""Parallelisation: what lies between a fork and its joins is made once a lane (FuseFlow, stream parallelizer).

Lowering marks the streams that enter the lanes of an index (``lanes_in``) and those that leave them (``lanes_out``).
Coordinates are dealt round-robin, the work below is duplicated, and fibers are gathered in the order of the
coordinates that were dealt.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.sparse.stream.graph import Node, Port


def expand_lanes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Replace marks by forks and joins and what is between them by one copy a lane; innermost lanes first."""
    todo = list(nodes)
    while indices := _marked(todo):
        inner = [i for i in indices if not _inside(todo, i) & (indices - {i})]
        todo = _expand(todo, sorted(inner or indices)[0])
    return tuple(todo)


def _marked(nodes: Sequence[Node]) -> set[str]:
    return {str(n.attr("index")) for n in nodes if n.kind in ("lanes_in", "lanes_out")}


def _zone(nodes: Sequence[Node], index: str) -> set[str]:
    """Nodes between the marks of an index: they depend on ``lanes_in`` and not through ``lanes_out``."""
    inside: set[str] = set()
    for node in nodes:
        if node.attr("index") == index and node.kind == "lanes_in":
            inside.add(node.name)
        elif node.attr("index") == index and node.kind == "lanes_out":
            continue
        elif any(port.node in inside for _, port in node.ins):
            inside.add(node.name)
    return inside


def _inside(nodes: Sequence[Node], index: str) -> set[str]:
    """Other indices with marks between the marks of this one."""
    zone = _zone(nodes, index)
    return {str(n.attr("index")) for n in nodes if n.name in zone and n.kind in ("lanes_in", "lanes_out")} - {index}


def _expand(nodes: Sequence[Node], index: str) -> list[Node]:
    zone = _zone(nodes, index)
    kinds = {node.name: node.kind for node in nodes}
    out: list[Node] = []
    for node in nodes:
        ways = int(node.attr("ways", 1) or 1)
        mark = node.attr("index") == index
        if mark and node.kind == "lanes_in":
            out.append(Node(node.name, "fork", node.ins, (("ways", ways),), node.source))
        elif mark and node.kind == "lanes_out":
            stream, crd = node.input("in"), node.input("crd")
            ins = tuple((f"in{lane}", _lane(stream, lane, zone, kinds, index, nodes)) for lane in range(ways))
            ins += ((f"in{ways}", crd),)
            attrs = (("level", int(node.attr("level") or 0)), ("ordered", 1))
            out.append(Node(node.name, "join", ins, attrs, node.source))
        elif node.name in zone:
            lanes = _ways(nodes, index)
            for lane in range(lanes):
                ins = []
                for port, stream in node.ins:
                    if kinds[stream.node] == "root":  # a lane has its own beginning, as the released code does
                        root = f"{stream.node}_{index}lane{lane}"
                        if all(one.name != root for one in out):
                            out.append(Node(root, "root"))
                        ins.append((port, Port(root, stream.port)))
                    else:
                        ins.append((port, _lane(stream, lane, zone, kinds, index, nodes)))
                out.append(Node(f"{node.name}_{index}lane{lane}", node.kind, tuple(ins), node.attrs, node.source))
        else:
            out.append(node)
    return _renamed_joins(out)


def _lane(stream: Port, lane: int, zone: set[str], kinds: dict[str, str], index: str, nodes: Sequence[Node]) -> Port:
    """The stream as one lane sees it: its own copy, its way out of the fork, or, from outside, the stream itself."""
    if stream.node not in zone:
        return stream
    if kinds[stream.node] == "lanes_in" and any(n.name == stream.node and n.attr("index") == index for n in nodes):
        return Port(stream.node, f"out{lane}")
    return Port(f"{stream.node}_{index}lane{lane}", stream.port)


def _ways(nodes: Sequence[Node], index: str) -> int:
    return next(int(n.attr("ways", 1) or 1) for n in nodes if n.attr("index") == index)


def _renamed_joins(nodes: list[Node]) -> list[Node]:
    """Joins have the output ``out``, as their marks did; forks lose roots that nothing reads any more."""
    read = {port.node for node in nodes for _, port in node.ins}
    return [n for n in nodes if n.kind != "root" or n.name in read]
