"""From a PyTorch module with sparse tensors to an einsum program: ``tilestream.sparse.compile``.

``capture`` gives the graph of ATen operators; here each of them is recorded. What tensors really store comes from the
tensors given, or from ``formats``. What follows from constants and indices alone is computed once, by PyTorch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tilestream.errors import CaptureError, SparseError
from tilestream.sparse.capture import Captured, capture, is_index, owned, source_line
from tilestream.sparse.dtypes import settled, widest
from tilestream.sparse.einsum import Declared
from tilestream.sparse.folding import MASKING, SOFTMAX, folded, operator_name
from tilestream.sparse.operators import ALIASES, FACTORIES, INDEXED, OPERATORS, SHAPED, TRUTHS, WRITING
from tilestream.sparse.outputs import OutputView
from tilestream.sparse.program import Program, declare
from tilestream.sparse.recorder import Condition, Recorder, View
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format, SparseTensor, default_format, from_torch, plain, prune, repack

_TRACED = (1 << 60) - 1
"""Elements of an input: bytes of a stand-in have to fit 64 bits."""


def compile(
    module: nn.Module,
    *inputs: Any,
    formats: Mapping[str, Format] | None = None,
    schedule: Schedule | None = None,
) -> Program:
    """Compile a module for the given inputs to a sparse streaming program.

    Args:
        module: any module that runs on dense inputs without looking at their values; parameters, buffers and inputs
            may be sparse.
        inputs: tensors; their shapes and layouts are compiled in, their values are not, but for tensors of whole
            numbers (edge indices), whose values are. A module that looks into a sparse input (a PyTorch Geometric layer
            with an adjacency) has that input's values compiled in as well.
        formats: by name of an input (of ``forward``), parameter or buffer (``"layer.weight"``); otherwise the layout
            says: CSR, COO, CSC, BSR, or strided (dense).
        schedule: default ``Schedule()``: fused where that is expected to take fewer cycles.

    Returns:
        The program; ``run(*inputs)`` takes tensors of the same shapes.

    Raises:
        CaptureError: the module fails, or what it does depends on values.
        SparseError: an operator that cannot be lowered, naming it and the user's line, an index out of range, or a
            format that does not fit.
    """
    inputs = tuple(plain(x) for x in inputs)
    tensors = owned(module)
    names = _input_names(module, inputs)
    if unknown := [name for name in formats or {} if name not in (*names, *tensors)]:
        raise SparseError(
            f"a format for {unknown[0]!r}, which the module does not have", f"use {', '.join([*names, *tensors])}"
        )
    for name, x in zip(names, inputs, strict=True):
        if isinstance(x, torch.Tensor | SparseTensor) and math.prod(x.shape) > _TRACED:
            raise CaptureError(
                f"input {name!r} of shape {tuple(x.shape)} is too large for PyTorch to trace a dense one of its shape",
                "use tilestream.sparse.compile_einsum",
            )
    sparse = any(isinstance(x, torch.Tensor) and x.layout != torch.strided for x in inputs)
    try:
        captured, fixed = capture(module, inputs, tensors, False), False
    except CaptureError:
        if not sparse:
            raise
        captured, fixed = capture(module, inputs, tensors, True), True
    reader = _Reader(captured, names, inputs, tensors, formats or {}, fixed)
    views = reader.read()
    rec = reader.rec
    program = rec.program([v.tensor for v in views])
    constants = {name: tensor for name, tensor in rec.constants.items() if name in program.inputs}
    for name in rec.pruned & constants.keys():
        constants[name] = prune(repack(constants[name], program.inputs[name].format or constants[name].format))
    outputs = [OutputView(v.tensor, v.dims, v.shape) for v in views]
    compiled_in = {name: value for name, value in zip(names, inputs, strict=True) if name in reader.fixed}
    made = Program(
        program,
        schedule or Schedule(),
        reader.free,
        constants,
        _stored(names, inputs, program.inputs),
        outputs,
        compiled_in,
        names,
        rec.pruned - constants.keys(),
        rec.unbroken,
        {n: t for n, t in tensors.items() if n in constants and n not in rec.pruned and _can_change(t)},
    )
    made.bits, made.module = rec.narrowest, module
    return made


def _can_change(tensor: torch.Tensor) -> bool:
    """Whether a tensor that a module owns is one of numbers, in memory of its own."""
    return tensor.layout == torch.strided and tensor.is_floating_point() and not tensor.is_meta


def _stored(names: tuple[str, ...], inputs: tuple[Any, ...], declared: Mapping[str, Declared]) -> list[SparseTensor]:
    """The example inputs as the program stores them."""
    pairs = [(n, v) for n, v in zip(names, inputs, strict=True) if n in declared]
    return [v if isinstance(v, SparseTensor) else from_torch(n, v, declared[n].format) for n, v in pairs]


def _input_names(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[str, ...]:
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{n}" for n in range(len(inputs) - len(names))]
        else:
            names.append(parameter.name)
    if len(names) < len(inputs):
        raise CaptureError(f"forward takes {len(names)} inputs and {len(inputs)} were given", "pass what it takes")
    return tuple(names[: len(inputs)])


class _Reader:
    """Records a captured graph. ``fixed``: inputs whose values are compiled in; ``free``: the others, in order."""

    def __init__(
        self,
        captured: Captured,
        names: tuple[str, ...],
        inputs: tuple[Any, ...],
        tensors: Mapping[str, torch.Tensor],
        formats: Mapping[str, Format],
        concrete: bool,
    ) -> None:
        self.captured, self.names, self.inputs, self.tensors, self.formats = captured, names, inputs, tensors, formats
        looked_into = [concrete and isinstance(x, torch.Tensor) and x.layout != torch.strided for x in inputs]
        self.fixed = [n for n, x, into in zip(names, inputs, looked_into, strict=True) if into or is_index(x)]
        self.free = [
            n
            for n, x in zip(names, inputs, strict=True)
            if n not in self.fixed and isinstance(x, torch.Tensor | SparseTensor)
        ]
        self.rec = Recorder()
        self.widest = widest([x.dtype for x in tensors.values()] + [_dtype(x) for x in inputs])
        self.values: dict[str, Any] = {}
        self.made: dict[int, tuple[str, torch.Tensor]] = {}
        self.family: dict[str, str] = {}
        """By node, the first one whose memory it shares."""

    def read(self) -> list[View]:
        """Record every operator; the outputs."""
        free = iter(self.free)
        views: list[Any] = []
        for node in self.captured.graph.nodes:
            self.rec.at, self.rec.source = node.name, source_line(node)
            if node.op == "placeholder":
                self.values[node.name] = self._input(next(free))
            elif node.op == "get_attr":
                self.values[node.name] = self._attribute(node)
            elif node.op == "call_function":
                self.values[node.name] = self._call(node)
            elif node.op == "output":
                found = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                views = [self.values[x.name] for x in tree_leaves(list(found)) if isinstance(x, torch.fx.Node)]
        views = [self._number(v, f"output{n}") for n, v in enumerate(views)]
        if wrong := [v for v in views if not isinstance(v, View)]:
            raise SparseError(f"an output is a {type(wrong[0]).__name__.lower()}", "return tensors of numbers")
        return views

    def _input(self, name: str) -> View | Condition:
        """An input: its order of levels is the user's, unless it is dense."""
        value = self.rec.examples[name] = self.inputs[self.names.index(name)]
        if isinstance(value, SparseTensor):
            return self.rec.input(name, value.shape, declare(value))
        format = self.formats.get(name)
        if format is None and value.layout == torch.strided:
            made = self.rec.input(name, tuple(value.shape), Declared(tuple(value.shape)))
        else:
            stored = from_torch(name, value, _scalar(format or default_format(value)))
            made = self.rec.input(name, stored.shape, declare(stored))
        return Condition(made, True) if value.dtype == torch.bool else made

    def _attribute(self, node: torch.fx.Node) -> Any:
        found = self.captured.attributes[str(node.target)]
        if not isinstance(found, str):
            return found.detach() if found.layout == torch.strided else self._sparse(found)
        value = self.tensors[found]
        if is_index(value) or (value.dtype == torch.bool and value.layout == torch.strided):
            return value.detach()
        return self._constant(found, value)

    def _constant(self, name: str, value: torch.Tensor) -> View | Condition:
        """A tensor that is known: stored once, in whatever order the schedule wants."""
        if name in self.rec.constants:
            made = self.rec.spread(name, tuple(value.shape)) if 1 not in value.shape else self.rec.squeezed(name)
        else:
            stored = from_torch(name, value, _scalar(self.formats.get(name) or default_format(value)))
            made = self.rec.constant(name, stored)
        return Condition(made, True) if value.dtype == torch.bool else made

    def _sparse(self, value: torch.Tensor) -> View | Condition:
        """A sparse tensor that was made while the module ran, or looked into: once by whatever name."""
        if id(value) not in self.made:
            at = next((n for n, x in zip(self.names, self.inputs, strict=True) if x is value), "")
            self.made[id(value)] = at or self.rec.fresh("adjacency"), value
        return self._constant(*self.made[id(value)])

    def _number(self, value: Any, name: str) -> Any:
        """A tensor that is known as one of the program's; conditions as ones and zeros."""
        if isinstance(value, torch.Tensor):
            value = self._constant(self.rec.fresh(name), value)
        return self.rec.truth(value) if isinstance(value, Condition) else value

    def _call(self, node: torch.fx.Node) -> Any:
        """Record one operator of the graph, or run it if everything that it reads is known."""
        bound: Any = torch.fx.map_arg((node.args, node.kwargs), lambda n: self.values[n.name])
        args, kwargs = bound
        if getattr(node.target, "__name__", "") == "getitem":
            self._share(node)
            return args[0][args[1]]
        target: Any = node.target
        name = operator_name(node)
        if not any(isinstance(x, View | Condition) for x in _flat((args, list(kwargs.values())))):
            self._share(node) if name in ALIASES else None
            return target(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__"):
            self._check_alone(node, name)
        if name in ALIASES:
            self._share(node)
        if name in FACTORIES:
            made = FACTORIES[name](_shape(node), args, kwargs)
            dtype = node.meta["val"].dtype
            return made if dtype.is_floating_point else made.to(dtype)
        self.rec.into_softmax = bool(node.users) and all(operator_name(user) in SOFTMAX for user in node.users)
        if name in ("item", "_local_scalar_dense", "is_nonzero"):
            raise SparseError(
                f"the module looks at a value that is not known before it runs ({self.rec.source or 'no source line'})",
                "choose with torch.where instead",
            )
        lowering = OPERATORS.get(name) or OPERATORS.get(name.removesuffix("_"))
        if lowering is None:
            raise SparseError(
                f"operator {node.target} ({self.rec.source or 'no source line'}) has no sparse lowering",
                "rewrite it, or add it to tilestream.sparse.operators",
            )
        plain = name if name.endswith("__") else name.removesuffix("_")
        if plain in SHAPED:
            kwargs = {**kwargs, "shape": _shape(node)}
            if isinstance(args[0], torch.Tensor):  # an index, spread as a tensor of numbers is
                return args[0].expand(_shape(node)) if "expand" in plain else args[0].reshape(_shape(node))
        try:
            args = [*args[:1], *self._known(plain, args[1:])] if plain in WRITING else self._known(plain, args)
            kwargs = {k: self._known(plain, [v])[0] for k, v in kwargs.items() if v is not None}
            if plain in MASKING:
                self.rec.folded = folded(node)
            made = lowering(self.rec, *args, **kwargs)
            first, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
            return settled(self.rec, made, plain, first, result, self.widest, plain in SHAPED | ALIASES)
        except SparseError as error:
            if self.rec.source in error.cause or not self.rec.source:
                raise
            raise SparseError(f"{node.target} ({self.rec.source}): {error.cause}", error.remedy) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise SparseError(
                f"operator {node.target} ({self.rec.source or 'no source line'}) is used in a way that has no sparse "
                f"lowering: {error}",
                "write it with fewer options",
            ) from error

    def _known(self, name: str, args: Any) -> list[Any]:
        """Arguments with known tensors made tensors of the program, but for indices; truth values as numbers where
        the operator wants numbers."""
        made: list[Any] = []
        for n, one in enumerate(args):
            if isinstance(one, list | tuple):
                made.append(self._known(name, one))
            elif isinstance(one, torch.Tensor) and not (name in INDEXED and (is_index(one) or one.dtype == torch.bool)):
                one = self._constant(self.rec.fresh(f"{self.rec.at}_known{n}"), one)
                made.append(one if name in TRUTHS or not isinstance(one, Condition) else self.rec.truth(one))
            elif isinstance(one, Condition) and name not in TRUTHS:
                made.append(self.rec.truth(one))
            else:
                made.append(one)
        return made

    def _share(self, node: torch.fx.Node) -> None:
        first = node.all_input_nodes[0].name if node.all_input_nodes else node.name
        self.family[node.name] = self.family.get(first, first)

    def _check_alone(self, node: torch.fx.Node, name: str) -> None:
        """An operator that writes in place changes every tensor that shares the memory; here it makes a new one."""
        first = node.all_input_nodes[0].name
        root = self.family.get(first, first)
        self.family[node.name] = root
        relatives = {n for n, r in self.family.items() if r == root} | {root}
        reached = False
        for later in self.captured.graph.nodes:
            if reached and later.name not in relatives | {first}:
                used = {x.name for x in later.all_input_nodes}
                if used & (relatives - {node.name}):
                    raise SparseError(
                        f"{name} ({self.rec.source or 'no source line'}) writes into a tensor that "
                        f"{later.name} ({source_line(later) or 'no source line'}) reads by another name",
                        "make a new tensor: the operator without _ at its end, torch.cat, or torch.where",
                    )
            reached = reached or later is node


def _dtype(value: Any) -> torch.dtype:
    """Of an input as it is traced."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return torch.get_default_dtype() if isinstance(value, SparseTensor) else torch.int64


def _scalar(format: Format) -> Format:
    """The format with its blocks opened; blocks are made again if the schedule asks for them."""
    return Format(format.levels, format.order)


def _flat(args: Any) -> list[Any]:
    return [x for a in args for x in (_flat(a) if isinstance(a, list | tuple) else [a])]


def _shape(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        return [tuple(int(s) for s in one.shape) for one in value]
    return tuple(int(s) for s in value.shape)


__all__: Sequence[str] = ["compile", "source_line"]
