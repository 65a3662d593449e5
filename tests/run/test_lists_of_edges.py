"""Graph layers over lists as users have them: any order, type, stride and length, changed between calls, or wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_messages_training import Step
from torch import Tensor, nn

from tilestream.errors import InputError
from tilestream.plan import messages
from tilestream.run import oracle
from tilestream.run.backend import tilestream

NODES, EDGES, WIDTH = 50, 400, 16
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = [pytest.mark.usefixtures("fresh", "small"), pytest.mark.parametrize("device", DEVICES)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of few rows pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


class Layer(nn.Module):
    """A network of messages of ``how``, twice over the same edges: a softmax's sums, means, sums or maxima."""

    def __init__(self, how: str, width: int = WIDTH) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            x = torch.tanh(self.summed(layer(x), edges[0], edges[1]) + layer(x))
        return x

    def summed(self, h: Tensor, sender: Tensor, receiver: Tensor) -> Tensor:
        nodes, messages = len(h), h[sender]
        zeros = torch.zeros_like(h)
        wide = receiver.long()[:, None].expand_as(messages)
        if self.how == "sum":
            return zeros.index_add(0, receiver, messages)
        if self.how == "put":
            return zeros.index_put((receiver.long(),), messages, accumulate=True)
        if self.how in ("mean", "amax", "amin"):
            return zeros.scatter_reduce(0, wide, messages, self.how, include_self=False)
        score = (messages * h[receiver]).sum(-1)
        most = score.new_zeros(nodes).scatter_reduce(0, receiver.long(), score.detach(), "amax", include_self=False)
        share = torch.exp(score - most[receiver])
        total = score.new_zeros(nodes).index_add(0, receiver, share)
        return zeros.index_add(0, receiver, messages * (share / total[receiver])[:, None])


HOW = ["sum", "put", "mean", "amax", "softmax"]


def drawn(device: str, edges: int = EDGES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features, and edges with repeated ones and loops among them; the last nodes have none."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(NODES, WIDTH, generator=random)
    return x.to(device), torch.randint(NODES - 5, (2, edges), generator=random).to(device)


def compiled(module: nn.Module, device: str, dynamic: bool | None = None, keep: bool = False) -> Callable[..., Any]:
    """On a CPU the graphs that the compiler makes, operator by operator."""
    if device == "cpu":
        return Step(module, dynamic)
    return torch.compile(module, backend=tilestream, options={"measure": False, "keep_lists": keep}, dynamic=dynamic)


def values(function: Callable[..., Tensor], module: nn.Module, x: Tensor, edges: Tensor) -> list[Tensor]:
    """The result, and the gradients of the features and all parameters."""
    module.zero_grad(set_to_none=True)
    given = x.detach().requires_grad_()
    y = function(given, edges)
    (y * torch.cos(y.detach())).sum().backward()
    return [y.detach(), *(p.grad for p in (given, *module.parameters()) if p.grad is not None)]


def check(function: Callable[..., Tensor], module: nn.Module, x: Tensor, edges: Tensor) -> None:
    """Without and with gradients as near to float64 as eager, and the same bits twice."""
    wide = copy.deepcopy(module).double()
    exact, eager = values(wide, wide, x.double(), edges), values(module, module, x, edges)
    got, again = values(function, module, x, edges), values(function, module, x, edges)
    with torch.no_grad():
        got.append(function(x, edges))
    for ours, theirs, wanted in zip(got, [*eager, eager[0]], [*exact, exact[0]], strict=True):
        assert oracle.error(ours, wanted) <= 2 * oracle.error(theirs, wanted) + 1e-6
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=False))


def strided(edges: Tensor) -> Tensor:
    return torch.stack([edges, edges], dim=-1)[..., 0]


def of_pairs(edges: Tensor) -> Tensor:
    return edges.t().contiguous().t()


def in_order(edges: Tensor) -> Tensor:
    return edges[:, torch.argsort(edges[1], stable=True)]


def backwards(edges: Tensor) -> Tensor:
    return in_order(edges).flip(1)


def to_one(edges: Tensor) -> Tensor:
    return torch.stack([edges[0], torch.full_like(edges[1], 7)])


LISTS = [torch.Tensor.int, strided, of_pairs, in_order, backwards, to_one]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.every(3)
def test_every_way_to_add_up(how: str, device: str) -> None:
    module = Layer(how).to(device)
    check(compiled(module, device), module, *drawn(device))


@pytest.mark.parametrize("change", LISTS, ids=lambda f: f.__name__)
@pytest.mark.every(3)
def test_lists_of_any_type_stride_and_order(change: Callable[[Tensor], Tensor], device: str) -> None:
    module = Layer("sum").to(device)
    x, edges = drawn(device)
    check(compiled(module, device), module, x, change(edges))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.every(3)
def test_no_edges(how: str, device: str) -> None:
    module = Layer(how).to(device)
    x, edges = drawn(device, 0)
    check(compiled(module, device), module, x, edges)


def test_numbers_of_edges_that_change(device: str) -> None:
    module = Layer("mean").to(device)
    function = compiled(module, device, dynamic=True)
    for k, edges in enumerate((EDGES, 77, 1, 0, 900)):
        check(function, module, *drawn(device, edges, seed=k))


def _copied(edges: Tensor, other: Tensor) -> None:
    edges.copy_(other)


def _by_data(edges: Tensor, other: Tensor) -> None:
    edges.data.copy_(other)


def _by_view(edges: Tensor, other: Tensor) -> None:
    edges[1:].copy_(other[1:])


@pytest.mark.parametrize("write", [_copied, _by_data, _by_view])
@pytest.mark.every(3)
def test_a_list_that_changes_in_place_between_calls(write: Callable[[Tensor, Tensor], None], device: str) -> None:
    """By ``data`` a tensor's version stays as it was, and lists are kept for who asks, and does not write so."""
    module = Layer("sum").to(device)
    x, edges = drawn(device)
    function = compiled(module, device, keep=write is not _by_data)
    for seed in range(3):
        write(edges, drawn(device, seed=seed + 1)[1])
        check(function, module, x, edges)


class Held(nn.Module):
    """A layer that holds its graph, and changes it itself."""

    def __init__(self, layer: nn.Module, edges: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        before = self.layer(x, self.edges)
        self.edges.copy_(other)
        return before + self.layer(x, self.edges)


def test_a_list_that_the_model_changes(device: str) -> None:
    layer = Layer("sum").to(device)
    x, edges = drawn(device)
    module = Held(layer, edges.clone())
    function = compiled(module, device)
    for seed in range(3):
        other = drawn(device, seed=seed)[1]
        with torch.no_grad():
            module.edges.copy_(edges)
            wanted = module(x, other)
            module.edges.copy_(edges)
            got = function(x, other)
        assert torch.equal(module.edges, other)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("bad", [NODES, -1, 2**31])
@pytest.mark.every(3)
def test_an_index_that_is_no_node_is_refused(bad: int, device: str) -> None:
    """As eager does; on a GPU that ends the context: ``test_gpu_messages`` tries it in processes of its own."""
    if device == "cuda":
        pytest.skip("ends the context")
    module = Layer("sum")
    x, edges = drawn(device)
    edges[1, 5] = bad
    function = compiled(module, device)
    with pytest.raises((RuntimeError, IndexError)):
        values(module, module, x, edges)
    with pytest.raises((InputError, RuntimeError, IndexError)):
        values(function, module, x, edges)


def test_negative_indices_count_from_the_last_node_where_eagers_do(device: str) -> None:
    module = Layer("put").to(device)
    x, edges = drawn(device)
    edges[:, 1::3] -= NODES
    check(compiled(module, device), module, x, edges)


class Ends(nn.Module):
    """Rows of senders, and of receivers, to receivers, each as its name says."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.ways, self.first = ways, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        senders, receivers = edges[0], edges[1]
        messages = h.index_select(0, senders) if "select senders" in self.ways else h[senders]
        if "select receivers" in self.ways:
            messages = messages * h.index_select(0, edges[1])  # the same row of the list, taken anew
        zeros = torch.zeros_like(h)
        if "add" in self.ways:
            return zeros.index_add(0, receivers, messages)
        if "scatter" in self.ways:
            return zeros.scatter_add(0, receivers.view(-1, 1).expand_as(messages), messages)
        return zeros.index_put((receivers,), messages, accumulate=True)


WRONG = [(("add",), 1), (("scatter",), 1), (("select senders",), 0), (("select receivers",), 1)]


@pytest.mark.parametrize(("ways", "end"), WRONG)
@pytest.mark.every(3)
def test_negative_indices_are_refused_where_eager_refuses_them(ways: tuple[str, ...], end: int, device: str) -> None:
    if device == "cuda":
        pytest.skip("ends the context: test_gpu_messages")
    module, (x, edges) = Ends(*ways), drawn(device)
    edges[end, 3] -= NODES
    with pytest.raises((RuntimeError, IndexError)):
        module(x, edges)
    fast = torch.compile(module, backend=tilestream, options={"target": "reference"})
    with torch.no_grad(), pytest.raises(InputError, match="outside of its 50 rows"):
        fast(x, edges)
    edges[end, 3] += NODES
    edges[1 - end, 3] -= NODES  # the other end counts them from the last node
    check(compiled(module, device), module, x, edges)


def rows_of_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def one_for_all(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


@pytest.mark.parametrize("change", [rows_of_columns, one_for_all], ids=lambda f: f.__name__)
@pytest.mark.every(2)
def test_features_of_any_stride(change: Callable[[Tensor], Tensor], device: str) -> None:
    module = Layer("softmax").to(device)
    x, edges = drawn(device)
    check(compiled(module, device), module, change(x), edges)


@pytest.mark.parametrize("how", ["sum", "amax", "mean"])
def test_a_bad_number_stays_at_its_receivers(how: str, device: str) -> None:
    module = Layer(how).to(device)
    x, edges = drawn(device)
    x[3, 2] = float("nan")
    with torch.no_grad():
        wanted, got = module(x, edges), compiled(module, device)(x, edges)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert not wanted.isnan().all()


def test_doubles_are_doubles(device: str) -> None:
    module = Layer("mean").to(device).double()
    x, edges = drawn(device)
    got, wanted = (values(f, module, x.double(), edges) for f in (compiled(module, device), module))
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_a_list_that_changes_between_replays(device: str) -> None:
    """Of a CUDA graph: written by a copy, and by a graph of its own, which leaves the tensor's version as it was."""
    if device == "cpu":
        pytest.skip("CUDA graphs")
    module = Layer("sum").to(device)
    x, edges = drawn(device)
    function = compiled(module, device)
    source = edges.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(2):
            function(x, edges)
    torch.cuda.current_stream().wait_stream(side)
    graph, writes = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = function(x, edges)
    with torch.cuda.graph(writes):
        edges.copy_(source)
    for seed in range(4):
        other = drawn(device, seed=seed + 5)[1]
        if seed % 2:
            source.copy_(other)
            writes.replay()
        else:
            edges.copy_(other)
        graph.replay()
        with torch.no_grad():
            torch.testing.assert_close(got, module(x, other))
            torch.testing.assert_close(function(x, edges), module(x, other))  # outside of the graph
