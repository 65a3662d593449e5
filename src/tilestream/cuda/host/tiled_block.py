"""Tiled blocks on the host build: the generated kernel, compiled by g++ and run with threads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.cuda.host.build import (
    OF_FILE,
    Arena,
    HostRun,
    check_ended,
    compile_for_host,
    execute,
    left_at,
    run_file,
)
from tilestream.cuda.host.maps import tensor_map
from tilestream.cuda.launch_tiled_block import TiledDump
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.product.tiled_block.emit import TiledBlockSource, emit
from tilestream.kernels.product.tiled_block.model import CLUSTER, space_bytes
from tilestream.kernels.product.tiled_block.params import params


def run_tiled_on_host(
    pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], options: HostRun | None = None
) -> dict[str, torch.Tensor]:
    """The outputs ``[rows, out]`` of a tiled block by name, computed by its generated kernel.

    Blocks with nothing in front of their first layer, as ``host.shared_tile``.

    Args:
        tensors: CPU tensors: inputs ``[rows, features]`` and parameters, by name.

    Raises:
        CompileError, QueueTimeout, HostTrap, HostRace: as ``build.run_on_host``.
        ValueError: something stands in front of the first layer.
    """
    options = options or HostRun()
    source = emit(pipeline)
    b, rows = source.schedule.block, tensors[pipeline.by_role(Role.INPUT)[0].name].shape[0]
    if b.before:
        raise ValueError("the host build runs a block with nothing in front of its first layer")
    # NaNs: an element that nobody writes shows
    dtype = TORCH_DTYPES[b.output_dtype]
    empty = {x.output: torch.full((rows, x.columns), float("nan"), dtype=dtype) for x in b.lasts}
    return _run(source, {**tensors, **empty}, rows, options)


def _run(
    source: TiledBlockSource, tensors: dict[str, torch.Tensor], rows: int, options: HostRun
) -> dict[str, torch.Tensor]:
    s, arena = source.schedule, Arena()
    program = compile_for_host(source, options)
    where = {name: arena.where(t) for name, t in tensors.items()}
    flags, *rings = space_bytes(s)
    work = arena.add(b"\0" * flags + b"\xff" * sum(rings))
    dump = TiledDump(s, source.pipeline.name)
    record = arena.add(b"\0" * (dump.words.numel() * 8))
    limit_ns = int(options.flag_limit_s * 1e9)
    packed = params(source, where, OF_FILE + work, OF_FILE + record, tensor_map, rows, limit_ns)
    done, raw = run_file(arena, packed, lambda path: execute(program, path, source, (s.ctas, CLUSTER), options))
    dump.words.copy_(left_at(raw, record, dump.words))
    dump.check()
    check_ended(source.name, done)
    names = [last.output for last in s.block.lasts]
    return {name: left_at(raw, where[name].address - OF_FILE, tensors[name]) for name in names}
