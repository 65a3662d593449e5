"""Kernels against the reference machine, pipeline by pipeline."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_pipelines import NAMED
from oracle_runs import assert_close, assert_same_bits, cut, reference_run, run_poisoned, to_gpu
from random_pipelines import tensors_for
from torch import Tensor

from tilestream import cuda, devices
from tilestream.errors import InputError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Role
from tilestream.kernels.fits import verify_on

MOST = 4096
ROWS = (0, 1, 63, 64, 65, 300, MOST)


@functools.cache
def expected(name: str) -> tuple[Mapping[str, Tensor], ...]:
    """(tensors, float64 results, working results) of the largest number of rows: rows do not depend on each other."""
    pipeline = NAMED[name]()
    tensors = tensors_for(pipeline, MOST, seed=1)
    return tensors, *reference_run(pipeline, tensors)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.every(8)
def test_named_pipelines_are_legal_and_compile_without_spills(name: str):
    pipeline = NAMED[name]()
    verify_on(pipeline, devices.get("h200"))
    assert [r.spills for r in cuda.compile_only(pipeline)] == [0] * len(cut_at_dram(pipeline))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMED)
def test_named_pipelines(name: str):
    pipeline = NAMED[name]()
    tensors, exact, working = expected(name)
    inputs = [t.name for t in pipeline.by_role(Role.INPUT)]
    compiled = cuda.build(pipeline)
    largest: dict[str, Tensor] = {}
    for rows in sorted(ROWS, reverse=True):
        given = to_gpu(cut(tensors, rows, *inputs))
        got = run_poisoned(compiled, given, rows)
        assert_close(pipeline, got, cut(exact, rows), cut(working, rows))
        assert_same_bits(got, run_poisoned(compiled, given, rows))
        largest = largest or got
        assert_same_bits(got, cut(largest, rows))  # a row's result does not depend on how many there are


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nerf", "spatial_multicast"])
def test_many_launches_in_a_row_give_the_same_bits(name: str):
    pipeline = NAMED[name]()
    compiled = cuda.build(pipeline)
    given = {k: t.cuda() for k, t in expected(name)[0].items()}
    first = compiled(given, MOST)
    again = [compiled(given, MOST) for _ in range(50)]
    for other in again:
        assert_same_bits(first, other)


@pytest.mark.gpu
def test_strided_and_misaligned_tensors():
    """Rows of a wider tensor, columns of a transposed one, and an odd address give what contiguous copies give."""
    pipeline = NAMED["edge_block"]()
    compiled = cuda.build(pipeline)
    given = {k: t.cuda() for k, t in expected("edge_block")[0].items()}
    wanted = compiled(given, MOST)
    wide = torch.randn(MOST, 400, device="cuda").bfloat16()
    wide[:, 8:136] = given["e"]
    odd = torch.randn(MOST * 128 + 1, device="cuda").bfloat16()[1:].view(MOST, 128)
    odd.copy_(given["a"])
    weight = next(t.name for t in pipeline.by_role(Role.PARAMETER) if len(t.shape) == 2)
    views = {"e": wide[:, 8:136], "a": odd, "b": given["b"].t().contiguous().t()}
    views[weight] = given[weight].t().contiguous().t()
    assert not any(v.is_contiguous() and v.data_ptr() % 16 == 0 for v in views.values())
    assert_same_bits(wanted, compiled({**given, **views}, MOST))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 65, 300])
def test_odd_rows_from_any_place(rows: int):
    """Columns of a wider tensor, from an odd or an even one on, up to its last one or not: what lies around is NaN."""
    pipeline = NAMED["nerf"]()
    compiled = cuda.build(pipeline)
    given = {k: t.cuda() for k, t in expected("nerf")[0].items()}
    names = [t.name for t in pipeline.by_role(Role.INPUT)]
    given |= {name: given[name][:rows].contiguous() for name in names}
    wanted = compiled(given, rows)
    for columns, first in ((70, 5), (64, 1), (91, 0)):
        views = {}
        for name in names:
            features = given[name].shape[1]
            wide = torch.full((rows, max(columns, features + first)), float("nan"), device="cuda").bfloat16()
            views[name] = wide[:, first : first + features]
            views[name].copy_(given[name])
        assert_same_bits(wanted, compiled({**given, **views}, rows))


@pytest.mark.gpu
def test_inputs_that_alias():
    pipeline = NAMED["edge_block"]()
    compiled = cuda.build(pipeline)
    given = {k: t.cuda() for k, t in expected("edge_block")[0].items()}
    apart = {**given, "a": given["e"].clone(), "b": given["e"].clone()}
    together = {**given, "a": given["e"], "b": given["e"]}
    assert_same_bits(compiled(apart, MOST), compiled(together, MOST))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["edge_block", "spatial_heads_f16"])
def test_after_bad_input_the_next_call_is_right(name: str):
    pipeline = NAMED[name]()
    compiled = cuda.build(pipeline)
    given = {k: t.cuda() for k, t in expected(name)[0].items()}
    wanted = compiled(given, MOST)
    inputs = pipeline.by_role(Role.INPUT)
    first = inputs[0].name
    bad = [
        ({k: t for k, t in given.items() if k != first}, "is missing"),
        ({**given, first: given[first].float()}, "torch.float32"),
        ({**given, first: given[first].cpu()}, "on cpu"),
        ({**given, first: given[first][:, 1:]}, "the pipeline wants"),
        ({**given, first: given[first][1:]}, "the pipeline wants"),
    ]
    for tensors, says in bad:
        with pytest.raises(InputError, match=says):
            compiled(tensors, MOST)
        assert_same_bits(wanted, compiled(given, MOST))


@pytest.mark.gpu
def test_new_row_counts_and_weights_compile_nothing(monkeypatch: pytest.MonkeyPatch):
    from tilestream.cuda import cache, compile

    pipeline = NAMED["spatial_hybrid"]()
    compiled = cuda.build(pipeline)
    tensors = expected("spatial_hybrid")[0]
    compiled({k: t.cuda() for k, t in tensors.items()}, MOST)
    calls: list[str] = []
    monkeypatch.setattr(compile, "compile_text", lambda *a, **_: calls.append(a[1]))
    kernels = len(cache._memory)
    for rows in (1, 64, 1000, 4095):
        given = to_gpu(tensors_for(pipeline, rows, seed=rows))
        assert cuda.build(pipeline) is compiled
        run_poisoned(compiled, given, rows)
    assert calls == [] and len(cache._memory) == kernels


@pytest.mark.gpu
def test_a_pipeline_for_more_sms_than_there_are():
    from gpu_pipelines import spread
    from programs import chain

    from tilestream.errors import DeviceError

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(DeviceError, match=f"= {2 * sms} CTAs at once and this GPU holds {sms}. Remedy: plan for"):
        cuda.build(spread(chain(2, 64), replicas=sms))


@pytest.mark.gpu
def test_a_thread_that_never_called_cuda():
    compiled = cuda.build(NAMED["spatial_heads_f16"]())
    given = {k: t.cuda() for k, t in expected("spatial_heads_f16")[0].items()}
    wanted = compiled(given, MOST)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: compiled(given, MOST), range(40)):
            torch.cuda.synchronize()
            assert_same_bits(wanted, out)


@pytest.mark.gpu
def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    pipeline = NAMED["spatial_heads_f16"]()
    tensors = expected("spatial_heads_f16")[0]
    wanted = cuda.build(pipeline)({k: t.cuda() for k, t in tensors.items()}, MOST)
    other = torch.device("cuda", 1)
    out = cuda.build(pipeline, other)({k: t.to(other) for k, t in tensors.items()}, MOST)
    torch.cuda.synchronize(other)
    assert torch.cuda.current_device() == 0
    assert_same_bits(wanted, {k: t.to("cuda:0") for k, t in out.items()})


@pytest.mark.gpu
def test_outputs_that_cannot_be_written():
    """Memory that is read, or that kernels cannot address, is refused before anything runs."""
    compiled = cuda.build(NAMED["heads"]())
    given = {k: t.cuda() for k, t in expected("heads")[0].items()}
    names = [t.name for t in compiled.pipeline.by_role(Role.OUTPUT)]
    wanted = compiled(given, MOST)
    good = {n: torch.empty_like(t) for n, t in wanted.items()}
    room = torch.empty(MOST * 192 + 8, dtype=torch.bfloat16, device="cuda")
    room[: MOST * 100] = given["x"].flatten()
    shared = room[: MOST * 100].view(MOST, 100)
    bad = [
        ({names[0]: good[names[0]].float()}, given, "the pipeline wants"),
        ({names[0]: good[names[0]][1:]}, given, "the pipeline wants"),
        ({names[0]: good[names[0]].cpu()}, given, "on cpu"),
        ({names[0]: room[1 : MOST * 192 + 1].view(MOST, 192)}, given, "kernels cannot write"),
        ({names[0]: room[: MOST * 192].view(192, MOST).t()}, given, "kernels cannot write"),
        ({names[0]: room[: MOST * 192].view(MOST, 192)}, {**given, "x": shared}, "shares memory with 'x'"),
        ({**good, names[2]: good[names[0]].view(-1)[: MOST * 17].view(MOST, 17)}, given, "shares memory with"),
    ]
    for out, tensors, says in bad:
        with pytest.raises(InputError, match=says):
            compiled(tensors, MOST, out=out)
    for name, t in good.items():
        t.fill_(float("nan"))
        compiled(given, MOST, out={name: t})
        assert torch.equal(t, wanted[name])
