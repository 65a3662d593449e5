"""Kernels of operators of ours on the host build. Of those of plain warps a lane is a thread, so that ThreadSanitizer
sees the races of lanes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilestream.cuda.beside import Address, BesideSource, LaneCall
from tilestream.cuda.host.build import (
    OF_FILE,
    Arena,
    HostRun,
    bytes_of,
    check_ended,
    compile_for_host,
    execute,
    left_at,
    run_file,
    run_in_lanes,
)


def on_lanes(make: Callable[[Address], LaneCall], ctas: int = 0, options: HostRun | None = None) -> list[torch.Tensor]:
    """The results of an operator's kernel on CPU tensors, by its own text: NaN where it writes nothing.

    Args:
        make: makes its launch, given where tensors are.
        ctas: of the launch; by default as many as have work.

    Raises:
        CompileError, HostTrap, HostRace: as ``build.run_on_host``.
        InputError: an index names no row.
    """
    arena, call, address = _placed(make)
    kernel, record = call.kernel, call.kernel.record and call.kernel.record()
    left = arena.add(bytes(record.words.nbytes)) if record else 0
    packed = kernel.argument.pack(**call.values, **({"record": OF_FILE + left} if record else {}))
    shape = (ctas or call.ctas, 32 * kernel.warps, kernel.shared_bytes)
    raw, ended = run_lanes(kernel.text, kernel.name, kernel.argument.name, shape, arena, packed, options or HostRun())
    if record:
        record.words.copy_(left_at(raw, left, record.words))
        record.check()
    ended()
    return [left_at(raw, address(made) - OF_FILE, made) for made in call.results]


def on_warpgroups(make: Callable[[Address], LaneCall], options: HostRun | None = None) -> list[torch.Tensor]:
    """The same of a kernel of consumer warpgroups and a producer's, written against ``ptx.cuh``."""
    options = options or HostRun()
    arena, call, address = _placed(make)
    kernel = call.kernel
    source = BesideSource(kernel.name, kernel.text, kernel.shared_bytes)
    run = partial(
        execute,
        compile_for_host(source, options, kernel.argument.name),
        source=source,
        ctas=(call.ctas, 1),
        options=options,
        warpgroups=kernel.warps // 4 - 1,
    )
    done, raw = run_file(arena, kernel.argument.pack(**call.values), run)
    check_ended(kernel.name, done)
    return [left_at(raw, address(made) - OF_FILE, made) for made in call.results]


def _placed(make: Callable[[Address], LaneCall]) -> tuple[Arena, LaneCall, Address]:
    """A launch on CPU tensors, the file that holds them, and where in it: results are NaN."""
    arena, held = Arena(), dict[int, tuple[int, torch.UntypedStorage]]()

    def address(t: torch.Tensor) -> int:
        memory = t.untyped_storage()
        if memory.data_ptr() not in held:
            held[memory.data_ptr()] = arena.add(bytes(memory.nbytes())), memory
        return OF_FILE + held[memory.data_ptr()][0] + int(t.storage_offset()) * t.element_size()

    call = make(address)
    for made in call.results:
        made.fill_(float("nan") if made.is_floating_point() else -1)
    arena.parts = [(at, bytes_of(torch.empty(0, dtype=torch.uint8).set_(memory))) for at, memory in held.values()]
    return arena, call, address


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
    done, raw = run_file(arena, packed, run_in_lanes(text, name, params, shape, options))
    return raw, partial(check_ended, name, done)
