"""What compute-sanitizer watches (``tests/gpu/every_shape.py``) has a kernel of every header."""

from __future__ import annotations

import importlib
import re

import pytest
from places import TESTS

from tilestream import cuda
from tilestream.kernels.parts.headers import headers

LAUNCHED = {
    "channels.cuh",
    "depthwise.cuh",
    "few_keys.cuh",
    "few_keys_gradients.cuh",
    "few_queries.cuh",
    "grouped.cuh",
    "head_attention.cuh",
    "norm_gradients.cuh",
    "interaction.cuh",
    "pack.cuh",
    "pad.cuh",
    "short_attention.cuh",
    "squeeze.cuh",
    "step.cuh",
    "step_attention.cuh",
    "step_loader.cuh",
    "step_rows.cuh",
    "step_tiles.cuh",
    "turn.cuh",
    "weight_parts.cuh",
}
"""Of kernels that are compiled where they are launched, which takes a GPU."""


def test_every_header_is_compiled_for_some_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "gpu"))
    shapes = importlib.import_module("every_shape")
    texts = [s.text for make in shapes.PIPELINES.values() for p, *_ in make() for s in cuda.sources(p)]
    texts += [s.text for make in shapes.BESIDE.values() for s in make()]
    known, found = headers(), set[str]()
    while texts:
        new = set(re.findall(r'#include "(.+?)"', texts.pop())) - found
        found |= new
        texts += [known[name] for name in new if name in known]
    assert set(known) - found == LAUNCHED
