"""Random expressions, formats, orders and lanes: values equal NumPy's, on the specification and on the engine."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_programs import EVEN_SIZES, SIZES, Case, random_case

from tilestream.sparse.program import Program
from tilestream.sparse.schedule import Schedule

SEEDS = st.integers(0, 2**32)


def check(case: Case, schedule: Schedule, engine="spec") -> Program:
    program = Program(case.program, schedule, list(case.inputs), {}, list(case.inputs.values()))
    result = program.run(engine=engine)
    for view, output in zip(program.outputs, result.outputs, strict=True):
        np.testing.assert_allclose(output.numpy(), case.values[view.tensor], rtol=1e-9, atol=1e-9)
    return program


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from(["none", "all"]), st.booleans())
def test_values_fused_or_not(seed, fuse, locate):
    case = random_case(seed)
    check(case, Schedule(fuse=fuse, locate=locate))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.dictionaries(st.sampled_from("ijkl"), st.integers(1, 5), max_size=3))
def test_values_in_lanes(seed, lanes):
    check(random_case(seed), Schedule(fuse="all", parallel=present(random_case(seed), lanes)))


def present(case: Case, lanes: dict[str, int]) -> dict[str, int]:
    """Lanes of those indices that the program has whatever is fused."""
    used = {i for s in case.program.statements if s.name in case.program.outputs for i in s.indices}
    return {index: ways for index, ways in lanes.items() if index in used}


@settings(max_examples=40, deadline=None)
@given(SEEDS, SEEDS)
def test_values_in_every_order(seed, choice):
    case = random_case(seed)
    program = check(case, Schedule(fuse="all"))
    if len(program.regions) == 1 and not any("memory" in note for note in program.regions[0].notes):
        number = choice % len(program.regions[0].orders)
        chosen = check(case, Schedule(fuse="all", order=number))
        regions = [r for r in chosen.regions if "/" not in r.name]
        cut = any("memory" in note for r in chosen.regions for note in r.notes)
        assert cut or regions[0].order == program.regions[0].orders[number]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["none", "all"]), st.booleans())
def test_values_in_blocks(seed, fuse, locate):
    case = random_case(seed, EVEN_SIZES, masks=False)
    check(case, Schedule(fuse=fuse, locate=locate, block=2))


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    st.sampled_from(["none", "all"]),
    st.integers(2, 6),
    st.sampled_from([SIZES, {"i": 5, "j": 2, "k": 5, "l": 2}]),
    st.dictionaries(st.sampled_from("ijkl"), st.integers(1, 3), max_size=2),
)
def test_values_in_blocks_that_do_not_divide(seed, fuse, block, sizes, lanes):
    """What lies behind an index's end is in no sum and no maximum, whatever an operator makes of it."""
    case = random_case(seed, {**sizes, "k": sizes["i"], "l": sizes["j"]}, masks=False)
    check(case, Schedule(fuse=fuse, block=block, parallel=present(case, lanes)))


@pytest.mark.parametrize("block", [1, 2])
def test_a_scalar_beside_sums_of_nothing(block):
    """An accumulator gives out no fiber that is empty, so that its outer level is not full though its operand's is."""
    case = random_case(755, EVEN_SIZES, masks=False)
    assert any(d.format is not None and 0.0 in d.extents for d in case.program.inputs.values())
    check(case, Schedule(fuse="all", block=block))


@pytest.mark.parametrize("seed", range(12))
def test_engine_agrees_with_the_specification(seed):
    case = random_case(1000 + seed)
    rng = random.Random(seed)
    schedule = Schedule(fuse="all", parallel=present(case, {rng.choice("ijkl"): 2}))
    program = check(case, schedule, "fast")
    fast, spec = program.run(engine="fast"), program.run(engine="spec")
    assert [x.cycles for x in fast.regions.values()] == [x.cycles for x in spec.regions.values()]
    assert fast.flops == spec.flops and fast.bytes == spec.bytes


def test_generator_reaches_what_is_hard():
    """Masks, completion, several reductions, results through memory: the random programs do have them."""
    kinds = set()
    for seed in range(150):
        case = random_case(seed)
        program = Program(case.program, Schedule(fuse="all"), list(case.inputs), {}, list(case.inputs.values()))
        for region in program.regions:
            kinds |= {node.kind for node in region.graph.nodes}
            kinds |= {"cut" for note in region.notes if "memory" in note}
            kinds |= {"copy" for note in region.notes if "another order" in note}
            kinds |= {f"spacc{n.attr('order')}" for n in region.graph.nodes if n.kind == "spacc"}
            kinds |= {"complete" for n in region.graph.nodes if n.name.startswith("scan_range")}
    assert {"union", "intersect", "locate", "reduce", "spacc0", "spacc1", "spacc2", "cut", "copy", "complete"} <= kinds
