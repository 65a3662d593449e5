"""Operations, bytes and cycles of a stream graph without running it (FuseFlow section 7).

The paper's estimate asks the user for the share of coordinates that survive at each index. This one reads it off the
tensors: for every stream it keeps how many elements it has at each level, how often each coordinate comes, and how
often each position of a level is visited. A scanner turns visits of fibers into visits of their children, exactly. A
joiner assumes that operands are independent of each other given the coordinate, an accumulator that the fibers that
it sums are. Nothing else is assumed, so that a graph without joiners of two varying operands is counted exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.storage import SparseTensor
from tilestream.sparse.stream.graph import Graph, Node, Port
from tilestream.sparse.timing import COMAL, Timing

WORD = 4
MOST_SIZES = 64  # different fiber lengths that an accumulator tells apart


@dataclass(frozen=True)
class NodeEstimate:
    """Expected figures of one node, in the units of ``result.NodeStats``."""

    name: str
    kind: str
    tokens: float
    busy: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Estimate:
    """Expected figures of a run. ``cycles``: when the last node is done, if nodes keep up with what they read."""

    cycles: float
    flops: float
    bytes: float
    nodes: tuple[NodeEstimate, ...] = field(repr=False, default=())
    outputs: Mapping[str, Profile] = field(repr=False, default_factory=dict)

    def __add__(self, other: Estimate) -> Estimate:
        """One run after the other."""
        both = (self.cycles + other.cycles, self.flops + other.flops, self.bytes + other.bytes)
        return Estimate(*both, self.nodes + other.nodes, {**self.outputs, **other.outputs})


@dataclass(frozen=True)
class Profile:
    """What is expected of a tensor that is not made yet: of each level its size, and the share of fibers that have
    each coordinate (float64 [size]; None: dense)."""

    sizes: tuple[int, ...]
    shares: tuple[np.ndarray | None, ...] = field(repr=False)


@dataclass(frozen=True)
class Flow:
    """What is expected of a stream.

    ``counts``: elements at each level from the outside, the last being those that it carries. ``marginal``: float64
    [size], how often each coordinate comes, or None if unknown. ``visits``: float64 [positions], of a reference
    stream, how often each position of ``tensor``'s ``level`` comes. ``lengths``: (lengths, how many) of the innermost
    fibers. ``present``: the share of elements that are not N.
    """

    counts: tuple[float, ...]
    size: int = 0
    marginal: np.ndarray | None = None
    tensor: str = ""
    level: int = -1
    visits: np.ndarray | None = None
    lengths: tuple[np.ndarray, np.ndarray] | None = None
    present: float = 1.0

    @property
    def n(self) -> float:
        return self.counts[-1]

    @property
    def fibers(self) -> float:
        return self.counts[-2] if len(self.counts) > 1 else 1.0

    @property
    def tokens(self) -> float:
        """Elements and stops: an innermost fiber ends in one stop."""
        return self.n + (self.fibers if len(self.counts) > 1 else 0.0)

    def at(self, counts: tuple[float, ...]) -> Flow:
        return replace(self, counts=counts)


def estimate(graph: Graph, tensors: Mapping[str, SparseTensor | Profile], timing: Timing = COMAL) -> Estimate:
    """Expected operations, bytes and cycles of ``graph`` on ``tensors``, some of which may be only expected.

    The time that it takes grows with the tensors' fibers, not with the tokens of a run.

    Raises:
        SparseError: a tensor that the graph reads is missing.
    """
    work = _Work(graph, tensors)
    nodes = []
    for node in graph.nodes:
        flops, moved, steps = work.node(node)
        op = "unary" if node.attr("unary") else str(node.attr("op", ""))
        interval, _ = timing.of(node.kind, op, graph.block)
        out = sum(work.flows[Port(node.name, p)].tokens + 1 for p in node.outs)
        nodes.append(NodeEstimate(node.name, node.kind, out, steps * interval, flops, moved))
    totals = (_last(graph, nodes, work.groups), sum(n.flops for n in nodes), sum(n.bytes for n in nodes))
    return Estimate(*totals, tuple(nodes), work.profiles())


def _last(graph: Graph, nodes: list[NodeEstimate], groups: Mapping[str, float]) -> float:
    """When the last node is done, if nodes keep up with what they read.

    A node starts with its first token and takes at least its busy cycles. An accumulator gives nothing before its
    first group is complete, and each group at once: who reads it has the last group still before him at its end.
    """
    first: dict[str, float] = {}
    end: dict[str, float] = {}
    for node, figures in zip(graph.nodes, nodes, strict=True):
        sources = [stream.node for _, stream in node.ins]
        start = max((first[s] for s in sources), default=0.0)
        last = max((end[s] + figures.busy / groups.get(s, np.inf) for s in sources), default=0.0)
        end[node.name] = max(start + figures.busy, last)
        own = groups.get(node.name)
        first[node.name] = start + 1 if own is None else start + figures.busy / own
        if node.kind == "broadcast" and sources[0] in groups:
            groups = {**groups, node.name: groups[sources[0]]}
    return max(end.values(), default=0.0)


class _Work:
    def __init__(self, graph: Graph, tensors: Mapping[str, SparseTensor | Profile]) -> None:
        self.block, self.tensors = graph.block, tensors
        self.written: dict[str, dict[int, Flow]] = {}
        self.groups: dict[str, float] = {}  # of each accumulator, how often it gives its sums
        self.flows: dict[Port, Flow] = {}
        self.rules: dict[str, Callable[[Node], tuple[float, float, float]]] = {
            "root": self._root,
            "scan": self._scan,
            "repeat": self._repeat,
            "intersect": self._join,
            "union": self._join,
            "locate": self._locate,
            "array": self._array,
            "alu": self._alu,
            "reduce": self._reduce,
            "spacc": self._spacc,
            "crd_drop": self._drop,
            "crd_hold": self._hold,
            "val_drop": self._keep,
            "fork": self._fork,
            "join": self._gather,
        }

    def node(self, node: Node) -> tuple[float, float, float]:
        """(operations, bytes, steps) of a node; its outputs' flows are kept."""
        return self.rules.get(node.kind, self._same)(node)

    def ins(self, node: Node, stem: str = "") -> list[Flow]:
        return [self.flows[s] for p, s in node.ins if not stem or p.rstrip("0123456789") == stem]

    def put(self, node: Node, *flows: Flow) -> None:
        for port, flow in zip(node.outs, flows, strict=True):
            self.flows[Port(node.name, port)] = flow

    def profiles(self) -> dict[str, Profile]:
        """What is expected of each result, from the coordinates that its writers get."""
        made = {}
        for name, levels in self.written.items():
            flows = [levels[i] for i in sorted(levels)]
            shares = []
            for flow in flows:
                size = max(1, flow.size)
                shares.append(np.minimum(1.0, self._marginal(flow, size) / max(flow.fibers, 1e-300)))
            made[name] = Profile(tuple(max(1, f.size) for f in flows), tuple(shares))
        return made

    def tensor(self, node: Node) -> SparseTensor | Profile:
        name = str(node.attr("tensor"))
        if name not in self.tensors:
            raise SparseError(f"node {node.name!r} reads tensor {name!r}, which is missing", "give it")
        return self.tensors[name]

    def _same(self, node: Node) -> tuple[float, float, float]:
        """Repeat signals, broadcasts and writers: what comes in goes out."""
        (flow,) = self.ins(node)
        self.put(node, *(flow for _ in node.outs))
        if node.kind == "write_crd":
            self.written.setdefault(str(node.attr("tensor")), {})[int(node.attr("level") or 0)] = flow
            return 0.0, WORD * flow.tokens, flow.tokens
        if node.kind == "write_val":
            return 0.0, WORD * flow.n * self.block**2, flow.n
        return 0.0, 0.0, flow.tokens

    def _root(self, node: Node) -> tuple[float, float, float]:
        self.put(node, Flow((1.0,), visits=np.ones(1)))
        return 0.0, 0.0, 1.0

    def _scan(self, node: Node) -> tuple[float, float, float]:
        (refs,) = self.ins(node)
        tensor, index = self.tensor(node), int(node.attr("level") or 0)
        name, moved = str(node.attr("tensor")), 0.0
        if isinstance(tensor, Profile):
            return self._scan_expected(node, refs, tensor, index)
        level = tensor.levels[index]
        if level.seg is None or level.crd is None:
            real = refs.n * refs.present
            total = real * level.size
            visits = (
                None
                if refs.visits is None
                else np.repeat(refs.visits, level.size)
                if self._more(tensor, index)
                else None
            )
            lengths = (np.array([float(level.size)]), np.array([real]))
            marginal = np.full(level.size, real)
        else:
            sizes = np.diff(level.seg).astype(np.float64)
            seen = refs.visits
            if seen is None:
                seen = np.full(len(sizes), refs.n * refs.present / max(1, len(sizes)))
            total = float(sizes @ seen)
            visits = np.repeat(seen, np.diff(level.seg))
            marginal = np.bincount(level.crd, weights=visits, minlength=level.size)
            lengths = _histogram(sizes, seen)
            moved = WORD * (2 * refs.n * refs.present + total)
        crd = Flow((*refs.counts, total), level.size, marginal, name, index, visits, lengths)
        self.put(node, crd, crd)
        return 0.0, moved, total + refs.n

    def _scan_expected(self, node: Node, refs: Flow, tensor: Profile, index: int) -> tuple[float, float, float]:
        size, share = tensor.sizes[index], tensor.shares[index]
        real = refs.n * refs.present
        marginal = np.full(size, real) if share is None else share * real
        total = float(marginal.sum())
        crd = Flow((*refs.counts, total), size, marginal, str(node.attr("tensor")), index)
        self.put(node, crd, crd)
        return 0.0, 0.0 if share is None else WORD * (2 * real + total), total + refs.n

    @staticmethod
    def _more(tensor: SparseTensor | Profile, index: int) -> bool:
        """Whether visits matter below a dense level: only where a compressed one follows."""
        if isinstance(tensor, Profile):
            return False
        return any(level.compressed for level in tensor.levels[index + 1 :])

    def _repeat(self, node: Node) -> tuple[float, float, float]:
        held, signal = self.flows[node.input("in")], self.flows[node.input("sig")]
        visits = held.visits * (signal.n / held.n) if held.visits is not None and held.n else None
        self.put(node, replace(held, counts=signal.counts, visits=visits, marginal=None, lengths=signal.lengths))
        return 0.0, 0.0, signal.tokens

    def _join(self, node: Node) -> tuple[float, float, float]:
        crds, payloads = self.ins(node, "crd"), self.ins(node, "in")
        groups = max(1e-300, min(c.fibers for c in crds))
        size = max(c.size for c in crds) or 1
        shares = [np.minimum(1.0, self._marginal(c, size) / groups) for c in crds]
        if node.kind == "intersect":
            kept = np.prod(shares, axis=0) * groups
        else:
            kept = (1 - np.prod([1 - s for s in shares], axis=0)) * groups
        total = float(kept.sum())
        lengths = crds[0].lengths if node.kind == "intersect" and np.all(shares[-1] == 1.0) else None
        out = Flow((*crds[0].counts[:-1], total), size, kept, lengths=lengths)
        outs = [out]
        for crd, payload in zip(crds, payloads, strict=True):
            visits = self._survive(crd, payload, kept)
            present = min(1.0, crd.n / total) if node.kind == "union" and total else 1.0
            outs.append(replace(payload, counts=out.counts, visits=visits, marginal=None, present=present))
        self.put(node, *outs)
        # A step takes a coordinate from every operand that has it.
        steps = float((1 - np.prod([1 - s for s in shares], axis=0)).sum()) * groups
        return 0.0, 0.0, steps + out.fibers

    @staticmethod
    def _marginal(crd: Flow, size: int) -> np.ndarray:
        if crd.marginal is not None and len(crd.marginal) == size:
            return crd.marginal
        return np.full(size, crd.n / size)

    def _survive(self, crd: Flow, payload: Flow, kept: np.ndarray) -> np.ndarray | None:
        """Visits of a payload's positions after a joiner: each survives as its coordinate does."""
        if payload.visits is None or not payload.tensor:
            return None
        tensor = self.tensors[payload.tensor]
        if isinstance(tensor, Profile):
            return None
        level = tensor.levels[payload.level]
        before = self._marginal(crd, len(kept))
        share = np.divide(kept, before, out=np.zeros_like(kept), where=before > 0)
        share = np.minimum(share, 1.0)
        if level.crd is not None:
            return payload.visits * share[level.crd]
        return payload.visits * np.tile(share, max(1, len(payload.visits) // max(1, level.size)))

    def _locate(self, node: Node) -> tuple[float, float, float]:
        crd, ref = self.flows[node.input("crd")], self.flows[node.input("ref")]
        tensor, index = self.tensor(node), int(node.attr("level") or 0)
        size = tensor.sizes[index] if isinstance(tensor, Profile) else tensor.levels[index].size
        visits = None
        if index == 0 and crd.marginal is not None and self._more(tensor, index):
            visits = crd.marginal
        found = Flow(crd.counts, size, crd.marginal, str(node.attr("tensor")), index, visits, crd.lengths)
        self.put(node, crd, found)
        return 0.0, 0.0, max(crd.tokens, ref.tokens)

    def _array(self, node: Node) -> tuple[float, float, float]:
        (refs,) = self.ins(node)
        self.put(node, Flow(refs.counts, lengths=refs.lengths))
        return 0.0, WORD * refs.n * refs.present * self.block**2, refs.tokens

    def _alu(self, node: Node) -> tuple[float, float, float]:
        flows = self.ins(node)
        flow = max(flows, key=lambda f: f.n)
        self.put(node, flow)
        op, unary = node.attr("op"), bool(node.attr("unary"))
        tile = 2 * self.block**3 if not unary and op in ("matmul", "matmul_t") else self.block**2
        return flow.n * tile, 0.0, flow.tokens

    def _reduce(self, node: Node) -> tuple[float, float, float]:
        (values,) = self.ins(node)
        self.put(node, Flow(values.counts[:-1] or (1.0,)))
        return values.n * self.block**2, 0.0, values.tokens

    def _spacc(self, node: Node) -> tuple[float, float, float]:
        order = int(node.attr("order") or 0)
        crds, values = self.ins(node, "crd"), self.flows[node.input("val")]
        flops, steps = values.n * self.block**2, values.tokens
        if order == 0:
            self.put(node, Flow(crds[0].counts))
            return flops, 0.0, steps
        reduced = crds[order]
        above = reduced.counts[:-1] or (1.0,)
        groups = self.groups[node.name] = max(1.0, above[-1])
        sizes, many = (
            reduced.lengths if reduced.lengths else (np.array([reduced.n / max(groups, 1e-300)]), np.array([groups]))
        )
        counts, outs = above, []
        fibers = reduced.n  # fibers of the level in hand that are summed
        for depth in range(order - 1, -1, -1):
            crd = crds[depth]
            size = crd.size or 1
            share = np.minimum(1.0, self._marginal(crd, size) / max(fibers, 1e-300))
            kept = np.zeros(size)
            for r, w in zip(sizes, many, strict=True):
                kept += w * (1 - (1 - share) ** r)
            total = float(kept.sum())
            counts = (*counts, total)
            outs.append(Flow(counts, size, kept))
            sizes, many = np.array([crd.n / max(total, 1e-300)]), np.array([total])
            fibers = crd.n
        self.put(node, *reversed(outs), Flow(counts))
        return flops, 0.0, steps

    def _drop(self, node: Node) -> tuple[float, float, float]:
        outer, inner = self.flows[node.input("outer")], self.flows[node.input("inner")]
        if inner.lengths is not None:
            sizes, many = inner.lengths
            held = float(many[sizes > 0].sum()) / max(1e-300, float(many.sum()))
        else:
            share = min(1.0, inner.n / max(1e-300, inner.fibers) / max(1, inner.size)) if inner.size else 1.0
            held = 1 - (1 - share) ** inner.size if inner.size else 1.0
        kept = outer.n * held
        marginal = None if outer.marginal is None else outer.marginal * held
        visits = None if outer.visits is None else outer.visits * held
        out = replace(outer, counts=(*outer.counts[:-1], kept), marginal=marginal, visits=visits)
        self.put(node, out, inner.at((*inner.counts[:-2], kept, inner.n) if len(inner.counts) > 1 else inner.counts))
        return 0.0, 0.0, outer.tokens

    def _keep(self, node: Node) -> tuple[float, float, float]:
        """As if no value were 0: values are not known here."""
        crd, val = self.flows[node.input("crd")], self.flows[node.input("val")]
        self.put(node, crd, val)
        return 0.0, 0.0, crd.tokens

    def _hold(self, node: Node) -> tuple[float, float, float]:
        outer, inner = self.flows[node.input("outer")], self.flows[node.input("inner")]
        self.put(node, replace(outer, counts=inner.counts, marginal=None, visits=None, lengths=inner.lengths))
        return 0.0, 0.0, inner.tokens

    def _fork(self, node: Node) -> tuple[float, float, float]:
        (flow,) = self.ins(node)
        ways = len(node.outs)
        part = replace(
            flow,
            counts=(*flow.counts[:-1], flow.n / ways),
            marginal=None if flow.marginal is None else flow.marginal / ways,
            visits=None if flow.visits is None else flow.visits / ways,
            lengths=None if flow.lengths is None else (flow.lengths[0] / ways, flow.lengths[1]),
        )
        self.put(node, *(part for _ in node.outs))
        return 0.0, 0.0, flow.tokens

    def _gather(self, node: Node) -> tuple[float, float, float]:
        flows = self.ins(node, "in")
        flows = flows[:-1] if node.attr("ordered") else flows  # the last one only says in which order
        below = int(node.attr("level", 0) or 0) + 1
        first = flows[0]
        keep = len(first.counts) - below
        counts = tuple(c if i < keep else sum(f.counts[i] for f in flows) for i, c in enumerate(first.counts))
        parts = [f.marginal for f in flows]
        marginal = None if any(m is None for m in parts) else np.sum([m for m in parts if m is not None], axis=0)
        visits = None
        if all(f.visits is not None for f in flows):
            visits = np.sum([f.visits for f in flows if f.visits is not None], axis=0)
        out = replace(first, counts=counts, marginal=marginal, visits=visits, lengths=None)
        self.put(node, out)
        return 0.0, 0.0, out.tokens


def _histogram(sizes: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fiber lengths and how many fibers have each; beyond ``MOST_SIZES`` different ones, bins of equal count."""
    unique, index = np.unique(sizes, return_inverse=True)
    many = np.bincount(index, weights=weights, minlength=len(unique))
    if len(unique) <= MOST_SIZES:
        return unique, many
    edges = np.searchsorted(np.cumsum(many), np.linspace(0, many.sum(), MOST_SIZES + 1)[1:-1])
    bins = np.searchsorted(np.unique(edges), np.arange(len(unique)), side="right")
    total = np.bincount(bins, weights=many)
    mean = np.bincount(bins, weights=many * unique) / np.maximum(total, 1e-300)
    return mean, total
