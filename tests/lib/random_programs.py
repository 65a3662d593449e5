"""Random programs: legal one-stage pipelines of tile ops.

Values stay well conditioned, so that results can be compared: each tile carries an estimate of its largest
magnitude and a lower bound, and log, sqrt, division and the like are only applied above ``POSITIVE``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tilestream.ir.pipeline import Pipeline, Residency, Role, Shard, Stage, Tensor, Tile, TileOp

POSITIVE = 0.1
TOP = 60.0  # no tile is expected to exceed this: far from the largest fp16
ODD_WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 384, 511, 512)
SCALARS = (-2, -1.0, -0.5, 0.25, 0.5, 1.1, 2, 3.0)


@dataclass(frozen=True)
class Limits:
    """What random pipelines may contain. One stage only: ``stages=1``. No DRAM queues: ``launches=1``."""

    max_width: int = 256
    ops: int = 18
    stages: int = 4
    launches: int = 3
    replicas: int = 3
    dtypes: tuple[str, ...] = ("bf16", "f16")
    f32: bool = True  # casts to fp32, fp32 outputs, fp32 biases of linears
    mixed: bool = False  # inputs of any dtype, fp32 most of all; products of 16 bits, or of fp32 alone
    resident_bytes: int = 96 * 1024  # weights of a stage are resident only up to here


ANYTHING = Limits()


@dataclass(frozen=True)
class _Value:
    """A tile with what is known of it: every element > ``floor`` if given, |elements| < ``top`` (an estimate)."""

    tile: Tile
    top: float
    floor: float | None = None
    lively: bool = True  # its features differ, so that a norm of it is no amplified rounding error

    @property
    def width(self) -> int:
        return self.tile.features

    @property
    def positive(self) -> bool:
        return self.floor is not None and self.floor >= POSITIVE


def program(rng: random.Random, limits: Limits = ANYTHING) -> Pipeline:
    """A one-stage pipeline of random ops."""
    return _Builder(rng, limits).build()


def source(rng: random.Random, line: int) -> str:
    return f"model.py:{line}" if rng.random() < 0.8 else ""


@dataclass
class _Builder:
    rng: random.Random
    limits: Limits
    ops: list[TileOp] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    pool: list[_Value] = field(default_factory=list)
    dtype: str = ""

    def build(self) -> Pipeline:
        self.dtype = self.rng.choice((*self.limits.dtypes, "f32") if self.limits.mixed else self.limits.dtypes)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            self.load()
        count = self.rng.randint(2, self.limits.ops)
        while len(self.ops) < count:
            weights, makers = zip(*_MAKERS, strict=True)
            self.rng.choices(makers, weights)[0](self)
        stored = {self.pool[-1].tile.name: self.pool[-1]}
        taken = {name for op in self.ops for name in op.ins}
        leaves = [v for v in self.pool[:-1] if v.tile.name not in taken]
        for values, most in ((leaves, 3), (self.pool, self.rng.choice((0, 0, 1)))):
            for value in self.rng.sample(values, min(len(values), self.rng.randint(0, most))):
                stored[value.tile.name] = value
        for value in stored.values():
            dtype = "f32" if self.limits.f32 and self.rng.random() < 0.1 else value.tile.dtype
            out = self.tensor(Role.OUTPUT, (value.width,), dtype)
            self.ops.append(TileOp("store", None, (value.tile.name,), (out.name,), (), source(self.rng, len(self.ops))))
        ops = _live(self.ops)
        used = {name for op in ops for name in op.params}
        tensors = tuple(t for t in self.tensors if t.name in used)
        return Pipeline("random", tensors, (place(self.rng, "s0", ops, tensors, self.limits),))

    def tensor(self, role: Role, shape: tuple[int, ...], dtype: str) -> Tensor:
        made = Tensor.of(f"{role.value}{len(self.tensors)}", role, shape, dtype)
        self.tensors.append(made)
        return made

    def emit(self, kind: str, width: int, ins=(), params=(), dtype: str | None = None, **known) -> _Value:
        attrs = tuple(sorted(known.pop("attrs", {}).items()))
        if dtype is None:
            dtype = "f32" if any(v.tile.dtype == "f32" for v in ins) else self.dtype
        tile = Tile.of(f"t{len(self.ops)}", width, dtype)
        names = tuple(v.tile.name for v in ins)
        self.ops.append(
            TileOp(kind, tile, names, tuple(p.name for p in params), attrs, source(self.rng, len(self.ops)))
        )
        self.pool.append(_Value(tile, **known))
        return self.pool[-1]

    def width(self) -> int:
        if self.rng.random() < 0.6:
            return self.rng.choice([w for w in ODD_WIDTHS if w <= self.limits.max_width])
        return self.rng.randint(1, self.limits.max_width)

    def pick(self, fits: Callable[[_Value], bool] = lambda v: True) -> _Value | None:
        """Mostly the newest tile, so that chains grow; else an early one or one of the last few: skip connections."""
        fitting = [v for v in self.pool[-8:] if fits(v)]
        if not fitting:
            return None
        chance = self.rng.random()
        if chance < 0.55:
            return fitting[-1]
        hub = self.pool[min(len(self.pool) - 1, 3)]
        return hub if chance < 0.75 and fits(hub) else self.rng.choice(fitting)

    def some(self) -> _Value:
        return self.pick() or self.pool[-1]

    def load(self) -> None:
        width = self.width()
        dtype = self.rng.choice(("f32", "f32", self.dtype, "bf16", "f16")) if self.limits.mixed else self.dtype
        tensor = self.tensor(Role.INPUT, (width,), dtype)
        self.emit("load", width, params=(tensor,), dtype=dtype, top=3.0)

    def linear(self) -> None:
        x = self.some()
        if x.tile.dtype != self.dtype:
            x = self.emit("cast", x.width, (x,), dtype=self.dtype, top=x.top, floor=x.floor, lively=x.lively)
        width = self.width()
        params = [self.tensor(Role.PARAMETER, (width, x.width), self.dtype)]
        wide = "f32" if self.limits.f32 else self.dtype
        if self.rng.random() < 0.7:
            params.append(self.tensor(Role.PARAMETER, (width,), self.rng.choice((self.dtype, wide))))
        # Weights are N(0, 1/in): results are about N(0, rms(x)), and rms(x) is about top / 3.
        self.emit("linear", width, (x,), params, top=min(TOP, 1.5 * x.top + 0.5))

    def squash(self) -> None:
        """Activations that take any argument."""
        x = self.some()
        kinds = ("relu", "gelu", "gelu_tanh", "gelu_slope", "silu", "sigmoid", "tanh", "softplus", "neg", "abs")
        kind = self.rng.choice(kinds)
        bounded = kind in ("sigmoid", "tanh", "gelu_slope")
        attrs = {}
        if kind == "softplus" and self.rng.random() < 0.5:
            attrs = {"beta": self.rng.choice((0.5, 1.0, 2.0)), "threshold": self.rng.choice((5.0, 20.0))}
        floor = {"relu": 0.0, "sigmoid": 0.0, "softplus": 0.0, "abs": 0.0}.get(kind)
        top = 1.2 if bounded else min(TOP, x.top + 1.5) if kind == "softplus" else x.top
        self.emit(kind, x.width, (x,), attrs=attrs, top=top, floor=floor, lively=x.lively)

    def wave(self) -> None:
        x = self.pick(lambda v: v.top <= 16)
        if x is not None:
            self.emit(self.rng.choice(("sin", "cos")), x.width, (x,), top=1.0, lively=x.lively)

    def grow(self) -> None:
        if self.rng.random() < 0.5:
            x = self.pick(lambda v: v.top <= 7)
            if x is not None:
                self.emit("square", x.width, (x,), top=x.top**2, floor=0.0, lively=x.lively)
        else:
            x = self.pick(lambda v: v.top <= 4)
            if x is not None:
                kind, floor = self.rng.choice((("exp", 0.0), ("expm1", None)))
                self.emit(kind, x.width, (x,), top=min(TOP, 2.72**x.top), floor=floor, lively=x.lively)

    def positive(self) -> _Value:
        """A tile above ``POSITIVE``, made if there is none."""
        known = self.pick(lambda v: v.positive)
        if known is not None and self.rng.random() < 0.5:
            return known
        x = self.some()
        kind = self.rng.choice(("exp", "softplus", "abs", "square", "sigmoid"))
        if kind in ("exp", "square") and x.top > 4 or kind == "sigmoid":
            x, top = self.emit("sigmoid", x.width, (x,), top=1.0, floor=0.0, lively=x.lively), 1.0
        else:
            top = {"exp": 2.72**x.top, "square": x.top**2}.get(kind, x.top + 1.5)
            x = self.emit(kind, x.width, (x,), top=min(TOP, top), floor=0.0, lively=x.lively)
        c = self.rng.choice((0.5, 1.0, 2.0))
        return self.emit("add", x.width, (x,), attrs={"scalar": c}, top=x.top + c, floor=c, lively=x.lively)

    def guarded(self) -> None:
        x = self.positive()
        assert x.floor is not None
        kind = self.rng.choice(("log", "sqrt", "rsqrt", "reciprocal"))
        top = {"log": 5.0, "sqrt": x.top**0.5 + 1, "rsqrt": x.floor**-0.5, "reciprocal": 1 / x.floor}[kind]
        self.emit(kind, x.width, (x,), top=top, floor=None if kind == "log" else 1 / (x.top + 1), lively=x.lively)

    def cast(self) -> None:
        x = self.some()
        dtype = self.rng.choice(("f32", self.dtype)) if self.limits.f32 else self.dtype
        self.emit("cast", x.width, (x,), dtype=dtype, top=x.top, floor=x.floor, lively=x.lively)

    def binary_scalar(self) -> None:
        x = self.some()
        kind = self.rng.choice(("add", "sub", "mul", "div", "maximum", "minimum"))
        c = self.rng.choice(SCALARS)
        is_reversed = self.rng.random() < 0.3 and (kind != "div" or x.positive)
        attrs: dict[str, float] = {"scalar": c} | ({"reversed": 1} if is_reversed else {})
        top = {"mul": x.top * abs(c), "div": x.top / abs(c)}.get(kind, x.top + abs(c))
        if kind == "div" and is_reversed:
            top = abs(c) / (x.floor or 1)
        floor = None
        if x.floor is not None and c > 0 and not is_reversed:
            floor = {"add": x.floor + c, "mul": x.floor * c, "div": x.floor / c, "minimum": min(x.floor, c)}.get(kind)
        if kind == "maximum" and c > 0:
            floor = max(float(c), x.floor or 0)
        if top <= TOP:
            self.emit(kind, x.width, (x,), attrs=attrs, top=top, floor=floor, lively=x.lively and kind not in _CLAMPS)

    def binary_vector(self) -> None:
        """Vectors lie in 0.5 to 1.5."""
        x = self.some()
        kind = self.rng.choice(("add", "sub", "mul", "div", "maximum", "minimum"))
        is_reversed = self.rng.random() < 0.3 and (kind != "div" or x.positive)
        width = x.width if x.width > 1 else self.width()
        shape = self.rng.choice(((x.width,), (x.width,), (width,), (1,), ()))
        vector = self.tensor(Role.PARAMETER, shape, self.rng.choice((self.dtype, "f32")))
        top = {"mul": x.top * 1.5, "div": x.top * 2}.get(kind, x.top + 1.5)
        if kind == "div" and is_reversed:
            top = 1.5 / (x.floor or 1)
        floor = {"maximum": 0.5}.get(kind)
        if x.floor is not None and not is_reversed:
            floor = {
                "add": x.floor + 0.5,
                "mul": x.floor * 0.5,
                "div": x.floor / 1.5,
                "maximum": max(0.5, x.floor),
            }.get(kind)
        attrs = {"reversed": 1} if is_reversed else {}
        if top <= TOP:
            out = max(x.width, vector.features)
            self.emit(
                kind, out, (x,), (vector,), attrs=attrs, top=top, floor=floor, lively=x.lively and kind not in _CLAMPS
            )

    def binary_tiles(self) -> None:
        kind = self.rng.choice(("add", "add", "sub", "mul", "div", "maximum", "minimum"))
        b = self.positive() if kind == "div" else self.some()
        a = self.pick(lambda v: v.width in (1, b.width) or b.width == 1)
        if a is None or (a is b and kind not in ("add", "mul")):
            return
        top = {"mul": a.top * b.top, "div": a.top / (b.floor or 1)}.get(kind, a.top + b.top)
        floor = None
        if a.floor is not None and b.floor is not None:
            floor = {"add": a.floor + b.floor, "mul": a.floor * b.floor, "maximum": max(a.floor, b.floor)}.get(kind)
        ins, attrs = (a, b), {}
        if self.rng.random() < 0.2:
            ins, attrs = (b, a), {"reversed": 1}
        if top <= TOP:
            lively = (a.lively or b.lively) and kind not in _CLAMPS
            self.emit(kind, max(a.width, b.width), ins, attrs=attrs, top=top, floor=floor, lively=lively)

    def cat(self) -> None:
        parts = [self.some() for _ in range(self.rng.choice((1, 2, 2, 3, 4)))]
        while sum(v.width for v in parts) > self.limits.max_width:
            parts.pop()
        if parts:
            floors = [v.floor for v in parts if v.floor is not None]
            floor = min(floors) if len(floors) == len(parts) else None
            self.emit(
                "cat", sum(v.width for v in parts), parts, top=max(v.top for v in parts), floor=floor, lively=False
            )

    def slice(self) -> None:
        x = self.some()
        start = self.rng.randint(0, x.width - 1)
        stop = self.rng.randint(start + 1, x.width)
        attrs = {"start": start, "stop": stop}
        self.emit("slice", stop - start, (x,), attrs=attrs, top=x.top, floor=x.floor, lively=x.lively)

    def reduce(self) -> None:
        x = self.some()
        kind = self.rng.choice(("sum", "mean", "max"))
        top = x.top * x.width**0.5 if kind == "sum" and x.floor is None else x.top * x.width if kind == "sum" else x.top
        if top <= TOP:
            self.emit(kind, 1, (x,), top=top, floor=x.floor, lively=False)

    def norm(self) -> None:
        x = self.some()
        kind = self.rng.choice(("layer_norm", "rms_norm", "softmax"))
        if kind == "softmax":
            self.emit("softmax", x.width, (x,), top=1.0, floor=0.0, lively=False)
            return
        letters = self.rng.choice(("wb", "wb", "w", "b", "") if kind == "layer_norm" else ("w", "w", ""))
        params = [self.tensor(Role.PARAMETER, (x.width,), self.rng.choice((self.dtype, "f32"))) for _ in letters]
        attrs: dict[str, float | str] = {
            "eps": self.rng.choice((1e-6, 1e-5, 1e-3)) if x.lively and x.width > 7 else 0.1
        }
        if kind == "layer_norm":
            attrs["affine"] = letters
        self.emit(kind, x.width, (x,), params, attrs=attrs, top=6.0)


_CLAMPS = ("maximum", "minimum")
_MAKERS = (
    (5, _Builder.linear),
    (4, _Builder.squash),
    (1, _Builder.wave),
    (1, _Builder.grow),
    (1, _Builder.guarded),
    (0.7, _Builder.cast),
    (2, _Builder.binary_scalar),
    (1.5, _Builder.binary_vector),
    (2.5, _Builder.binary_tiles),
    (1, _Builder.cat),
    (1, _Builder.slice),
    (1, _Builder.reduce),
    (1.5, _Builder.norm),
)


def _live(ops: list[TileOp]) -> tuple[TileOp, ...]:
    """The ops that some store depends on."""
    wanted: set[str] = set()
    kept = []
    for op in reversed(ops):
        if op.out is None or op.out.name in wanted:
            kept.append(op)
            wanted.update(op.ins)
    return tuple(reversed(kept))


def place(
    rng: random.Random, name: str, ops: tuple[TileOp, ...], tensors: tuple[Tensor, ...], limits: Limits, wide: int = 1
) -> Stage:
    """A stage with random replicas, placement and residency; ``wide`` is the widest tile that it takes."""
    weights = sum(
        t.shape[0] * t.features * 2 for t in tensors if len(t.shape) == 2 and any(t.name in op.params for op in ops)
    )
    resident = weights <= limits.resident_bytes and rng.random() < 0.5
    widest = max([wide, *(op.out.features for op in ops if op.out is not None)])
    return Stage.of(
        name,
        ops,
        rng.randint(1, limits.replicas),
        Shard(1) if widest > 256 or rng.random() < 0.25 else Shard(0),
        Residency.RESIDENT if resident else Residency.STREAMED,
        in_flight=1 + len(ops) % 2,
    )
