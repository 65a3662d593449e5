"""What SAM's generator reads of a node and of an edge: types, indices, tensors, sizes and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tilestream.sparse.storage import Format
from tilestream.sparse.stream.graph import Graph, Node, Port, StreamType
from tilestream.sparse.stream.types import stream_types

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


class SamNames:
    """The names that one graph's nodes and streams have in SAM's dialect."""

    def __init__(self, graph: Graph, formats: Mapping[str, Format]) -> None:
        self.formats = formats
        self.nodes = {node.name: node for node in graph.nodes}
        self.readers = {stream: found[0][0] for stream, found in graph.consumers().items()}
        self.index = index_names(graph)
        self.dims = self._dims(graph)

    def _dims(self, graph: Graph) -> dict[str, str]:
        """A dimension of an operand for each index: ``B0_dim`` is as long as B's mode 0."""
        found: dict[str, str] = {}
        for node in graph.nodes:
            if node.kind in ("scan", "locate"):
                index = self.index.get(Port(node.name, "crd"), "")
                found.setdefault(index, f"{word(str(node.attr('tensor')))}{self._mode(node)}_dim")
        return found

    def _mode(self, node: Node) -> int:
        level, format = int(node.attr("level", 0) or 0), self.formats.get(str(node.attr("tensor")))
        return format.order[level] if format else level

    def attributes(self, node: Node) -> dict[str, str]:
        """What SAM's own files say of a node."""
        op = str(node.attr("op", ""))
        order = int(node.attr("order", 0) or 0)
        attrs = {"type": "reduce" if node.kind == "spacc" and not order else TYPES.get(node.kind, node.kind)}
        crds = {port: self.index.get(stream, "") for port, stream in node.ins}
        if node.kind == "alu":
            attrs["type"] = "add" if op == "sub" and not node.attr("unary") else op
            attrs["sub"] = {"add": "0", "sub": "1"}.get(op, "") if not node.attr("unary") else ""
            attrs["rb_const"] = str(node.attr("scalar", ""))
        if node.kind in ("scan", "write_crd", "locate"):
            name, level = str(node.attr("tensor")), int(node.attr("level", 0) or 0)
            format = self.formats.get(name)
            attrs["index"] = crds.get("crd") or self.index.get(Port(node.name, "crd"), "")
            attrs |= {"tensor": word(name), "mode": str(self._mode(node))}
            attrs["format"] = format.levels[level] if format else "compressed"
        if node.kind in ("array", "write_val"):
            attrs["tensor"] = word(str(node.attr("tensor")))
        if node.kind in ("write_crd", "write_val"):
            attrs |= self._sizes(node)
        if node.kind in ("intersect", "union"):
            attrs["index"] = crds["crd0"]
        if node.kind in ("repeat", "repsig"):
            attrs["index"] = self._over(node.input("sig" if node.kind == "repeat" else "in"))
        if node.kind == "repeat":
            attrs["tensor"] = word(self.tensor(Port(node.name, "out")))
        if node.kind in ("scan", "repeat"):
            attrs["root"] = str(any(self.nodes[s.node].kind == "root" for _, s in node.ins)).lower()
        if node.kind in ("crd_drop", "crd_hold"):
            attrs |= {"outer": crds["outer"], "inner": crds["inner"] or "val"}
        if node.kind == "val_drop":
            attrs |= {"outer": crds["crd"], "inner": "val"}
        if node.kind == "spacc" and order:
            attrs |= {"order": str(order), **{f"in{i}": crds[f"crd{i}"] for i in range(order)}}
        return attrs

    def _sizes(self, writer: Node) -> dict[str, str]:
        """Room for a result: for all of its dimensions, down to the level that is written."""
        mine = [n for n in self.nodes.values() if n.kind == "write_crd" and n.attr("tensor") == writer.attr("tensor")]
        levels = sorted(mine, key=lambda n: int(n.attr("level") or 0))
        dims = [self.dims.get(self.index.get(level.input("crd"), ""), "1") for level in levels]
        if writer.kind == "write_val":
            return {"mode": "vals", "size": "*".join(["1", *dims]), "sink": "true"}
        at = levels.index(writer)
        above = "*".join(dims[:at])
        return {"segsize": f"{above}+1" if at else "2", "crdsize": "*".join(dims[: at + 1]), "sink": "true"}

    def _over(self, stream: Port) -> str:
        """The index of a stream of coordinates, of references under them, or of their repeat signals."""
        node = self.nodes[stream.node]
        if found := self.index.get(stream) or self.index.get(Port(stream.node, "crd")):
            return found
        before = dict(node.ins).get("sig") or dict(node.ins).get("in") or next((s for _, s in node.ins), None)
        return self._over(before) if before else ""

    def tensor(self, stream: Port) -> str:
        """The tensor that references or values belong to: of the level that made them, or of the one they lead to."""
        node = self.nodes[stream.node]
        if node.kind in ("scan", "locate", "array"):
            return str(node.attr("tensor"))
        if node.kind in ("repeat", "broadcast", "fork"):
            return self.tensor(node.input("in"))
        if node.kind in ("intersect", "union"):
            return self.tensor(node.input(f"in{stream.port[3:]}"))
        reader = self.readers.get(stream)
        while reader is not None and reader.kind in ("repeat", "broadcast"):
            ahead = [Port(reader.name, port) for port in reader.outs]
            reader = next((self.readers[port] for port in ahead if port in self.readers), None)
        return str(reader.attr("tensor", "")) if reader is not None else ""

    def label(self, attrs: Mapping[str, str]) -> str:
        """What a node's box says."""
        what = {"fiberlookup": "FiberLookup", "fiberwrite": "FiberWrite", "arrayvals": "Array Vals"}
        text = what.get(attrs["type"], attrs["type"])
        tensor = attrs.get("tensor", "") + (attrs["mode"] if attrs.get("mode", "vals") != "vals" else "")
        rest = " ".join(filter(None, (attrs.get("index", ""), tensor and f": {tensor}")))
        return f"{text} {rest}".strip().replace(" :", ":")

    def tag(self, node: Node, port: str, stream: Port) -> str:
        """The operand or the index that SAM writes on the edge into a node's port."""
        maker = self.nodes[stream.node]
        if node.kind in ("intersect", "union") and port != "crd":
            return f"in-{self._operand(node, port[len(port.rstrip('0123456789')) :])}"
        if node.kind == "spacc" and port != "val":
            order = int(node.attr("order", 0) or 0)
            side = "inner-" if port == "crd0" else "outer-" if port == "crd1" else ""
            return ("" if order > 2 else side) + self.index.get(stream, "")
        if node.kind in ("crd_drop", "crd_hold", "val_drop") and port != "val":
            return self.index.get(stream, "")
        if maker.kind in ("intersect", "union") and stream.port != "crd":
            return f"out-{self._operand(maker, stream.port[3:])}"
        return self.index.get(stream, "") if maker.kind in ("crd_drop", "crd_hold", "val_drop", "spacc") else ""

    def _operand(self, node: Node, number: str) -> str:
        """The name of a joiner's operand: its tensor, or its number where two are of one tensor or of none."""
        names = [word(self.tensor(stream)) for port, stream in node.ins if port.startswith("in")]
        name = names[int(number)]
        return name if name and names.count(name) == 1 else f"t{number}"


def word(name: str) -> str:
    """A tensor's name without what separates words in SAM's comments."""
    return re.sub(r"\W", "_", name)


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
