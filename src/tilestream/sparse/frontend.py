"""From a PyTorch module with sparse tensors to an einsum program: ``tilestream.sparse.compile``.

The module is captured by ``torch.export`` with dense stand-ins (no memory, no data) for its tensors; what they really
store comes from the tensors given, or from ``formats``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tilestream.errors import CaptureError, SparseError
from tilestream.sparse.einsum import Declared
from tilestream.sparse.operators import OPERATORS
from tilestream.sparse.program import OutputView, Program, declare
from tilestream.sparse.recorder import Condition, Recorder, View
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format, SparseTensor, default_format, from_torch, prune, repack

_SHAPED = ("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "view_as", "unflatten")
_SHAPED += ("expand", "expand_as", "broadcast_to", "split", "split_with_sizes", "chunk")
_LIBRARY = ("/torch/", "/tilestream/sparse/frontend.py")


class _DenseNames(TorchFunctionMode):
    """Sparse spellings as their dense ones, since the stand-ins are dense."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.sparse.mm, torch.smm, torch.hspmm):
            func = torch.mm
        elif func is torch.sparse.addmm:
            func = torch.addmm
        elif func is torch.sparse.softmax:
            raise CaptureError("torch.sparse.softmax", "mask the dense scores with masked_fill and use torch.softmax")
        elif func is torch.sparse.sum:
            func = torch.sum
        elif func in (torch.Tensor.to_dense, torch.Tensor.coalesce, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
            return args[0]
        return func(*args, **kwargs)


class _Spelled(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        with _DenseNames():
            return self.module(*args)


def compile(
    module: nn.Module,
    *inputs: Any,
    formats: Mapping[str, Format] | None = None,
    schedule: Schedule | None = None,
) -> Program:
    """Compile a module for the given inputs to a sparse streaming program.

    Args:
        module: any module that ``torch.export`` captures; parameters, buffers and inputs may be sparse.
        inputs: tensors; their shapes and layouts are compiled in, their values are not.
        formats: by name of an input (of ``forward``), parameter or buffer (``"layer.weight"``); otherwise the layout
            says: CSR, COO, CSC, BSR, or strided (dense).
        schedule: default ``Schedule()``: nothing fused.

    Returns:
        The program; ``run(*inputs)`` takes tensors of the same shapes.

    Raises:
        CaptureError: the module cannot be exported.
        SparseError: an operator that cannot be lowered, naming it and the user's line, or a format that does not fit.
    """
    schedule = schedule or Schedule()
    tensors = _owned(module)
    names = _input_names(module, inputs)
    _check_formats(formats or {}, [*names, *tensors])
    exported = _export(module, inputs, tensors)
    rec = Recorder()
    constants: dict[str, SparseTensor] = {}
    values: dict[str, Any] = {}
    bound = iter(zip(names, inputs, strict=True))
    for spec in exported.graph_signature.input_specs:
        at = str(getattr(spec.arg, "name", ""))
        target = str(spec.target or "").removeprefix("module.")
        if spec.kind.name == "USER_INPUT":
            name, value = next(bound)
            values[at] = _given(rec, name, value, formats) if isinstance(value, torch.Tensor | SparseTensor) else value
        elif target in tensors:
            values[at] = _constant(rec, target, tensors[target], formats, constants)
        else:
            lifted = exported.constants[str(spec.target)]
            owner = next((n for n, t in tensors.items() if t is lifted), None)
            values[at] = _constant(rec, owner or at, tensors[owner] if owner else lifted, formats, constants)
    for node in exported.graph.nodes:
        if node.op == "call_function":
            values[node.name] = _call(rec, node, values)
        elif node.op == "output":
            views = [values[x.name] for x in node.args[0] if isinstance(x, torch.fx.Node)]
    if wrong := [v for v in views if not isinstance(v, View)]:
        raise SparseError(f"an output is a {type(wrong[0]).__name__.lower()}", "return tensors of numbers")
    program = rec.program([v.tensor for v in views])
    for name in rec.pruned & constants.keys():
        constants[name] = prune(repack(constants[name], program.inputs[name].format or constants[name].format))
    outputs = [OutputView(v.tensor, v.dims, v.shape) for v in views]
    return Program(program, schedule, names, constants, _stored(names, inputs, program.inputs), outputs)


def _stored(names: tuple[str, ...], inputs: tuple[Any, ...], declared: Mapping[str, Declared]) -> list[SparseTensor]:
    """The example inputs as the program stores them."""
    pairs = [(n, v) for n, v in zip(names, inputs, strict=True) if n in declared]
    return [v if isinstance(v, SparseTensor) else from_torch(n, v, declared[n].format) for n, v in pairs]


def _owned(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain attributes that are tensors, by qualified name."""
    found = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


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


def _check_formats(formats: Mapping[str, Format], names: list[str]) -> None:
    if unknown := [name for name in formats if name not in names]:
        raise SparseError(f"a format for {unknown[0]!r}, which the module does not have", f"use {', '.join(names)}")


@contextmanager
def _standins(module: nn.Module, tensors: Mapping[str, torch.Tensor], mode: FakeTensorMode) -> Iterator[None]:
    """The module with a dense fake tensor in place of each sparse one that it owns."""
    replaced: list[tuple[Any, str, torch.Tensor]] = []
    for name, tensor in tensors.items():
        if tensor.layout == torch.strided:
            continue
        path, _, last = name.rpartition(".")
        part = module.get_submodule(path)
        holders: tuple[Any, ...] = (part._parameters, part._buffers, vars(part))
        for holder in holders:
            if last in holder:
                replaced.append((holder, last, tensor))
                with mode:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                holder[last] = nn.Parameter(fake, False) if holder is part._parameters else fake
    try:
        yield
    finally:
        for holder, last, tensor in replaced:
            holder[last] = tensor


def _export(module: nn.Module, inputs: tuple[Any, ...], tensors: Mapping[str, torch.Tensor]) -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    examples = []
    for value in inputs:
        if isinstance(value, torch.Tensor | SparseTensor):
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.get_default_dtype()
            with mode:
                value = torch.empty(tuple(value.shape), dtype=dtype)
        examples.append(value)
    training = module.training
    module.eval()
    try:
        with _standins(module, tensors, mode), torch.no_grad():
            return torch.export.export(_Spelled(module), tuple(examples), strict=False)
    except SparseError:
        raise
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises whatever the module raises
        raise CaptureError(
            f"{type(module).__name__} cannot be exported: {error}", "make it work under torch.export with dense inputs"
        ) from error
    finally:
        module.train(training)


def _given(rec: Recorder, name: str, value: Any, formats: Mapping[str, Format] | None) -> View:
    """An input: its order of levels is the user's, unless it is dense."""
    if isinstance(value, SparseTensor):
        return rec.input(name, value.shape, declare(value))
    format = (formats or {}).get(name)
    if format is None and value.layout == torch.strided:
        return rec.input(name, tuple(value.shape), Declared(tuple(value.shape)))
    stored = from_torch(name, value, _scalar(format or default_format(value)))
    return rec.input(name, stored.shape, declare(stored))


def _constant(
    rec: Recorder,
    name: str,
    value: torch.Tensor,
    formats: Mapping[str, Format] | None,
    constants: dict[str, SparseTensor],
) -> View:
    """A tensor that the module owns: stored once, in whatever order the schedule wants."""
    if name in constants:
        return rec.spread(name, tuple(value.shape))
    format = _scalar((formats or {}).get(name) or default_format(value))
    constants[name] = from_torch(name, value, format)
    return rec.input(name, tuple(value.shape), declare(constants[name], free=True))


def _scalar(format: Format) -> Format:
    """The format with its blocks opened; blocks are made again if the schedule asks for them."""
    return Format(format.levels, format.order)


def _call(rec: Recorder, node: torch.fx.Node, values: Mapping[str, Any]) -> Any:
    """Record one operator of the exported graph."""
    rec.at, rec.source = node.name, source_line(node)
    bound: Any = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    args, kwargs = bound
    if getattr(node.target, "__name__", "") == "getitem":
        return args[0][args[1]]
    name = str(node.target).rsplit(".", 1)[0] if isinstance(node.target, torch._ops.OpOverload) else str(node.target)
    lowering = OPERATORS.get(name)
    if lowering is None:
        raise SparseError(
            f"operator {node.target} ({rec.source or 'no source line'}) has no sparse lowering",
            "rewrite it, or add it to tilestream.sparse.operators",
        )
    extra = {"shape": _shapes(node)} if name.removeprefix("aten.") in _SHAPED else {}
    if not any(isinstance(x, View | Condition) for x in _flat(args)):
        raise SparseError(f"operator {node.target} ({rec.source}) makes a tensor of its own", "register it as a buffer")
    try:
        return lowering(rec, *args, **{k: v for k, v in kwargs.items() if v is not None}, **extra)
    except SparseError as error:
        if rec.source in error.cause or not rec.source:
            raise
        raise SparseError(f"{node.target} ({rec.source}): {error.cause}", error.remedy) from error


def _flat(args: Any) -> list[Any]:
    return [x for a in args for x in (_flat(a) if isinstance(a, list | tuple) else [a])]


def _shapes(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        return [tuple(int(s) for s in one.shape) for one in value]
    return tuple(int(s) for s in value.shape)


def source_line(node: torch.fx.Node) -> str:
    """``file:line`` of the innermost frame that is the user's."""
    lines = [x.strip() for x in (node.meta.get("stack_trace") or "").split("\n") if x.strip().startswith("File ")]
    for line in reversed(lines):
        path, _, rest = line.removeprefix('File "').partition('", line ')
        if not any(part in path for part in _LIBRARY):
            return f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return ""


__all__ = ["compile", "source_line"]
