"""Random modules over masks of truth values: right on every target, or a refusal with a remedy."""

import pytest
from sparse_random_masks import verdict

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def test_random_masks():
    verdicts = [verdict(seed) for seed in range(40)]
    assert verdicts.count("right") > 36, "the generator makes modules that lower"


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_random_masks(first):
    for seed in range(first, first + 50):
        verdict(seed)
