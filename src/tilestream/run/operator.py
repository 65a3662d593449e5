"""``tilestream::region``: the operator that stands for a region in a graph that Inductor compiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tilestream.graph.own import operator
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.run.call import RegionCall
from tilestream.run.spec import decode

_calls: dict[tuple[str, int], RegionCall] = {}


def run(inputs: Sequence[torch.Tensor], sizes: Sequence[int], spec: str) -> list[torch.Tensor]:
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


def text_of(region: RegionCall) -> str:
    """The operator's argument that stands for a region which it has called.

    Raises:
        KeyError: the operator has not called this region.
    """
    for (text, _), call in _calls.items():
        if call is region:
            return text
    raise KeyError(region)


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


REGION = operator("region(Tensor[] inputs, SymInt[] sizes, str spec) -> Tensor[]", run, shapes)
"""What stands in a graph."""

# A name that the code which Inductor writes can call without an import.
torch.ops.tilestream.run_region = run  # pyright: ignore[reportAttributeAccessIssue]


@cache
def call_directly() -> None:
    """Let Inductor's code call ``run`` itself: through torch's dispatcher a call takes microseconds longer."""
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering

    handler = fallback_handler(REGION, add_to_fallback_set=False)

    @register_lowering(REGION, type_promotion_kind=None)
    def _(inputs: Any, sizes: Any, spec: str) -> Any:
        found = handler(inputs, sizes, spec)
        box = found[0]
        while not isinstance(box, ir.MultiOutput):
            box = box.data
        kernel = box.inputs[0]
        assert isinstance(kernel, ir.FallbackKernel)
        kernel.python_kernel_name = "torch.ops.tilestream.run_region"
        return found
