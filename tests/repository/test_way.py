"""The way of a graph through torch.compile goes down the house's floors, and hardly ever back up."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from test_rooms import PACKAGE, ROOMS
from torch import nn

FLOOR = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
MOST_UP = 9


def room_of(code: CodeType) -> str | None:
    """The room that a function stands in; None for what is not ours, and for the package's own page."""
    return _room_of(code.co_filename)


@cache
def _room_of(file: str) -> str | None:
    path = Path(file)
    if PACKAGE not in path.parents:
        return None
    if path == PACKAGE / "ir" / "once.py":  # a decorator: its frames stand for the functions' own callers
        return None
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return part if part in FLOOR else None


class Steps:
    """Calls from one room into another while a profile is taken: from whom, to whom, how often.

    Frames of others in between (Dynamo, AOTAutograd, Inductor) are looked through.
    """

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        here = room_of(frame.f_code) if event == "call" else None
        caller = frame.f_back
        while here is not None and caller is not None and room_of(caller.f_code) is None:
            caller = caller.f_back
        if here is None or caller is None:
            return
        there = room_of(caller.f_code)
        if there is not None and there != here:
            self.found[there, caller.f_code.co_qualname, here, frame.f_code.co_qualname] += 1


def test_a_graph_goes_down_through_the_house() -> None:
    """25 of 90 steps went back up before rooms had floors."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16().eval()
    compiled = torch.compile(net, backend="tilestream", options={"target": "reference", "cache": False})
    steps = Steps()
    before = sys.getprofile()
    sys.setprofile(steps)
    try:
        with torch.no_grad():
            compiled(torch.randn(300, 64).bfloat16())
    finally:
        sys.setprofile(before)
    up = [step for step in steps.found if FLOOR[step[2]] > FLOOR[step[0]]]
    assert len(steps.found) > 60, "the way is not seen"
    assert len(up) <= MOST_UP, "\n".join(f"{a}.{f} calls {b}.{g}" for a, f, b, g in up)
