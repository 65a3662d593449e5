"""Passes that read streams: a turn's loads before its arithmetic, turns and equal steps as loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import sass
from compiled import compile_source
from programs import slopes

from tilestream import cuda
from tilestream.cuda.compile import compiler_version
from tilestream.ir.pipeline import Pipeline, Residency, Shard
from tilestream.kernels.stream.build import build


def placed(p: Pipeline, dim: int = 0) -> Pipeline:
    return p.with_stages((p.stages[0].with_(placement=Shard(dim), residency=Residency.STREAMED, replicas=132),))


def text(p: Pipeline) -> str:
    (source,) = cuda.sources(p)
    return source.text


@pytest.mark.skipif(compiler_version() == "none", reason="NVRTC is not installed (pip install 'tilestream[cuda]')")
@pytest.mark.skipif(
    sass.disassembler() is None, reason="cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)"
)
@pytest.mark.parametrize("dim", [0, 1])
def test_no_pair_waits_for_the_store_of_the_one_before(dim: int):
    """Of 64 pairs by rows, 32 by columns: loads behind stores are those of the next turn."""
    (source,) = cuda.sources(placed(slopes(1), dim))
    moved = [i.name for i in sass.disassemble(compile_source(source).cubin).consumers() if i.name in ("LDS", "STS")]
    assert moved.count("LDS") >= 32
    assert sum(a == "STS" and b == "LDS" for a, b in pairwise(moved)) <= 5


def test_turns_are_a_loop_where_nothing_is_in_registers():
    schedule = build(placed(slopes(2)).stages[0], placed(slopes(2)))
    found = [(bool(schedule.ahead(s, p)), schedule.looped(s, p)) for s in schedule.steps for p in s.phases]
    assert found == [(True, False)] * 2 + [(True, True)] * 2


@pytest.mark.parametrize("kind", ["relu", "square"])
def test_passes_without_special_functions_are_as_they_were(kind: str):
    schedule = build(placed(slopes(2, kind)).stages[0], placed(slopes(2, kind)))
    assert not any(schedule.ahead(s, p) for s in schedule.steps[:2] for p in s.phases)


def test_steps_that_differ_in_their_stream_are_one_loop():
    assert text(placed(slopes(2))).count("softplus(a") == text(placed(slopes(6))).count("softplus(a") == 1
