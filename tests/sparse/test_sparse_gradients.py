"""Gradients through the loops, held against PyTorch's in float64."""

import logging

import pytest
import torch
from sparse_modules import Call, rand
from torch import nn

from tilestream.apps.sparse import GCN
from tilestream.sparse import compile
from tilestream.sparse.cpu import CpuProgram

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
ADJACENCY = rand(20, 20, density=0.2)


def held(module, loops, *inputs):
    """Gradients of a weighted sum of the output, for the inputs that want one and all parameters."""
    wanted = [x for x in inputs if x.requires_grad] + [x for x in module.parameters() if x.requires_grad]
    made = loops(*inputs)
    weight = rand(*made.shape, seed=9)
    got = torch.autograd.grad((made * weight).sum(), wanted)
    expected = torch.autograd.grad((module(*inputs) * weight).sum(), wanted)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.own, self.last = nn.Linear(7, 6), nn.Linear(7, 6), nn.Linear(6, 3)

    def forward(self, a, x):
        hidden = torch.relu(self.near(a @ x) + self.own(x))
        return torch.sigmoid(self.last(a @ (hidden * 2.0)) / (1.0 + hidden.sum(1, keepdim=True) ** 2))


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_the_backward_pass_of_layers_is_loops(layout):
    module, x = Layers().double(), rand(20, 7, seed=3).requires_grad_()
    given = ADJACENCY.to_sparse(layout=layout), x
    loops = CpuProgram(compile(module, *given), compiled=False)
    assert loops.gradient_by("x", *(n for n, _ in module.named_parameters())) == "loops"
    for _ in range(2):
        held(module, loops, *given)
    with torch.no_grad():
        assert not loops(*given).requires_grad


def test_a_backward_pass_that_is_no_sum_of_products_is_pytorchs_and_said(caplog):
    class Largest(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(7, 6)

        def forward(self, x):
            return self.linear(x).amax(1)

    module, x = Largest().double(), rand(9, 7).requires_grad_()
    loops = CpuProgram(compile(module, x), compiled=False)
    with caplog.at_level(logging.WARNING, "tilestream"):
        held(module, loops, x)
    assert "PyTorch's operators" in caplog.text and "max" in caplog.text


def test_gradients_of_a_sparse_weight_and_of_a_transposed_output():
    w, x = rand(5, 6), rand(6, 4)
    module = Call(lambda w, x: (w @ x).t().exp())
    given = w.requires_grad_(), x.requires_grad_()
    held(module, CpuProgram(compile(module, *given), compiled=False), *given)


def test_training_in_float32_follows_pytorch():
    torch.manual_seed(0)
    module = Layers()
    other = Layers()
    other.load_state_dict(module.state_dict())
    given = ADJACENCY.to_sparse_csr().float(), rand(20, 7).float()
    loops, losses = CpuProgram(compile(module, *given)), {}
    for name, model, call in (("loops", module, loops), ("torch", other, other)):
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        losses[name] = []
        for _ in range(8):
            optimiser.zero_grad()
            loss = (call(*given) - 0.3).square().mean()
            loss.backward()
            optimiser.step()
            losses[name].append(float(loss))
    assert losses["loops"] == pytest.approx(losses["torch"], rel=1e-3) and losses["loops"][-1] < losses["loops"][0]


def test_a_softmax_and_sparse_weights_run_by_pytorch():
    module, x = GCN(features=7, hidden=4, classes=3), rand(20, 7).requires_grad_()
    loops = CpuProgram(compile(module, ADJACENCY.to_sparse_csr(), x), compiled=False)
    held(module, loops, ADJACENCY.to_sparse_csr(), x)
