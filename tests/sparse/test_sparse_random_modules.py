"""Random modules of ordinary operators: the right values or a refusal with a remedy, never another exception."""

import pytest
from sparse_random_modules import verdict

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.mark.parametrize("first", range(0, 120, 20))
@pytest.mark.every(2)
def test_random_modules(first):
    verdicts = [verdict(seed) for seed in range(first, first + 20)]
    assert verdicts.count("right") > 12, "the generator makes modules that lower"


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 2000, 50))
def test_two_thousand_random_modules(first):
    for seed in range(first, first + 50):
        verdict(seed)
