"""Attention of a few queries on the host build: the kernel's own text, a lane a thread (``lanes.cuh``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.cuda.few_queries import NAME, Kernel, parameters
from tilestream.cuda.host.build import OF_FILE, Arena, HostRun, bytes_of, left_at
from tilestream.cuda.host.lanes import run_lanes
from tilestream.ir.dtypes import DTYPES


def attention_on_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    options: HostRun | None = None,
    resident: int = 2,
) -> Tensor:
    """``cuda.few_queries.attention`` on contiguous CPU tensors; the kernel of ``resident`` CTAs an SM.

    Raises:
        CompileError, HostTrap, HostRace: as ``build.run_on_host``.
    """
    heads, _, queries, features = query.shape
    kernel = Kernel(queries, features, resident, DTYPES[query.dtype], mask is not None)
    arena = Arena()
    empty = torch.full_like(query, float("nan"))
    at = {id(t): arena.add(bytes_of(t)) for t in (query, key, value, mask, empty) if t is not None}
    packed = parameters([query, key, value], mask, empty, scale, address=lambda t: OF_FILE + at[id(t)])
    shape = (heads, 32 * kernel.warps, kernel.shared_bytes)
    raw, ended = run_lanes(kernel.text, NAME, "FewQueriesParams", shape, arena, packed, options or HostRun())
    ended()
    return left_at(raw, at[id(empty)], query)
