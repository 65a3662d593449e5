"""The kernels that sort edges by node, compiled by g++ and run with threads: against torch's stable sort."""

from __future__ import annotations

import faulthandler
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sorted_keys_on_host import THREADS, OnHost
from torch import Tensor

from tilestream.cuda import sorted_keys
from tilestream.cuda.host.build import Mutation
from tilestream.graph.rewrites import operators
from tilestream.graph.rewrites.operators import DROPPED, busy_words

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Results begin as large numbers: memory that was freed just before holds what another test has sorted rightly."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    return OnHost(tmp_path_factory.mktemp("sorted_keys"))


def segments(index: Tensor, nodes: int, **how: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As ``device_ops`` has it on a GPU."""
    busy = torch.empty(busy_words(len(index)), dtype=torch.int32)
    return *sorted_keys.segments(index, nodes, busy, **how), busy


def listed(busy: Tensor) -> dict[int, int]:
    """Of each node that is summed in pieces how many; every one of them is there."""
    count = int(busy[0])
    items = [(int(node), int(which) >> 16, int(which) & 0xFFFF) for node, which in busy[1 : 1 + 2 * count].view(-1, 2)]
    pieces = {node: many for node, _, many in items}
    assert sorted(items) == [(node, k, many) for node, many in sorted(pieces.items()) for k in range(many)]
    return pieces


def check(index: Tensor, nodes: int) -> None:
    order, starts, busy = segments(index, nodes)
    to = torch.where(index < 0, index + nodes, index).long()
    assert torch.equal(order.long(), to.sort(stable=True).indices)
    counts = torch.bincount(to, minlength=nodes)
    assert torch.equal(starts.long(), torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    assert listed(busy) == {n: -(-int(counts[n]) // 256) for n in (counts > 64).nonzero().flatten().tolist()}
    assert order.dtype == starts.dtype == busy.dtype == torch.int32


def mesh(edges: int, nodes: int, busy: int = 0) -> Tensor:
    """``busy`` edges of the last node but one, among all others."""
    torch.manual_seed(edges)
    index = torch.randint(max(1, nodes), (edges,))
    index[torch.randperm(edges)[:busy]] = max(0, nodes - 2)
    return index


TILE = 16 * THREADS
CASES = [
    *((1, 1), (2, 2), (33, 5), (TILE, 70), (TILE + 1, 1025), (3 * TILE - 7, 1024), (5 * TILE + 5, 300)),
    *((100, 9000), (100, 5000)),  # a search for each node; gaps that a warp writes
]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("edges", "nodes"), CASES)
@pytest.mark.every(3)
def test_sorted(edges: int, nodes: int, few: bool, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host.use(monkeypatch, few)
    check(mesh(edges, nodes, edges // 3), nodes)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("edges", "nodes"), [(1000, 7), (100, 9000), (3 * TILE - 7, 1024)])
def test_dropped(edges: int, nodes: int, few: bool, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges of no node lie behind the others, as they came, and are in no list of busy nodes."""
    on_host.use(monkeypatch, few)
    assert sorted_keys.DROPPED == DROPPED
    for share in (0, 4, 1):
        index = mesh(edges, nodes, edges // 3)
        index[torch.arange(edges) % 4 < share] = DROPPED
        order, starts, busy = segments(index, nodes, wraps=False, drops=True)
        wanted = operators.segments(index, nodes, wraps=False, drops=True)
        assert torch.equal(order, wanted[0]) and torch.equal(starts, wanted[1])
        counts = torch.bincount(index[index >= 0], minlength=nodes)
        assert listed(busy) == {n: -(-int(counts[n]) // 256) for n in (counts > 64).nonzero().flatten().tolist()}
    assert int(starts[-1]) == int((index >= 0).sum())


@pytest.mark.parametrize("few", [False, True])
def test_lists_of_all_kinds(few: bool, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """int32, negative, with steps between them, all equal, backwards, sorted already, and none."""
    on_host.use(monkeypatch, few)
    index, nodes = mesh(1000, 50, 300), 50
    check(index.int(), nodes)
    check(index - torch.randint(2, (1000,)) * nodes, nodes)
    check(torch.stack([index, index], 1)[:, 1], nodes)
    check(torch.full((2600,), 7), nodes)
    check(torch.arange(nodes * 20).flip(0) // 20, nodes)
    on_host.launched.clear()
    check((torch.arange(nodes * 20) // 20).int(), nodes)
    check(torch.tensor([3, 90]), 120)
    assert on_host.launched == (["count", "scatter", "starts"] * 2 if not few else ["few"] * 2)
    order, starts, busy = segments(index[:0], 3)
    assert len(order) == 0 and starts.tolist() == [0, 0, 0, 0] and busy.tolist() == [0]


@pytest.mark.parametrize("passes", [3, 4])
def test_several_passes(passes: int, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host.use(monkeypatch)
    monkeypatch.setattr(sorted_keys, "MOST_BITS", -(-11 // passes))
    on_host.launched.clear()
    check(mesh(1500, 1100, 200), 1100)
    assert on_host.launched.count("scatter") == passes


def test_digits() -> None:
    """As few passes as can be, of like size."""
    wanted = {1: (1, 1), 2: (1, 1), 1024: (10, 1), 1025: (6, 2), 100_000: (9, 2), 1 << 20: (10, 2), 2**31 - 1: (8, 4)}
    assert {nodes: sorted_keys.digits_of(nodes) for nodes in wanted} == wanted


def test_more_edges_than_posts_hold(on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host.use(monkeypatch)
    monkeypatch.setattr(sorted_keys, "MOST_EDGES", 100)
    check(mesh(500, 40, 100) - 40, 40)
    assert on_host.launched[-1] == "starts"
    with pytest.raises(RuntimeError, match="names no row"):
        segments(mesh(500, 40), 39)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("bad", [5, -6, 2**32])
def test_an_index_that_is_no_node(bad: int, few: bool, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends, as torch's own assertion does; what it leaves says which index it was."""
    on_host.use(monkeypatch, few)
    record = sorted_keys.node_record()
    record.words.share_memory_()
    monkeypatch.setattr(sorted_keys, "_record", lambda _: record)
    child = os.fork()
    if child == 0:
        segments(torch.tensor([0, bad, 1]), 5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert f"the index of row 1 of a sum of rows by their indices is {bad}, and the sum has 5" in str(record.error())


@pytest.mark.parametrize("launch", ["count", "few", "picked"])
def test_an_index_below_zero_where_it_is_no_node(launch: str, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host.use(monkeypatch, launch == "few")
    record = sorted_keys.node_record()
    record.words.share_memory_()
    monkeypatch.setattr(sorted_keys, "_record", lambda _: record)
    index, busy = torch.tensor([0, -1, 1]), torch.empty(busy_words(3), dtype=torch.int32)
    child = os.fork()
    if child == 0:
        if launch == "picked":
            sorted_keys.picked(index, torch.arange(3, dtype=torch.int32), 5, wraps=False)
        else:
            sorted_keys.segments(index, 5, busy, wraps=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert "the index of row 1 of a sum of rows by their indices is -1, and the sum has 5" in str(record.error())


@pytest.mark.parametrize("edges", [1, 3000])
def test_another_index_in_sorted_order(edges: int, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host.use(monkeypatch, False)
    order, index = torch.randperm(edges).int(), torch.randint(-7, 7, (edges,))
    for given in (index, index.int()):
        got = sorted_keys.picked(given, order, 7)
        assert got.dtype == torch.int32 and torch.equal(got, (index % 7)[order.long()].int())


MUTANTS = {
    "not stable": ("place[k] = before + in_front;", "place[k] = before + lanes::ones(same) - 1 - in_front;"),
    "tiles in front": ("if (there) found += words[k] & COUNT, --at;", "if (there) --at;"),
    "the first warp's place": ("    total += own[warp];\n", "    total += own[warp] & 0;\n"),
    "nodes without edges": (
        "if (!p.by_node) fill(p.starts, before[k] + 1, here[k], at);",
        "if (here[k] >= 0) p.starts[here[k]] = at;",
    ),
    "what descends is sorted already": ("if (down) lanes::add32(descends, 1);", ""),
}


@pytest.mark.parametrize("what", MUTANTS)
@pytest.mark.every(2)
def test_mutants_show(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = OnHost(tmp_path, Mutation("sorted_keys.cuh", *MUTANTS[what]))
    mutant.use(monkeypatch)
    child = os.fork()  # a mutant may write anywhere
    if child == 0:
        faulthandler.disable()
        try:
            check(mesh(1500, 1100, 200), 1100)
        except AssertionError:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
