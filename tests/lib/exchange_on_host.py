"""A collective by itself on the host build."""

from __future__ import annotations

import torch

from tilestream.bench.exchange import Exchange, Kind, map_sizes, params
from tilestream.cuda.host.build import (
    OF_FILE,
    Arena,
    HostRun,
    bytes_of,
    check_ended,
    compile_for_host,
    execute,
    run_file,
)
from tilestream.cuda.host.maps import encoded
from tilestream.kernels.parts.params import LINE_BYTES
from tilestream.kernels.parts.tensor_maps import MatrixMap
from tilestream.kernels.product.shared_tile.model import PHASES


def exchange_on_host(
    e: Exchange, tiles: torch.Tensor, times: int = 1, options: HostRun | None = None
) -> torch.Tensor:  # fmt: skip
    """What all CTAs have after ``times`` exchanges.

    Args:
        tiles: ``[CTAs, bytes of a tile]``, of any dtype; of sums fp32, as accumulators lie.

    Returns:
        Of gathers ``[CTAs, peers, ...]``; of sums ``[CTAs, ...]``, NaN in blocks that others finish; of ``ADD_MEMORY``
        ``[groups, 64 rows, columns]`` in bf16.

    Raises:
        CompileError, HostTrap, HostRace: as ``build.run_on_host``.
    """
    options, arena, ctas = options or HostRun(), Arena(), tiles.shape[0]
    program = compile_for_host(e, options)
    source = arena.add(bytes_of(tiles))
    out = arena.add(b"\xff" * e.out_bytes(ctas))
    empty = b"\0" if e.kind is Kind.ADD_MEMORY else b"\xff"
    between = arena.add(empty * e.between_bytes(ctas))
    flags = arena.add(b"\0" * (PHASES * ctas * LINE_BYTES))
    dump = arena.add(b"\0" * 64)
    columns, rows, row_bytes, box_rows, box_columns = map_sizes(e, ctas)
    made = encoded(MatrixMap("bf16", OF_FILE + between, columns, rows, row_bytes, box_rows, box_columns))
    at = [OF_FILE + a for a in (source, out, between, flags, dump)]
    packed = params(e, made, at[0], at[1], at[2], at[3], at[4], int(options.flag_limit_s * 1e9), times)
    done, raw = run_file(arena, packed, lambda path: execute(program, path, e, (ctas, e.cluster), options, 1))
    check_ended(e.name, done)
    if e.kind is Kind.ADD_MEMORY:
        sums = torch.frombuffer(raw, dtype=torch.bfloat16, count=rows * columns, offset=between)
        return sums.reshape(ctas // e.peers, 64, columns).clone()
    shape = (ctas, e.peers, *tiles.shape[1:]) if e.gathers else tiles.shape
    count = e.out_bytes(ctas) // tiles.element_size()
    return torch.frombuffer(raw, dtype=tiles.dtype, count=count, offset=out).reshape(shape).clone()
