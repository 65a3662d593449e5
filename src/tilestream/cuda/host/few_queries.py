"""Attention of a few queries on the host build: the kernel's own text, a lane a thread (``lanes.cuh``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.cuda.few_queries import NAME, Kernel, parameters
from tilestream.cuda.host.build import (
    OF_FILE,
    Arena,
    HostRun,
    bytes_of,
    check_ended,
    left_at,
    run_file,
    run_program,
)
from tilestream.cuda.host.lanes import compiled
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
    how = options or HostRun()
    heads, _, queries, features = query.shape
    kernel = Kernel(queries, features, resident, DTYPES[query.dtype], mask is not None)
    program = compiled(kernel.text, NAME, "FewQueriesParams", how)
    arena = Arena()
    empty = torch.full_like(query, float("nan"))
    at = {id(t): arena.add(bytes_of(t)) for t in (query, key, value, mask, empty) if t is not None}
    packed = parameters([query, key, value], mask, empty, scale, address=lambda t: OF_FILE + at[id(t)])
    numbers = map(str, (heads, 32 * kernel.warps, kernel.shared_bytes))
    done, raw = run_file(arena, packed, lambda path: run_program([str(program), str(path), *numbers], NAME, how))
    check_ended(NAME, done)
    return left_at(raw, at[id(empty)], query)
