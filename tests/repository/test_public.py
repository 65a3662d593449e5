"""What ``import tilestream`` alone gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tilestream


@pytest.mark.smoke
def test_every_public_name_is_there():
    assert all(hasattr(tilestream, name) for name in tilestream.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        tilestream.nothing  # noqa: B018


def test_parts_are_loaded_when_they_are_used():
    code = (
        "import sys, tilestream; assert 'tilestream.sparse' not in sys.modules; tilestream.sparse.compile; "
        "tilestream.devices.get('a100+kitsune'); import tilestream.studies.kitsune; tilestream.studies.kitsune.design; "
        "tilestream.simulator.run"
    )
    _runs(code)


def test_dynamo_and_inductor_are_loaded_with_the_back_end():
    """Both take seconds: not for ``tilestream --help``, and not in the first call of a compiled model. numba, of the
    event loop, takes half a second: the planner ranks by closed forms."""
    _runs(
        "import sys, tilestream.run.prepare; assert 'numba' not in sys.modules; "
        "import tilestream, tilestream.cli, tilestream.bench; "
        "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules); "
        "import tilestream.run.backend; assert 'torch._inductor.compile_fx' in sys.modules"
    )


def _runs(code: str) -> None:
    # Not this process's own path: loading a user's model puts the model's folder there.
    source = str(Path(tilestream.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})
