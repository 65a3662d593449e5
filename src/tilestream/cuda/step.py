"""A decode step as one kernel, launched (``kernels/step``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilestream.cuda.again import Again
from tilestream.cuda.cache import compiled
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.one_launch import Launch
from tilestream.errors import InputError
from tilestream.kernels.step.form import Form
from tilestream.kernels.step.kernel import EVERYTHING, LAYER, STAGES, StepKernel
from tilestream.kernels.step.shape import Shape, shape_of

KEPT = 64
"""Sets of addresses that launches are kept for: where results go varies from call to call."""


def step(
    row: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, weights: Sequence[Tensor],
    caches: Sequence[Tensor], lengths: Sequence[Tensor], form: str, counted: bool, scale: float, eps: float,
    head_eps: float, times: float,
) -> Tensor:  # fmt: skip
    """The logits of a step; arguments as ``graph.decode.op.decode_step``. Caches and lengths are written in place.

    Raises:
        InputError: an earlier step was at a position that its cache has not, and the context is lost; or weights or
            caches do not start on 16 bytes.
        QueueTimeout: a wait of an earlier step expired.
    """
    kernel = StepKernel(shape_of(row, mask, weights, caches, parsed(form)))
    numbers = (int(counted), scale, eps, head_eps, times)
    return loaded(kernel, row.device.index or 0)(row, cos, sin, mask, weights, caches, lengths, numbers)


parsed = cache(Form.of)


@cache  # captured graphs keep the record's address
def loaded(kernel: StepKernel, device_index: int) -> Loaded:
    """A kernel, ready on a device."""
    return Loaded(kernel, torch.device("cuda", device_index))


class Loaded:
    """A step's kernel on a device, which enqueues it again and again. ``stamps``: of its last step (``stamps_of``), if
    its kernel has them."""

    def __init__(self, kernel: StepKernel, device: torch.device) -> None:
        self.kernel, self.device = kernel, device
        self.launch = Launch(kernel, kernel.source, compiled(kernel.source), device)
        self._again = Again(device.index or 0, KEPT)
        sms = torch.cuda.get_device_properties(device).multi_processor_count if kernel.stamps else 0
        self.stamps = torch.zeros(stamps_of(kernel.shape, sms), dtype=torch.int64, device=device)

    def __call__(
        self, row: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, weights: Sequence[Tensor],
        caches: Sequence[Tensor], lengths: Sequence[Tensor], numbers: tuple[int, float, float, float, float],
    ) -> Tensor:  # fmt: skip
        assert self.launch.record is not None
        self.launch.record.check()
        out = torch.empty((row.shape[0], self.kernel.shape.vocabulary), dtype=row.dtype, device=row.device)
        small = [None if t is None else t.contiguous() for t in (row, cos, sin, mask)]
        steps = steps_of(small[1], small[3], self.kernel.shape)
        held = [0 if t is None else t.data_ptr() for t in (*small, out, *weights, *caches, *lengths)]
        key = (*held, *steps, *numbers)
        stream = torch.cuda.current_stream(row.device).cuda_stream
        self._again.enqueue((stream, *key), stream, lambda capture: self._prepared(key, stream, capture))
        return out

    def _prepared(self, key: tuple[int | float, ...], stream: int, capture: int) -> list[PreparedLaunch]:
        values = values_of(self.kernel.shape, key)
        values["stamps"] = self.stamps.data_ptr()
        bulk = [a for layer in values["layers"] for name, a in layer.items() if not name.endswith(("length", "_bias"))]
        if any(address % 16 for address in (*bulk, values["head"])):
            raise InputError("weights or caches of a decode step do not start on 16 bytes", "copy them: t.clone()")
        return self.launch.prepare({}, 1, stream, capture, values)


def stamps_of(shape: Shape, ctas: int) -> tuple[int, int, int, int]:
    """The shape of a kernel's stamps, in nanoseconds: CTA; layer, and one for the head; stage (``STAGES``); when it
    began, had its first values, and ended. 0 where a CTA has nothing of a stage."""
    return ctas, shape.layers + 1, len(STAGES), 3


def steps_of(cos: Tensor | None, mask: Tensor | None, shape: Shape) -> tuple[int, int]:
    """Elements from a sequence's cosines, and mask, to the next one's: 0 where all have the same."""
    return tuple(0 if t is None or t.numel() == n else n for t, n in ((cos, shape.rotary), (mask, shape.positions)))  # pyright: ignore[reportReturnType]


def values_of(shape: Shape, key: Sequence[int | float]) -> dict[str, Any]:
    """The kernel's argument, but for its stamps, from addresses and numbers, in the order of ``Loaded``."""
    names, last, form = shape.form.weights, shape.form.last, shape.form
    row, cos, sin, mask, out, *rest = key
    count = shape.layers * len(names)
    weights, ends, rest = rest[:count], rest[count : count + len(last)], rest[count + len(last) :]
    caches, lengths, (turn_step, mask_step, counted, scale, eps, head_eps, times) = (
        rest[: 2 * shape.layers],
        rest[2 * shape.layers : 3 * shape.layers],
        rest[3 * shape.layers :],
    )
    layers = []
    for n in range(shape.layers):
        layer = dict.fromkeys((f.name for f in LAYER.fields), 0)
        layer |= dict(zip(names, weights[n * len(names) :], strict=False))
        layer |= {"keys": caches[2 * n], "values": caches[2 * n + 1], "length": lengths[n]}
        # Where parts of one weight begin: bytes of a row of [outputs, inputs], or of a number.
        step = 2 if form.turned else 2 * shape.width
        for i, name in enumerate(("key", "value")) if form.qkv else ():
            rows = (shape.heads + i * shape.key_heads) * shape.features
            layer[name], layer[f"{name}_bias"] = layer["query"] + step * rows, layer["query_bias"] + 2 * rows
        if form.gate_up:
            layer["up"] = layer["gate"] + step * shape.hidden
        layers.append(layer)
    return dict.fromkeys(EVERYTHING.last, 0) | dict(zip(last, ends, strict=True)) | {
        "layers": layers, "row": row, "cos": cos, "sin": sin, "out": out, "mask": mask, "counted": counted,
        "scale": scale, "eps": eps, "head_eps": head_eps, "times": times,
        "turn_step": turn_step, "mask_step": mask_step,
    }  # fmt: skip
