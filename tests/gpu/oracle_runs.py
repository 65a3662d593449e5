"""Runs of a pipeline on the GPU over poisoned memory, held against the reference machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tilestream import reference
from tilestream.cuda.launch import CompiledPipeline
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Queue, Role, Stage

GUARD = 64  # rows around a tensor that no kernel may touch
NAN = float("nan")
FAST = 1e-4  # relative error of fp32 operators that go to the special function unit


def reference_run(pipeline: Pipeline, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(float64 results, results of the reference machine in working precision)."""
    return reference.run(pipeline, tensors, precision="float64"), reference.run(pipeline, tensors)


def guarded(value: Tensor) -> Tensor:
    """A copy on the GPU with NaN before and behind it: what is read there would be seen."""
    rows = value.shape[0] if value.dim() else 1
    room = torch.full((rows + 2 * GUARD, *value.shape[1:]), NAN, dtype=value.dtype, device="cuda")
    inside = room[GUARD : GUARD + rows].view(value.shape)
    return inside.copy_(value)


def to_gpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: guarded(t) for name, t in tensors.items()}


def cut(tensors: Mapping[str, Tensor], rows: int, *names: str) -> dict[str, Tensor]:
    """The first ``rows`` rows, of all tensors or of those named."""
    return {name: t[:rows] if not names or name in names else t for name, t in tensors.items()}


def run_poisoned(compiled: CompiledPipeline, tensors: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Outputs of one launch over memory full of NaN, on the CPU; the memory around them is still NaN after it."""
    rooms, out = {}, {}
    for t in compiled.pipeline.by_role(Role.OUTPUT):
        dtype = TORCH_DTYPES[t.dtype]
        rooms[t.name] = torch.full((rows + 2 * GUARD, t.features), NAN, dtype=dtype, device="cuda")
        out[t.name] = rooms[t.name][GUARD : GUARD + rows]
    got = compiled(tensors, rows, out=out)
    torch.cuda.synchronize()
    for name, room in rooms.items():
        around = torch.cat((room[:GUARD], room[GUARD + rows :]))
        assert around.isnan().all(), f"{name}: {int((~around.isnan()).sum())} elements were written outside of it"
        assert got[name].data_ptr() == out[name].data_ptr()
    return {name: t.cpu() for name, t in out.items()}


def distance(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Relative errors: of everything (Frobenius), and of the worst row against the mean size of a row."""
    difference = got.double() - exact
    size = torch.linalg.vector_norm(exact).item() + 1e-30
    worst = torch.linalg.vector_norm(difference, dim=1).max().item()
    return torch.linalg.vector_norm(difference).item() / size, worst / (size / exact.shape[0] ** 0.5)


def eager_run(pipeline: Pipeline, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As eager rounds: to its dtype after every operation. Every op is a stage of its own, and queues round."""
    ops = [op for stage in pipeline.stages for op in stage.ops]
    users = {op.out.name: [k for k, other in enumerate(ops) if op.out.name in other.ins] for op in ops if op.out}
    home = {op.out.name: k for k, op in enumerate(ops) if op.out}
    queues = tuple(
        Queue(tile, f"op{home[tile]}", tuple(f"op{k}" for k in takers), depth=10_000) for tile, takers in users.items()
    )
    stages = tuple(Stage.of(f"op{k}", (op,)) for k, op in enumerate(ops))
    return reference.run(pipeline.with_stages(stages, queues), tensors)


def assert_close(
    pipeline: Pipeline,
    got: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    working: Mapping[str, Tensor],
    eager: Callable[[], Mapping[str, Tensor]] | None = None,
):
    """Within twice the error of the reference machine at the same precision, as a whole and in the worst row.

    Kernels round a tile that waits in shared memory, which the reference machine does not, and a norm may make much
    of it: ``eager`` gives results that are rounded everywhere, and is asked where the first comparison fails.
    """
    # tf32 products keep 11 bits of what the reference machine keeps 24 of.
    tf32 = any(t.dtype == "f32" for t in pipeline.tensors if len(t.shape) == 2)
    coarsest = max(torch.finfo(TORCH_DTYPES[t.dtype]).eps for t in pipeline.tiles().values()) / 2
    floor = 2e-3 if tf32 else max(coarsest, FAST)
    for name, result in got.items():
        if not result.numel():
            continue
        whole, worst = distance(result, exact[name])
        own_whole, own_worst = distance(working[name], exact[name])
        if eager is not None and (whole > max(2 * own_whole, floor) or worst > 3 * own_worst + 4 * floor):
            own_whole, own_worst = distance(eager()[name], exact[name])
        assert whole <= max(2 * own_whole, floor), f"{name}: error {whole:.2e}, at this precision {own_whole:.2e}"
        assert worst <= 3 * own_worst + 4 * floor, f"{name}: worst row {worst:.2e}, at this precision {own_worst:.2e}"


def assert_same_bits(one: Mapping[str, Tensor], two: Mapping[str, Tensor]):
    for name, result in one.items():
        wrong = result != two[name]
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ"
