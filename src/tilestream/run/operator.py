"""``tilestream::region``: the operator that stands for a region in a graph that Inductor compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilestream.graph.own import OPERATORS, operator
from tilestream.graph.rewrites.operators import LENT, SEGMENT_REDUCE, SEGMENTS, SORTED_INDEX
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.run import device_ops
from tilestream.run.call import RegionCall
from tilestream.run.spec import decode

_calls: dict[tuple[str, int], RegionCall] = {}


def region(inputs: Sequence[torch.Tensor], sizes: Sequence[int], spec: str) -> list[torch.Tensor]:
    """The results of the region that ``spec`` describes (``run.spec.encode``), on its tensors and its sizes.

    Raises:
        CacheError: ``spec`` was written by another version.
        InputError, QueueTimeout: as ``RegionCall``.
    """
    key = (spec, inputs[0].get_device())  # a number, -1 for the CPU: cheaper to make and to compare than a device
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = RegionCall(decode(spec), inputs[0].device)
    return call(inputs, sizes)


def text_of(called: RegionCall) -> str:
    """The operator's argument that stands for a region which it has called.

    Raises:
        KeyError: the operator has not called this region.
    """
    for (text, _), call in _calls.items():
        if call is called:
            return text
    raise KeyError(called)


def shapes(inputs: Sequence[torch.Tensor], sizes: Sequence[Any], spec: str) -> list[torch.Tensor]:
    """The results without values: sizes, strides, dtypes and device, symbolic where the arguments are."""
    made = decode(spec)
    found = made.shapes(*made.read_sizes(made.merged(inputs, sizes)))
    return [
        torch.empty_permuted(
            shape,
            result.order or tuple(range(len(shape))),
            dtype=TORCH_DTYPES[made.pipeline.tensor(result.tensor).dtype],
            device=inputs[0].device,
        )
        for shape, result in zip(found, made.results, strict=True)
    ]


REGION = operator(region, shapes)
"""What stands in a graph."""

DIRECT = {REGION: region}
"""Operators that Inductor's code calls past torch's dispatcher, with what it calls: on any device."""
DIRECT_ON_GPU = {
    SEGMENTS: device_ops.segments, SORTED_INDEX: device_ops.sorted_index, SEGMENT_REDUCE: device_ops.segment_reduce,
}  # fmt: skip
"""The same, on a GPU alone."""

KEPT = {SEGMENTS: 2, SORTED_INDEX: 4}
"""Operators that may give what was kept, and which argument says how."""

for _defined, _run in (DIRECT | DIRECT_ON_GPU).items():  # names that such code can call without an import
    setattr(torch.ops.tilestream, f"run_{_defined._opname}", _run)


def lower_operators() -> None:
    """Tell Inductor of all operators of ours that are defined by now: it calls them.

    Some its code calls past torch's dispatcher, by which a call takes microseconds longer. Of an operator that it was
    not told of, torch 2.11 writes out all that it reads, and what that was made of: of a recurrent decoder's 12 layers
    that did not end. So it does where a lowering fails, in any version: what it says is less from here on.
    """
    from torch._inductor.exc import OperatorIssue
    from torch._inductor.lowering import lowerings, make_fallback

    OperatorIssue.operator_str = staticmethod(_briefly)
    for defined in OPERATORS:
        if defined in lowerings:
            continue
        if defined in DIRECT or defined in DIRECT_ON_GPU:
            _lower(defined, f"torch.ops.tilestream.run_{defined._opname}", anywhere=defined in DIRECT)
        else:
            make_fallback(defined)


def _briefly(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What Inductor says of an operator that it cannot lower: its operands, not what they were made of."""

    def told(given: Any) -> str:
        if isinstance(given, list | tuple):
            return f"[{', '.join(map(told, given))}]"
        name, size = getattr(given, "maybe_get_name", None), getattr(given, "maybe_get_size", None)
        return f"{name()} {size()}" if name and size else f"{given}"

    return "\n".join([f"target: {target}", *map(told, args), *(f"{k}: {told(v)}" for k, v in kwargs.items())])


def _lower(defined: torch._ops.OpOverload, name: str, anywhere: bool) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    handler = fallback_handler(defined, add_to_fallback_set=False)

    @register_lowering(defined, type_promotion_kind=None)
    def _(*args: Any, **kwargs: Any) -> Any:
        found = handler(*args, **kwargs)
        box = found[0] if isinstance(found, list | tuple) else found
        while not isinstance(box, ir.MultiOutput):
            box = box.data
        kernel = box.inputs[0]
        assert isinstance(kernel, ir.FallbackKernel)
        if anywhere or box.get_device().type == "cuda":
            kernel.python_kernel_name = name
        if args[KEPT.get(defined, len(args)) :][:1] == (LENT,):  # Inductor would write where it has read
            results = found if isinstance(found, list | tuple) else [found]
            V.graph.never_reuse_buffers.update(result.get_name() for result in results)
        return found
