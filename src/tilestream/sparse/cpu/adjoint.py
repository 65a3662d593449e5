"""The backward pass of an einsum program as an einsum program: its sums of products are sums of products again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Access, Declared, EinsumProgram, Move, Statement, fresh_name


@dataclass
class _Adjoint:
    """Statements in the making. ``sums``: by tensor, what its gradient is the sum of; ``read``: what the forward pass
    has to keep; ``wanted``: tensors that a gradient has to reach."""

    program: EinsumProgram
    wanted: set[str]
    steps: list[Statement | Move] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sums: dict[str, list[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)

    def make(
        self,
        indices: tuple[str, ...],
        op: str,
        operands: tuple[Access, ...],
        sizes: dict[str, int],
        reduced: tuple[str, ...] = (),
        scalar: float | None = None,
    ) -> Access:
        name = fresh_name("d", self.taken)
        self.steps.append(Statement(name, indices, op, operands, reduced, scalar=scalar))
        self.shapes[name] = tuple(sizes[i] for i in indices)
        self.read |= {a.tensor for a in operands} & self.program.shapes.keys()
        return Access(name, indices)

    def gradient(self, name: str) -> str | None:
        """The sum of what was given to a tensor."""
        parts = self.sums.get(name, [])
        while len(parts) > 1:
            letters = tuple(f"i{n}" for n in range(len(self.program.shapes[name])))
            sizes = dict(zip(letters, self.program.shapes[name], strict=True))
            made = self.make(letters, "add", (Access(parts[0], letters), Access(parts[1], letters)), sizes)
            parts = self.sums[name] = [made.tensor, *parts[2:]]
        return parts[0] if parts else None


def adjoint(program: EinsumProgram, wanted: Collection[str]) -> tuple[EinsumProgram, dict[str, str], dict[str, str]]:
    """The backward pass.

    Args:
        wanted: dense inputs whose gradients are asked for.

    Returns:
        The program; by output of the forward pass the name of its gradient, which is an input; by wanted tensor the
        name of its gradient, which is an output. The other inputs are tensors of the forward pass.

    Raises:
        SparseError: a statement or move whose backward pass is no sum of products.
    """
    reached = set(wanted)
    for step in program.steps:
        names = step.operands if isinstance(step, Move) else [a.tensor for a in step.operands]
        if reached & set(names):
            reached.add(step.name)
    made = _Adjoint(program, reached, taken=set(program.shapes))
    given = {}
    for name in dict.fromkeys(program.outputs):
        if name in reached:
            given[name] = fresh_name(f"d_{name}", made.taken)
            made.sums[name] = [given[name]]
            made.shapes[given[name]] = program.shapes[name]
    for step in reversed(program.steps):
        dy = made.gradient(step.name)
        if dy is not None:
            (_move if isinstance(step, Move) else _statement)(made, step, dy)  # pyright: ignore[reportArgumentType]
    found = {name: dy for name in wanted if (dy := made.gradient(name)) is not None}
    own = {step.name for step in made.steps}
    inputs = {name: Declared(program.shapes[given_]) for given_, name in given.items()}
    for name in sorted(made.read - own - inputs.keys()):
        known = program.inputs.get(name)
        inputs[name] = replace(known, free=True) if known else Declared(program.shapes[name])
    shapes = {**{n: made.shapes.get(n) or program.shapes[n] for n in inputs}, **{n: made.shapes[n] for n in own}}
    return EinsumProgram(inputs, tuple(made.steps), tuple(dict.fromkeys(found.values())), shapes), given, found


def _move(made: _Adjoint, step: Move, dy: str) -> None:
    (source,) = step.operands if len(step.operands) == 1 else ("",)
    if step.kind not in ("reshape", "permute") or not source:
        raise SparseError(f"the backward pass of {step.kind}", "it runs in PyTorch")
    if source not in made.wanted:
        return
    name, shape = fresh_name("d", made.taken), made.program.shapes[source]
    args = tuple(step.args.index(d) for d in range(len(step.args))) if step.kind == "permute" else ()
    made.steps.append(Move(name, step.kind, (dy,), shape, args))
    made.shapes[name] = shape
    made.sums.setdefault(source, []).append(name)


def _statement(made: _Adjoint, step: Statement, dy: str) -> None:
    sizes = {i: n for a in step.operands for i, n in zip(a.indices, made.program.shapes[a.tensor], strict=True)}
    sizes |= dict(zip(step.indices, made.program.shapes[step.name], strict=True))
    own = Access(dy, step.indices)
    for at, access in enumerate(step.operands):
        if access.tensor not in made.wanted:
            continue
        part = _part(made, step, own, at, sizes)
        kept = access.indices
        if part.indices != kept:  # summed over what the operand does not have, repeated along what was summed
            gone = tuple(i for i in part.indices if i not in kept)
            part = made.make(kept, "copy", (part,), sizes, gone)
        made.sums.setdefault(access.tensor, []).append(part.tensor)


def _part(made: _Adjoint, step: Statement, dy: Access, at: int, sizes: dict[str, int]) -> Access:
    """The gradient that a statement gives one operand."""
    access, op = step.operands[at], step.op
    if op == "copy" and (step.reduction == "add" or not step.reduced):
        return dy
    if op == "mul" and len(step.operands) == 2 and step.reduction == "add":
        other = step.operands[1 - at]
        used = list(dict.fromkeys((*dy.indices, *other.indices)))
        kept = tuple(i for i in access.indices if i in used)
        return made.make(kept, "mul", (dy, other), sizes, tuple(i for i in used if i not in kept))
    rule = _RULES.get((op, len(step.operands), step.scalar is not None))
    if rule is None or step.reduced:
        raise SparseError(f"the backward pass of {step}", "it runs in PyTorch")
    every = tuple(dict.fromkeys(step.indices))
    y = Access(step.name, step.indices)

    def do(name: str, *operands: Access, scalar: float | None = None) -> Access:
        return made.make(every, name, operands, sizes, scalar=scalar)

    return rule(do, dy, step.operands, y, at, step.scalar)


Rule = Callable[..., Access]


def _sigmoid(do: Callable[..., Access], dy: Access, xs: tuple[Access, ...], y: Access, at: int, s: float) -> Access:
    return do("mul", do("mul", dy, y), do("rsub", y, scalar=1.0))


def _tanh(do: Callable[..., Access], dy: Access, xs: tuple[Access, ...], y: Access, at: int, s: float) -> Access:
    return do("mul", dy, do("rsub", do("square", y), scalar=1.0))


def _quotient(op: str) -> Rule:
    def rule(do: Callable[..., Access], dy: Access, xs: tuple[Access, ...], y: Access, at: int, s: float) -> Access:
        over = do(op, dy, xs[1])
        return over if at == 0 else do("neg", do("mul", over, y))

    return rule


def _larger(do: Callable[..., Access], dy: Access, xs: tuple[Access, ...], y: Access, at: int, s: float) -> Access:
    return do("keep", dy, do("gt", xs[0], xs[1]) if at == 0 else do("ge", xs[1], xs[0]))


_RULES: dict[tuple[str, int, bool], Rule] = {
    ("add", 2, False): lambda do, dy, xs, y, at, s: dy,
    ("sub", 2, False): lambda do, dy, xs, y, at, s: dy if at == 0 else do("neg", dy),
    ("div", 2, False): _quotient("div"),
    ("share", 2, False): _quotient("share"),  # 0 by 0 is 0
    ("max", 2, False): _larger,
    ("add", 1, True): lambda do, dy, xs, y, at, s: dy,
    ("sub", 1, True): lambda do, dy, xs, y, at, s: dy,
    ("rsub", 1, True): lambda do, dy, xs, y, at, s: do("neg", dy),
    ("mul", 1, True): lambda do, dy, xs, y, at, s: do("mul", dy, scalar=s),
    ("div", 1, True): lambda do, dy, xs, y, at, s: do("div", dy, scalar=s),
    ("relu", 1, False): lambda do, dy, xs, y, at, s: do("keep", dy, y),
    ("exp", 1, False): lambda do, dy, xs, y, at, s: do("mul", dy, y),
    ("neg", 1, False): lambda do, dy, xs, y, at, s: do("neg", dy),
    ("log", 1, False): lambda do, dy, xs, y, at, s: do("div", dy, xs[0]),
    ("square", 1, False): lambda do, dy, xs, y, at, s: do("mul", do("mul", dy, xs[0]), scalar=2.0),
    ("sqrt", 1, False): lambda do, dy, xs, y, at, s: do("mul", do("div", dy, y), scalar=0.5),
    ("sigmoid", 1, False): _sigmoid,
    ("tanh", 1, False): _tanh,
    ("identity", 1, False): lambda do, dy, xs, y, at, s: dy,
}
"""By operation, how many operands, and whether one is a number."""
