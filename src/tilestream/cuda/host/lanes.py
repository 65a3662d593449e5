"""Kernels of plain warps on the host build: a lane is a thread, so that ThreadSanitizer sees the races of lanes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch

from tilestream.cuda.host.build import (
    OF_FILE,
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
from tilestream.cuda.interaction import BACKWARD, FORWARD, Kernel, parameters
from tilestream.errors import InputError
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.parts.headers import headers

CTAS, WARPS = 2, 2
"""Of a launch here: each lane is a thread."""

GAP = 3
"""Elements between rows of gradients, which start on no 16 bytes."""

HOST_FILES = ("lanes.cuh", "lanes_run.h", "ptx.cuh", "machine.h")


def forward_on_host(
    sources: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor | None],
    first: torch.Tensor,
    second: torch.Tensor,
    head: int,
    options: HostRun | None = None,
) -> torch.Tensor:
    """``cuda.interaction.forward`` on CPU tensors, by the kernel's own text.

    Raises:
        CompileError, HostTrap, HostRace: as ``build.run_on_host``.
        InputError: an index names no row.
    """
    kernel = Kernel(FORWARD, len(sources), sources[0].shape[1], len(first), head, DTYPES[sources[0].dtype])
    batch = len(sources[0]) if indices[0] is None else len(indices[0])
    return _run(kernel, sources, indices, first, second, None, (batch, kernel.width), options or HostRun())


def backward_on_host(
    sources: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor | None],
    first: torch.Tensor,
    second: torch.Tensor,
    given: torch.Tensor,
    options: HostRun | None = None,
) -> torch.Tensor:
    """``cuda.interaction.backward`` on CPU tensors; raises as ``forward_on_host``."""
    kernel = Kernel(BACKWARD, len(sources), sources[0].shape[1], len(first), -1, DTYPES[sources[0].dtype])
    shape = (len(sources), len(given), kernel.features)
    return _run(kernel, sources, indices, first, second, given, shape, options or HostRun())


def _run(
    kernel: Kernel,
    sources: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor | None],
    first: torch.Tensor,
    second: torch.Tensor,
    given: torch.Tensor | None,
    shape: tuple[int, ...],
    options: HostRun,
) -> torch.Tensor:
    arena = Arena()
    like = sources[0]
    size = like.element_size()
    held = [
        (OF_FILE + arena.add(bytes_of(t)), _added(arena, i), len(t), t.shape[1] * size, int(_is_wide(i)))
        for t, i in zip(sources, indices, strict=True)
    ]
    pairs = [OF_FILE + arena.add(bytes_of(t)) for t in (first, second)]
    gaps = None if given is None else torch.cat([given, given.new_ones(len(given), GAP)], 1)
    empty = torch.full(shape, float("nan"), dtype=like.dtype)
    out = arena.add(bytes_of(empty))
    record = arena.add(bytes(32))
    stride = 0 if gaps is None else gaps.shape[1] * size
    batch = shape[0] if given is None else shape[1]
    places = (_added(arena, gaps), OF_FILE + out, OF_FILE + record)
    packed = parameters(held, pairs, *places, stride, batch, int(_is_wide(first)))
    shape = (CTAS, 32 * WARPS, kernel.shared_bytes(WARPS))
    raw, ended = run_lanes(kernel.text(WARPS), kernel.name, "InteractionParams", shape, arena, packed, options)
    claimed, what, rows, found = struct.unpack_from("<4q", raw, record)
    if claimed:
        vector, at = what & 0xFFFFFFFF, what >> 32
        raise InputError(f"vector {vector}, at {at}: {found} of {rows}", "give indices that exist")
    ended()
    return left_at(raw, out, empty)


def run_lanes(
    text: str, name: str, params: str, shape: tuple[int, int, int], arena: Arena, packed: bytes, options: HostRun
) -> tuple[bytearray, Callable[[], None]]:
    """Run the kernel ``name`` of a text, whose argument is a ``params``: the arena's bytes behind it, and what raises
    if it did not end.

    Args:
        shape: CTAs, threads of each, bytes of shared memory.

    Raises:
        CompileError, HostRace: as ``build.run_on_host``.
    """
    program = str(compiled(text, name, params, options))
    numbers = [str(n) for n in shape]
    done, raw = run_file(arena, packed, lambda path: run_program([program, str(path), *numbers], name, options))
    return raw, partial(check_ended, name, done)


def compiled(text: str, name: str, params: str, options: HostRun) -> Path:
    """The program that runs the kernel ``name`` of a text against ``lanes.cuh``, whose argument is a ``params``.

    Raises:
        CompileError: as ``build.built``.
    """
    texts = headers() | {n: (files("tilestream.cuda.host") / n).read_text() for n in HOST_FILES}
    texts["kernel"] = f'{text}#include "lanes_run.h"\nTS_LANES_MAIN({name}, {params})\n'
    mutate(texts, options.mutations)
    flags = ["-std=c++20", "-g1", "-O1", "-pthread", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas"]
    if options.sanitize:
        flags.append("-fsanitize=thread")
    return built(options.folder or default_folder(), texts, "kernel", flags, "")


def _added(arena: Arena, t: torch.Tensor | None) -> int:
    """The address of a tensor, added to the arena; 0 for none."""
    return 0 if t is None else OF_FILE + arena.add(bytes_of(t))


def _is_wide(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.int64
