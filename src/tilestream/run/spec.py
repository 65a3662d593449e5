"""A region as data: the pipeline that runs it, where its tensors come from, what its results look like.

The text of it is an argument of the operator ``tilestream::region``. So a compiled graph that comes from torch's caches
carries all it needs: nothing of ours can be missing, and equal regions have equal text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from tilestream.errors import CacheError, PlanError
from tilestream.graph.region import Operand, Region
from tilestream.ir.dtypes import ELEMENT_DTYPES, TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.plan.gradient_launches import GradientLaunch

FORMAT = 1
TENSOR, SIZE = "tensor", "size"


@dataclass(frozen=True)
class ResultSpec:
    """One result: output ``tensor`` of the pipeline, its ``shape`` (numbers, or Python expressions of the region's
    sizes ``r0``, ``r1``, ...), and the order of its dimensions in memory where that is not row-major."""

    tensor: str
    shape: tuple[int | str, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RegionSpec:
    """All that a call of a region needs to know.

    ``target`` is ``cuda`` or ``reference``. ``arguments`` says of each argument whether it is a tensor or a size;
    ``sizes`` tells where size ``r0``, ``r1``, ... is read: (argument, dimension), dimension -1 for the argument itself.
    ``layouts`` holds sizes and strides of every tensor where all are known: calls with one spec differ in addresses.
    ``constant``: parameters do not change, so that copies of them are made once. ``early``: its kernels may start while
    the one in front of them still runs, since that writes no parameter.
    """

    target: str
    pipeline: Pipeline
    arguments: tuple[str, ...]
    inputs: tuple[Operand, ...]
    parameters: tuple[Operand, ...]
    results: tuple[ResultSpec, ...]
    sizes: tuple[tuple[int, int], ...]
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    constant: bool = False
    early: bool = False

    @cached_property
    def is_static(self) -> bool:
        """Whether every size was known when the graph was compiled."""
        return bool(self.layouts)

    @cached_property
    def shapes(self) -> Callable[..., tuple[tuple[Any, ...], ...]]:
        """The results' shapes as a function of the sizes ``r0``, ``r1``, ..., which may be symbolic."""
        names = ", ".join(f"r{i}" for i in range(len(self.sizes)))
        dims = ", ".join("(" + "".join(f"{d}, " for d in r.shape) + ")" for r in self.results)
        return eval(f"lambda {names}: ({dims},)", {"math": __import__("math"), "torch": torch})

    def read_sizes(self, values: Sequence[Any]) -> list[Any]:
        """``r0``, ``r1``, ... from the arguments."""
        return [values[i] if d < 0 else values[i].shape[d] for i, d in self.sizes]

    def merged(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> Sequence[Any]:
        """The arguments in order, of tensors and sizes apart."""
        if not sizes:
            return tensors
        left = {TENSOR: iter(tensors), SIZE: iter(sizes)}
        return [next(left[kind]) for kind in self.arguments]


def spec_of(region: Region, pipeline: Pipeline, target: str, constant: bool = False) -> RegionSpec:
    """The spec of a region that runs as ``pipeline``; the user's lines and the region's name are no part of it.

    Raises:
        PlanError: a size of a result is not known before the region runs.
    """
    names = {symbol: sympy.Symbol(f"r{i}") for i, (symbol, _, _) in enumerate(region.symbols)}
    values = [n.meta["val"] for n in region.graph.graph.nodes if n.op == "placeholder"]
    layouts = tuple((tuple(v.shape), tuple(v.stride())) for v in values if isinstance(v, torch.Tensor))
    static = all(isinstance(n, int) for layout in layouts for part in layout for n in part)
    return RegionSpec(
        target=target,
        pipeline=pipeline,
        arguments=tuple(TENSOR if isinstance(v, torch.Tensor) else SIZE for v in values),
        inputs=region.inputs,
        parameters=region.parameters,
        results=tuple(ResultSpec(r.tensor, tuple(_dim(d, names) for d in r.shape), r.order) for r in region.results),
        sizes=tuple((index, dim) for _, index, dim in region.symbols),
        layouts=layouts if static and not region.symbols else (),
        constant=constant,
    )


def sums_spec(launch: GradientLaunch, pipeline: Pipeline, kind: str) -> RegionSpec:
    """What the operator is told of a launch: arguments are the operands, each once, in order."""
    names, nodes = list(launch.operands), list(launch.operands.values())
    dtype = TORCH_DTYPES[launch.layers[0].dtype]
    widths = {t.name: t.features for t in pipeline.by_role(Role.INPUT)}
    rows = [node.meta["val"].shape[0] for node in nodes]
    static = all(isinstance(n, int) for n in rows)
    return RegionSpec(
        target=kind,
        pipeline=pipeline,
        arguments=(TENSOR,) * len(names),
        inputs=tuple(Operand(tensor, index, (), dtype) for index, tensor in enumerate(names)),
        parameters=(),
        results=tuple(ResultSpec(t.name, t.shape) for t in pipeline.by_role(Role.OUTPUT)),
        sizes=(),
        layouts=tuple(((n, widths[t]), (widths[t], 1)) for n, t in zip(rows, names, strict=True)) if static else (),
    )


def _dim(dim: int | sympy.Expr, names: dict[sympy.Symbol, sympy.Symbol]) -> int | str:
    if isinstance(dim, int) or dim.is_Integer:
        return int(dim)
    if unknown := dim.free_symbols - names.keys():
        raise PlanError(f"size {unknown.pop()} of a result is not known before it runs", "use static shapes")
    return PythonPrinter().doprint(dim.xreplace(names))


def encode(spec: RegionSpec) -> str:
    """A spec as text: the same for equal specs, in every process."""
    data = {"format": FORMAT, **{f.name: getattr(spec, f.name) for f in fields(spec)}}
    told = {name: x for name, x in data.items() if x is not False}
    text = json.dumps(told, default=_to_json, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@lru_cache(maxsize=1024)
def decode(text: str) -> RegionSpec:
    """The spec that ``encode`` made ``text`` of.

    Raises:
        CacheError: the text is damaged, or of another version of tilestream.
    """
    try:
        data = json.loads(zlib.decompress(base64.b64decode(text)))
        if (found := data.pop("format")) != FORMAT:
            raise CacheError(f"a compiled region of format {found!r}, not {FORMAT}", REMEDY)
        pipeline, told = pipeline_from_json(data.pop("pipeline")), {name: _tuples(x) for name, x in data.items()}
        operands = {
            kind: tuple(Operand(name, at, steps, ELEMENT_DTYPES[dtype]) for name, at, steps, dtype in told.pop(kind))
            for kind in ("inputs", "parameters")
        }
        results = tuple(ResultSpec(*r) for r in told.pop("results"))
        return RegionSpec(pipeline=pipeline, results=results, **operands, **told)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise CacheError(f"a compiled region cannot be read: {error!r}", REMEDY) from error


REMEDY = "delete torch's caches (torch._inductor.config.force_disable_caches = True compiles without them)"

_NAMES = {dtype: name for name, dtype in ELEMENT_DTYPES.items()}


def _to_json(x: Any) -> Any:
    """What JSON has no word for: operands and results are lists of their fields."""
    if isinstance(x, Pipeline):
        return pipeline_to_json(x, sources=False)
    return _NAMES[x] if isinstance(x, torch.dtype) else [getattr(x, f.name) for f in fields(x)]


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
