"""Stationary sums and backward chains on the host build: the generated kernel, compiled by g++ and run with threads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.cuda import sources
from tilestream.cuda.diagnose_stationary import SumDump
from tilestream.cuda.host.build import (
    LINE,
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
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.gradients.stationary.argument import Addresses, pack
from tilestream.kernels.gradients.stationary.emit import StationarySource


def run_sums_on_host(
    pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], options: HostRun | None = None
) -> dict[str, torch.Tensor]:
    """Every output of a pipeline of stationary sums, or of a backward chain, computed by its generated kernel.

    Args:
        tensors: CPU tensors, inputs [rows, features] and weights [out, k], by name.

    Raises:
        CompileError, QueueTimeout, HostTrap, HostRace: as ``build.run_on_host``.
    """
    options = options or HostRun()
    (source,) = sources(pipeline)
    assert isinstance(source, StationarySource)
    rows = tensors[pipeline.by_role(Role.INPUT)[0].name].shape[0]
    have = dict(tensors)
    for t in pipeline.by_role(Role.OUTPUT):  # NaNs: an element that nobody writes shows
        shape = [rows if n is None else n for n in (a.size for a in t.axes)]
        have[t.name] = torch.full(shape, float("nan"), dtype=TORCH_DTYPES[t.dtype])
    return _run(source, have, rows, options)


def _run(
    source: StationarySource, tensors: dict[str, torch.Tensor], rows: int, options: HostRun
) -> dict[str, torch.Tensor]:
    program, pipeline, arena = compile_for_host(source, options), source.pipeline, Arena()
    where = {t.name: arena.where(tensors[t.name]) for t in pipeline.tensors}
    partials = arena.add(b"\xff" * source.partial_bytes)
    flags = arena.add(b"\0" * (source.ctas * LINE))
    dump = SumDump(source.schedules, pipeline.name)
    record = arena.add(b"\0" * (dump.words.numel() * 8))
    at = Addresses(OF_FILE + flags, OF_FILE + partials, OF_FILE + record)
    params = pack(source, where, at, rows, tensor_map, int(options.flag_limit_s * 1e9))
    done, raw = run_file(arena, params, lambda path: execute(program, path, source, (source.ctas, 1), options))
    dump.words.copy_(left_at(raw, record, dump.words))
    dump.check()
    check_ended(source.name, done)
    return {
        t.name: left_at(raw, where[t.name].address - OF_FILE, tensors[t.name]) for t in pipeline.by_role(Role.OUTPUT)
    }
