"""The generated part of a kernel of segments: loads, values and sums, one struct a pass over the edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from tilestream.ir.ways import reached
from tilestream.kernels.parts.snippets import expression, literal
from tilestream.kernels.parts.text import block, loop
from tilestream.kernels.segments.layout import Layout
from tilestream.kernels.segments.memory import Access
from tilestream.kernels.segments.model import Pass, Place, Step, made_of

IDENTITY = {"sum": 0.0, "max": float("-inf"), "min": float("inf"), "mul": 1.0}
ALIKE = ("cast", "copy", "load")
"""Ops whose results are their operands, rounded."""
COMBINE = {"sum": "Sum", "max": "Larger", "min": "Smaller", "mul": "Times"}


class Code:
    """C++ of a program in a layout. Values are arrays: of edges local ones, else members of ``Node`` and ``Fixed``."""

    def __init__(self, at: Layout) -> None:
        self.p, self.at = at.p, at
        self.numbers = {name: n for n, name in enumerate((*self.p.reads, *self.p.steps))}
        self.passes = [PassCode(self, each) for each in self.p.passes]

    def name(self, value: str) -> str:
        """C++ of a value's array."""
        letters = {Place.EDGE: "e", Place.NODE: "n.v", Place.FIXED: "f.v"}[self.p.value(value).place]
        return f"{letters}{self.numbers[value]}"

    def access(self, value: str) -> Access:
        return Access(self.at, self.p.reads[value])

    # -- the parts of the template

    def members(self, place: str) -> list[str]:
        """Arrays of ``Node`` or ``Fixed``."""
        here = [v for v in self.numbers if self.p.value(v).place == place]
        return [f"float v{self.numbers[v]}[{self.at.count(self.p.axes(v))}];" for v in here]

    def fixed(self) -> list[str]:
        reads = [v for v in self.p.reads if self.p.value(v).place is Place.FIXED]
        lines = [line for v in reads for line in block("", [*self._load(v, "", "words"), self._unpack(v, "words")])]
        return [*lines, *(line for s in self.p.fixed for line in self.value(s))]

    def node(self) -> list[str]:
        """What is done for a node: its own rows loaded, values that a pass needs before it, all else behind the last:
        registers are for the edges, and of several CTAs that share a node one alone comes there."""
        loads = [v for v in self.p.reads if self.p.value(v).place is Place.NODE]
        lines = ["Node n;", *(line for v in loads for line in self._load(v, "node", f"w{self.numbers[v]}"))]
        for name, each in self.p.counted.items():
            lines += self._assign(self.p.sums[name], f"{literal(each)} * (float)(how.to - how.from)")
        left = [*loads, *(s.makes for s in self.p.nodes if s.write is None and s.makes not in self.p.sums)]
        for depth, each in enumerate(self.passes):
            lines += self._now(left, self._needed(each.each))
            lines += each.call(depth)
        lines += self._now(left, set(left))
        for s in self.p.nodes:
            if s.write is not None:
                lines += Access(self.at, s.write).store(self.name(s.operands[0]), "node", "how.writes(t)")
        return lines

    def _needed(self, each: Pass) -> set[str]:
        """Values of the node that a pass needs."""
        ends = [name for s in (*each.steps, *each.sums, *each.stores) for name in s.operands]
        return reached(ends, lambda name: () if name in self.p.sums else made_of(self.p.steps, name))

    def _now(self, left: list[str], needed: set[str]) -> list[str]:
        """Statements of those of the values ``left`` that are ``needed``, in order; they are taken out."""
        now = [name for name in left if name in needed]
        left[:] = [name for name in left if name not in needed]
        lines = []
        for name in now:
            if name in self.p.reads:
                lines.append(self._unpack(name, f"w{self.numbers[name]}"))
            else:
                lines += self.value(self.p.steps[name])
        return lines

    def _load(self, value: str, row: str, words: str) -> list[str]:
        access = self.access(value)
        return [f"u32 {words}[{access.words}];", *access.load(words, row)]

    def _unpack(self, value: str, words: str) -> str:
        return self.access(value).unpacked(self.name(value), words)

    # -- values

    def at_index(self, value: str, of: int) -> str:
        """C++ of a value's element in a loop over ``of`` elements ``i``."""
        own = self.at.count(self.p.axes(value))
        return self.name(value) + ("[0]" if own == 1 else "[i]" if own == of else f"[i / {self.at.vector}]")

    def value(self, s: Step) -> list[str]:
        """Statements that make a step's value; of an edge, its array as well."""
        declared = [f"float {self.name(s.makes)}[{self.at.count(s.axes)}];"] if s.place is Place.EDGE else []
        if s.op.kind == "product" and s.taken != s.axes:
            product = self.product(s.operands, self.at.count(s.taken))
            return [*declared, *self.over_features(s, self.name(s.makes), product)]
        return [*declared, *self._assign(s, self._element(s))]

    def _assign(self, s: Step, element: str) -> list[str]:
        n = self.at.count(s.axes)
        line = f"{self.name(s.makes)}[{'i' if n > 1 else '0'}] = {element};"
        return loop("i", n, [line]) if n > 1 else [line]

    def _element(self, s: Step) -> str:
        """C++ of element ``i`` of a step's value."""
        n = self.at.count(s.axes)
        if s.op.kind == "fill":
            return literal(float(s.op.attr("value", 1.0) or 0.0))
        if s.op.kind == "product":
            return self.product(s.operands, n)
        operands = [self.at_index(v, n) for v in s.operands]
        if s.op.kind == "cast" and s.dtype != "f32":
            return f"rounded_to<{s.dtype}>({operands[0]})"
        return operands[0] if s.op.kind in ALIKE else expression(s.op, operands)

    def product(self, operands: Sequence[str], of: int) -> str:
        """C++ of the product of operands in a loop over ``of`` elements ``i``, each rounded to its dtype."""
        taken = []
        for v in operands:
            dtype, text = self.p.rounds(v), self.at_index(v, of)
            taken.append(f"rounded_to<{dtype}>({text})" if dtype else text)
        return " * ".join(taken)

    def over_features(self, s: Step, target: str, element: str) -> list[str]:
        """Statements that combine ``element`` ``i`` over the features that the result lacks: in a lane, then lanes."""
        at, combine = self.at, COMBINE[s.op.combine]
        team = at.team

        def summed(first: str, last: str, width: int, to: str) -> list[str]:
            inner = loop("k", at.vector, [f"const int i = r * {at.vector} + k;", f"x = {combine}::of(x, {element});"])
            lines = [f"float x = {literal(IDENTITY[s.op.combine])};"]
            rows = f"for (int r = {first}; r < {last}; ++r)"
            lines += ["#pragma unroll", *block(rows, block("if (t.there(r))", inner))]
            return [*lines, f"{to} = over_lanes<{combine}, {width}, {team}>(x);"]

        if not s.axes:
            return block("", summed("0", str(at.vectors), at.lanes, f"{target}[0]"))
        if at.per_run <= at.lanes:
            return loop("q", at.vectors, summed("q", "q + 1", at.per_run, f"{target}[q]"))
        several = at.per_run // at.lanes
        body = summed("q", f"q + {several}", at.lanes, f"{target}[q]")
        body += loop("r", several - 1, [f"{target}[q + 1 + r] = {target}[q];"])
        return ["#pragma unroll", *block(f"for (int q = 0; q < {at.vectors}; q += {several})", body)]


@dataclass(frozen=True)
class Kept:
    """Where a sum lies among those of its pass: ``first`` of ``count`` floats; of a softmax first ``scores`` maxima and
    as many sums of weights, then the weighted values."""

    step: Step
    first: int
    count: int
    scores: int = 0


class PassCode:
    """The struct of one pass."""

    def __init__(self, code: Code, each: Pass) -> None:
        self.code, self.each, self.p = code, each, code.p
        self.in_flight = code.at.in_flight(each)
        self.kept: list[Kept] = []
        first = 0
        for s in each.sums:
            scores = code.at.count(self.p.axes(s.operands[0])) if s.op.combine == "softmax" else 0
            self.kept.append(Kept(s, first, code.at.count(s.taken), scores))
            first += self.kept[-1].count + 2 * scores
        self.count = first
        accesses = [code.access(name) for name in each.reads]
        self.words = dict(zip(each.reads, accesses, strict=True))
        reads = [*(a.read for a in accesses), *(s.write for s in each.stores if s.write)]
        self.indices: dict[int, list[int]] = {}
        for r in reads:
            if r.index >= 0:
                self.indices.setdefault(r.index, []).append(r.number)

    def row(self) -> list[str]:
        """Members of what is loaded of an edge."""
        words = [f"u32 w{self.code.numbers[name]}[{a.words}];" for name, a in self.words.items()]
        return [*(f"u32 at{index};" for index in self.indices), *words]

    def find(self) -> list[str]:
        """Statements that look the rows of an edge up."""
        return [f"row.at{index} = row_of<{wide}>(p.tensors[{index}], at);" for index, (wide, _) in self._named.items()]

    def exist(self) -> str:
        """C++ of whether all rows of an edge exist."""
        return " & ".join(f"(row.at{index} < (u32){rows})" for index, (_, rows) in self._named.items()) or "true"

    def named(self) -> list[str]:
        """A call of ``of`` for each index of the pass."""
        return [f"of({index}, {wide}, {rows});" for index, (wide, rows) in self._named.items()]

    @property
    def _named(self) -> dict[int, tuple[str, str]]:
        """Of each index whether it is i64, and C++ of how many rows it names, in the smallest table."""
        found = {}
        for index, tables in self.indices.items():
            first, *others = dict.fromkeys(tables)
            rows = f"p.rows[{first}]"
            for other in others:
                rows = f"least({rows}, p.rows[{other}])"
            found[index] = ("true" if self.p.pipeline.tensors[index].dtype == "i64" else "false", rows)
        return found

    def load(self) -> list[str]:
        numbers, words = self.code.numbers, self.words.items()
        return [line for name, a in words for line in a.load(f"row.w{numbers[name]}", self._row(a.read.index))]

    def _row(self, index: int) -> str:
        return f"row.at{index}" if index >= 0 else "(u32)at"

    def _values(self, ends: Sequence[str]) -> list[str]:
        """Statements that make values of an edge, and all that they are made of, from its rows."""
        wanted, lines = reached(ends, partial(made_of, self.p.steps)), []
        for name, a in self.words.items():
            if name in wanted:
                value = self.code.name(name)
                lines += [f"float {value}[{a.count}];", a.unpacked(value, f"row.w{self.code.numbers[name]}")]
        return [*lines, *(line for s in self.each.steps if s.makes in wanted for line in self.code.value(s))]

    @property
    def scores(self) -> int:
        """Scores of an edge, of all softmaxes."""
        return sum(k.scores for k in self.kept)

    def score(self) -> list[str]:
        """Statements that leave an edge's scores in ``w``."""
        softmaxes = [k for k in self.kept if k.scores]
        lines = self._values([k.step.operands[0] for k in softmaxes])
        for k, first in zip(softmaxes, self._firsts(), strict=True):
            score = self.code.product([k.step.operands[0]], k.scores)
            lines += loop("i", k.scores, [f"w.v[{first} + i] = {score};"])
        return lines

    def _firsts(self) -> list[int]:
        """Where each softmax's scores lie among those of an edge."""
        counts = [k.scores for k in self.kept if k.scores]
        return list(accumulate(counts, initial=0))[:-1]

    def weigh(self) -> list[str]:
        """Statements that make weights of a batch's scores: maxima move, and what was summed is scaled to them."""
        lines = []
        for k, first in zip([k for k in self.kept if k.scores], self._firsts(), strict=True):
            keep, most, total = f"keep{first}", f"s.v[{k.first} + j]", f"s.v[{k.first + k.scores} + j]"
            body = [f"{keep}[j] = weights<IN_FLIGHT>(w, {first} + j, count, {most}, {total});"]
            lines += [f"float {keep}[{k.scores}];", *loop("j", k.scores, body)]
            lines += self._over(k, f"s.v[{k.first + 2 * k.scores} + i] *= {keep}[{self._score_of(k)}];")
        return lines

    def step(self) -> list[str]:
        ends = [name for s in (*self.each.stores, *self.each.sums) for name in s.operands[s.op.combine == "softmax" :]]
        lines = self._values(ends)
        for s in self.each.stores:
            assert s.write is not None
            access = Access(self.code.at, s.write)
            lines += access.store(self.code.name(s.operands[0]), self._row(s.write.index), "")
        weights = iter(self._firsts())
        for k in self.kept:
            lines += self._over(k, self._weighed(k, next(weights)) if k.scores else self._combined(k))
        return lines

    def _over(self, k: Kept, line: str) -> list[str]:
        return loop("i", k.count, [line])

    def _combined(self, k: Kept) -> str:
        *others, last = k.step.operands
        to = f"s.v[{k.first} + i]"
        if k.step.op.combine == "sum" and others:
            return f"{to} = fma_({self.code.product(others, k.count)}, {self.code.product([last], k.count)}, {to});"
        return f"{to} = {COMBINE[k.step.op.combine]}::of({to}, {self.code.product(k.step.operands, k.count)});"

    def _weighed(self, k: Kept, first: int) -> str:
        to, value = f"s.v[{k.first + 2 * k.scores} + i]", self.code.product(k.step.operands[1:], k.count)
        return f"{to} = fma_(w.v[{first} + {self._score_of(k)}], {value}, {to});"

    def _score_of(self, k: Kept) -> str:
        """C++ of the score of element ``i``."""
        return "0" if k.scores == 1 else "i" if k.scores == k.count else f"i / {self.code.at.vector}"

    def clear(self) -> list[str]:
        lines = []
        for k in self.kept:
            if k.scores:
                lines += loop("j", k.scores, [f"v[{k.first} + j] = {literal(float('-inf'))};"])
                lines += loop("i", k.scores + k.count, [f"v[{k.first + k.scores} + i] = 0.0f;"])
            else:
                lines += self._over(k, f"v[{k.first} + i] = {literal(IDENTITY[k.step.op.combine])};")
        return lines

    def add(self) -> list[str]:
        """Statements that merge the sums ``o`` of other edges."""
        lines = []
        for k in self.kept:
            if not k.scores:
                at = f"v[{k.first} + i]"
                lines += self._over(k, f"{at} = {COMBINE[k.step.op.combine]}::of({at}, o.{at});")
                continue
            scores, j = k.scores, self._score_of(k)
            own, other = f"own{k.first}", f"other{k.first}"
            lines.append(f"float {own}[{scores}], {other}[{scores}];")
            most, weight = f"v[{k.first} + j]", f"v[{k.first + scores} + j]"
            lines += loop(
                "j", scores,
                [
                    f"shares({most}, o.{most}, {own}[j], {other}[j]);",
                    f"{weight} = {weight} * {own}[j] + o.{weight} * {other}[j];",
                ],
            )  # fmt: skip
            at = f"v[{k.first + 2 * scores} + i]"
            lines += self._over(k, f"{at} = {at} * {own}[{j}] + o.{at} * {other}[{j}];")
        return lines

    def call(self, number: int) -> list[str]:
        """The pass in a node's code, and what its sums become."""
        body = [f"typename Pass{number}::Sums s;", "s.clear();"]
        body.append(f"if (!how.template sum<Pass{number}>(p, t, f, n, s)) return;")
        for k in self.kept:
            body += self._finish(k)
        return block("", body)

    def _finish(self, k: Kept) -> list[str]:
        s, code = k.step, self.code
        at = f"s.v[{k.first} + i]"
        if k.scores:
            j = self._score_of(k)
            text = f"weighed(s.v[{k.first} + {j}], s.v[{k.first + k.scores} + {j}], s.v[{k.first + 2 * k.scores} + i])"
            text = f"how.from == how.to ? 0.0f : {text}"
            return self._over(k, f"{code.name(s.makes)}[i] = {text};")
        if s.taken != s.axes:
            return code.over_features(s, code.name(s.makes), at)
        empty = s.op.attr("empty")
        text = at if empty is None else f"how.from == how.to ? {literal(float(empty))} : {at}"
        return self._over(k, f"{code.name(s.makes)}[i] = {text};")
