"""Operators of ours on the host build. In those of plain warps a lane is a fiber; to ThreadSanitizer it is a thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilestream.cuda.beside import Address, LaneCall
from tilestream.cuda.host.build import OF_FILE, Arena, HostRun, bytes_of, left_at, run_call, runner
from tilestream.cuda.host.maps import encoded
from tilestream.kernels.parts.source import Call, Part


def on_lanes(make: Callable[[Address], LaneCall], ctas: int = 0, options: HostRun | None = None) -> list[torch.Tensor]:
    """The results of an operator's kernel on CPU tensors, by its own text: NaN where it writes nothing.

    Args:
        make: makes its launch, given where tensors are.
        ctas: of the launch; by default as many as have work.

    Raises:
        CompileError, HostTrap, HostRace: as ``build.run_on_host``.
        InputError: an index names no row.
    """
    arena, held = Arena(), dict[int, tuple[int, torch.UntypedStorage]]()

    def address(t: torch.Tensor) -> int:
        memory = t.untyped_storage()
        if memory.data_ptr() not in held:
            held[memory.data_ptr()] = arena.add(bytes(memory.nbytes())), memory
        return OF_FILE + held[memory.data_ptr()][0] + int(t.storage_offset()) * t.element_size()

    made = make(address)
    for result in made.results:
        result.fill_(float("nan") if result.is_floating_point() else -1)
    arena.parts = [(at, bytes_of(torch.empty(0, dtype=torch.uint8).set_(memory))) for at, memory in held.values()]
    kernel, source = made.kernel, made.kernel.source
    run = runner(kernel, source, (ctas or made.ctas, kernel.frame.cluster), options or HostRun())
    call = Call({}, {}, 0, Part(0, made.ctas, made.ctas), encoded, values=made.values)
    raw = run_call(kernel, source, call, arena, run)
    return [left_at(raw, address(result) - OF_FILE, result) for result in made.results]
