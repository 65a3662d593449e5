"""The CUDA text of README's cases, and of the pipelines that the GPU tests run, is what it was."""

from __future__ import annotations

import json

import golden_cuda
import pytest
from golden_cuda import FILE, MODELS, PIPELINES

GOLDEN = json.loads(FILE.read_text())
CHANGED = "the generated CUDA changed; if that is meant, and measured, run python tests/lib/golden_cuda.py"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_text_of_models(name: str) -> None:
    assert golden_cuda.of_model(name) == GOLDEN[f"model {name}"], CHANGED


@pytest.mark.smoke
@pytest.mark.parametrize("name", PIPELINES)
def test_text_of_pipelines(name: str) -> None:
    assert golden_cuda.of_pipeline(PIPELINES[name]()) == GOLDEN[name], CHANGED
