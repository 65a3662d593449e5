"""From the graphs that SAM's compiler writes to stream graphs of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from tilestream.errors import SparseError
from tilestream.sparse.dot.drops import aligned
from tilestream.sparse.dot.text import DotText
from tilestream.sparse.storage import Format
from tilestream.sparse.stream.graph import ALU_BINARY, ALU_UNARY, Graph, Node, Port, with_broadcasts

Edge = tuple[str, str, dict[str, str]]

_LOOKS = ("comment", "label", "color", "shape", "style")
_CONSTANTS = ("rb_const", "const0", "const1", "in1", "in2")
_SUPPORTED = (
    "fiberlookup fiberwrite broadcast repsiggen repeat intersect union arrayvals reduce spaccumulator vectorreducer "
    "crddrop crdhold valdrop"
).split()


def graph_of(dot: DotText, name: str) -> tuple[Graph, dict[str, Format]]:
    """The graph, and the formats that its comment gives, or its nodes where the comment leaves a tensor out.

    Raises:
        SparseError: a node that has no counterpart here, or an edge that cannot be placed; names it.
    """
    formats = formats_of(dot.attrs.get("comment", ""))
    reader = _Reader(dot, formats)
    order = TopologicalSorter({node: [] for node in dot.nodes})
    for src, dst, _ in dot.edges:
        order.add(dst, src)
    try:
        for node in order.static_order():
            reader.read(node)
    except CycleError as error:
        raise SparseError(f"graph {name!r} has a cycle through {error.args[1][0]!r}", "streams go one way") from error
    return with_broadcasts(name, aligned(reader.nodes)), formats | {
        x: y for x, y in _of_nodes(dot).items() if x not in formats
    }


def formats_of(text: str, separator: str = ",") -> dict[str, Format]:
    """The formats that a graph's comment gives: ``B=ds10`` is a dense level of index 1 over a compressed one of 0."""
    found = {}
    for part in filter(None, text.split(separator)):
        tensor, _, letters = part.rpartition("=")
        count = sum(x in "sd" for x in letters) if letters != "none" else 0
        levels = tuple("dense" if x == "d" else "compressed" for x in letters[:count])
        order = tuple(int(x) for x in letters[count:]) if count else ()
        found[tensor.strip()] = Format(levels, order)
    return found


def _of_nodes(dot: DotText) -> dict[str, Format]:
    """The formats that nodes give: levels in the order of modes. A tensor that lacks one of them is left out."""
    modes: dict[str, dict[int, str]] = {}
    for attrs in dot.nodes.values():
        if "tensor" in attrs and attrs.get("mode", "").isdigit() and attrs.get("format") in ("dense", "compressed"):
            modes.setdefault(attrs["tensor"], {})[int(attrs["mode"])] = attrs["format"]
    found = {
        tensor: [levels[i] for i in sorted(levels)] for tensor, levels in modes.items() if max(levels) < len(levels)
    }
    return {tensor: Format(tuple(levels)) for tensor, levels in found.items()}


class _Reader:
    def __init__(self, dot: DotText, formats: Mapping[str, Format]) -> None:
        self.dot, self.formats = dot, formats
        self.nodes: dict[str, Node] = {}
        self.ins: dict[str, list[Edge]] = {node: [] for node in dot.nodes}
        for edge in dot.edges:
            self.ins[edge[1]].append(edge)

    def read(self, name: str) -> None:
        """Add what becomes of one node; its inputs have been read."""
        attrs, kind = self.dot.nodes[name], self._kind(name)
        edges = self.ins[name]
        tensor = attrs.get("tensor", "")
        if kind == "crdhold":
            self._add(name, "crd_hold", {p: self._named(name, attrs[p]) for p in ("outer", "inner")})
        elif kind in ("broadcast", "valhold"):
            pass  # what reads them reads what they were given
        elif kind == "fiberlookup":
            self._add(name, "scan", {"ref": self._or_root(name)}, tensor=tensor, level=self._level(name))
        elif kind == "repsiggen":
            self._add(name, "repsig", {"in": self._only(name)})
        elif kind == "repeat":
            signal = self._of_type(name, "repsig")
            rest = [x for x in edges if _type(x) != "repsig"]
            value = self._stream(rest[0]) if rest else self._root(name)
            self._add(name, "repeat", {"in": value, "sig": signal})
        elif kind in ("intersect", "union"):
            ins: dict[str, Port] = {}
            for i, operand in enumerate(self._operands(name)):
                for edge in edges:
                    if _tag(edge) == operand:
                        ins[f"{'crd' if _type(edge) == 'crd' else 'in'}{i}"] = self._stream(edge)
            self._add(name, kind, dict(sorted(ins.items())))
        elif kind == "arrayvals":
            self._add(name, "array", {"ref": self._or_root(name)}, tensor=tensor)
        elif kind == "reduce":
            val = self._of_type(name, "val")
            self._add(name, "spacc", {"crd0": self._above(val), "val": val}, order=0, op=attrs.get("op", "add"))
        elif kind == "spaccumulator":
            self._accumulator(name)
        elif kind == "vectorreducer":
            crd = self._of_type(name, "crd")
            ins = {"crd0": crd, "crd1": self._above(crd), "val": self._of_type(name, "val")}
            self._add(name, "spacc", ins, order=1, op=attrs.get("op", "add"))
        elif kind == "valdrop":
            self._add(name, "val_drop", {"crd": self._of_type(name, "crd"), "val": self._of_type(name, "val")})
        elif kind == "crddrop":
            outer, inner = self._named(name, attrs["outer"]), self._inner(name, attrs["inner"])
            if (below := self._depth(inner) - self._depth(outer)) != 1:
                raise SparseError(
                    f"crddrop {name!r} has inner coordinates {below} levels below the outer ones",
                    "drop the coordinates of the level right above",
                )
            self._add(name, "crd_drop", {"outer": outer, "inner": inner})
        elif kind == "fiberwrite" and attrs.get("mode") == "vals":
            self._add(name, "write_val", {"val": self._only(name)}, tensor=tensor)
        elif kind == "fiberwrite":
            level = self._level(name)
            skips = {"skip_empty": 1} if level else {}
            self._add(name, "write_crd", {"crd": self._only(name)}, tensor=tensor, level=level, **skips)
        else:
            self._arithmetic(name, kind)

    def _arithmetic(self, name: str, kind: str) -> None:
        attrs = self.dot.nodes[name]
        op = "sub" if kind == "add" and attrs.get("sub") == "1" else {"smax": "max"}.get(kind, kind)
        if op not in (*ALU_BINARY, *ALU_UNARY):
            raise self._unknown(name, kind)
        edges = sorted((e for e in self.ins[name] if _type(e) == "val"), key=lambda e: self._from_left(e[0]))
        if unknown := [a for a in attrs if a not in _LOOKS and a not in ("type", "sub", "op", *_CONSTANTS)]:
            raise SparseError(
                f"DOT node {name!r} has {unknown[0]}={attrs[unknown[0]]!r}, which is not understood",
                f"leave it out, or give a constant as {_CONSTANTS[0]}",
            )
        constants = [attrs[a] for a in _CONSTANTS if a in attrs]
        if len(constants) > 1 or (constants and len(edges) != 1):
            raise SparseError(f"DOT node {name!r} has {len(edges)} streams and constants", "give one of each")
        scalar = constants[0] if constants else None
        if len(edges) == 2 and op in ALU_BINARY:
            self._add(name, "alu", {"a": self._stream(edges[0]), "b": self._stream(edges[1])}, op=op)
        elif len(edges) == 1 and op in ALU_UNARY:
            extra = {"scalar": float(scalar)} if scalar is not None else {}
            self._add(name, "alu", {"a": self._stream(edges[0])}, op=op, unary=1, **extra)
        else:
            raise self._unknown(name, kind)

    def _from_left(self, name: str) -> tuple[int, tuple[int, str]]:
        """Where an operand stands in the expression: by its first tensor in the graph's comment, which names tensors
        from the left; of one tensor, by the number of its values' node, since SAM numbers from the left as well. The
        numbers of other nodes, and the order of edges, differ between SAM's versions."""
        found: list[tuple[int, tuple[int, str]]] = []
        todo, seen = [name], {name}
        while todo:
            one = todo.pop()
            if self.dot.nodes[one].get("type") == "arrayvals":
                tensor = self.dot.nodes[one].get("tensor", "")
                order = list(self.formats)
                found.append((order.index(tensor) if tensor in order else len(order), _number(one)))
                continue
            before = [e[0] for e in self.ins[one] if _type(e) == "val" and e[0] not in seen]
            seen.update(before)
            todo += before
        return min(found, default=(len(self.formats), _number(name)))

    def _accumulator(self, name: str) -> None:
        """``in0`` is the innermost coordinate, ``order`` of them are summed under, and one more comes in: the reduced
        one. Coordinates that SAM holds for each inner one are taken as they were before."""
        attrs = self.dot.nodes[name]
        order = int(attrs["order"])
        kept = [attrs[f"in{i}"] for i in range(len(attrs)) if f"in{i}" in attrs]
        tags = [_tag(e) for e in self.ins[name] if _type(e) == "crd"]
        reduced = [x for x in tags if x not in kept]
        if len(reduced) != 1 or any(x not in tags for x in kept[:order]):
            raise SparseError(
                f"accumulator {name!r} of order {order} has the coordinates {', '.join(tags)}",
                "join it to those of the levels it keeps and of the one it reduces",
            )
        ins = {f"crd{i}": self._held(self._named(name, x)) for i, x in enumerate([*kept[:order], reduced[0]])}
        ins["val"] = self._of_type(name, "val")
        self._add(name, "spacc", ins, order=order, op=attrs.get("op", "add"))

    def _add(self, name: str, kind: str, ins: Mapping[str, Port], **attrs: str | int | float) -> None:
        given = tuple((k, v) for k, v in attrs.items())
        self.nodes[_name(name)] = Node(_name(name), kind, tuple(ins.items()), given, f"DOT node {name}")

    def _kind(self, name: str) -> str:
        """SAM's type of a node, without its number format. A drop of values that are 0 is written in three ways."""
        attrs = self.dot.nodes[name]
        kind = attrs.get("type", "").removeprefix("fp_")
        of_values = attrs.get("vals", "false") == "true" or (attrs.get("inner") == "val" and attrs.get("mode") == "0")
        if kind in ("crddrop", "crdhold") and of_values:
            return f"val{kind[3:]}"  # a coordinate has one value: to hold it once for each is to leave it
        return kind

    def _stream(self, edge: Edge) -> Port:
        """The stream on an edge."""
        source = edge[0]
        node = self.dot.nodes[source]
        kind, type_, tag = self._kind(source), _type(edge), _tag(edge)
        if kind == "broadcast":
            return self._only(source)
        if kind == "valhold":
            return self._of_type(source, type_)
        if kind == "fiberlookup":
            return Port(_name(source), "crd" if type_ == "crd" else "ref")
        if kind in ("intersect", "union") and type_ != "crd":
            return Port(_name(source), f"out{self._operands(source).index(tag)}")
        if kind == "valdrop":
            return Port(_name(source), "val" if type_ == "val" else "crd")
        if kind == "vectorreducer" and type_ == "crd":
            return Port(_name(source), "crd0")
        if kind in ("crddrop", "crdhold"):
            if tag == node["outer"]:
                return Port(_name(source), "outer")
            return Port(_name(source), "inner") if kind == "crddrop" else self._named(source, node["inner"])
        if kind == "spaccumulator" and type_ == "crd":
            kept, order = [node[f"in{i}"] for i in range(len(node)) if f"in{i}" in node], int(node["order"])
            if tag not in kept and order != 1:
                raise SparseError(
                    f"the edge from accumulator {source!r} says {tag!r}, which is none of {', '.join(kept)}",
                    "label it with the index that it carries",
                )
            level = kept.index(tag) if tag in kept else 0
            return Port(_name(source), f"crd{level}") if level < order else self._held(self._named(source, tag))
        out = {"repsiggen": "sig", "repeat": "out", "intersect": "crd", "union": "crd"}.get(kind, "val")
        return Port(_name(source), out)

    def _held(self, stream: Port) -> Port:
        """The coordinates before they were held."""
        while self.nodes[stream.node].kind == "crd_hold":
            stream = self.nodes[stream.node].input("outer")
        return stream

    def _named(self, name: str, index: str) -> Port:
        for edge in self.ins[name]:
            if _tag(edge) == index:
                return self._stream(edge)
        raise SparseError(f"no stream of index {index!r} feeds node {name!r}", "label an edge with this index")

    def _inner(self, name: str, index: str) -> Port:
        """The inner stream of a drop, which may be one of values."""
        vals = [e for e in self.ins[name] if _type(e) == "val"]
        return self._stream(vals[0]) if vals else self._named(name, index)

    def _of_type(self, name: str, type_: str) -> Port:
        for edge in self.ins[name]:
            if _type(edge) == type_:
                return self._stream(edge)
        raise SparseError(f"no {type_} stream feeds node {name!r}", f"join one to it, with type={type_}")

    def _or_root(self, name: str) -> Port:
        return self._only(name) if self.ins[name] else self._root(name)

    def _only(self, name: str) -> Port:
        """What feeds a node of one input."""
        if not self.ins[name]:
            raise SparseError(f"nothing feeds DOT node {name!r}", "join a stream to it")
        return self._stream(self.ins[name][0])

    def _root(self, name: str) -> Port:
        root = f"root_{name}"
        self.nodes[root] = Node(root, "root")
        return Port(root, "ref")

    def _operands(self, name: str) -> list[str]:
        return list(dict.fromkeys(_tag(e) for e in self.ins[name]))

    def _level(self, name: str) -> int:
        attrs = self.dot.nodes[name]
        tensor, mode = attrs.get("tensor", ""), int(attrs.get("mode", 0))
        format = self.formats.get(tensor)
        return format.order.index(mode) if format and mode in format.order else mode

    def _above(self, stream: Port) -> Port:
        """A stream of the level above: its elements are the fibers of this one."""
        node = self.nodes[stream.node]
        ins = dict(node.ins)
        if node.kind == "scan":
            return ins["ref"]
        if node.kind == "crd_drop" and stream.port == "inner":
            return Port(stream.node, "outer")
        if node.kind == "spacc":
            order = int(node.attr("order") or 0)
            level = 0 if stream.port == "val" else int(stream.port[3:])
            return Port(stream.node, f"crd{level + 1}") if level + 1 < order else self._above(ins[f"crd{order}"])
        for port in ("sig", "in", "crd0", "ref", "a", "crd", "inner" if node.kind == "crd_hold" else "outer"):
            if port in ins:
                return self._above(ins[port])
        raise SparseError(f"node {stream.node!r} is above every level", "reduce a stream of one level or more")

    def _depth(self, stream: Port) -> int:
        """Levels above a stream."""
        above = 0
        while self.nodes[stream.node].kind != "root":
            stream, above = self._above(stream), above + 1
        return above

    def _unknown(self, name: str, kind: str) -> SparseError:
        return SparseError(f"DOT node {name!r} is of type {kind!r}", f"use one of: {', '.join(_SUPPORTED)}, arithmetic")


def _type(edge: Edge) -> str:
    """What an edge carries: as its type says, or else its label."""
    type_ = edge[2].get("type", "")
    return type_ if type_ in ("crd", "ref", "val", "repsig") else edge[2].get("label", "").partition("_")[0]


def _tag(edge: Edge) -> str:
    """The operand or index on an edge: ``B`` of ``crd_in-B``, ``i`` of ``crd_outer-i`` and ``crd_i``. A label that says
    one is right even where the comment says another."""
    label = edge[2].get("label", "")
    text = label.partition("_")[2] or edge[2].get("comment") or label
    return re.split(r"[-_]", text)[-1]


def _number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (0, name)


def _name(name: str) -> str:
    return f"sam_{name}" if name.isdigit() else name
