"""The stream graph: SAM primitives joined by streams. What is executed, timed, drawn and exported.

A stream is a sequence of tokens: ``d`` coordinate streams and one value stream are a tensor of ``d`` levels.
``NODES`` says what each kind of node takes and gives; ``sparse.spec`` says what it means, token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tilestream.errors import SparseError


class StreamType(StrEnum):
    """What the values of a stream are: coordinates, references into a level or an array, values, repeat signals."""

    CRD = "crd"
    REF = "ref"
    VAL = "val"
    REPSIG = "repsig"
    ANY = "any"  # a node that passes whatever it is given


@dataclass(frozen=True)
class NodeSpec:
    """Signature of a kind of node.

    ``ins`` and ``outs`` map port names to stream types. A port name that ends in ``*`` stands for several, numbered
    from 0 (``crd*`` is ``crd0``, ``crd1``, ...). ``attrs`` are the attributes that it must have, ``optional`` those
    that it may.
    """

    ins: Mapping[str, StreamType]
    outs: Mapping[str, StreamType]
    attrs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    doc: str = ""


_CRD, _REF, _VAL, _SIG, _ANY = StreamType.CRD, StreamType.REF, StreamType.VAL, StreamType.REPSIG, StreamType.ANY

NODES: dict[str, NodeSpec] = {
    "root": NodeSpec({}, {"ref": _REF}, doc="reference 0, then done: where a tensor's iteration begins"),
    "scan": NodeSpec(
        {"ref": _REF},
        {"crd": _CRD, "ref": _REF},
        ("tensor", "level"),
        doc="level scanner: the coordinates of each fiber and where each one's children are",
    ),
    "repsig": NodeSpec({"in": _ANY}, {"sig": _SIG}, doc="one repeat signal an element of its input"),
    "repeat": NodeSpec({"in": _ANY, "sig": _SIG}, {"out": _ANY}, doc="each element once a repeat signal"),
    "intersect": NodeSpec(
        {"crd*": _CRD, "in*": _ANY}, {"crd": _CRD, "out*": _ANY}, doc="coordinates present in all operands"
    ),
    "union": NodeSpec(
        {"crd*": _CRD, "in*": _ANY}, {"crd": _CRD, "out*": _ANY}, doc="coordinates present in any; N where absent"
    ),
    "locate": NodeSpec(
        {"crd": _CRD, "ref": _REF},
        {"crd": _CRD, "ref": _REF},
        ("tensor", "level"),
        doc="the child of coordinate crd in the dense level that ref points to",
    ),
    "array": NodeSpec({"ref": _REF}, {"val": _VAL}, ("tensor",), doc="values by reference"),
    "alu": NodeSpec(
        {"a": _VAL, "b": _VAL},
        {"val": _VAL},
        ("op",),
        ("scalar", "unary"),
        doc="arithmetic on one value stream (unary=1, with an optional scalar) or on two that match",
    ),
    "reduce": NodeSpec({"val": _VAL}, {"val": _VAL}, ("op",), doc="each innermost fiber to one value: add or max"),
    "spacc": NodeSpec(
        {"crd*": _CRD, "val": _VAL},
        {"crd*": _CRD, "val": _VAL},
        ("order",),
        ("op",),
        doc="sparse accumulator of an order n: crd0 is the innermost; crd1.. go outwards, crdn being the reduced one",
    ),
    "crd_drop": NodeSpec(
        {"outer": _CRD, "inner": _ANY},
        {"outer": _CRD, "inner": _ANY},
        doc="outer coordinates whose fibers hold something",
    ),
    "val_drop": NodeSpec(
        {"crd": _CRD, "val": _VAL},
        {"crd": _CRD, "val": _VAL},
        doc="coordinates whose value is not 0, and those values",
    ),
    "crd_hold": NodeSpec({"outer": _CRD, "inner": _CRD}, {"outer": _CRD}, doc="the outer coordinate once an inner one"),
    "fork": NodeSpec({"in": _ANY}, {"out*": _ANY}, (), ("level",), doc="elements dealt round-robin; stops to all"),
    "join": NodeSpec({"in*": _ANY}, {"out": _ANY}, (), ("level",), doc="fibers gathered round-robin"),
    "broadcast": NodeSpec({"in": _ANY}, {"out*": _ANY}, doc="one stream to several consumers"),
    "write_crd": NodeSpec(
        {"crd": _CRD},
        {},
        ("tensor", "level"),
        ("skip_empty",),
        doc="one level of a result; skip_empty=1: fibers that hold nothing may be left out, as SAM's writers do",
    ),
    "write_val": NodeSpec({"val": _VAL}, {}, ("tensor",), doc="the values of a result"),
}

ALU_BINARY = tuple("add sub mul div max min gt ge eq ne keep shift share pow mod atan2".split())
"""``gt``, ``ge``, ``eq`` and ``ne`` give 1 or 0; ``keep`` is the first operand where the second is not 0, else 0. Two
are safe where a mask leaves nothing: ``shift`` is ``sub``, but minus infinity stays; ``share`` is ``div``, but 0 over 0
is 0. ``mod`` has the sign of its second operand, as ``torch.remainder``."""
ALU_UNARY = tuple(
    "relu exp log rsqrt sqrt neg abs sigmoid tanh gelu gelu_tanh silu sin cos square reciprocal identity zeroed "
    "floor ceil trunc round erf tan asin acos atan "
    "add sub rsub mul div rdiv max min gt ge lt le eq ne pick cast".split()
)
"""Unary operations; from ``add`` on they combine with ``scalar``. ``zeroed`` makes minus infinity 0; ``round`` is to
even; ``pick`` gives ``scalar`` where its operand is not 0, else 0; ``cast`` rounds to a float of ``scalar`` significant
bits: 24 (float32), 11 (float16) or 8 (bfloat16)."""


@dataclass(frozen=True)
class Port:
    """An output of a node: the stream that comes out there."""

    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


@dataclass(frozen=True)
class Node:
    """One primitive. ``ins`` are (port, stream) pairs in the order of ``NODES``; ``source`` is the user's line."""

    name: str
    kind: str
    ins: tuple[tuple[str, Port], ...] = ()
    attrs: tuple[tuple[str, str | int | float], ...] = ()
    source: str = ""

    def attr(self, name: str, default: str | int | float | None = None) -> str | int | float | None:
        return dict(self.attrs).get(name, default)

    def input(self, port: str) -> Port:
        """The stream at ``port``; ``KeyError`` if nothing is there."""
        return dict(self.ins)[port]

    @property
    def outs(self) -> tuple[str, ...]:
        """Names of its output ports, in order."""
        return tuple(_expand(self))


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order. ``block`` is the edge of the square tiles that are its values (1: scalars).

    Every stream has at most one consumer: fan-out is a ``broadcast`` node (``with_broadcasts`` adds them).
    """

    name: str
    nodes: tuple[Node, ...]
    block: int = 1
    notes: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        check(self)

    def node(self, name: str) -> Node:
        for one in self.nodes:
            if one.name == name:
                return one
        raise SparseError(f"graph {self.name!r} has no node {name!r}", "use the name of one of its nodes")

    def consumers(self) -> dict[Port, list[tuple[Node, str]]]:
        """Who reads each stream, and at which port."""
        found: dict[Port, list[tuple[Node, str]]] = {}
        for node in self.nodes:
            for port, stream in node.ins:
                found.setdefault(stream, []).append((node, port))
        return found

    def tensors(self) -> tuple[str, ...]:
        """Tensors that are read, in order of first use."""
        reads = (n for n in self.nodes if n.kind in ("scan", "locate", "array"))
        return tuple(dict.fromkeys(str(n.attr("tensor")) for n in reads))

    def results(self) -> tuple[str, ...]:
        """Tensors that are written."""
        return tuple(dict.fromkeys(str(n.attr("tensor")) for n in self.nodes if n.kind == "write_val"))


def _expand(node: Node) -> Iterator[str]:
    """Output ports: a starred one is repeated as its node's inputs say, or as often as the attribute ``ways`` says."""
    for port in NODES[node.kind].outs:
        if not port.endswith("*"):
            yield port
        elif node.kind in ("fork", "broadcast"):
            ways = int(node.attr("ways", 0) or 0)
            yield from (f"{port[:-1]}{i}" for i in range(ways))
        else:
            stem = "crd" if node.kind == "spacc" else "in"
            count = sum(name.rstrip("0123456789") == stem for name, _ in node.ins)
            count -= node.kind == "spacc"  # the reduced coordinate does not come out
            yield from (f"{port[:-1]}{i}" for i in range(count))


def check(graph: Graph) -> None:
    """Names once, ports known and filled, streams defined before they are read and read once, attributes there.

    Raises:
        SparseError: naming the node and the user's line.
    """
    made: set[Port] = set()
    read: dict[Port, str] = {}
    names: set[str] = set()
    for node in graph.nodes:
        where = f"node {node.name!r}" + (f" ({node.source})" if node.source else "")
        spec = NODES.get(node.kind)
        if spec is None:
            raise SparseError(f"{where} is of unknown kind {node.kind!r}", f"use one of: {', '.join(NODES)}")
        if node.name in names:
            raise SparseError(f"two nodes are called {node.name!r}", "give each node its own name")
        names.add(node.name)
        given = dict(node.attrs)
        missing = [a for a in spec.attrs if a not in given]
        missing += ["ways"] if node.kind in ("fork", "broadcast") and not given.get("ways") else []
        if missing:
            raise SparseError(f"{where}, a {node.kind}, lacks {', '.join(missing)}", "give these attributes")
        got = [port.rstrip("0123456789") + "*" if port not in spec.ins else port for port, _ in node.ins]
        unary = node.kind == "alu" and bool(node.attr("unary"))
        wanted = [p for p in spec.ins if not (unary and p == "b")]
        if unknown := [p for p in got if p not in wanted]:
            raise SparseError(f"{where} has no input {unknown[0]!r}", f"its inputs: {', '.join(wanted) or 'none'}")
        if empty := [p for p in wanted if p not in got]:
            raise SparseError(f"nothing feeds input {empty[0]!r} of {where}", "join a stream to it")
        for _, stream in node.ins:
            if stream not in made:
                raise SparseError(f"{where} reads {stream}, which no earlier node makes", "order the nodes by use")
            if stream in read:
                raise SparseError(f"{where} and {read[stream]} both read {stream}", "use with_broadcasts(nodes)")
            read[stream] = where
        made |= {Port(node.name, p) for p in node.outs}


def with_broadcasts(name: str, nodes: tuple[Node, ...], block: int = 1, **notes: str) -> Graph:
    """The graph of ``nodes``, with a ``broadcast`` node behind every stream that several nodes read."""
    readers: dict[Port, int] = {}
    for node in nodes:
        for _, stream in node.ins:
            readers[stream] = readers.get(stream, 0) + 1
    next_way: dict[Port, int] = {}
    out: list[Node] = []
    for node in nodes:
        ins = []
        for port, stream in node.ins:
            if readers[stream] > 1:
                way = next_way.get(stream, 0)
                next_way[stream] = way + 1
                stream = Port(_copies(stream), f"out{way}")
            ins.append((port, stream))
        out.append(Node(node.name, node.kind, tuple(ins), node.attrs, node.source))
        for port in out[-1].outs:
            stream = Port(node.name, port)
            if readers.get(stream, 0) > 1:
                attrs = (("ways", readers[stream]),)
                out.append(Node(_copies(stream), "broadcast", (("in", stream),), attrs, node.source))
    return Graph(name, tuple(out), block, notes)


def _copies(stream: Port) -> str:
    return f"{stream.node}_{stream.port}_copies"
