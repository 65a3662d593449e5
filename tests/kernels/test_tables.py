"""The tables that loader and publisher warps walk, and the text of consumers."""

from __future__ import annotations

from dataclasses import replace

from programs import Program, chain, edge_block, nerf

from tilestream.ir.pipeline import Pipeline, Queue, Shard, Stage, Transport
from tilestream.kernels.families import kernel_of
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.stream.emit import emit


def shared(p: Pipeline) -> Pipeline:
    return replace(p, stages=tuple(s.with_(placement=Shard(1)) for s in p.stages))


def two_stages() -> Pipeline:
    p = chain(2, 128)
    ops = p.stages[0].ops
    stages = (Stage.of("a", ops[:3], replicas=2), Stage.of("b", ops[3:], replicas=2))
    return replace(p, stages=stages, queues=(Queue(ops[2].out.name, "a", ("b",), Transport.L2, 8),))  # type: ignore[union-attr]


def pages(source: KernelSource) -> list[tuple[str, int, int]]:
    return [(source.tables.maps[op[0]].name, op[1], op[2]) for op in source.tables.page_ops]


def test_pages_come_in_the_order_of_the_products() -> None:
    assert pages(emit(chain(2, 128))) == [(w, x, 0) for w in ("w1", "w3") for x in (0, 64)]


def test_odd_weights_are_packed_with_every_segment_on_a_chunk() -> None:
    packs = emit(nerf()).tables.packs
    skip = next(p for p in packs if len(p.segments) == 2 and p.segments[0][1] == 63)
    assert skip.segments == ((0, 63, 0), (63, 256, 64)) and skip.columns == 320


def test_only_the_last_use_of_an_input_may_leave_the_cache_first() -> None:
    source = emit(edge_block(128, 3, "relu"))
    uses = [(source.tables.maps[op[0]].name, op[7]) for op in source.tables.load_ops]
    residual = source.tables.maps[source.tables.load_ops[-1][0]].name
    assert [again for name, again in uses if name == residual] == [1, 1, 0, 0]


def test_inputs_of_odd_width_have_no_tensor_map() -> None:
    tables = emit(nerf()).tables
    assert all(op[0] == -1 for op in tables.load_ops)
    assert {op[4] for op in tables.load_ops} == {63, 27}


def test_warpgroups_that_share_a_tile_publish_chunk_by_chunk() -> None:
    columns = [op[1] for op in emit(shared(edge_block(512, 2, "silu"))).tables.store_ops]
    assert columns == [0, 256, 64, 320, 128, 384, 192, 448]


def test_a_queued_tile_is_announced_by_its_first_and_last_chunk() -> None:
    source = emit(two_stages())
    rings = [op for op in source.tables.store_ops if op[2] == 0]
    assert [(op[1], op[3], op[4]) for op in rings] == [(0, 1, 0), (64, 0, 1)] * 2  # once for each warpgroup
    assert kernel_of(source.pipeline).frame.together


def test_a_queue_has_a_line_a_slot_and_a_line_a_slot_and_consumer() -> None:
    assert emit(two_stages()).tables.lines == 8 * (1 + 1)


def test_equal_layers_become_a_loop() -> None:
    text = emit(chain(8, 256)).text
    assert text.count("for (int l = 0; l < 6; ++l)") == 1
    assert text.count("product_registers<Mma<T, 32, 0>, 4>") == 2 * 4, "six layers in the loop, and the last one"


def test_equal_stages_share_their_code() -> None:
    p = chain(4, 128)
    ops = p.stages[0].ops
    cuts = (ops[:3], ops[3:5], ops[5:7], ops[7:])
    stages = tuple(Stage.of(f"s{k}", o) for k, o in enumerate(cuts))
    queues = tuple(
        Queue(o[-1].out.name, f"s{k}", (f"s{k + 1}",), depth=4)  # type: ignore[union-attr]
        for k, o in enumerate(cuts[:-1])
    )
    source = emit(replace(p, stages=stages, queues=queues))
    assert [s.kind for s in source.tables.stages] == [0, 1, 1, 1], (
        "where tiles go is in the tables; only the first frees no slot"
    )


def test_register_splits_start_where_the_schedule_fits() -> None:
    small = Program("small")
    small.store(small.linear(small.load("x", 64), 64))
    assert len(emit(small.build()).register_splits) > len(emit(chain(8, 256)).register_splits) >= 1
