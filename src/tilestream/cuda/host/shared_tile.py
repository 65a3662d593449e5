"""Shared tiles on the host build: the generated kernel, compiled by g++ and run with threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tilestream.cuda.diagnose_shared_tile import ExchangeDump
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
from tilestream.cuda.host.maps import MAPS
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.taps import rows_given
from tilestream.kernels.parts.mma import specialisation
from tilestream.kernels.product.shared_tile.block import PANEL
from tilestream.kernels.product.shared_tile.emit import SharedTileSource, emit
from tilestream.kernels.product.shared_tile.params import Part, Space, params


def run_tile_on_host(
    pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], options: HostRun | None = None
) -> dict[str, torch.Tensor]:
    """The outputs ``[rows, columns]`` of a shared tile by name, computed by its generated kernel, in one launch.

    Blocks with nothing in front of their first layer: what is there exchanges values between lanes, which are no
    threads here.

    Args:
        tensors: CPU tensors: inputs ``[rows, features]`` and parameters, by name.

    Raises:
        CompileError, QueueTimeout, HostTrap, HostRace: as ``build.run_on_host``.
        ValueError: something stands in front of the first layer, there are more rows than a launch has, or races are
            looked for in a tile of fewer than 64 rows: its products read what lies behind it, whoever writes that.
    """
    options = options or HostRun()
    source = emit(pipeline)
    inputs = tuple(t.name for t in pipeline.by_role(Role.INPUT))
    s, rows = source.schedule, rows_given(pipeline, lambda name: tensors[name].shape[0], inputs)
    if s.block.before or rows > s.launched(rows) // (s.groups * s.columns) * s.tile_rows:
        raise ValueError("the host build runs one launch of a block with nothing in front of its first layer")
    if options.sanitize and s.tile_rows < PANEL:
        raise ValueError(f"products of {PANEL} rows read behind a tile of {s.tile_rows}, in rows that nobody stores")
    # NaNs: an element that nobody writes shows
    dtype = TORCH_DTYPES[s.block.output_dtype]
    empty = {x.output: torch.full((rows, x.columns), float("nan"), dtype=dtype) for x in s.block.lasts}
    return _run(source, {**tensors, **empty}, rows, options)


def for_host(source: SharedTileSource) -> SharedTileSource:
    """``source`` without its products for the tensor cores: the host twin of ptx.cuh has them."""
    s, text = source.schedule, source.text
    share = 16 if s.halves else 8
    for blocks in {s.middle_columns // share, s.out_columns // share} - {0}:
        text = text.replace(specialisation(s.block.dtype, blocks).strip(), "")
    return replace(source, text=text)


def _run(
    source: SharedTileSource, tensors: dict[str, torch.Tensor], rows: int, options: HostRun
) -> dict[str, torch.Tensor]:
    s, space, arena = source.schedule, Space.of(source.schedule), Arena()
    program = compile_for_host(for_host(source), options)
    where = {name: arena.where(t) for name, t in tensors.items()}
    work = arena.add(space.at_first(s.tagged, b"\xff"))
    dump = ExchangeDump(s, source.pipeline.name)
    record = arena.add(b"\0" * (dump.words.numel() * 8))
    packed = params(
        source, where, OF_FILE + work, OF_FILE + record, MAPS, Part(0, rows, rows),
        int(options.flag_limit_s * 1e9),
    )  # fmt: skip
    ctas = (s.launched(rows), s.cluster)
    done, raw = run_file(arena, packed, lambda path: execute(program, path, source, ctas, options, s.warpgroups))
    dump.words.copy_(left_at(raw, record, dump.words))
    dump.check()
    check_ended(source.name, done)
    names = [last.output for last in s.block.lasts]
    return {name: left_at(raw, where[name].address - OF_FILE, tensors[name]) for name in names}
