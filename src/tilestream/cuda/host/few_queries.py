"""Attention of a few queries on the host build: the kernel's own text, a lane a thread (``lanes.cuh``)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from tilestream.cuda.emit import headers
from tilestream.cuda.few_queries import NAME, Kernel, parameters
from tilestream.cuda.host.build import (
    Arena,
    HostRun,
    built,
    bytes_of,
    check_ended,
    default_folder,
    left_at,
    mutate,
    run_file,
    run_program,
)
from tilestream.cuda.host.lanes import HOST_FILES
from tilestream.ir.dtypes import DTYPES

ADDRESSES = 5


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
    program = _compiled(kernel, how)
    arena = Arena()
    held = [0 if t is None else arena.add(bytes_of(t)) for t in (query, key, value, mask)]
    out = arena.add(bytes_of(torch.full_like(query, float("nan"))))
    packed = bytearray(parameters([query, key, value], mask, out, scale))
    packed[: 8 * ADDRESSES] = b"".join(at.to_bytes(8, "little") for at in (*held, out))
    words = [arena.add(bytes(packed)), ADDRESSES, *(8 * k for k in range(ADDRESSES))]
    numbers = map(str, (heads, 32 * kernel.warps, kernel.shared_bytes))
    done, raw = run_file(arena, words, lambda path: run_program([str(program), str(path), *numbers], NAME, how))
    check_ended(NAME, done)
    return left_at(raw, out, query)


def _compiled(kernel: Kernel, options: HostRun) -> Path:
    texts = headers() | {n: (files("tilestream.cuda.host") / n).read_text() for n in HOST_FILES}
    texts["kernel"] = f'{kernel.text}#include "lanes_run.h"\nTS_LANES_MAIN({NAME}, FewQueriesParams)\n'
    mutate(texts, options.mutations)
    flags = ["-std=c++20", "-g1", "-O1", "-pthread", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas"]
    if options.sanitize:
        flags.append("-fsanitize=thread")
    return built(options.folder or default_folder(), texts, "kernel", flags, "")
