"""Interactions in graphs: which are found, what takes their place, and that it computes the same."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_regions import trace
from interactions import Case, Recommender, inputs
from on_reference import compiled
from places import DOCS
from streamed import eagerly
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from tilestream import devices
from tilestream.errors import OptionError, PlanError
from tilestream.graph.capture import boxed, capture
from tilestream.graph.interaction import (
    INTERACTION,
    INTERACTION_BACKWARD,
    Interaction,
    find_interactions,
    place,
    unpadded,
)
from tilestream.graph.interaction.op import interaction
from tilestream.graph.rewrites.operators import PADDED
from tilestream.options import Options, parse
from tilestream.plan import chooser
from tilestream.plan.analyse import analyse
from tilestream.plan.cache import store_sealed
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.interaction import INTERACTIONS, Kind, Sizes, kind_of, library, ours
from tilestream.run import epilogues, fallback, inductor, oracle, replacements
from tilestream.run import timing as clocks
from tilestream.run import trials as timing
from tilestream.run.target import Target
from tilestream.run.timer import Timer

DLRM = Sizes(32768, 27, 128, 351, 0, 26)


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def placed(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[fx.GraphModule, list[Interaction], Tensor]:
    """The inference graph of a module with operators of ours, what they are for, and what it computes."""
    kept: list[tuple[fx.GraphModule, list[Interaction]]] = []

    def backend(graph: fx.GraphModule, _: object) -> Any:
        sites = find_interactions(graph.graph)
        for site in sites:
            place(graph, site)
        kept.append((graph, sites))
        return boxed(fx.Interpreter(graph).boxed_run)

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(module, backend=aot_autograd(fw_compiler=backend, inference_compiler=backend))(*given)
    ((graph, sites),) = kept
    return graph, sites, result


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("how", ["stack", "cat", "block", "bags"])
@pytest.mark.every(3)
def test_ways_to_join_vectors(how: str, alone: bool) -> None:
    module, given = Recommender(how, alone).bfloat16(), inputs(37)
    graph, (site,), result = placed(module, given)
    assert len(site.vectors) == 5 and sum(v.index is not None for v in site.vectors) == 4
    assert site.head == (-1 if alone else 0)
    assert len(calls(graph.graph, INTERACTION)) == 1
    assert not {str(n.target) for n in graph.graph.nodes} & {"aten.bmm.default", "aten.embedding.default"}
    assert torch.equal(result, module(*given))


def test_bags_of_several_are_rows_that_are_there() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.EmbeddingBag(30, 16, mode="sum"), nn.EmbeddingBag(30, 16, mode="sum")

        def forward(self, x: Tensor, bags: Tensor, i: Tensor, j: Tensor) -> Tensor:
            z = torch.stack([x, self.one(bags), self.two(bags)], 1)
            return torch.bmm(z, z.transpose(1, 2))[:, i, j]

    module = Bags().bfloat16()
    given = torch.randn(9, 16).bfloat16(), torch.randint(30, (9, 3)), torch.tensor([1, 2]), torch.tensor([0, 2])
    _, (site,), result = placed(module, given)
    assert all(v.index is None for v in site.vectors)
    assert torch.equal(result, module(*given))


class Others(nn.Module):
    """What is no interaction, or none that kernels take."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if self.what == "other factors":
            return torch.bmm(z, (z + 1).transpose(1, 2))[:, i, j]
        if self.what == "not turned":
            return torch.bmm(z, z)[:, i, j]
        if self.what == "samples too":
            return torch.bmm(z, z.transpose(1, 2))[i, i, j]
        return torch.bmm(z, z.transpose(1, 2))[:, i, j]


@pytest.mark.parametrize(
    ("what", "shape", "dtype"),
    [
        ("other factors", (9, 4, 16), torch.bfloat16),
        ("not turned", (9, 16, 16), torch.bfloat16),
        ("samples too", (9, 4, 16), torch.bfloat16),
        ("fp32", (9, 4, 16), torch.float32),
        ("odd features", (9, 4, 12), torch.bfloat16),
        ("wide features", (9, 4, 264), torch.bfloat16),
        ("many vectors", (9, 65, 16), torch.bfloat16),
    ],
)
def test_others_are_left_alone(what: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    graph = trace(Others(what), (torch.randn(shape).to(dtype), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0])))
    assert not find_interactions(graph.graph)


def test_vectors_that_are_there_are_taken() -> None:
    """The same factors as above, of a shape and dtype that kernels take."""
    given = torch.randn(9, 4, 16).bfloat16(), torch.tensor([1, 2, 3, -1]), torch.tensor([0, 1, 0, 3])
    graph = trace(Others(""), given)
    for site in find_interactions(graph.graph):
        place(graph, site)
    assert len(calls(graph.graph, INTERACTION)) == 1
    assert torch.equal(graph(*given)[0], Others("")(*given))


def test_a_wide_layer_reads_the_padded_rows() -> None:
    """Three products are padded to eight: the layer behind them takes 24 columns, and only its weight is copied."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(19, 512)

        def forward(self, z: Tensor, i: Tensor, j: Tensor) -> Tensor:
            x = z[:, 0]
            z = torch.stack([x, z[:, 1], z[:, 2]], 1)
            return torch.relu(self.top(torch.cat([x, torch.bmm(z, z.transpose(1, 2))[:, i, j]], 1)))

    module = Wide().bfloat16()
    given = torch.randn(9, 3, 16).bfloat16(), torch.tensor([1, 2, 2]), torch.tensor([0, 0, 1])
    graph, _, _ = placed(module, given)
    (call,) = calls(graph.graph, INTERACTION)
    assert call.meta["val"].shape == (9, 24)
    assert all(unpadded(user) is call for user in call.users)
    assert epilogues.fuse(graph, {}) == 1
    (pad,) = calls(graph.graph, PADDED)
    (weight,) = pad.args[0]  # pyright: ignore
    assert weight.meta["val"].shape == (512, 19)
    assert calls(graph.graph, torch.ops.aten._addmm_activation.default)[0].args[1] is call


# -- in torch.compile


@pytest.fixture
def quick(fresh: None, monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Graphs run operator by operator, and are kept."""
    kept: list[fx.GraphModule] = []

    def kept_and_run(graph: fx.GraphModule, *args: Any) -> Any:
        kept.append(graph)
        return eagerly(graph, *args)

    monkeypatch.setattr(inductor, "compile_inner", kept_and_run)
    monkeypatch.setattr(fallback, "whole", lambda graph, *_: graph.forward)
    return kept


def results(module: Any, given: tuple[Tensor, ...], training: bool) -> list[Tensor]:
    """The result, or all gradients of the sum of its squares."""
    if not training:
        with torch.no_grad():
            return [module(*given)]
    module.zero_grad(set_to_none=True)
    module(*given).double().square().sum().backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("training", [False, True])
def test_as_near_to_float64_as_eager(training: bool, quick: list[fx.GraphModule]) -> None:
    """One compilation of symbolic batches after the first."""
    module = Recommender().bfloat16()
    fast = compiled(module, interactions=True, cache=False)
    for batch in (130, 7, 33):
        given = inputs(batch)
        wide = copy.deepcopy(module).double()
        got, eager = results(fast, given, training), results(module, given, training)
        exact = results(wide, (given[0].double(), given[1]), training)
        error, own, good = oracle.judge(got, eager, exact)
        assert good, f"batch {batch}: error {error:.2e}, eager's {own:.2e}"
    targets = [INTERACTION, INTERACTION_BACKWARD] if training else [INTERACTION]
    assert all(sum(len(calls(g.graph, t)) for g in quick) == len(quick) // len(targets) for t in targets)
    assert not any(calls(g.graph, torch.ops.aten.bmm.default) for g in quick)


def test_one_sample(quick: list[fx.GraphModule]) -> None:
    module, given = Recommender().bfloat16(), inputs(1)
    assert torch.equal(results(compiled(module, interactions=True), given, False)[0], module(*given))


def test_nothing_of_the_vectors_is_saved(quick: list[fx.GraphModule]) -> None:
    results(compiled(Recommender().bfloat16(), interactions=True, cache=False), inputs(40), True)
    forward, backward = quick
    (call,) = calls(forward.graph, INTERACTION)
    saved: Any = forward.graph.find_nodes(op="output")[0].args[0]
    assert call in saved  # with its zeros, which the gradient of the layer behind it reads in bulk
    assert not [n for n in saved if isinstance(n, fx.Node) and n.meta["val"].dim() == 3]
    (gradient,) = calls(backward.graph, INTERACTION_BACKWARD)
    sources: Any = gradient.args[0]
    assert {n.op for n in sources} == {"placeholder"}


def test_the_example_of_the_page(quick: list[fx.GraphModule]) -> None:
    page = (DOCS / "interaction.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "docs/interaction.md", "exec"), {"__name__": "page"})
    assert [len(calls(g.graph, INTERACTION)) for g in quick] == [1, 0]


@pytest.mark.parametrize("options", [{}, {"interactions": False}])
def test_on_by_default(options: dict[str, Any], quick: list[fx.GraphModule]) -> None:
    results(compiled(Recommender().bfloat16(), **options), inputs(40), False)
    assert len(quick) == 1 and len(calls(quick[0].graph, INTERACTION)) == (not options)


def test_a_failure_of_ours_costs_the_interaction(quick: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(replacements, "choice", fail)
    monkeypatch.delenv("TILESTREAM_STRICT", raising=False)
    module, given = Recommender().bfloat16(), inputs(40)
    assert torch.equal(results(compiled(module, interactions=True), given, False)[0], module(*given))
    assert not calls(quick[0].graph, INTERACTION)


def test_the_option_is_checked() -> None:
    assert parse({"interactions": True}).interactions
    with pytest.raises(OptionError, match="not a bool"):
        parse({"interactions": "yes"})


# -- choices and plans


KIND = Kind(DLRM, (0, *[100_000] * 26), str(torch.bfloat16), False)


def test_what_is_not_timed_is_predicted() -> None:
    """The reference machine, which was asked for, runs ours; a GPU what is predicted to be faster."""
    target = Target("reference", torch.device("cpu"), devices.get("h200"))
    made = replacements.choice(INTERACTIONS, KIND, Options(cache=False), target)
    assert made.wins and made.gain_us > 0 and all(c.measured_us is None for c in made.candidates)
    other = replacements.choice(INTERACTIONS, KIND, Options(cache=False, measure=False), replace(target, kind="cuda"))
    assert other.wins and other.candidates == made.candidates


@pytest.mark.parametrize("other", ["{}", {"ours_us": 5.0, "library_us": 10.0, "measured": True}])
def test_choices_are_kept(other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged, or of another version, is made anew."""
    times = [5.0]
    monkeypatch.setattr(replacements.prepare, "measures", lambda *_: True)
    monkeypatch.setattr(Timer, "__call__", lambda *_: [times.pop(), 10.0])
    target, options = Target("cuda", torch.device("cpu"), devices.get("h200")), Options(cache_dir=tmp_path)

    def chosen() -> tuple[bool, float]:
        chooser.forget()
        made = replacements.choice(INTERACTIONS, KIND, options, target)
        return made.wins, made.candidates[0].measured_us or 0.0

    assert chosen() == chosen() == (True, 5.0)
    (kept,) = (tmp_path / "plans").iterdir()
    if isinstance(other, str):
        kept.write_text(other)
    else:
        store_sealed(kept, other)
    times.append(20.0)
    assert chosen() == chosen() == (False, 20.0)


def test_costs() -> None:
    """What docs/interaction.md says of DLRM."""
    h200 = devices.get("h200")
    assert DLRM.rows_bytes == 32768 * 27 * 256 and DLRM.result_bytes == 32768 * 960
    assert 60 < DLRM.forward_bytes / 4.3e6 < 63 and 110 < DLRM.backward_bytes / 4.3e6 < 114
    for batch in (2048, 32768):
        sizes = replace(DLRM, batch=batch)
        for training in (False, True):
            floor = sizes.forward_bytes + (sizes.backward_bytes if training else 0)
            mine, theirs = (count(sizes, training, h200).seconds for count in (ours, library))
            assert floor / h200.dram_bytes_per_s < mine < theirs


@pytest.mark.parametrize("training", [False, True])
def test_the_plan_of_a_whole_model_has_it_as_a_launch(training: bool) -> None:
    module, given = Recommender(features=128, tables=8).bfloat16().requires_grad_(training), inputs(2048, tables=8)
    without, found = (
        analyse(module, given, Options(interactions=on, device="h200"), training=training) for on in (False, True)
    )
    ours = [launch for launch in found.whole.launches if launch.ours and launch.kind == "library"]
    assert [x.operators for x in ours] == [
        ("tilestream.interaction.default",),
        *([("tilestream.interaction_backward.default",)] if training else []),
    ]
    assert found.whole.predicted_us < without.whole.predicted_us
    # tables of 30 to 65 rows, the bottom's rows, indices and pairs are read once; 36 products and a head are written
    rows = sum(30 + 5 * k for k in range(8)) + 2048
    assert ours[0].bytes == 256 * rows + 2048 * 8 * 8 + 2 * 36 * 8 + 2048 * 2 * (128 + 40)
    assert not [e for e in found.exclusions if "interaction" in e.op]
    assert found.on_inductor.predicted_us == without.on_inductor.predicted_us
    assert not any(launch.ours for launch in found.on_inductor.launches)


@pytest.mark.parametrize("ours_us", [5.0, 20.0])
def test_explain_tells_of_those_that_a_compilation_has_timed(ours_us: float, tmp_path: Path) -> None:
    """It had every interaction as ours, whatever it takes."""
    module, given = Recommender(features=128, tables=8).bfloat16().requires_grad_(False), inputs(2048, tables=8)
    (site,) = find_interactions(capture(module, given).graphs[0].graph)
    options = Options(cache_dir=tmp_path, device="h200")
    chooser.choose(INTERACTIONS.question(kind_of(site), devices.get("h200")), options, lambda _: [ours_us, 10.0])
    chooser.forget()
    found = analyse(module, given, options)
    assert any("tilestream.interaction" in op for x in found.whole.launches for op in x.operators) == (ours_us < 10.0)
    chooser.forget()


def test_the_operators_meaning() -> None:
    """Against a loop over samples and pairs."""
    case = Case(4, 8, 3, head=2, diagonal=True)
    sources, indices, first, second = case.operands()
    got = interaction([s.double() for s in sources], indices, first, second, 2)
    for b in range(3):
        z = [s[b] if i is None else s[i[b]] for s, i in zip(sources, indices, strict=True)]
        want = [float(z[i].double() @ z[j].double()) for i, j in zip(first, second, strict=True)]
        torch.testing.assert_close(got[b], torch.cat([z[2].double(), torch.tensor([*want, *[0.0] * 6]).double()]))


# -- timing


@pytest.mark.parametrize(("ours_us", "taken"), [(5.0, 1), (10.0, 0)])
def test_what_is_timed_decides(ours_us: float, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacements.prepare, "measures", lambda *_: True)
    monkeypatch.setattr(Timer, "__call__", lambda *_: [ours_us, 10.0])
    target = Target("cuda", torch.device("cpu"), devices.get("h200"))
    options = Options(cache_dir=tmp_path)
    for found in (replacements.replace_by(INTERACTIONS, _captured(), options, target) for _ in range(2)):
        assert [made.gain_us for made in found] == [5.0] * taken
    assert not replacements.replace_by(INTERACTIONS, _captured(), options.with_(interactions=False), target)


def _captured() -> fx.GraphModule:
    return capture(Recommender().bfloat16(), inputs(64)).graphs[0]


def test_the_librarys_way_is_compiled_while_a_graph_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are fake ones of another mode than those of the graph around it."""
    monkeypatch.setattr(fallback, "_unavailable", lambda failure: pytest.fail(str(failure)))
    made = timing.operands(Sizes(33, 5, 16, 7, 0, 4), (0, 20, 30, 40, 50), torch.bfloat16, torch.device("cpu"))
    with tracing(TracingContext(FakeTensorMode())), torch.no_grad():
        timing.library_forward(made, training=True)()
        timing.library_backward(made)()


def test_the_librarys_way_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "rest", fallback.eager)
    made = timing.operands(Sizes(33, 5, 16, 7, 0, 4), (0, 20, 30, 40, 50), torch.bfloat16, torch.device("cpu"))
    assert [len(s) for s in made.sources] == [33, 20, 30, 40, 50] and made.indices[0] is None
    result, rows = timing.library_forward(made, training=True)()  # pyright: ignore[reportGeneralTypeIssues]
    (gradient,) = timing.library_backward(made)()  # pyright: ignore[reportGeneralTypeIssues]
    assert rows.shape == (33, 5, 16)
    assert torch.equal(result, INTERACTION(*made.ours, made.head)[:, :23])
    assert torch.equal(gradient.transpose(0, 1), INTERACTION_BACKWARD(*made.ours, made.given))


SIZES, TABLES = Sizes(33, 5, 16, 7, 0, 4), (0, 20, 30, 40, 50)
HERE = Target("cuda", torch.device("cpu"), devices.get("h200"))


class Called:
    """Stands for a captured function and its graph."""

    def __init__(self, run: Callable[[], list[Tensor]]) -> None:
        self.run, self.outputs = run, run()

    def replay(self) -> None:
        for out, right in zip(self.outputs, self.run(), strict=True):
            out.copy_(right)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fault", ["", "scaled", "unwritten"])
def test_both_passes_are_timed_and_held_to_float64(training: bool, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and the library's; what is timed of a training step is both passes."""
    monkeypatch.setattr(fallback, "rest", fallback.eager)
    monkeypatch.setattr(clocks, "capture", Called)
    monkeypatch.setattr(clocks, "to_choose", lambda arms: [[float(len(arm.outputs))] for arm in arms])
    trial = timing.interaction_trial(Kind(SIZES, TABLES, str(torch.bfloat16), training), HERE)
    right = trial.call

    def wrong(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        def run() -> Sequence[Tensor]:
            *others, last = right(candidate, values)()
            spoilt = last * 1.02 if fault == "scaled" else last.index_fill(0, torch.tensor(3), float("nan"))
            return [*others, spoilt]

        return run if fault and candidate.strategy != FALLBACK else right(candidate, values)

    ours = Candidate("interaction", None, None, operator="tilestream.interaction")
    found, library_us = Timer(replace(trial, call=wrong), HERE)([ours, Candidate(FALLBACK, None, None)])
    assert library_us == (3.0 if training else 1.0)  # of training the rows are a result too
    if fault:
        assert isinstance(found, PlanError) and "interaction computes a wrong result" in str(found)
    else:
        assert found == (2.0 if training else 1.0)
