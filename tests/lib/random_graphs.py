"""Random functions as users write them: odd views, odd inputs, state, breaks. The same one for the same seed.

>>> made = Graph(7)
>>> made(*made.inputs())
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (1, 2, 5, 8, 9, 16)
ROWS = (1, 2, 7, 9, 64, 65)
Step = tuple[Callable[..., Any], tuple[int, ...]]

UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    *(torch.relu, F.elu, F.selu, F.silu, F.gelu, torch.tanh, torch.sigmoid, F.softplus, F.hardswish, F.mish, torch.neg),
    *(torch.abs, lambda x: F.leaky_relu(x, 0.0), lambda x: x * 0.5 + 1, lambda x: 2 - x, lambda x: x.clamp(-1, 0.5)),
    *(lambda x: F.celu(x, 2.0), lambda x: torch.rsqrt(x.abs() + 1), lambda x: x.clone(), lambda x: torch.expm1(x / 4)),
    *(lambda x: x.float(), lambda x: x.bfloat16(), lambda x: x.to(torch.float16), lambda x: x * x.new_tensor(0.5)),
    *(lambda x: torch.where(x > 0, x, x * 0.1), lambda x: x.masked_fill(x < -1, 0), lambda x: x.sin()),
)
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda x: x.t(), lambda x: x.mT, lambda x: x.transpose(0, 1), lambda x: x.transpose(-1, -2).contiguous()),
    *(
        lambda x: x.transpose(0, -1),
        lambda x: x.permute((-1, *range(x.dim() - 1))),
        lambda x: x.unsqueeze(-1),
    ),
    *(lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(1), lambda x: x.unsqueeze(-2), lambda x: x.squeeze()),
    *(lambda x: x.squeeze(-1), lambda x: x.squeeze(0), lambda x: x.flatten(0, 1), lambda x: x.flatten()),
    *(lambda x: x.view(-1, 1), lambda x: x.reshape(1, -1), lambda x: x.view(*x.shape[:-1], 2, -1), lambda x: x[None]),
    *(lambda x: x[:, None], lambda x: x[..., None], lambda x: x.expand(2, *x.shape), lambda x: x[..., 0]),
    *(
        lambda x: x[..., : x.shape[-1] // 2 + 1],
        lambda x: x[..., 1:],
        lambda x: x[1:],
        lambda x: x[::2],
        lambda x: x[0],
    ),
    *(lambda x: x[..., ::2], lambda x: x.chunk(2, -1)[0], lambda x: x.movedim(0, -1), lambda x: x.flip(-1)),
    *(lambda x: x.expand(*x.shape[:-1], 5), lambda x: x.unflatten(0, (-1, 1)), lambda x: x.swapaxes(-2, -1)),
)
ALONG: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda x: x.sum(-1), lambda x: x.mean(-1, keepdim=True), lambda x: x.amax(-1), lambda x: x.amin(-1, True)),
    *(lambda x: x.var(-1, correction=0), lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.softmax(0)),
    *(lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1), lambda x: F.rms_norm(x, x.shape[-1:], eps=0.1)),
    *(lambda x: x.sum(0), lambda x: x.mean(), lambda x: x.cumsum(-1) / 8, lambda x: x.mean(0, keepdim=True)),
    *(lambda x: F.glu(x, -1), lambda x: F.normalize(x, dim=-1, eps=0.1), lambda x: x.sum((-2, -1))),
)
PAIRS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    *(torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, lambda a, b: torch.add(a, b, alpha=0.5)),
    *(lambda a, b: a / (b.abs() + 1), lambda a, b: torch.cat([a, b], -1), lambda a, b: torch.cat([a, b], 0)),
    *(lambda a, b: a @ b.mT / 8, lambda a, b: torch.clamp(a, min=b), lambda a, b: torch.where(a > 0, a, b)),
    *(lambda a, b: a @ b / 4, lambda a, b: torch.addcmul(a, a, b), lambda a, b: a + b.t()),
    *(lambda a, b: torch.stack([a, b], -1), lambda a, b: b.to(a.dtype) * a),
)


def _break(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def _clone(x: Tensor) -> Tensor:
    return x.clone()


def _written(x: Tensor) -> Tensor:
    return x.add_(0.5)


class Graph(nn.Module):
    """A function of ``inputs``; its results are several values, which may be inputs, views of them, or equal."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.seed = seed
        self.dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16))
        self.dynamic = draw.choice((None, None, True, "marked"))
        self.rows = draw.choice(ROWS)
        self.shapes = [self._shape(draw) for _ in range(draw.randint(1, 3))]
        self.forms = [draw.choice(FORMS) for _ in self.shapes]
        self.weights = nn.ParameterList()
        self.register_buffer("state", torch.zeros(()))
        self.steps: list[Step] = []
        self._grow(draw)

    def _shape(self, draw: random.Random) -> tuple[int | None, ...]:
        """``None`` stands for the rows."""
        f = draw.choice(WIDTHS)
        return draw.choice(
            ((None, f), (None, f), (None, f), (2, None, f), (None, 1, f), (1, f), (f,), (), (1, None, f))
        )

    def inputs(self, rows: int = 0) -> list[Tensor]:
        """Fresh inputs, the same numbers, strides and aliases every time."""
        generator = torch.Generator().manual_seed(self.seed)
        made: list[Tensor] = []
        for shape, form in zip(self.shapes, self.forms, strict=True):
            sizes = [(rows or self.rows) if d is None else d for d in shape]
            made.append(form(sizes, self.dtype, generator, made))
        if self.dynamic == "marked":
            for x, shape in zip(made, self.shapes, strict=True):
                if None in shape and x.dim() == len(shape) and self.rows > 1:
                    torch._dynamo.maybe_mark_dynamic(x, shape.index(None))
        return made

    def _grow(self, draw: random.Random) -> None:
        """Draw steps, and keep those that run, give finite numbers, and stay small."""
        values = [*self.inputs()]
        for _ in range(draw.randint(4, 14)):
            step = self._step(draw, values)
            try:
                with torch.no_grad():
                    found = step[0](*(values[i] for i in step[1]))
            except (RuntimeError, IndexError, ValueError, TypeError):
                continue
            if isinstance(found, Tensor) and 0 < found.numel() < 60_000 and bool(found.isfinite().all()):
                values.append(found)
                self.steps.append(step)
        last = len(values) - 1
        self.results = [last, *(draw.randrange(len(values)) for _ in range(draw.randint(0, 2)))]

    def _step(self, draw: random.Random, values: list[Tensor]) -> Step:
        at = draw.randrange(len(values)) if draw.random() < 0.3 else len(values) - 1
        kind = draw.choices(
            ("linear", "unary", "view", "along", "pair", "write", "break", "state", "gather"),
            (6, 3, 6, 2, 4, 0.4, 0.4, 0.3, 0.3),
        )[0]
        if kind == "linear":
            return self._linear(draw, values[at]), (at,)
        if kind == "pair":
            return draw.choice(PAIRS), (at, draw.randrange(len(values)))
        if kind == "write":
            at = draw.randrange(len(self.shapes))
            return _clone if self._shares_elements(at) else _written, (at,)
        choices = {"unary": UNARY, "view": VIEWS, "along": ALONG, "break": (_break,), "gather": (_gather,)}
        return (self._count if kind == "state" else draw.choice(choices[kind])), (at,)

    def _shares_elements(self, index: int) -> bool:
        """Whether elements of an input share memory: what it means to write there is not defined."""
        form = self.forms[0] if self.forms[index] in (_alias, _same) else self.forms[index]
        return form in (_overlapping, _expanded)

    def _linear(self, draw: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
        width = x.shape[-1] if x.dim() else 1
        shared = [i for i, w in enumerate(self.weights) if w.shape[1] == width and w.dtype == x.dtype]
        if shared and draw.random() < 0.4:
            index = draw.choice(shared)
        else:
            generator = torch.Generator().manual_seed(draw.randrange(10**6))
            weight = torch.randn(draw.choice(WIDTHS), width, generator=generator) / width**0.5
            index = len(self.weights)
            self.weights.append(nn.Parameter(weight.to(x.dtype), requires_grad=False))
        if draw.random() < 0.3:
            return lambda x: x @ self.weights[index].t()
        bias = self.weights[index][:, 0] if draw.random() < 0.4 else None
        return lambda x: F.linear(x, self.weights[index], bias)

    def _count(self, x: Tensor) -> Tensor:
        self.state.add_(1)
        return x * self.state.to(x.dtype)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        values = list(inputs)
        for function, operands in self.steps:
            values.append(function(*(values[i] for i in operands)))
        return [values[i] for i in self.results]


def _gather(x: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0] - 1, -1, -1)]


def _dense(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.randn(sizes, generator=g).to(dtype)


def _strided(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.randn([2 * s for s in sizes], generator=g).to(dtype)[tuple(slice(None, None, 2) for _ in sizes)]


def _transposed(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.randn(sizes[::-1], generator=g).to(dtype).permute(tuple(reversed(range(len(sizes)))))


def _expanded(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.randn([1, *sizes[1:]], generator=g).to(dtype).expand(sizes) if sizes else _dense(sizes, dtype, g, _)


def _overlapping(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.randn(sum(sizes) + 1, generator=g).to(dtype).as_strided(sizes, [1] * len(sizes))


def _alias(sizes: list[int], dtype: torch.dtype, g: torch.Generator, made: list[Tensor]) -> Tensor:
    return made[0][..., :1] if made and made[0].dim() else _dense(sizes, dtype, g, made)


def _same(sizes: list[int], dtype: torch.dtype, g: torch.Generator, made: list[Tensor]) -> Tensor:
    return made[0] if made else _dense(sizes, dtype, g, made)


def _integers(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.randint(-3, 4, sizes, generator=g)


def _booleans(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.rand(sizes, generator=g) > 0.5


def _wide(sizes: list[int], dtype: torch.dtype, g: torch.Generator, _: list[Tensor]) -> Tensor:
    return torch.randn(sizes, generator=g)


FORMS: tuple[Callable[[list[int], torch.dtype, torch.Generator, list[Tensor]], Tensor], ...] = (
    *(_dense, _dense, _dense, _dense, _strided, _transposed, _expanded, _overlapping, _alias, _same),
    *(_integers, _booleans, _wide),
)
