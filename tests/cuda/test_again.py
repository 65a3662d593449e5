"""Launches at the same addresses: no GPU, so what is enqueued is written down."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tilestream.cuda import again, driver
from tilestream.cuda.again import Again, Prepared

STREAM = 7


class Machine:
    """Takes note of launches, of graphs, and of what is prepared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.capturing = False
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: self.capturing, raising=False)
        monkeypatch.setattr(driver, "ensure_context", lambda _: None)
        monkeypatch.setattr(driver, "capture_number", lambda _: 5)
        monkeypatch.setattr(again, "LaunchGraph", self.graph)

    def prepare(self, capture: int) -> Sequence[Prepared]:
        self.did.append(f"prepared {capture}")
        return [lambda: self.did.append("launched")] * 2  # pyright: ignore[reportReturnType]

    def graph(self, launches: Sequence[Prepared], stream: int) -> object:
        assert len(launches) == 2 and stream == STREAM
        self.did.append("graph")
        return lambda: self.did.append("replayed")

    def of(self, made: Again, address: int) -> list[str]:
        """What a call does."""
        self.did.clear()
        made.enqueue((STREAM, address), STREAM, self.prepare)
        return list(self.did)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_what_comes_again_is_a_graph(machine: Machine) -> None:
    made = Again(0, 4)
    assert machine.of(made, 1) == ["prepared 0", "launched", "launched"]
    assert machine.of(made, 2) == ["prepared 0", "launched", "launched"]
    assert machine.of(made, 1) == ["graph", "replayed"]
    assert machine.of(made, 1) == ["replayed"]


def test_a_capture_takes_launches_of_its_own(machine: Machine) -> None:
    made = Again(0, 4)
    for _ in range(3):
        machine.of(made, 1)
    machine.capturing = True
    assert machine.of(made, 1) == ["prepared 5", "launched", "launched"]


def test_addresses_that_never_come_again_are_forgotten(machine: Machine) -> None:
    made = Again(0, 4)
    for address in range(5):
        assert machine.of(made, address) == ["prepared 0", "launched", "launched"]
    assert machine.of(made, 0) == ["prepared 0", "launched", "launched"]
    assert machine.of(made, 4) == ["graph", "replayed"]
