"""The table of what may take the place of operators of a graph, and the kernels that operators of ours name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx

from tilestream import devices
from tilestream.devices import Device
from tilestream.graph.own import KERNELS, loaded
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.parts.source import BesideSource
from tilestream.options import Options
from tilestream.plan.candidates import Plan
from tilestream.plan.chooser import decide
from tilestream.plan.interaction import JOINT_INTERACTIONS
from tilestream.plan.replacement import Replacement
from tilestream.plan.replacements import REPLACEMENTS
from tilestream.run import replacements
from tilestream.run.target import Target

HERE = Target("cuda", torch.device("cpu"), devices.get("h200"))


def test_each_has_a_name_of_its_own_and_a_trial() -> None:
    assert len({each.name for each in REPLACEMENTS}) == len(REPLACEMENTS)
    assert set(replacements.TRIALS) == {*REPLACEMENTS, JOINT_INTERACTIONS}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_of_an_operator_is_there_and_takes_its_operands(name: str) -> None:
    schema = getattr(torch.ops.tilestream, name).default._schema
    given = inspect.signature(loaded(KERNELS[name])).parameters.values()
    assert any(p.kind is p.VAR_POSITIONAL for p in given) or len(given) >= len(schema.arguments)


@dataclass(frozen=True)
class Letter:
    name: str


OURS_US = {"a": 10.0, "b": 30.0, "c": 10.0, "d": 10.0}


def ours(kind: Letter, _: Device) -> Counts:
    return Counts("ours", (Amount("waits", OURS_US[kind.name] * 1e-6),))


def letters(placed: list[str], could: bool = True) -> Replacement:
    """One whose sites are words, of a kind for each letter."""
    return Replacement(
        "letters",
        "letters stay",
        lambda _graph, options: ["a", "ab", "c", "cd"] if options.interactions else (),
        lambda site, _device: [Letter(k) for k in site],
        ours,
        lambda _kind, _device: Counts("library", (Amount("waits", 20e-6),)),
        lambda _owner, site, _device: could and not placed.append(site),
    )


GRAPH = fx.GraphModule({}, fx.Graph())
PREDICTED = Options(cache=False, measure=False)


def test_all_kinds_of_a_site_must_win() -> None:
    placed: list[str] = []
    made = replacements.replace_by(letters(placed), GRAPH, PREDICTED, HERE)
    assert placed == ["a", "c", "cd"] and len(made) == 4 and all(plan.wins for plan in made)
    expected: list[str] = []
    letters(expected).place_expected(GRAPH, PREDICTED, HERE.hardware)
    assert expected == placed


def test_what_cannot_be_built_ahead_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(each: Replacement, kind: Letter, *_: object) -> Plan:
        return decide(each.question(kind, HERE.hardware))

    def fails(*_: object) -> list[BesideSource]:
        raise RuntimeError("no")

    monkeypatch.setattr(replacements.prepare, "measures", lambda *_: True)
    monkeypatch.setattr(replacements, "choice", choice)
    placed: list[str] = []
    assert replacements.replace_by(replace(letters(placed), sources=fails), GRAPH, PREDICTED, HERE)
    assert placed == ["a", "c", "cd"]


def test_what_could_not_be_placed_is_no_choice_of_the_graph() -> None:
    assert not replacements.replace_by(letters([], could=False), GRAPH, PREDICTED, HERE)
    assert not replacements.replace_by(letters([]), GRAPH, PREDICTED.with_(interactions=False), HERE)


def test_an_exception_costs_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILESTREAM_STRICT", raising=False)
    monkeypatch.delitem(OURS_US, "b")
    placed: list[str] = []
    assert len(replacements.replace_by(letters(placed), GRAPH, PREDICTED, HERE)) == 4
    assert placed == ["a", "c", "cd"]
    with pytest.raises(KeyError, match="b"):
        replacements.replace_by(letters([]), GRAPH, PREDICTED.with_(fallback=False), HERE)
