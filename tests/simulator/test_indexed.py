"""Rows that kernels read or add to by an index: what they move, and how the time of sums follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilestream import devices
from tilestream.simulator import run
from tilestream.simulator.library import Indexed, launch, stream
from tilestream.simulator.library.indexed import SAME_S, traffic
from tilestream.simulator.workload import Workload

H200 = devices.get("h200")
MESSAGES = Indexed(100_000, 1_000_000, 64, 2, adds=True)


def us(table: Indexed) -> float:
    """A kernel that reads what it adds, in order."""
    read = table.draws * (table.row + 8)
    stage = stream("sum", table.draws * table.features, read, table.size, H200, by_index=(table,))
    return run(Workload("sum", (launch("sum", stage, H200),)), H200).time_s * 1e6


def test_a_table_that_the_l2_holds_comes_once() -> None:
    small = Indexed(10_000, 1_000_000, 64, 2)
    found = traffic((small,), H200)
    assert found.dram_read == pytest.approx(0.0) and found.shared_read == pytest.approx((1e6 - 1e4) * 128)


def test_a_table_beyond_the_l2_comes_again_and_sums_are_written_again() -> None:
    large = Indexed(1_000_000, 3_000_000, 64, 2)
    read = traffic((large,), H200).dram_read
    assert 0 < read < 3e6 * 128
    summed = traffic((replace(large, adds=True),), H200)
    assert summed.dram_read > read and summed.dram_write > 0


def test_rows_below_a_sector_come_as_sectors() -> None:
    narrow = Indexed(16_000_000, 8_000_000, 8, 2)
    assert traffic((narrow,), H200).dram_read > 2 * narrow.distinct * narrow.row


def test_sums_take_longer_the_more_meet_in_one_row() -> None:
    even, uneven = us(MESSAGES), us(replace(MESSAGES, most=50_000))
    assert uneven > even and uneven == pytest.approx(50_000 * SAME_S * 1e6, rel=0.2)
    assert traffic((Indexed(64, 300_000, 64, 2, adds=True),), H200).serial_s > 30e-6


def test_odd_rows_of_16_bits_are_added_to_by_single_elements() -> None:
    assert us(replace(MESSAGES, features=65)) > 4 * us(MESSAGES)
    assert us(replace(MESSAGES, features=65, itemsize=4)) < us(replace(MESSAGES, features=65))


def test_more_bandwidth_never_slows_a_sum() -> None:
    for name in ("l2_bytes_per_s", "dram_bytes_per_s", "l2_bytes"):
        faster = H200.scale(name, 1.25)
        stages = [stream("sum", 64e6, 136e6, MESSAGES.size, d, by_index=(MESSAGES,)) for d in (H200, faster)]
        plain, other = (
            run(Workload("sum", (launch("sum", s, d),)), d).time_s for s, d in zip(stages, (H200, faster), strict=True)
        )
        assert other <= 1.02 * plain
