"""Float32 numbers as sums of three of bf16: what products on tensor cores take as exactly as float32 products.

The parts of ``x`` are ``x0 = bf16(x)``, ``x1 = bf16(x - x0)`` and ``x2 = bf16(x - x0 - x1)``: 24 bits in all. Of the
nine products of parts the three smallest are below float32's own rounding (Henry, Tang and Heinecke 2019, "Leveraging
the bfloat16 artificial intelligence datatype for higher-precision computations").
"""

from __future__ import annotations

from tilestream.ir.pipeline import Pipeline

PAIRS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
"""Which part of the left operand meets which of the right, in the order in which they are added: tensor cores truncate
their sums, so the small ones come first, while the sum is small."""

LARGEST = 3.3895313892515355e38
"""Of bf16. Parts but the last are held to it: nothing finite rounds to infinity, and infinity is in the last alone."""

MOST_FEATURES = 128
"""Summed by one such product. Of more, what tensor cores truncate may exceed twice the error of a float32 sum.
On an H200 one layer of positive numbers had 1.0 times it for 128 features, 1.6 for 256 and 4.1 for 384, of both signs
0.6, 0.8 and 1.4; chains of two layers of 200 and 256 features had 5 to 9 times."""


def by_parts(program: Pipeline) -> bool:
    """Whether a pipeline has such a product: the only ones of bf16 whose result is float32."""
    linears = [op for stage in program.stages for op in stage.ops if op.kind == "linear"]
    made = {(op.out.dtype, program.tensor(op.params[0]).dtype) for op in linears if op.out is not None}
    return ("f32", "bf16") in made
