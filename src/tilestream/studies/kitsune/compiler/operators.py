"""What Kitsune's evaluation counts: the operators of a captured model, what each does and which values join them.

An operator is what a user of PyTorch would call one: a linear with its bias, a ReLU, a concatenation, a softmax.
Reshapes, transposes, slices and other views are free and have no operator; an operand that is a view names the value
that it views, and its bytes are those that the view touches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

from tilestream.errors import CaptureError
from tilestream.graph.costs.table import Kind
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.record import Mode, Recorded

Phase = Literal["forward", "backward"]

PRODUCTS = (Kind.LINEAR, Kind.BMM, Kind.ATTENTION)
"""What tensor cores compute."""


@dataclass(frozen=True)
class Value:
    """A tensor in memory. ``bytes`` are of the whole tensor.

    ``saved`` marks results of the forward graph that the backward graph reads: they go to memory whatever is fused.
    ``is_input`` includes the incoming gradients of a training graph; ``is_output`` its parameters' gradients.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    is_parameter: bool = False
    is_input: bool = False
    is_output: bool = False
    saved: bool = False


@dataclass(frozen=True)
class Operand:
    """One operand of an operator: which value it reads, and how much of it.

    ``bytes`` are distinct bytes of the value that are read: what DRAM must deliver when nothing is cached from before.
    ``touched`` are bytes read counting repeats (a gather reads a node's features once for every edge): what L2
    delivers. For an operand that is a view, ``shape`` is the view's.
    """

    value: str
    shape: tuple[int, ...]
    bytes: float
    touched: float


@dataclass(frozen=True)
class Operator:
    """One counted operator.

    Attributes:
        name: unique in its graph; the name of the fx node that it ends with.
        target: the ATen operator, as ``aten.addmm.default``.
        label: what a reader would call it: ``linear``, ``linear dW``, ``relu``.
        kind: its family.
        engine: the pipes that it keeps busy.
        phase: forward or backward graph.
        inputs: its operands; ``outputs`` names the values that it writes.
        output_bytes: bytes written, one for each output.
        flops: of tensor cores, unpadded: 2 m n k for each product.
        dtype: of the tensor-core products, or of the first output.
        simt_ops, sfu_ops: issued fp32 lane operations, and those of the special function unit.
        gemm: (batch, m, n, k) of products, ``m`` the rows; None for other operators.
        rows: how many rows (all dimensions but the last) the first output has.
        reduced: how many elements go into one of a reduction's results; k for a GEMM; 1 where nothing is reduced.
        over_rows: whether what is reduced are rows: gradients of weights, sums over the batch.
        tiles: how many CTAs its usual kernel has work for: 128 x 128 tiles of output for GEMMs, 16384 elements of
            output elsewhere.
        nodes: what it is in the captured graph, in order.
        source: the user's line.
    """

    name: str
    target: str
    label: str
    kind: Kind
    engine: Engine
    phase: Phase
    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    output_bytes: tuple[float, ...]
    flops: float = 0.0
    dtype: str = "bf16"
    simt_ops: float = 0.0
    sfu_ops: float = 0.0
    gemm: tuple[int, int, int, int] | None = None
    rows: int = 1
    reduced: int = 1
    over_rows: bool = False
    tiles: int = 1
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False)
    source: str = ""

    @property
    def node(self) -> fx.Node:
        """The node that gives it its name and family."""
        return next(n for n in self.nodes if n.name == self.name)

    @property
    def bytes_read(self) -> float:
        """Distinct bytes of all operands; a value that is read twice counts once, at its larger part."""
        most: dict[str, float] = {}
        for operand in self.inputs:
            most[operand.value] = max(most.get(operand.value, 0.0), operand.bytes)
        return sum(most.values())

    @property
    def bytes_written(self) -> float:
        return sum(self.output_bytes)

    @property
    def bytes(self) -> float:
        """Off-chip traffic when it runs as a kernel of its own: every operand read once, every result written once."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, eq=False)
class OperatorGraph:
    """Operators in a topological order (forward, then backward) and the values between them. Two are equal if they are
    one: what is selected of it is remembered.

    ``recorded`` are the graphs that it is a view of.

    Raises:
        CaptureError: an operator reads a value that nothing made before it, or two write one value.
    """

    name: str
    mode: Mode
    operators: tuple[Operator, ...]
    values: dict[str, Value] = field(repr=False)
    recorded: Recorded = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        written = {v.name for v in self.values.values() if v.is_input or v.is_parameter}
        for op in self.operators:
            for operand in op.inputs:
                if operand.value not in written:
                    raise CaptureError(
                        f"operator {op.name!r} of {self.name} reads {operand.value!r}, which nothing made before it",
                        "mark the value as an input, or put its producer first",
                    )
            again = written & set(op.outputs)
            if again:
                raise CaptureError(f"{', '.join(sorted(again))} of {self.name} has two producers", "give each its name")
            written |= set(op.outputs)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def __len__(self) -> int:
        return len(self.operators)

    def __getitem__(self, name: str) -> Operator:
        return self._by_name[name]

    def producer(self, value: str) -> Operator | None:
        """The operator that writes ``value``; None for inputs and parameters."""
        return self._producers.get(value)

    def consumers(self, value: str) -> tuple[Operator, ...]:
        """The operators that read ``value``, in order, each once."""
        return self._consumers.get(value, ())

    def predecessors(self, op: Operator) -> tuple[Operator, ...]:
        """The operators whose results ``op`` reads, each once."""
        made = (self.producer(operand.value) for operand in op.inputs)
        return tuple({p.name: p for p in made if p is not None}.values())

    def successors(self, op: Operator) -> tuple[Operator, ...]:
        """The operators that read what ``op`` writes, each once."""
        return tuple({c.name: c for value in op.outputs for c in self.consumers(value)}.values())

    def phase(self, phase: Phase) -> tuple[Operator, ...]:
        return tuple(op for op in self.operators if op.phase == phase)

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.operators)

    @property
    def bytes(self) -> float:
        """Off-chip traffic, bulk-synchronous: the sum over operators."""
        return sum(op.bytes for op in self.operators)

    @cached_property
    def _by_name(self) -> dict[str, Operator]:
        return {op.name: op for op in self.operators}

    @cached_property
    def _producers(self) -> dict[str, Operator]:
        return {value: op for op in self.operators for value in op.outputs}

    @cached_property
    def _consumers(self) -> dict[str, tuple[Operator, ...]]:
        found: dict[str, dict[str, Operator]] = {}
        for op in self.operators:
            for operand in op.inputs:
                found.setdefault(operand.value, {})[op.name] = op
        return {value: tuple(ops.values()) for value, ops in found.items()}

    def __str__(self) -> str:
        """A table: one line an operator."""
        lines = [f"{self.name}, {self.mode}: {len(self)} operators, {self.flops:.3g} FLOPs, {self.bytes:.3g} bytes"]
        for op in self.operators:
            shapes, made = _shapes(o.shape for o in op.inputs), _shapes(self.values[o].shape for o in op.outputs)
            lines.append(f"{op.phase:8} {op.name:28} {op.label:22} {op.engine:6} {shapes} -> {made}")
        return "\n".join(lines)


def _shapes(shapes: Iterable[tuple[int, ...]], most: int = 4) -> str:
    """``2048x128 128``; after ``most`` different ones, how many more."""
    counts = Counter("x".join(map(str, shape)) or "1" for shape in shapes)
    shown = [f"{n} of {shape}" if n > 1 else shape for shape, n in counts.items()]
    return ", ".join(shown[:most] + ([f"and {len(shown) - most} more"] if len(shown) > most else []))
