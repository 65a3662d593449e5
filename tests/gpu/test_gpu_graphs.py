"""CUDA graphs, the user's and our own; a thousand replays, and two streams at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from gpu_pipelines import NAMED
from oracle_runs import assert_same_bits
from random_pipelines import tensors_for
from torch import Tensor

from tilestream import cuda
from tilestream.cuda.launch import CompiledPipeline
from tilestream.ir.pipeline import Role

# One stage with packed weights; rings with a multicast skip; rings and DRAM; DRAM only.
CAPTURED = ("nerf", "spatial_chain", "spatial_multicast", "l2_and_dram", "bulk_odd_f16")
SETS = 7


def data(compiled: CompiledPipeline, rows: int, seed: int) -> dict[str, Tensor]:
    return {k: t.cuda() for k, t in tensors_for(compiled.pipeline, rows, seed).items()}


def inputs(compiled: CompiledPipeline) -> list[str]:
    return [t.name for t in compiled.pipeline.by_role(Role.INPUT)]


@dataclass
class Graph:
    """A captured call: its tensors are replaced in place, its outputs read after ``replay``."""

    compiled: CompiledPipeline
    tensors: dict[str, Tensor]
    rows: int

    def __post_init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.compiled(self.tensors, self.rows)

    def load(self, fresh: dict[str, Tensor], *names: str) -> None:
        for name in names or fresh:
            self.tensors[name].copy_(fresh[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_a_thousand_replays_with_new_data(name: str):
    compiled, rows = cuda.build(NAMED[name]()), 1000
    sets = [data(compiled, rows, seed) for seed in range(SETS)]
    weights = {k: t for k, t in sets[0].items() if k not in inputs(compiled)}
    wanted = [compiled({**s, **weights}, rows) for s in sets]
    graph = Graph(compiled, {k: t.clone() for k, t in sets[0].items()}, rows)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for k in range(1000):
        graph.load(sets[k % SETS], *inputs(compiled))
        for out in graph.out.values():
            out.fill_(float("nan"))
        graph.graph.replay()
        for output, out in graph.out.items():
            wrong += (out != wanted[k % SETS][output]).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert_same_bits(wanted[999 % SETS], graph.out)
    assert_same_bits(
        wanted[0], compiled({**sets[0], **weights}, rows)
    )  # launches and replays do not disturb each other


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_replays_see_weights_changed_in_place(name: str):
    compiled, rows = cuda.build(NAMED[name]()), 300
    one, two = data(compiled, rows, 1), data(compiled, rows, 2)
    graph = Graph(compiled, {k: t.clone() for k, t in one.items()}, rows)
    for tensors in (one, two, one, two):
        graph.load(tensors)
        graph.graph.replay()
        assert_same_bits(compiled(tensors, rows), graph.out)
    first = next(t.name for t in compiled.pipeline.by_role(Role.PARAMETER) if len(t.shape) == 2)
    graph.load(one)
    graph.tensors[first].mul_(-1)
    graph.graph.replay()
    assert_same_bits(compiled({**one, first: -one[first]}, rows), graph.out)
    assert any(not torch.equal(t, graph.out[k]) for k, t in compiled(one, rows).items())


@pytest.mark.gpu
def test_replays_back_to_back_without_waiting():
    """Nothing runs between two replays: the second starts on the flags that the first has left."""
    compiled, rows = cuda.build(NAMED["spatial_chain_tight"]()), 700
    tensors = data(compiled, rows, 3)
    wanted = compiled(tensors, rows)
    graph = Graph(compiled, tensors, rows)
    for _ in range(1000):
        graph.graph.replay()
    assert_same_bits(wanted, graph.out)


@pytest.mark.gpu
def test_a_graph_of_several_calls():
    compiled, rows = cuda.build(NAMED["spatial_multicast"]()), 500
    sets = [data(compiled, rows, seed) for seed in range(4)]
    wanted = [compiled(s, rows) for s in sets]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [compiled(s, rows) for s in sets]
    for _ in range(20):
        graph.replay()
    for one, two in zip(wanted, got, strict=True):
        assert_same_bits(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["spatial_multicast", "spatial_edge_block", "nerf", "l2_and_dram"])
def test_two_streams_at_once(name: str):
    """The same compiled pipeline, with data of its own on each stream: small grids, so that both are resident."""
    compiled, rows = cuda.build(NAMED[name]()), 2000
    sets = [data(compiled, rows, seed) for seed in range(4)]
    wanted = [compiled(s, rows) for s in sets]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got: list[list[dict[str, Tensor]]] = [[], []]
    for _ in range(20):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[k] += [compiled(sets[2 * k], rows), compiled(sets[2 * k + 1], rows)]
    torch.cuda.synchronize()
    for k in (0, 1):
        for call, out in enumerate(got[k]):
            assert_same_bits(wanted[2 * k + call % 2], out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["spatial_multicast", "nerf"])
def test_two_graphs_on_two_streams(name: str):
    compiled, rows = cuda.build(NAMED[name]()), 2000
    sets = [data(compiled, rows, seed) for seed in (0, 1)]
    wanted = [compiled(s, rows) for s in sets]
    graphs = [Graph(compiled, s, rows) for s in sets]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.graph.replay()
    torch.cuda.synchronize()
    for graph, right in zip(graphs, wanted, strict=True):
        assert_same_bits(right, graph.out)


@pytest.mark.gpu
def test_eager_launches_beside_replays():
    compiled, rows = cuda.build(NAMED["spatial_edge_block"]()), 2000
    sets = [data(compiled, rows, seed) for seed in (0, 1)]
    wanted = [compiled(s, rows) for s in sets]
    graph = Graph(compiled, sets[0], rows)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = []
    for _ in range(50):
        with torch.cuda.stream(streams[0]):
            graph.graph.replay()
        with torch.cuda.stream(streams[1]):
            got.append(compiled(sets[1], rows))
    torch.cuda.synchronize()
    assert_same_bits(wanted[0], graph.out)
    for out in got:
        assert_same_bits(wanted[1], out)


@pytest.mark.gpu
def test_capture_before_any_launch():
    """The first call of a freshly built pipeline may be the captured one."""
    from tilestream.cuda import sources
    from tilestream.cuda.cache import compiled as kernel
    from tilestream.cuda.one_launch import Launch
    from tilestream.kernels.families import kernel_of

    pipeline, rows = NAMED["spatial_multicast"](), 300
    device = torch.device("cuda", torch.cuda.current_device())
    fresh = CompiledPipeline(
        pipeline, [Launch(kernel_of(s.pipeline), s, kernel(s), device) for s in sources(pipeline)], device
    )
    tensors = data(fresh, rows, 0)
    graph = Graph(fresh, tensors, rows)
    graph.graph.replay()
    graph.graph.replay()
    assert_same_bits(cuda.build(pipeline)(tensors, rows), graph.out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_calls_at_addresses_that_come_back_are_a_graph(name: str):
    """One by one, then a graph of the launches, which sees data and weights of the moment; on each stream its own."""
    compiled, rows = cuda.build(NAMED[name]()), 300
    sets = [data(compiled, rows, seed) for seed in range(4)]
    wanted = [compiled(s, rows) for s in sets]
    tensors = {k: t.clone() for k, t in sets[0].items()}
    bound = compiled.bind(tensors, rows, tuple(wanted[0]))
    out = {k: torch.empty_like(t) for k, t in wanted[0].items()}
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for fresh, right in zip(sets, wanted, strict=True):
                for k, t in tensors.items():
                    t.copy_(fresh[k])
                for t in out.values():
                    t.fill_(float("nan"))
                bound(tuple(out.values()))
                torch.cuda.synchronize()
                assert_same_bits(right, out)
    assert (len(bound._again._launches), len(bound._again._graphs)) == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_a_capture_of_what_is_a_graph_already(name: str):
    """What a user captures has a workspace of its own, also at addresses that calls outside have used."""
    compiled, rows = cuda.build(NAMED[name]()), 300
    tensors = data(compiled, rows, 5)
    wanted = compiled(tensors, rows)
    bound = compiled.bind(tensors, rows, tuple(wanted))
    out = {k: torch.empty_like(t) for k, t in wanted.items()}
    for _ in range(3):
        bound(tuple(out.values()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(tuple(out.values()))
    for _ in range(5):
        for t in out.values():
            t.fill_(float("nan"))
        graph.replay()
        bound(tuple(out.values()))
    torch.cuda.synchronize()
    assert_same_bits(wanted, out)


@pytest.mark.gpu
def test_graphs_of_addresses_are_given_back():
    """A call whose results lie elsewhere each time keeps few graphs."""
    from tilestream.cuda.launch import KEPT

    compiled, rows = cuda.build(NAMED["nerf"]()), 64
    tensors = data(compiled, rows, 1)
    wanted = compiled(tensors, rows)
    bound = compiled.bind(tensors, rows, tuple(wanted))
    outs = [{k: torch.empty_like(t) for k, t in wanted.items()} for _ in range(3 * KEPT)]
    for out in outs:
        for _ in range(3):
            bound(tuple(out.values()))
        assert len(bound._again._graphs) + len(bound._again._launches) <= KEPT
    torch.cuda.synchronize()
    for out in outs:
        assert_same_bits(wanted, out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chain", "chain_resident", "spatial_chain"])
def test_kernels_that_start_early_read_what_those_in_front_wrote(name: str):
    """Each call takes what the one before made, 8 times over in a graph: bits as of launches one after another."""
    pipeline, rows = NAMED[name](), 9000
    (x,), (y,) = (pipeline.by_role(role) for role in (Role.INPUT, Role.OUTPUT))
    after, early = cuda.build(pipeline), cuda.build(pipeline, dependent=True)
    assert all(launch.dependent for launch in early.launches)
    tensors = data(after, rows, 0)

    def fed_back(compiled: CompiledPipeline) -> Tensor:
        made = tensors[x.name]
        for _ in range(8):
            made = compiled({**tensors, x.name: made}, rows)[y.name]
        return made

    wanted = fed_back(after)
    fed_back(early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fed_back(early)
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)
