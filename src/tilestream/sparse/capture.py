"""What a module does, as a graph of ATen operators: no data of dense tensors, no memory for them.

Tensors of numbers become dense stand-ins without data. Tensors of whole numbers (edge indices, offsets) are taken as
they are: which operators run, and on what shapes, may depend on them; what is computed of them alone is computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tilestream.errors import CaptureError, SparseError, TilestreamError
from tilestream.sparse.storage import SparseTensor

_LIBRARY = ("/torch/", "/torch_geometric/", "/tilestream/sparse/", "<eval_with_key>")


@torch.library.custom_op("tilestream_sparse::stored", mutates_args=())
def stored(x: torch.Tensor) -> torch.Tensor:
    """Where a sparse tensor stores something, explicit zeros included; of a dense one, where it is not 0."""
    return x != 0


@stored.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool)


@dataclass(frozen=True)
class Captured:
    """A graph, and what its ``get_attr`` nodes stand for: by target, a tensor, or the name of one that the module
    owns."""

    graph: torch.fx.Graph
    attributes: Mapping[str, torch.Tensor | str]


class _DenseNames(TorchFunctionMode):
    """Sparse spellings as dense ones, since the stand-ins are dense.

    ``concrete``: sparse tensors with values are about. What is done with these alone is done at once, out of sight;
    where they meet a stand-in they get one of their own.
    """

    def __init__(self, mode: FakeTensorMode, concrete: bool) -> None:
        super().__init__()
        self.mode, self.concrete = mode, concrete
        self.standins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.unknown: dict[int, torch.Tensor] = {}  # with values into which a stand-in was written

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        fake = any(isinstance(x, FakeTensor) for x in tensors)
        if self.concrete:
            if fake and tensors and not isinstance(tensors[0], FakeTensor) and _writes(func):
                self.unknown[id(tensors[0])] = tensors[0]
            sparse = any(x.layout != torch.strided for x in tensors) or func in _MAKE_SPARSE
            if sparse and not fake:
                if any(id(x) in self.unknown for x in tensors):
                    raise CaptureError("a sparse tensor is made of values that are not known", "pass it to the module")
                with _disable_current_modes():
                    return func(*args, **kwargs)
            args = tuple(self._standin(x) for x in args)
        if func in _INDEXING and fake:
            args = (args[0], _numbers(args[1]), *args[2:])
        if func in _PRODUCTS:
            return _product(*args, **kwargs)
        if func is torch.sparse.addmm:
            return torch.addmm(*args, **kwargs)
        if func is torch.sparse.sampled_addmm:
            return _sampled(*args, **kwargs)
        if func is torch.sparse.softmax:
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            kept = args[0].masked_fill(torch.logical_not(stored(args[0])), -torch.inf)
            return torch.ops.aten._safe_softmax.default(kept, dim)
        if func is torch.sparse.log_softmax:
            raise CaptureError("torch.sparse.log_softmax", "take torch.sparse.softmax, and log where it is wanted")
        if func is torch.sparse.sum:
            return torch.sum(*args, **kwargs)
        if func in _AS_IT_IS and isinstance(args[0], FakeTensor):
            return args[0]
        return func(*args, **kwargs)

    def _standin(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor) or x.layout == torch.strided:
            return x
        if id(x) not in self.standins:
            with _disable_current_modes(), self.mode:
                self.standins[id(x)] = torch.empty(tuple(x.shape), dtype=x.dtype), x
        return self.standins[id(x)][0]


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _numbers(index: Any) -> Any:
    """An index with known truth values as the numbers of the rows that they keep."""
    if isinstance(index, tuple):
        return tuple(_numbers(x) for x in index)
    if isinstance(index, torch.Tensor) and not isinstance(index, FakeTensor) and index.dtype == torch.bool:
        return index.nonzero().reshape(-1) if index.ndim == 1 else index
    return index


_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_MAKE_SPARSE = (
    torch.sparse_coo_tensor,
    torch.sparse_csr_tensor,
    torch.sparse_csc_tensor,
    torch.sparse_compressed_tensor,
    torch.Tensor.to_sparse,
    torch.Tensor.to_sparse_csr,
    torch.Tensor.to_sparse_csc,
)
_PRODUCTS = (torch.sparse.mm, torch.smm, torch.hspmm)
_AS_IT_IS = (
    torch.Tensor.to_dense,
    torch.Tensor.coalesce,
    torch.Tensor.to_sparse,
    torch.Tensor.to_sparse_csr,
    torch.Tensor.to_sparse_csc,
    torch.Tensor.to_sparse_coo,
)


def _product(a: torch.Tensor, b: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
    """``torch.sparse.mm``, whose third argument says how the entries of a row are brought together."""
    if reduce == "sum":
        return torch.mm(a, b)
    if reduce == "mean":
        count = stored(a).to(b.dtype).sum(1, keepdim=True).clamp(min=1)
        return torch.mm(a, b) / count
    raise CaptureError(f"torch.sparse.mm with reduce={reduce!r}", "gather with index_select and use scatter_reduce")


def _sampled(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> torch.Tensor:
    product = torch.mm(a, b).masked_fill(torch.logical_not(stored(x)), 0.0)
    return product * alpha + x * beta


def owned(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain attributes that are tensors, by qualified name."""
    found = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def is_index(value: object) -> bool:
    """Whether a tensor is taken with its values: one of whole numbers, stored densely."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def capture(
    module: nn.Module,
    inputs: Sequence[Any],
    tensors: Mapping[str, torch.Tensor],
    concrete: bool = False,
    functional: bool = False,
) -> Captured:
    """The operators that a module runs, with composite ones (``linear``, ``softmax``) whole.

    Args:
        inputs: the module's; the graph's placeholders are those that are tensors of numbers, in order.
        tensors: what the module owns, by name.
        concrete: sparse inputs are taken with their values as well, for modules that look into their structure.
        functional: below what ``torch.func`` transforms, without operators that write in place; composite ones are then
            taken apart.

    Raises:
        CaptureError: the module fails, or what it does depends on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = _DenseNames(mode, concrete)
    named: dict[int, str] = {}
    given, examples = _given(inputs, mode, concrete)
    positions = [at for at, value in enumerate(given) if isinstance(value, FakeTensor)]

    def call(*numbers: torch.Tensor) -> Any:
        for at, value in zip(positions, numbers, strict=True):
            given[at] = value
        tracer: Any = getattr(get_proxy_mode(), "tracer", None)
        if tracer is not None:  # by default only lines of functions called forward are kept
            tracer._record_forward_stack_traces_only = False
        with names:
            return module(*given)

    try:
        with _for_tracing(module), _without_data(module, tensors, mode, named), torch.no_grad():
            trace = make_fx(
                torch.func.functionalize(call, remove="mutations") if functional else call,
                _allow_non_fake_inputs=True,
                pre_dispatch=not functional,
                _error_on_data_dependent_ops=False,
                record_stack_traces=True,
            )
            made = trace(*examples)
            if not functional and any(_transformed(node) for node in made.graph.nodes):
                raise CaptureError(
                    f"{type(module).__name__} uses torch.vmap or torch.func", "write out what it maps over"
                )
            known: dict[int, Any] = {id(tensor): name for name, tensor in tensors.items()} | named
            known |= {id(standin): tensor for standin, tensor in names.standins.values()}
            attributes = {
                str(node.target): known.get(id(value), value)
                for node in made.graph.nodes
                if node.op == "get_attr" and (value := getattr(made, str(node.target))) is not None
            }
    except TilestreamError:
        raise
    except Exception as error:  # a module may raise anything
        line = _user_line(error) or "no source line"
        what, remedy = _short(error), "make it run on dense inputs without looking at their values"
        if isinstance(error, DynamicOutputShapeException):
            what, remedy = f"how much {what} gives depends on values", "keep all of it, and multiply by a mask"
        elif isinstance(error, DataDependentOutputException):
            what, remedy = f"it looks at a value that is not known before it runs, by {what}", "choose with torch.where"
        raise CaptureError(f"{type(module).__name__} cannot be captured: {what} ({line})", remedy) from error
    return Captured(made.graph, attributes)


def _given(inputs: Sequence[Any], mode: FakeTensorMode, concrete: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """What a module is traced with, and those of it that are tensors of numbers, without any."""
    given: list[Any] = []
    examples: list[torch.Tensor] = []
    for value in inputs:
        if is_index(value):
            value = value.clone()
        elif concrete and isinstance(value, torch.Tensor) and value.layout != torch.strided:
            value = value.detach()
        elif isinstance(value, torch.Tensor | SparseTensor):
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.get_default_dtype()
            with mode:
                value = torch.empty(tuple(value.shape), dtype=dtype)
            examples.append(value)
        given.append(value)
    return given, examples


@contextmanager
def _for_tracing(module: nn.Module) -> Iterator[None]:
    """Without a warning of what fails, and without the one operator that hides attention.

    Raises:
        SparseError: a part in train mode that draws random numbers, or counts how often it is called.
    """
    _check_mode(module)
    noisy = logging.getLogger("torch._subclasses.fake_tensor")
    level = noisy.level
    fastpath = torch.backends.mha.get_fastpath_enabled()
    noisy.setLevel(logging.CRITICAL)  # a module that fails is reported by the error of ``capture``
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        noisy.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fastpath)


def _check_mode(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if not part.training:
            continue
        words = f"{name or 'the module'} ({type(part).__name__}) is in train mode"
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise SparseError(f"{words}, and drops at random", "call .eval() on the module first")
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise SparseError(
                f"{words}, where each call changes its running statistics", "call .eval() on the module first"
            )


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _without_data(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], mode: FakeTensorMode, named: dict[int, str]
) -> Iterator[None]:
    """The module with a dense stand-in in place of each tensor of numbers that it owns; ``named`` gets their names."""
    replaced: list[tuple[Any, str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_index(tensor) or (tensor.dtype == torch.bool and tensor.layout == torch.strided):
            continue
        path, _, last = name.rpartition(".")
        part = module.get_submodule(path)
        holders: tuple[Any, ...] = (part._parameters, part._buffers, vars(part))
        for holder in holders:
            if last in holder:
                replaced.append((holder, last, tensor))
                if id(tensor) not in made:
                    with mode:
                        made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if holder is part._parameters:
                        made[id(tensor)] = nn.Parameter(made[id(tensor)], False)
                    named[id(made[id(tensor)])] = name
                holder[last] = made[id(tensor)]
    try:
        yield
    finally:
        for holder, last, tensor in replaced:
            holder[last] = tensor


def _transformed(node: torch.fx.Node) -> bool:
    """Whether a transform of ``torch.func`` was at work: its tensors mean nothing outside of it."""
    values = tree_leaves(node.meta.get("val"))
    wrapped = any(isinstance(x, torch.Tensor) and is_functorch_wrapped_tensor(x) for x in values)
    dual = "_make_dual" in str(node.target)
    return wrapped or dual or "functorch" in getattr(node.target, "__module__", "")


def _user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is the user's, of an error's."""
    found, frame = "", error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if not path.startswith("<") and not any(part in path for part in _LIBRARY):
            found = f"{path.rsplit('/', 1)[-1]}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


def source_line(node: torch.fx.Node) -> str:
    """``file:line`` of the innermost frame that is the user's."""
    lines = [x.strip() for x in (node.meta.get("stack_trace") or "").split("\n") if x.strip().startswith("File ")]
    for line in reversed(lines):
        path, _, rest = line.removeprefix('File "').partition('", line ')
        if not any(part in path for part in _LIBRARY):
            return f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return ""
