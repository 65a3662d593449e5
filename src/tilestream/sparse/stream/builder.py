"""Builds the nodes of a stream graph: equal nodes once, names that say what they are."""

from __future__ import annotations

from tilestream.sparse.stream.graph import Node, Port

Attrs = tuple[tuple[str, str | int | float], ...]


class Builder:
    """Nodes in the order in which they were asked for. Asking again for an equal node gives the first one."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._made: dict[tuple[str, tuple[tuple[str, Port], ...], Attrs], str] = {}

    def add(self, name: str, kind: str, ins: tuple[tuple[str, Port], ...] = (), attrs: Attrs = (), at: str = "") -> str:
        """Name of the node of this kind with these inputs and attributes; ``name`` is for a new one."""
        key = (kind, ins, attrs)
        if key not in self._made:
            unique, n = name, 1
            while unique in self.nodes:
                n += 1
                unique = f"{name}_{n}"
            self.nodes[unique] = Node(unique, kind, ins, attrs, at)
            self._made[key] = unique
        return self._made[key]

    def root(self, tensor: str) -> Port:
        return Port(self.add(f"root_{tensor}", "root", (), (("of", tensor),)), "ref")

    def scan(self, tensor: str, level: int, index: str, ref: Port, at: str) -> tuple[Port, Port]:
        attrs = (("tensor", tensor), ("level", level))
        name = self.add(f"scan_{tensor}_{index}", "scan", (("ref", ref),), attrs, at)
        return Port(name, "crd"), Port(name, "ref")

    def repeat(self, stream: Port, over: Port, index: str, at: str) -> Port:
        """``stream`` once an element of ``over``, which has one level more."""
        signal = Port(self.add(f"repsig_{index}", "repsig", (("in", over),), (), at), "sig")
        return Port(self.add(f"repeat_{index}", "repeat", (("in", stream), ("sig", signal)), (), at), "out")

    def locate(self, tensor: str, level: int, index: str, crd: Port, ref: Port, at: str) -> Port:
        attrs = (("tensor", tensor), ("level", level))
        name = self.add(f"locate_{tensor}_{index}", "locate", (("crd", crd), ("ref", ref)), attrs, at)
        return Port(name, "ref")

    def joiner(self, kind: str, index: str, pairs: list[tuple[Port, Port]], at: str) -> tuple[Port, list[Port]]:
        """An intersect or a union of (coordinates, payload) pairs."""
        ins = tuple((f"crd{n}", crd) for n, (crd, _) in enumerate(pairs))
        ins += tuple((f"in{n}", payload) for n, (_, payload) in enumerate(pairs))
        name = self.add(f"{kind}_{index}", kind, ins, (), at)
        return Port(name, "crd"), [Port(name, f"out{n}") for n in range(len(pairs))]

    def array(self, tensor: str, ref: Port, at: str) -> Port:
        return Port(self.add(f"array_{tensor}", "array", (("ref", ref),), (("tensor", tensor),), at), "val")

    def alu(self, op: str, values: list[Port], scalar: float | None, name: str, at: str) -> Port:
        attrs: Attrs = (("op", op),)
        attrs += (("unary", 1),) if len(values) == 1 else ()
        attrs += (("scalar", float(scalar)),) if scalar is not None else ()
        ins = tuple(zip("ab", values, strict=False))
        return Port(self.add(f"{op}_{name}", "alu", ins, attrs, at), "val")

    def reduce(self, op: str, val: Port, name: str, at: str) -> Port:
        return Port(self.add(f"reduce_{name}", "reduce", (("val", val),), (("op", op),), at), "val")

    def spacc(self, op: str, crds: list[Port], val: Port, name: str, at: str) -> tuple[list[Port], Port]:
        """``crds``: innermost first, the reduced one last; of order 0, the one above the values alone."""
        order = len(crds) - 1
        ins = tuple((f"crd{n}", crd) for n, crd in enumerate(crds)) + (("val", val),)
        made = self.add(f"spacc{order}_{name}", "spacc", ins, (("order", order), ("op", op)), at)
        return [Port(made, f"crd{n}") for n in range(order)], Port(made, "val")

    def live(self, ends: list[str]) -> tuple[Node, ...]:
        """The nodes that ``ends`` need, in order."""
        wanted, stack = set(), list(ends)
        while stack:
            name = stack.pop()
            if name not in wanted:
                wanted.add(name)
                stack.extend(port.node for _, port in self.nodes[name].ins)
        return tuple(node for name, node in self.nodes.items() if name in wanted)
