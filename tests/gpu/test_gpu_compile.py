"""torch.compile(backend="tilestream") end to end on a GPU, against float64 and eager."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import Fn, linear
from torch import Tensor, nn

from tilestream.apps.edge_block import graphcast, meshgraphnets
from tilestream.apps.nerf import NeRF
from tilestream.bench.accuracy import Oracle, repeatable, tensors
from tilestream.plan import margins
from tilestream.run import executable as execution
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.usefixtures("fresh")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def compiled(module: Callable[..., Any], strategy: str = "vertical", **options: Any) -> Callable[..., Any]:
    """Without measuring: so that it is our kernels that run."""
    given = {"target": "cuda", "strategy": strategy, "measure": False, **options}
    return torch.no_grad()(torch.compile(module, backend=tilestream, options=given))


def data(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(s, device="cuda").to(dtype) for s in shapes]


def mlp(dtype: torch.dtype = BF16, *widths: int) -> nn.Sequential:
    widths = widths or (48, 128, 96, 20)
    layers = [m for ins, outs in itertools.pairwise(widths) for m in (nn.Linear(ins, outs), nn.SiLU())]
    return nn.Sequential(*layers[:-1]).to("cuda", dtype)


def check(module: nn.Module, *inputs: Tensor, fast: Callable[..., Any] | None = None, **options: Any) -> None:
    fast = fast or compiled(module, **options)
    judged = Oracle(module, inputs).judge(fast(*inputs))
    assert judged.ok, f"error {judged.error:.2e}, eager's own {judged.eager_error:.2e}"
    assert repeatable(lambda: fast(*inputs))


def strategies() -> list[str]:
    """What ran: the strategy of every region, or why it did not run."""
    return [
        a.problem or ("inductor" if a.plan is None or a.plan.chosen.pipeline is None else a.plan.chosen.strategy)
        for a in prepare.analyses()
    ]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nerf": (NeRF, (63, 27)),
    "meshgraphnets": (meshgraphnets, (128, 128, 128)),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(33, 200), nn.GELU(), nn.LayerNorm(200), nn.Linear(200, 150), nn.SiLU(), nn.Linear(150, 100)
        ),
        (33,),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["vertical", "spatial", "bulk"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", MODELS)
def test_error_is_at_most_twice_eagers(name: str, dtype: torch.dtype, strategy: str):
    make, widths = MODELS[name]
    module = make().to("cuda", dtype)
    check(module, *data(*((3000, w) for w in widths), dtype=dtype), strategy=strategy)
    assert set(strategies()) == {strategy}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["meshgraphnets", "mlp"])
def test_tf32_where_torchs_flag_allows_it(name: str, tf32: None):
    make, widths = MODELS[name]
    check(make().to("cuda"), *data(*((3000, w) for w in widths), dtype=F32))
    assert strategies() == ["vertical"]


@pytest.mark.gpu
def test_no_tf32_where_torchs_flag_does_not_allow_it():
    assert torch.get_float32_matmul_precision() == "highest"
    module = mlp(F32)
    (x,) = data((1000, 48), dtype=F32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_wide_layers():
    check(graphcast().to("cuda", BF16), *data((1000, 512), (1000, 512), (1000, 512)))


@pytest.mark.gpu
def test_the_measured_choice_is_right_whatever_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(margins, "SURE", 0.0)  # Inductor is timed, however clear the prediction
    module = mlp()
    (x,) = data((16384, 48))
    fast = torch.no_grad()(torch.compile(module, backend=tilestream))
    check(module, x, fast=fast)
    (analysis,) = prepare.analyses()
    assert analysis.plan is not None
    assert any(c.measured_us for c in analysis.plan.candidates if c.pipeline is None)


# ---- parts that are not ours


class Graph(nn.Module):
    """Gather by edges, update them, and sum them at the nodes: only the update streams."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = meshgraphnets()
        self.node = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128))

    def forward(self, nodes: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        edges = self.edge(edges, nodes[source], nodes[target])
        sums = torch.zeros_like(nodes).index_add(0, target, edges)
        return nodes + self.node(torch.cat([nodes, sums], -1)), edges


def sorted_between(m: Any, x: Tensor) -> Tensor:
    return m.layers[1](torch.sort(m.layers[0](x).relu(), dim=0).values).tanh()


@pytest.mark.gpu
def test_operators_that_stay_out_run_on_inductor(caplog: pytest.LogCaptureFixture):
    module = Fn(sorted_between, linear(40, 72), linear(72, 24)).to("cuda", BF16)
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(module, *data((777, 40)))
    said = [r.getMessage() for r in caplog.records if "go to Inductor" in r.getMessage()]
    assert len(said) == 1 and "sort" in said[0] and "test_gpu_compile.py" in said[0]
    assert strategies() == ["vertical", "vertical"]


@pytest.mark.gpu
def test_a_graph_network():
    module = Graph().to("cuda", BF16)
    nodes, edges = data((500, 128), (3000, 128))
    source, target = torch.randint(500, (2, 3000), device="cuda")
    fast = compiled(module)
    judged = Oracle(module, (nodes, edges, source, target)).judge(fast(nodes, edges, source, target))
    assert judged.ok, f"error {judged.error:.2e}, eager's own {judged.eager_error:.2e}"
    assert strategies().count("vertical") >= 1


@pytest.mark.gpu
def test_no_region_at_all():
    module = Fn(lambda m, x: torch.cumsum(x, 0).roll(1, 0))
    (x,) = data((300, 9), dtype=F32)
    torch.testing.assert_close(compiled(module)(x), module(x))
    assert prepare.analyses() == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_dtypes_that_are_not_ours(dtype: torch.dtype):
    module = Fn(lambda m, x: torch.relu(x * 3 - 1).sum(-1))
    x = torch.randint(-9, 9, (100, 8), device="cuda").to(dtype)
    assert torch.equal(compiled(module)(x), module(x))


@pytest.mark.gpu
def test_a_training_step_has_regions_both_ways():
    module = mlp()
    (x,) = data((3000, 48))
    found = []
    for function in (torch.compile(module, backend=tilestream, options={"strategy": "vertical"}), module):
        module.zero_grad()
        function(x).float().square().mean().backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0.1, atol=0.02 * want.abs().max().item())
    assert strategies().count("vertical") >= 2


# ---- shapes


@pytest.mark.gpu
def test_a_dynamic_batch_compiles_no_kernel(monkeypatch: pytest.MonkeyPatch):
    from tilestream.cuda import cache

    module = mlp()
    fast = compiled(module)
    for rows in (4096, 100):  # Dynamo makes the batch dynamic when it sees the second
        check(module, *data((rows, 48)), fast=fast)
    kernels = len(cache._memory)
    for rows in (1, 63, 64, 65, 1000, 4095, 5000):
        check(module, *data((rows, 48)), fast=fast)
    assert fast(*data((0, 48))).shape == (0, 20)
    assert len(cache._memory) == kernels
    assert len(execution._executables) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(48,), (1, 48), (3, 5, 48), (2, 1, 65, 48)])
def test_leading_dimensions(shape: tuple[int, ...]):
    check(mlp(), *data(shape))


@pytest.mark.gpu
def test_non_contiguous_and_overlapping_inputs():
    module = Fn(lambda m, x, y, z: m.layers[0](x) * y + z, linear(48, 64)).to("cuda", BF16)
    fast = compiled(module)
    (wide, many, row, window) = data((500, 96), (64, 500), (1, 64), (500 + 63,))
    cases = [
        (wide[:, ::2], many.t(), row.expand(500, 64)),
        (wide[:, 3:51], many.t(), window.as_strided((500, 64), (1, 1))),
        (wide[:, 48:], many.t().contiguous(), row.expand(500, 64).contiguous()),
        (wide.flip(0)[:, :48], many.t().flip(1), window.as_strided((500, 64), (1, 1)).contiguous()),
    ]
    for inputs in cases:
        check(module, *inputs, fast=fast)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["vertical", "bulk"])
def test_a_single_row_that_is_a_column(strategy: str):
    """``x.t()`` is contiguous, and its rows are 2 bytes apart, which no tensor map can say."""
    module = Fn(lambda m, x: m.layers[1](m.layers[0](x.t()).relu()), linear(256, 64), linear(64, 40)).to("cuda", BF16)
    check(module, *data((256, 1)), strategy=strategy)
    assert strategies() == [strategy]


@pytest.mark.gpu
def test_inputs_that_alias_each_other_and_outputs_that_alias_inputs():
    module = Fn(lambda m, x, y: (m.layers[0](x) + y, x, y[:, :8], m.layers[0](y)), linear(48, 48)).to("cuda", BF16)
    fast = compiled(module)
    (x, base) = data((300, 48), (300, 96))
    for a, b in ((x, x), (base[:, :48], base[:, 24:72]), (x, x[:])):
        got, wanted = fast(a, b), module(a, b)
        assert Oracle(module, (a, b)).judge(got).ok
        assert got[1].data_ptr() == a.data_ptr() and got[2].data_ptr() == b.data_ptr()
        assert [g.stride() for g in got] == [w.stride() for w in wanted]
    got = fast(x, x)
    kept = got[0].clone()
    x.zero_()
    assert torch.equal(got[0], kept) and not got[1].any()


def writes(m: Any, x: Tensor) -> Tensor:
    y = m.layers[0](x).relu()
    x.add_(1)
    m.count.add_(1)
    return y + x


@pytest.mark.gpu
def test_inputs_and_buffers_that_the_model_writes():
    module = Fn(writes, linear(48, 48)).to("cuda", BF16)
    module.register_buffer("count", torch.zeros(1, device="cuda"))
    fast = compiled(module)
    (x,) = data((300, 48))
    ours, theirs = x.clone(), x.clone()
    with torch.no_grad():
        for calls in (1, 2, 3):
            torch.testing.assert_close(fast(ours), module(theirs), rtol=0.05, atol=0.05)
            assert torch.equal(ours, theirs)
            assert module.count.item() == 2 * calls


# ---- values


SPECIAL = [float("nan"), float("inf"), float("-inf")]
FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "relu": lambda m, x: m.layers[1](m.layers[0](x).relu()),
    "activations": lambda m, x: (lambda h: (F.gelu(h), F.silu(h), h.sigmoid(), h.tanh(), F.softplus(h)))(
        m.layers[0](x)
    ),
    "clamp": lambda m, x: (lambda h: (h.clamp(-0.5, 0.5), torch.maximum(h, h * 2), h.abs(), -h))(m.layers[0](x)),
    "rows": lambda m, x: (lambda h: (h.sum(-1), h.amax(-1), h.softmax(-1), F.layer_norm(h, (65,))))(m.layers[0](x)),
    "division": lambda m, x: 1 / (m.layers[0](x) * 0) + torch.log(m.layers[0](x) - 1e4) + torch.exp(x.sum(-1, True)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "tf32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_and_infinities_go_where_eagers_go(name: str, dtype: torch.dtype, tf32: None):
    module = Fn(FUNCTIONS[name], linear(41, 65), linear(65, 30)).to("cuda", dtype)
    fast = compiled(module)
    (clean,) = data((200, 41), dtype=dtype)
    x = clean.clone()
    for row, value in zip((3, 64, 199), SPECIAL, strict=True):
        x[row, 7 * row % 41] = value
    x[100, :3] = torch.tensor(SPECIAL, device="cuda")
    touched = torch.tensor([3, 64, 100, 199])
    others = torch.ones(200, dtype=torch.bool).index_fill(0, touched, False)
    with torch.no_grad():
        wanted = tensors(module(x))
    for got, eager, plain in zip(tensors(fast(x)), wanted, tensors(fast(clean)), strict=True):
        assert torch.equal(got.isnan(), eager.isnan())
        assert torch.equal(got.isinf(), eager.isinf())
        assert torch.equal(got[got.isinf()].sign(), eager[eager.isinf()].sign())
        assert torch.equal(got[others.cuda()].nan_to_num(), plain[others.cuda()].nan_to_num())


# ---- graphs, weights, exceptions


@pytest.mark.gpu
def test_a_captured_model_with_parts_on_inductor():
    module = Fn(sorted_between, linear(40, 72), linear(72, 24)).to("cuda", BF16)
    fast = compiled(module)
    (x,) = data((777, 40))
    sets = [data((777, 40))[0] for _ in range(3)]
    wanted = [fast(s).clone() for s in sets]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fast(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast(x)
    for k in range(30):
        x.copy_(sets[k % 3])
        graph.replay()
        assert torch.equal(out, wanted[k % 3])


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["vertical", "spatial"])
def test_the_weights_may_change(strategy: str):
    module = mlp()
    fast, (x,) = compiled(module, strategy=strategy), data((500, 48))
    check(module, x, fast=fast)
    with torch.no_grad():
        module[0].weight.mul_(-2)
        module[2].bias.add_(1)
    check(module, x, fast=fast)
    module[0].weight.data = torch.randn(128, 48, device="cuda").to(BF16) / 7  # at another address
    check(module, x, fast=fast)


@pytest.mark.gpu
def test_after_an_exception_the_next_call_is_right():
    module = mlp()
    fast, (x,) = compiled(module), data((500, 48))
    check(module, x, fast=fast)
    for bad in (x[:, 1:], x.float(), x.cpu()):
        with pytest.raises((RuntimeError, TypeError)):  # torch's own errors, as in eager
            fast(bad)
        check(module, x, fast=fast)


@pytest.mark.gpu
def test_two_streams():
    module = mlp()
    fast = compiled(module, strategy="spatial")
    inputs = data((4000, 48), (4000, 48))
    wanted = [fast(x).clone() for x in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for _ in range(30):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[k].append(fast(inputs[k]))
    torch.cuda.synchronize()
    for k in (0, 1):
        assert all(torch.equal(out, wanted[k]) for out in got[k])
