"""Collectives by themselves on the GPU: values, by size of the cluster."""

from __future__ import annotations

import pytest

from tilestream.bench.collectives import PEERS, Runner
from tilestream.bench.exchange import BLOCK_BYTES, GATHERS, Exchange, Kind

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("peers", PEERS)
@pytest.mark.parametrize("kind", Kind)
def test_values(kind: Kind, peers: int):
    runner = Runner(Exchange(kind, peers, 4096 if kind in GATHERS else 2 * BLOCK_BYTES))
    for _ in range(3):  # on flags that were raised before
        assert runner.error() <= runner.e.error_bound
    assert runner.us() > 0.0
