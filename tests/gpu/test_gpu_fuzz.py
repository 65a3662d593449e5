"""Random legal pipelines on the GPU against the reference machine; ``TILESTREAM_FUZZ`` says how many."""

from __future__ import annotations

import functools
import os

import pytest
from oracle_runs import assert_close, assert_same_bits, eager_run, reference_run, run_poisoned, to_gpu
from random_pipelines import Limits, random_pipeline, tensors_for

from tilestream import cuda, devices
from tilestream.errors import VerifyError
from tilestream.kernels.fits import verify_on

COUNT = int(os.environ.get("TILESTREAM_FUZZ", "24"))
FIRST = int(os.environ.get("TILESTREAM_FUZZ_FIRST", "0"))


def limits(seed: int) -> Limits:
    return Limits(f32=seed % 4 == 0, mixed=seed % 5 == 4, max_width=512 if seed % 3 == 0 else 256)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random_pipelines(seed: int):
    pipeline = random_pipeline(seed, limits(seed))
    try:
        verify_on(pipeline, devices.get("h200"))
        sources = cuda.sources(pipeline)
    except VerifyError as refusal:
        pytest.skip(f"not legal on an H200: {refusal.cause}")
    assert sources
    compiled = cuda.build(pipeline)
    for rows in (seed * 37 % 300 + 1, 64 * (seed % 7 + 1)):
        tensors = tensors_for(pipeline, rows, seed)
        given = to_gpu(tensors)
        got = run_poisoned(compiled, given, rows)
        assert_close(pipeline, got, *reference_run(pipeline, tensors), functools.partial(eager_run, pipeline, tensors))
        assert_same_bits(got, run_poisoned(compiled, given, rows))


def test_most_random_pipelines_are_legal():
    """Seeds that are refused test nothing on the GPU; they must stay the exception."""
    refused = 0
    for seed in range(60):
        try:
            verify_on(random_pipeline(seed, limits(seed)), devices.get("h200"))
        except VerifyError:
            refused += 1
    assert refused <= 20
