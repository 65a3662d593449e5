"""The oracle of ``check``: models with state, with casts; what is written counts like what is returned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tilestream.bench import accuracy
from tilestream.graph.state import State
from tilestream.run import oracle


class Stateful(nn.Module):
    """Writes to its input, a buffer in place, a buffer by rebinding, a tensor and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.loose = torch.zeros(())
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        self.loose.add_(1)
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        y = self.layer(x) * self.count * self.calls * self.loose + self.mean
        x.add_(1)
        return y


@pytest.fixture
def inputs() -> tuple[Tensor]:
    return (torch.randn(9, 8)[:, ::2],)


def test_a_stateful_model_starts_every_run_from_the_same_state(inputs: tuple[Tensor]) -> None:
    module, before = Stateful(), inputs[0].clone()
    judge = accuracy.Oracle(module, inputs)
    assert module.calls == 0 and module.count == 0 and torch.equal(inputs[0], before)
    for _ in range(2):
        assert judge.check(lambda: module(*inputs)).ok
    assert judge.repeatable(lambda: module(*inputs))
    assert not accuracy.repeatable(lambda: module(*inputs))  # this one restores nothing


def test_what_is_written_is_judged(inputs: tuple[Tensor]) -> None:
    module = Stateful()
    judge = accuracy.Oracle(module, inputs)
    for spoil in (lambda: inputs[0].add_(0.1), lambda: module.count.add_(1), lambda: module.mean.mul_(2)):
        assert not judge.check(lambda f=spoil: (module(*inputs), f())[0]).ok


def test_state_is_restored_where_inputs_share_memory() -> None:
    base = torch.randn(9)
    shared = (base, base[2:5], base.as_strided((3, 3), (1, 1)), torch.randn(1, 4).expand(3, 4))
    before = [x.clone() for x in shared]
    state = State(nn.Identity(), shared)
    base.zero_()
    assert state.written() == ("input 0", "input 1", "input 2")
    state.restore()
    assert state.written() == () and all(torch.equal(a, b) for a, b in zip(shared, before, strict=True))


class Casting(nn.Module):
    """A bf16 net under a float32 layer, with every kind of cast."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x.to(torch.bfloat16)).float()
        scale = torch.ones(4, dtype=torch.bfloat16).type_as(h) + torch.zeros(4)
        return self.head(h.softmax(-1, dtype=torch.float32) * scale + h.half().to(h.dtype))


def test_casts_do_not_break_or_round_the_float64_run() -> None:
    module, x = Casting(), torch.randn(9, 4)
    judge = accuracy.Oracle(module, (x,))
    (exact,) = judge.exact
    assert exact.dtype == torch.float64 and judge.check(lambda: module(x)).ok
    weights = [p.double() for p in module.parameters()]
    h = torch.nn.functional.linear(x.double(), *weights[:2])
    want = torch.nn.functional.linear(h.softmax(-1) + h, *weights[2:])
    torch.testing.assert_close(exact, want, rtol=1e-12, atol=1e-12)


def test_float64_widens_what_is_made_inside_and_keeps_what_is_written_in_place() -> None:
    x, buffer = torch.randn(3, dtype=torch.bfloat16), torch.zeros(3)
    with oracle.Float64():
        made = torch.mv(torch.ones(3, 3), x)
        buffer.add_(made)
        view = buffer[1:]
    assert made.dtype == torch.float64 and buffer.dtype == torch.float32
    assert view.data_ptr() == buffer[1:].data_ptr() and torch.equal(buffer, made.float())
