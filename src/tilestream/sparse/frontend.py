"""From a PyTorch module with sparse tensors to an einsum program: ``tilestream.sparse.compile``.

``capture`` gives the graph of ATen operators; here each of them is recorded. What tensors really store comes from the
tensors given, or from ``formats``. What follows from constants and indices alone is computed once, by PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._pytree import tree_leaves

from tilestream.errors import CaptureError, SparseError
from tilestream.sparse.capture import Captured, capture, is_index, owned, source_line
from tilestream.sparse.decompose import decomposed
from tilestream.sparse.dtypes import settled, widest
from tilestream.sparse.einsum import Declared
from tilestream.sparse.folding import MASKING, SOFTMAX, folded, operator_name
from tilestream.sparse.operators import (
    ALIASES,
    FACTORIES,
    INDEXED,
    OPERATORS,
    SHAPED,
    TRUTHS,
    TYPED,
    WRITING,
    NoLowering,
)
from tilestream.sparse.outputs import LARGEST, OutputView
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
    reader, views = _read(module, inputs, tensors, names, formats or {}, sparse)
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


def _read(
    module: nn.Module,
    inputs: tuple[Any, ...],
    tensors: Mapping[str, torch.Tensor],
    names: tuple[str, ...],
    formats: Mapping[str, Format],
    sparse: bool,
) -> tuple[_Reader, list[View]]:
    """A module, recorded: with its operators whole if that can be; else with sparse inputs known; else in functional
    form, which takes apart ``torch.vmap`` and ``torch.func`` and writes into parts of a tensor."""
    failed: list[CaptureError | _Shared] = []
    for concrete, functional in ((False, False), *([(True, False)] if sparse else []), (False, True)):
        try:
            captured = capture(module, inputs, tensors, concrete, functional)
            reader = _Reader(captured, names, inputs, tensors, formats, concrete)
            return reader, reader.read()
        except (CaptureError, _Shared) as error:
            failed.append(error)
    about_values = isinstance(failed[0].__cause__, DataDependentOutputException | DynamicOutputShapeException)
    raise failed[0 if about_values else -2]  # the last attempt's is not about the module as it is written


class _Shared(SparseError):
    """A tensor is written into that is read by another name as well."""


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
        self.graph = captured.graph
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
        if isinstance(found, FakeTensor):
            raise SparseError(
                f"the module holds a tensor whose values are not known ({self.rec.source or 'no source line'})",
                "make it before, or of the inputs alone",
            )
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
        """Record one operator of the graph, or run it if everything that it reads is known. What one writes in place is
        from then on read by the name that it is written by."""
        name = operator_name(node)
        writes = name.endswith("_") and not name.endswith("__")
        made = self._made(node, name, writes)
        if writes and _unknown(made):
            self.values[node.all_input_nodes[0].name] = made
        return made

    def _made(self, node: torch.fx.Node, name: str, writes: bool) -> Any:
        bound: Any = torch.fx.map_arg((node.args, node.kwargs), lambda n: self.values[n.name])
        args, kwargs = bound
        if getattr(node.target, "__name__", "") == "getitem":
            if node.all_input_nodes[0].name in self.family:  # a part of what is split, not one of several results
                self._share(node)
            return args[0][args[1]]
        target: Any = node.target
        if target is torch._C._set_grad_enabled:  # with torch.no_grad(): nothing here has a gradient
            return None
        if name in ALIASES or _aliases(target):
            self._share(node)
        if not any(isinstance(x, View | Condition) for x in _flat((args, list(kwargs.values())))):
            return self._run(node, args, kwargs)
        if name in ("item", "_local_scalar_dense", "is_nonzero"):
            raise SparseError(
                f"the module looks at a value that is not known before it runs ({self.rec.source or 'no source line'})",
                "choose with torch.where instead",
            )
        if "val" not in node.meta:
            raise SparseError(
                f"{target} ({self.rec.source or 'no source line'}) gives what is not known while the module is traced",
                "write it with operators on tensors",
            )
        if writes:
            self._check_alone(node, name)
        if name in FACTORIES:
            made = FACTORIES[name](_shape(node), args, kwargs)
            dtype = node.meta["val"].dtype
            return made if dtype.is_floating_point else made.to(dtype)
        self.rec.into_softmax = bool(node.users) and all(operator_name(user) in SOFTMAX for user in node.users)
        plain = name.removesuffix("_") if writes else name
        lowering = OPERATORS.get(name) or OPERATORS.get(plain)
        if lowering is None:
            return self._otherwise(node)
        if plain in SHAPED:
            kwargs = {**kwargs, "shape": _shape(node)}
            if isinstance(args[0], torch.Tensor):  # an index, spread as a tensor of numbers is
                return args[0].expand(_shape(node)) if "expand" in plain else args[0].reshape(_shape(node))
        if plain in TYPED:
            kwargs = {**kwargs, "given": _read_dtype(node)}
        try:
            args = [*args[:1], *self._known(plain, args[1:])] if plain in WRITING else self._known(plain, args)
            kwargs = {k: self._known(plain, [v])[0] for k, v in kwargs.items() if v is not None}
            if plain in MASKING:
                self.rec.folded = folded(node)
            made = lowering(self.rec, *args, **kwargs)
            first, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
            return settled(self.rec, made, plain, first, result, self.widest, plain in SHAPED | ALIASES)
        except NoLowering:
            return self._otherwise(node)
        except SparseError as error:
            if self.rec.source in error.cause or not self.rec.source:
                raise
            raise SparseError(f"{node.target} ({self.rec.source}): {error.cause}", error.remedy) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):  # options that a lowering does not know
            return self._otherwise(node)

    def _run(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """What an operator makes of what is known."""
        target: Any = node.target
        self._check_repeatable(node)
        try:
            return target(*args, **kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise SparseError(
                f"{target} ({self.rec.source or 'no source line'}) of values that are known: {error}", "give other ones"
            ) from error

    def _otherwise(self, node: torch.fx.Node) -> Any:
        """An operator without a lowering: what PyTorch takes it apart into, or a step that PyTorch runs."""
        known = {n.name: v for n in node.all_input_nodes if not _unknown(v := self.values[n.name])}
        found = decomposed(node, known)
        if found is None:
            return self._eager(node)
        made, given = found
        outer = self.graph, self.values, self.family, self.rec.at
        parts: dict[str, Any] = {}
        holders = [n for n in made.graph.nodes if n.op == "placeholder"]
        parts |= {one.name: self.values[n.name] for one, n in zip(holders, given, strict=True)}
        self.graph, self.values, self.family = made.graph, parts, {}
        try:
            for one in made.graph.nodes:
                self.rec.at = f"{outer[3]}_{one.name}"
                if one.op == "get_attr":
                    parts[one.name] = getattr(made, str(one.target))
                elif one.op == "call_function":
                    parts[one.name] = self._call(one)
                elif one.op == "output":
                    return torch.fx.map_arg(one.args[0], lambda n: parts[n.name])
        finally:
            self.graph, self.values, self.family, self.rec.at = outer
        return None

    def _eager(self, node: torch.fx.Node) -> Any:
        """A step that PyTorch runs densely between regions; of several results, one a result."""
        self._check_possible(node)
        target: Any = node.target
        place = {n: at for at, n in enumerate(n for n in node.all_input_nodes if _unknown(self.values[n.name]))}
        operands = [(self._number(self.values[n.name], n.name), n.meta["val"].dtype) for n in place]
        known = {n: _doubled(v) for n in node.all_input_nodes if not _unknown(v := self.values[n.name])}
        changes = bool(target._schema.is_mutable)

        def run(at: int | None, *tensors: torch.Tensor) -> torch.Tensor:
            given = [x.clone() for x in tensors] if changes else tensors
            bound: Any = torch.fx.map_arg(
                (node.args, node.kwargs), lambda n: given[place[n]] if n in place else known[n]
            )
            made = target(*bound[0], **bound[1])
            return made if at is None else made[at]

        def one(value: Any, at: int | None) -> Any:
            if value is None:
                return None
            shape = tuple(int(size) for size in value.shape)
            made = self.rec.eager(str(target), operands, shape, functools.partial(run, at))
            first = node.all_input_nodes[0].meta.get("val")
            return settled(self.rec, made, "", first, value, self.widest, not value.dtype.is_floating_point)

        value = node.meta["val"]
        return [one(x, at) for at, x in enumerate(value)] if isinstance(value, list | tuple) else one(value, None)

    def _check_repeatable(self, node: torch.fx.Node) -> str:
        """Its name and line, unless it draws random numbers, or makes a dense tensor beyond ``LARGEST``."""
        where = f"{node.target} ({self.rec.source or 'no source line'})"
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise SparseError(f"{where} draws random numbers", "draw them outside, and pass them to the module")
        values = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        if large := [x for x in values if x.numel() > LARGEST and x.layout == torch.strided]:
            raise SparseError(f"{where} makes a dense tensor of shape {tuple(large[0].shape)}", "apply it to a part")
        return where

    def _check_possible(self, node: torch.fx.Node) -> None:
        """
        Raises:
            SparseError: an operator that neither a region nor PyTorch between regions can run.
        """
        where = self._check_repeatable(node)
        values = [x for x in tree_leaves(node.meta.get("val")) if x is not None]
        if not isinstance(node.target, torch._ops.OpOverload) or not all(isinstance(x, torch.Tensor) for x in values):
            raise SparseError(f"{where} has no sparse lowering", "rewrite it with operators that give tensors")
        read = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if any(x.is_complex() for x in (*values, *read)):
            raise SparseError(f"{where} is about complex numbers", "use real and imaginary parts")

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
        for later in self.graph.nodes:
            if reached and later.name not in relatives | {first}:
                used = {x.name for x in later.all_input_nodes}
                if used & (relatives - {node.name, first}):
                    raise _Shared(
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


def _unknown(value: Any) -> bool:
    return isinstance(value, View | Condition) or (isinstance(value, list | tuple) and any(map(_unknown, value)))


def _doubled(value: Any) -> Any:
    """A known tensor of real numbers as float64, which is what PyTorch computes with here."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _read_dtype(node: torch.fx.Node) -> torch.dtype:
    return next(n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)).meta["val"].dtype


def _aliases(target: Any) -> bool:
    """Whether a result may share its memory with an argument that is only read."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)


def _shape(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        return [tuple(int(s) for s in one.shape) for one in value]
    return tuple(int(s) for s in value.shape)


__all__: Sequence[str] = ["compile", "source_line"]
