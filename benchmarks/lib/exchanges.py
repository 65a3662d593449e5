"""Ways of a data-parallel step to exchange gradients, around one compiled model: they cost no compilation.

``ddp`` is ``DistributedDataParallel`` as it comes: for each parameter a kernel that scales its gradient into a bucket
and one that copies it back. ``view``: gradients are views of the buckets, and nothing is copied back. ``hook``: the
bucket is scaled instead of each gradient as well. ``once``: no wrapper; behind the backward pass all gradients lie in
one tensor, which is exchanged, and are its parts from then on. That overlaps nothing, in a launch or two.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

WARM = 11
"""Steps before a wrapped one may be captured: until then the wrapper takes times by events."""


def step(function: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One step without an optimizer: the gradients of the mean of all results."""
    module.zero_grad(set_to_none=True)
    results = [y for y in pytree.tree_leaves(function(*inputs)) if y.is_floating_point()]
    torch.stack([y.float().square().mean() for y in results]).sum().backward()


def average(module: nn.Module) -> None:
    """The mean of all processes' gradients of one dtype, as parts of one new tensor."""
    held = [p for p in module.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in held if p.grad is not None])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    for p, part in zip(held, flat.split([p.numel() for p in held]), strict=True):
        p.grad = part.view_as(p)


@contextmanager
def exchanging(
    way: str,
    function: Callable[..., Any],
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    captured: bool = False,
) -> Iterator[Callable[[], None]]:
    """A step of ``function``, which is ``module`` or its compiled form, whose gradients become the processes' mean.

    Wrapped steps are warm; a wrapper leaves hooks on the parameters for as long as it lives, which is until the end.

    Args:
        captured: the step is for a CUDA graph. The wrapper's part of the autograd graph runs on the stream that it was
            made on, which a capture takes in unless it is the default one; a plain step would wait for it.
    """
    if way == "once":

        def call() -> None:
            step(function, module, inputs)
            average(module)

        yield call
        return
    with _aside(captured and inputs[0].is_cuda):
        wrapped = [
            DistributedDataParallel(function, gradient_as_bucket_view=way != "ddp")  # type: ignore[arg-type]
        ]
        if way == "hook":
            wrapped[0]._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)  # pyright: ignore[reportPrivateUsage]
        for _ in range(WARM):
            step(wrapped[0], module, inputs)
    yield lambda: step(wrapped[0], module, inputs)
    module.zero_grad(set_to_none=True)  # views of buckets
    wrapped.clear()  # a caller may still hold what was yielded
    gc.collect()


@contextmanager
def _aside(wanted: bool) -> Iterator[None]:
    """On a stream of its own."""
    if not wanted:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
