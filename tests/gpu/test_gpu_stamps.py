"""Recordings of real runs: complete, in order, and not far from the time without stamps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_pipelines import NAMED
from random_pipelines import tensors_for
from stamped import check_complete, check_order

from tilestream import cuda, devices
from tilestream.report.accounts import compare
from tilestream.run.record import record
from tilestream.simulator import simulate

ROWS = 16384
RECORDINGS = 4
"""The quickest is held against the clock. Events around a burst of calls see more than kernels: ``chain_resident``, 4.3
us between its stamps, took 7.2 to 10.9 us a call in six recordings by itself on an H100, 6.2 to 7.2 in six beside
seven processes, and once 17.9 beside fourteen."""
KINDS = ["chain", "chain_resident", "chain_pairs", "nerf", "edge_block_512", "spatial_chain", "spatial_multicast"]
KINDS += ["bulk_chain"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_recordings(name: str) -> None:
    pipeline = NAMED[name]()
    runs = [record(pipeline, ROWS) for _ in range(RECORDINGS)]
    for run in runs:
        assert run.dropped == 0
        check_complete(pipeline, run, ROWS)
        check_order(run)
    run = min(runs, key=lambda each: each.stamped_us)
    # The stamps' own clock must agree with the events around a call: what is outside of the kernels is their launch.
    inside_us = run.stamped_us - min(s.start_us for s in run.slices)
    assert 0.5 * run.stamped_us < inside_us <= run.stamped_us
    assert 1 <= run.clock_ns <= 1024
    assert run.overhead < 0.5
    ours = replace(pipeline, strategy="spatial")  # strategy "bulk" is simulated as the kernels of libraries
    compared = compare(simulate(ours, ROWS, devices.get("h200")), run)
    assert len(compared) == len(pipeline.stages)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nerf", "spatial_multicast"])
def test_stamps_change_no_bit(name: str) -> None:
    pipeline = NAMED[name]()
    given = {k: t.cuda() for k, t in tensors_for(pipeline, 1000, seed=1).items()}
    plain, stamped = (cuda.build(pipeline, stamped=on)(given, 1000) for on in (False, True))
    assert all(torch.equal(plain[n], stamped[n]) for n in plain)
