"""What a kernel's last record says; the kernels that write it need a GPU (tests/gpu/test_gpu_timeout.py)."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch

from tilestream.cuda import diagnose
from tilestream.cuda.diagnose import Record
from tilestream.cuda.sorted_keys import node_record
from tilestream.errors import InputError, QueueTimeout
from tilestream.kernels.stream.kernel import RowStream
from tilestream.kernels.stream.tables import QueueSpec, Tables

EPOCH = 3 << 32


def tables() -> Tables:
    """Queue ``h`` from a stage to two others, then queue ``k`` to one."""
    first = QueueSpec("h", "bf16", 64, 2, ("b", "c"), 0, "model.py:7")
    return Tables(queues=[first, QueueSpec("k", "bf16", 64, 2, ("c",), 6, "")], lines=10)


def dump_of_tables() -> Record:
    """What a kernel of three stages leaves."""
    launch = SimpleNamespace(name="p", stages=[SimpleNamespace(name=n, replicas=1) for n in ("a", "b", "c")])
    kernel = RowStream(launch)  # pyright: ignore[reportArgumentType]
    kernel.tables = tables()
    return Record(kernel.frame.words, kernel.error)


def record(dump: Record, stage: int, queue: int, tile: int, free: int, expected: int, found: int, flags: list[int]):
    """Write what ``expire`` of roles.cuh writes."""
    raw = struct.pack(f"<6I2Q{len(flags)}Q", 1, stage, 11, queue, tile, free, expected, found, *flags)
    dump.words[: len(raw) // 8] = torch.frombuffer(bytearray(raw), dtype=torch.int64)


def test_no_record_no_error():
    dump = dump_of_tables()
    assert dump.words.numel() == 5 + 10
    dump.check()


def test_a_tile_that_did_not_come():
    dump = dump_of_tables()
    flags = [EPOCH | t for t in (5, 4, 5, 4, 3, 2)] + [EPOCH | 1, 0, 0, 0]
    record(dump, 1, 0, 5, 0, EPOCH | 6, EPOCH | 4, flags)
    with pytest.raises(QueueTimeout) as raised:
        dump.check()
    says = raised.value.cause.splitlines()
    assert says[0] == (
        "stage 'b' on SM 11 waited too long for tile 5 of queue 'h' (model.py:7): "
        "expected tile 5 of launch 3, found tile 3 of launch 3"
    )
    assert says[1].strip() == "queue 'h': depth 2, head 5, tail {b: 5, c: 3}"
    assert says[2].strip() == "queue 'k': depth 2, head 1, tail {c: 0}"
    assert "restart the process" in raised.value.remedy


def test_a_slot_that_did_not_become_free():
    dump = dump_of_tables()
    record(dump, 0, 1, 9, 1, EPOCH | 8, EPOCH | 7, [0] * 10)
    says = r"stage 'a' on SM 11 waited too long for a free slot in tile 9 of queue 'k' \(no source line\)"
    with pytest.raises(QueueTimeout, match=says):
        dump.check()


def test_a_process_that_ends_says_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """torch's own error for a trap names no queue."""
    monkeypatch.setattr(diagnose, "_records", set())
    quiet, dump = dump_of_tables(), dump_of_tables()
    assert diagnose._records == {quiet, dump}
    record(dump, 2, 1, 9, 0, EPOCH | 10, EPOCH | 9, [0] * 10)
    diagnose._tell()
    (said,) = caplog.messages
    assert said.startswith("QueueTimeout: stage 'c' on SM 11 waited too long for tile 9 of queue 'k'")


@pytest.mark.parametrize("index", [5, -6, 2**32])
def test_an_index_that_is_no_node(index: int):
    """What ``give_up`` of lanes.cuh writes in the kernel that sorts edges by node."""
    record = node_record()
    with pytest.raises(RuntimeError, match="launch failure"), record.explained():
        raise RuntimeError("launch failure")
    says = f"the index of row 17 of a sum of rows by their indices is {index}, and the sum has 5 rows"
    with pytest.raises(InputError, match=says) as raised, record.explained():
        record.words[:] = torch.tensor([1, 17 << 32, 5, index])
        raise RuntimeError("launch failure")  # of the operator behind it
    assert "restart the process, with indices that exist" in raised.value.remedy
    with pytest.raises(InputError, match=says), record.explained():
        pytest.fail("nothing is enqueued any more")
