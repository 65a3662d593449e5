"""The fusion table: one column a view, one row an index of the global order, and the values (FuseFlow, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.sparse.einsum import subscript
from tilestream.sparse.fusion import Fused, Leaf, Op, View


@dataclass(frozen=True)
class FusionTable:
    """``cells[row][column]``. A cell in angle brackets points to another cell's stream; others make nodes."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    def cell(self, row: str, column: str) -> str:
        return self.cells[self.rows.index(row)][self.columns.index(column)]

    def __str__(self) -> str:
        lines = [("", *self.columns), *((row, *cells) for row, cells in zip(self.rows, self.cells, strict=True))]
        widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
        text = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        ]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return "\n".join([text[0], rule, *text[1:]])


def nests(fused: Fused, order: tuple[str, ...]) -> dict[View, tuple[str, ...]]:
    """The loops that each view is under: a statement's own and those of its consumer until it ends (factored)."""
    rank = {index: n for n, index in enumerate(order)}
    found: dict[View, tuple[str, ...]] = {}

    def visit(view: View, consumer: tuple[str, ...]) -> None:
        if view in found:
            return
        loops: list[str] = []
        left, reduced = set(view.indices), view.reduced if isinstance(view, Op) else ()
        for index in consumer:
            if not left or any(rank[r] < rank[index] for r in reduced):
                break
            loops.append(index)
            left.discard(index)
        found[view] = (*loops, *sorted({*left, *reduced}, key=rank.__getitem__))
        if isinstance(view, Op):
            for one in sorted(view.operands, key=lambda v: isinstance(v, Op) and bool(v.reduced)):
                visit(one, found[view])

    for root in fused.roots.values():
        visit(root, ())
    return found


def fusion_table(fused: Fused, order: tuple[str, ...]) -> FusionTable:
    """The table of a fused region in one order of its indices."""
    maker = _Maker(fused, order)
    rows = (*order, "val")
    cells = [[maker.cell(view, row) for view in fused.views] for row in order]
    cells.append([maker.value(view) for view in fused.views])
    names = tuple(subscript(maker.names[v], v.indices) for v in fused.views)
    return FusionTable(rows, names, tuple(tuple(row) for row in cells))


class _Maker:
    def __init__(self, fused: Fused, order: tuple[str, ...]) -> None:
        self.fused, self.order = fused, order
        self.rank = {index: n for n, index in enumerate(order)}
        self.loops = nests(fused, order)
        self.users: dict[View, Op] = {}
        for view in fused.views:
            if isinstance(view, Op):
                for one in view.operands:
                    self.users.setdefault(one, view)
        self.names = self._names()

    def _names(self) -> dict[View, str]:
        """The tensor's name; with primes for its second view and later ones."""
        seen: dict[str, int] = {}
        names = {}
        for view in self.fused.views:
            base = view.tensor if isinstance(view, Leaf) else view.name
            names[view] = base + "'" * seen.get(base, 0)
            seen[base] = seen.get(base, 0) + 1
        return names

    def above(self, view: View, row: str) -> str:
        at = self.rank[row]
        return f"<{self.names[view]}_{self.order[at - 1]}>" if at else "root"

    def beside(self, view: View, row: str) -> str:
        """The stream of another operand at this row: what a repeat follows."""
        user = self.users.get(view)
        while user is not None:
            for one in user.operands:
                if one is not view and row in one.indices:
                    return f"<{self.names[one]}_{row}>"
            view, user = user, self.users.get(user)
        return f"<all_{row}>"

    def ended(self, op: Op, row: str) -> list[str]:
        """Reductions of ``op`` outside ``row``: those that its coordinates there come out of."""
        return [r for r in op.reduced if self.rank[r] < self.rank[row]]

    def cell(self, view: View, row: str) -> str:
        if row in view.indices:
            text, makes = self._own(view, row)
            side = self._side(view, row) if makes else ""
            if side:
                text = text.split("[")[0]
            return {"left": f"{text} ∩", "right": f"∩ {text}", "leftu": f"{text} ∪", "rightu": f"∪ {text}"}.get(
                side, text
            )
        if isinstance(view, Leaf):
            deeper = any(self.rank[i] > self.rank[row] for i in view.indices)
            looped = row in self.loops[view] or row in self.loops.get(self.users.get(view, view), ())
            if looped and (deeper or not self._ended_below(view, row)):
                return f"Rep({self.above(view, row)},{self.beside(view, row)})"
            return self.above(view, row)
        if not self.rank[row]:
            return "-"
        before = self.order[self.rank[row] - 1]
        produced = before in view.indices and self.ended(view, before)
        return self.above(view, row) + ("[crd0]" if produced else "")

    def _ended_below(self, leaf: Leaf, row: str) -> bool:
        """Whether the statement that reads the leaf has no loop over ``row``."""
        user = self.users.get(leaf)
        return user is None or row not in self.loops[user]

    def _own(self, view: View, row: str) -> tuple[str, bool]:
        """The cell of a view at one of its indices, and whether it makes coordinates."""
        if isinstance(view, Leaf):
            return f"LS({self.above(view, row)})", True
        if ended := self.ended(view, row):
            first = min(ended, key=self.rank.__getitem__)
            inside = [i for i in self.loops[view] if self.rank[i] > self.rank[first] and i not in view.reduced]
            place = len(inside) - 1 - inside.index(row)
            return f"Red{len(inside)}_{first}[crd{place}]", True
        for one in view.operands:
            if row in one.indices:
                return f"<{self.names[one]}_{row}>", False
        return f"LS(<all_{row}>)", True

    def _side(self, view: View, row: str) -> str:
        """On which side of a joiner the view's coordinates stand."""
        at: View = view
        user = self.users.get(at)
        while user is not None:
            having = [v for v in user.operands if row in v.indices]
            streams = {self._stream(v, row) for v in having}
            if len(streams) > 1 and row in self.loops[user]:
                union = "" if user.statement.op in ("mul", "keep", "mask", "div", "share") else "u"
                return ("left" if having[0] is at else "right") + union
            if row in user.reduced or row not in user.indices or self.ended(user, row):
                return ""
            at, user = user, self.users.get(user)
        return ""

    def _stream(self, view: View, row: str) -> View:
        """The view whose cell makes the coordinates of ``view`` at this row; one of several that are joined."""
        while isinstance(view, Op) and not self.ended(view, row):
            having = [v for v in view.operands if row in v.indices]
            if not having:
                return view
            view = having[0]
        return view

    def value(self, view: View) -> str:
        if isinstance(view, Leaf):
            return f"Val(<{self.names[view]}_{self.order[-1]}>)" if self.order else "Val(root)"
        name, user = self.names[view], self.users.get(view)
        own = [i for i in self.loops[view] if i not in view.reduced]
        over = [i for i in self.loops[user] if self.rank[i] > self.rank[own[-1]]] if user and own else []
        if user is not None and (not own or over) and (over or self.loops[user]):
            row = over[0] if over else self.loops[user][0]
            return f"Rep(<{name}_{own[-1] if own else 'val'}>[val],{self.beside(view, row)})"
        if view.reduced:
            first = min(view.reduced, key=self.rank.__getitem__)
            inside = [i for i in own if self.rank[i] > self.rank[first]]
            return f"Red{len(inside)}_{first}[val]"
        values = ", ".join(f"<{self.names[v]}_val>" for v in view.operands)
        return f"{view.statement.op}({values})"
