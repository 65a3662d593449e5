"""A test that loses the CUDA context is named: those after it fail at once instead of each in its own way."""

from __future__ import annotations

import pytest
import torch

_last: list[str] = []


@pytest.fixture(autouse=True)
def context(request: pytest.FixtureRequest):
    if request.node.get_closest_marker("gpu") is not None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            pytest.fail(f"the CUDA context was lost by or before {_last[-1:]}: {lost}", pytrace=False)
        _last.append(request.node.name)
    yield
