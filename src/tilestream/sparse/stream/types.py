"""What each stream of a graph carries."""

from __future__ import annotations

from tilestream.sparse.stream.graph import NODES, Graph, Port, StreamType


def stream_types(graph: Graph) -> dict[Port, StreamType]:
    """Coordinates, references, values or repeat signals, by stream. A node that passes whatever it is given gives
    what came."""
    found: dict[Port, StreamType] = {}
    for node in graph.nodes:
        outs, ins = NODES[node.kind].outs, dict(node.ins)
        for port in node.outs:
            kind = outs.get(port) or outs[port.rstrip("0123456789") + "*"]
            if kind is StreamType.ANY:
                # A joiner's out1 is its in1; the others have one input that they pass on.
                source = next(ins[p] for p in ("in", "inner", port.replace("out", "in"), "in0") if p in ins)
                kind = found[source]
            found[Port(node.name, port)] = kind
    return found
