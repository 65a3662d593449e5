"""Pipelines with several dtypes in one stage, as autocast, Mamba and quantities kept in fp32 make them."""

from __future__ import annotations

from programs import Program

from tilestream.ir.pipeline import Pipeline, Role, Shard


def residual_stream(layers: int = 2, width: int = 64, dtype: str = "bf16", act: str = "silu") -> Pipeline:
    """A float32 stream around products of 16 bits: s + act(linear(rms_norm(s).to(dtype), w)), layer after layer."""
    p = Program(f"stream{layers}x{width}", dtype)
    s = p.load("s", width, dtype="f32")
    for _ in range(layers):
        unit = p.op("rms_norm", width, s, dtype="f32", eps=1e-5)
        h = p.linear(p.op("cast", width, unit), width, act)
        s = p.op("add", width, s, h, dtype="f32")
    p.store(s, dtype="f32")
    return p.build()


def by_columns(p: Pipeline) -> Pipeline:
    return p.with_stages((p.stages[0].with_(placement=Shard(1)),))


def inputs_of_three(width: int) -> Pipeline:
    """No product: sums of inputs of every dtype, stored in every dtype."""
    p = Program("inputs")
    x, y, z = (p.load(n, width, dtype=d) for n, d in (("x", "bf16"), ("y", "f16"), ("z", "f32")))
    total = p.op("add", width, p.op("mul", width, x, y, dtype="f32"), z, dtype="f32")
    top = p.op("max", 1, total, dtype="f32")
    for dtype in ("f32", "f16", "bf16"):
        p.store(p.op("sub", width, total, top, dtype=dtype), dtype=dtype)
    return p.build()


def odd_inputs() -> Pipeline:
    """Rows that no bulk copy can address, of every dtype, through one product and beside it."""
    p = Program("odd")
    x, y, z = p.load("x", 27), p.load("y", 33, dtype="f32"), p.load("z", 41, dtype="f16")
    h = p.linear(p.cat(x, y, z), 33, "tanh")
    p.store(p.op("add", 33, h, y, dtype="f32"), dtype="f32")
    p.store(p.op("cast", 41, z, dtype="f32"), dtype="f32")
    return p.build()


def products_of_fp32() -> Pipeline:
    """bf16 rows into tf32 products, and their result out again."""
    p = Program("tf32", "f32")
    x, s = p.load("x", 72, dtype="bf16"), p.load("s", 72)
    h = p.linear(p.cat(p.op("cast", 72, x), s), 72, "gelu")
    p.store(p.op("add", 72, p.linear(h, 72), x), dtype="bf16")
    return p.build()


def slices_of_fp32(width: int = 100) -> Pipeline:
    """Columns of fp32 tiles, from memory and computed, that start anywhere; and as operands of a product."""
    p = Program("slices")
    s = p.load("s", width, dtype="f32")
    grown = p.op("mul", width, s, p.op("sigmoid", 1, p.op("mean", 1, s, dtype="f32"), dtype="f32"), dtype="f32")
    near, far = (p.op("slice", 40, s, dtype="f32", start=a, stop=a + 40) for a in (3, 32))
    mine = p.op("slice", 40, grown, dtype="f32", start=37, stop=77)
    h = p.linear(p.op("cast", 80, p.op("cat", 80, near, mine, dtype="f32")), 40)
    p.store(p.op("add", 40, p.op("mul", 40, h, far, dtype="f32"), mine, dtype="f32"), dtype="f32")
    return p.build()


def half_beside_bf16() -> Pipeline:
    """An fp16 value that outlives the bf16 product behind it keeps its bits."""
    p = Program("half")
    h = p.linear(p.load("x", 64), 64)
    kept = p.op("tanh", 64, h, dtype="f16")
    p.store(p.op("add", 64, p.linear(h, 64), kept, dtype="f16"), dtype="f16")
    return p.build()


def fp32_vectors() -> Pipeline:
    """16-bit vectors beside fp32 products, fp32 ones beside 16-bit products."""
    p = Program("vectors", "f32")
    scale = p.tensor("scale", Role.PARAMETER, 64, dtype="bf16")
    h = p.linear(p.load("x", 64), 64)
    p.store(p.op("mul", 64, h, params=(scale,)))
    return p.build()


ONE_STAGE = {
    "residual": lambda: residual_stream(2, 128),
    "residual_odd_f16": lambda: residual_stream(2, 99, "f16"),
    "residual_by_columns": lambda: by_columns(residual_stream(1, 330)),
    "residual_512": lambda: by_columns(residual_stream(1, 512, act="gelu")),
    "inputs_of_three": lambda: inputs_of_three(72),
    "inputs_of_three_by_columns": lambda: by_columns(inputs_of_three(200)),
    "odd_inputs": odd_inputs,
    "odd_inputs_by_columns": lambda: by_columns(odd_inputs()),
    "products_of_fp32": products_of_fp32,
    "products_of_fp32_by_columns": lambda: by_columns(products_of_fp32()),
    "slices_of_fp32": slices_of_fp32,
    "slices_of_fp32_by_columns": lambda: by_columns(slices_of_fp32()),
    "half_beside_bf16": half_beside_bf16,
    "fp32_vectors": fp32_vectors,
}
