"""Rows of a bin as several shorter tiles side by side."""

from __future__ import annotations

from shared_tiles import Ffn

from tilestream import devices
from tilestream.kernels.product.shared_tile import SharedTile, Tail, build
from tilestream.kernels.product.sharing import Middle
from tilestream.options import Options
from tilestream.plan import few_rows, margins
from tilestream.plan.passes.share_tile import Split, share_tile, tilings

H200 = devices.get("h200")
SMALL = Ffn(512, 416, 256)


def schedule(split: Split) -> SharedTile:
    p = share_tile(SMALL.program(), split)
    return build(p.stages[0], p)


def test_tiles_are_halved_down_to_16_rows_and_up_to_eight_tiles() -> None:
    assert [tilings(n) for n in (8, 16, 64, 128)] == [
        [(8, 1)], [(16, 1)], [(64, 1), (32, 2), (16, 4)], [(128, 1), (64, 2), (32, 4), (16, 8)],
    ]  # fmt: skip
    assert tilings(512) == [(128, 4), (64, 8)]


def test_candidates_have_tiles_of_several_heights() -> None:
    """Two of the highest whatever is predicted, and no more than are timed."""
    for block in (SMALL, Ffn(3072, 768, 768)):
        for any_order in (False, True):
            found = few_rows.best_splits(block.program(), 128, H200, Options(any_order=any_order))
            assert {s.tile_rows * s.row_tiles for s in found} == {128} and len(found) <= margins.SHARED
            assert (
                len([s for s in found if s.row_tiles == 1]) >= margins.SHARED_EACH < len({s.tile_rows for s in found})
            )


def test_candidates_have_fewer_groups_where_parts_of_the_middle_are_equal() -> None:
    """6 groups of 8 have 64 columns of 3072 each, 8 have 48; of 3080 no fewer groups have equal ones."""

    def groups(hid: int) -> set[int]:
        block = Ffn(hid, 768, 768, act="gelu", bias=True, residual=True)
        found = few_rows.best_splits(block.program(), 128, H200, Options(cluster_middle=False))
        assert len(found) <= margins.SHARED
        whole = [s for s in found if (s.tail, s.middle) == (Tail.PARTIALS, Middle.L2)]
        return {s.groups for s in whole if (s.columns, s.tile_rows) == (8, 64)}

    assert groups(3072) == {6, 8} and groups(3080) == {8}


def test_candidates_that_exchange_no_middle_have_small_first_layers_and_nothing_in_front() -> None:
    def made_by_each(block: Ffn, **options: object) -> set[int]:
        found = few_rows.best_splits(block.program(), 128, H200, Options().with_(**options))
        return {s.tile_rows for s in found if s.middle is Middle.NONE}

    heights = made_by_each(SMALL)  # the model tells high and short ones apart less well than others
    assert min(heights) <= 32 < max(heights)
    assert not made_by_each(Ffn(3072, 768, 768))  # a CTA would read 590 KB
    assert not made_by_each(Ffn(512, 416, 256, norm="layer"))
    assert not made_by_each(SMALL, measure=False)


def test_ctas_of_a_short_tile_have_more_columns() -> None:
    high, short = schedule(Split(4, 16)), schedule(Split(1, 16, Tail.NONE, 16, 8))
    assert (high.ctas, short.ctas) == (64, 128)
    assert (high.middle_columns, short.middle_columns) == (8, 32)
