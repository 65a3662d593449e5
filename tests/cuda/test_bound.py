"""Where the rows of a call's tensors lie, as launches are told: nothing is launched here."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import chain

from tilestream.apps.layers import Layer
from tilestream.cuda import driver
from tilestream.cuda.launch import CompiledPipeline, addressable
from tilestream.errors import DeviceError
from tilestream.ir.pipeline import Role, Tensor
from tilestream.kernels.parts.tensor_maps import MatrixMap
from tilestream.plan.turned import lying


@dataclass
class Recorder:
    """A launch that keeps what it is told."""

    source: Any
    told: dict[str, tuple[int, int]] = field(default_factory=dict)
    record = None
    kernel = SimpleNamespace(needs_rows=True, buffers=())

    def prepare(self, where: dict[str, tuple[int, int]], rows: int, stream: int, capture: int) -> list[Any]:
        self.told = dict(where)
        return []


@pytest.mark.parametrize(
    "shape, stride",
    [((12, 64), 64), ((3, 4, 64), 64), ((2, 3, 2, 64), 64), ((3, 2, 128), 64), ((6, 128), 64), ((768,), 64)],
    ids=["matrix", "clouds", "deeper", "folded", "folded matrix", "flat"],
)
def test_rows_of_a_result_of_any_shape(shape: tuple[int, ...], stride: int):
    """A result [clouds, points, features] is clouds x points rows: its first stride is not a row's."""
    program = chain(1, 64)
    launch = Recorder(SimpleNamespace(pipeline=program))
    compiled = CompiledPipeline(program, [launch], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    x = torch.zeros(12, 64, dtype=torch.bfloat16)
    (output,) = (t.name for t in compiled.outputs)
    result = torch.empty(shape, dtype=torch.bfloat16)
    compiled.bind({"x": x}, 12, (output,))._prepared([result], 0, 0)
    assert launch.told[output][:2] == (result.data_ptr(), stride) and launch.told["x"][:2] == (x.data_ptr(), 64)


def test_a_kernels_own_buffer_is_where_its_launch_looks():
    """As sums at nodes have one, of as many rows as the call."""
    program = chain(1, 64)
    launch = Recorder(SimpleNamespace(pipeline=program))
    launch.kernel = SimpleNamespace(needs_rows=True, buffers=(Tensor.of("left", Role.OUTPUT, (4,), "f32"),))
    compiled = CompiledPipeline(program, [launch], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    (buffer,) = compiled.buffers
    (output,) = (t.name for t in compiled.outputs)
    given = torch.empty(12, 64, dtype=torch.bfloat16), compiled.empty(buffer, 12, {})
    assert given[1].shape == (12, 4)
    compiled.bind({}, 12, (output,))._prepared(given, 0, 0)
    assert launch.told["left"][0] == given[1].data_ptr()


def test_rows_of_a_result_with_gaps():
    """Who calls a compiled pipeline may give a matrix whose rows are apart."""
    program = chain(1, 64)
    launch = Recorder(SimpleNamespace(pipeline=program))
    compiled = CompiledPipeline(program, [launch], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    (output,) = (t.name for t in compiled.outputs)
    result = torch.empty(12, 80, dtype=torch.bfloat16)[:, :64]
    compiled.bind({}, 12, (output,))._prepared([result], 0, 0)
    assert launch.told[output][1] == 80


def test_a_single_row_that_is_a_column():
    """What torch says of a single row's pitch is any number: ``[64, 1].t()`` is contiguous, with rows 2 bytes apart."""
    program = chain(1, 64)
    launch = Recorder(SimpleNamespace(pipeline=program))
    compiled = CompiledPipeline(program, [launch], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    row = torch.zeros(64, 1, dtype=torch.bfloat16).t().contiguous()
    (output,) = (t.name for t in compiled.outputs)
    result = torch.empty(64, 1, dtype=torch.bfloat16).t()
    assert row.stride(0) == result.stride(0) == 1 and addressable(row) and addressable(result)
    compiled.bind({"x": row}, 1, (output,))._prepared([result], 0, 0)
    assert launch.told["x"][1] == launch.told[output][1] == 64
    compiled.bind({}, 1, (output, "x"))._prepared([result, row], 0, 0)
    assert launch.told["x"][1] == 64


def test_a_weight_by_columns_is_read_where_it_lies_or_not_at_all():
    """Neither a copy by rows nor a weight that each call gives anew may stand for it."""
    program = lying(Layer(64, (640,)).program(), ["w0"])
    launch = Recorder(SimpleNamespace(pipeline=program))
    compiled = CompiledPipeline(program, [launch], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    x, y = torch.zeros(12, 64, dtype=torch.bfloat16), torch.empty(12, 640, dtype=torch.bfloat16)
    weight = torch.zeros(64, 648, dtype=torch.bfloat16)[:, :640].t()  # [in, out], with gaps
    compiled.bind({"x": x, "w0": weight}, 12, ("y0",))._prepared([y], 0, 0)
    assert launch.told["w0"][:2] == (weight.data_ptr(), 648)
    for odd in ({"w0": weight.contiguous()}, {"w0": torch.zeros(64, 644, dtype=torch.bfloat16)[:, :640].t()}):
        with pytest.raises(DeviceError, match="'w0' does not lie by columns"):
            compiled.bind({"x": x, **odd}, 12, ("y0",))
    with pytest.raises(DeviceError, match="'w0' does not lie by columns"):
        compiled.bind({"x": x}, 12, ("y0", "w0"))


@pytest.mark.parametrize("address, row_bytes, said", [(4096, 2, "apart: 2 = 16 x 0 "), (4104, 128, "byte 4104 = ")])
def test_a_tensor_map_that_the_driver_would_refuse(address: int, row_bytes: int, said: str):
    with pytest.raises(DeviceError, match=said):
        driver.encoded(MatrixMap("bf16", address, 64, 1, row_bytes, 64))
