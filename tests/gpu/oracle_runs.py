"""Runs of a pipeline on the GPU over poisoned memory, held against the reference machine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilestream import reference
from tilestream.cuda.launch import TORCH_DTYPES, CompiledPipeline
from tilestream.ir import Pipeline, Role

GUARD = 64  # rows around a tensor that no kernel may touch
NAN = float("nan")


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


def assert_close(
    pipeline: Pipeline, got: Mapping[str, Tensor], exact: Mapping[str, Tensor], working: Mapping[str, Tensor]
):
    """Within twice the reference machine's own error, as a whole and in the worst row."""
    # tf32 products keep 11 bits of what the reference machine keeps 24 of.
    tf32 = any(t.dtype == "f32" for t in pipeline.tensors if len(t.shape) == 2 or t.role is Role.INPUT)
    for name, result in got.items():
        if not result.numel():
            continue
        floor = 2e-3 if tf32 else torch.finfo(result.dtype).eps / 2
        whole, worst = distance(result, exact[name])
        own_whole, own_worst = distance(working[name], exact[name])
        assert whole <= max(2 * own_whole, floor), f"{name}: error {whole:.2e}, the reference machine's {own_whole:.2e}"
        assert worst <= 3 * own_worst + 4 * floor, f"{name}: worst row {worst:.2e}, reference {own_worst:.2e}"


def assert_same_bits(one: Mapping[str, Tensor], two: Mapping[str, Tensor]):
    for name, result in one.items():
        wrong = result != two[name]
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ"
