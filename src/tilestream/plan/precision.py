"""What a float32 model would gain in tf32 and in bf16: both captured and planned like the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tilestream.errors import TilestreamError
from tilestream.graph.capture import Captured, capture
from tilestream.graph.fake import fake_tensor, faked, twin
from tilestream.ir.float32 import by_parts
from tilestream.plan.analysis import Alternative, Analysis
from tilestream.plan.predicted import of_graphs

TF32 = 'torch.set_float32_matmul_precision("high")'
BF16 = "model.bfloat16(), and x.bfloat16() for its inputs"


def alternatives(
    made: Analysis, found: Captured, model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Alternative, ...]:
    """tf32 and bf16, where torch's float32 precision keeps linear layers of ``made`` from less exact products; else
    none."""
    kept = any("float32 matmul" in e.reason for e in made.exclusions)
    if not kept and not any(by_parts(r.program) for r in made.regions):
        return ()
    with _precision("high"):
        tf32 = _planned("tf32", TF32, made, found, model)
    return (tf32, _bf16(made, model, inputs, keywords))


def _bf16(made: Analysis, model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Alternative:
    if not isinstance(model, nn.Module):
        return Alternative("bf16", "bf16 weights and inputs", problem="a function: its weights cannot be converted")
    try:
        mode, given, named = faked(model, inputs, keywords)
        given, named = tree_map_only(torch.Tensor, lambda x: fake_tensor(x, mode, torch.bfloat16), (given, named))
        small = twin(model, mode, torch.bfloat16)
        return _planned("bf16", BF16, made, capture(small, given, named, made.training), small)
    except (TilestreamError, RuntimeError, TypeError, ValueError) as failure:  # a lazy layer, a __deepcopy__ of its own
        return Alternative("bf16", BF16, problem=str(failure).splitlines()[0])


def _planned(name: str, write: str, made: Analysis, found: Captured, model: Callable[..., Any]) -> Alternative:
    assert made.hardware is not None
    other = of_graphs(model, found, made.options, made.hardware, made.training)
    return Alternative(name, write, other.coverage, other.predicted_us, other.inductor_predicted_us)


@contextlib.contextmanager
def _precision(wanted: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
