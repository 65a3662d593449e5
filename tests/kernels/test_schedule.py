"""Schedules: steps, passes between reductions, places of tiles, shared memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from programs import Program, chain, edge_block, nerf

from tilestream.errors import IRError, VerifyError
from tilestream.ir.pipeline import Pipeline, Residency, Role, Shard
from tilestream.kernels.families import footprint
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.layout import CHUNK, SHARED_LIMIT, lay_out
from tilestream.kernels.stream.model import Place, Schedule
from tilestream.kernels.stream.places import REGISTER_LIMIT, REGISTER_SPLITS


def schedule(p: Pipeline) -> Schedule:
    return build(p.stages[0], p)


def staged(p: Pipeline, **changes) -> Pipeline:
    return replace(p, stages=tuple(s.with_(**changes) for s in p.stages))


def test_a_chain_is_a_step_a_layer_and_stays_in_registers() -> None:
    s = schedule(chain(8, 256))
    assert [step.features for step in s.steps] == [256] * 8
    first, *rest = s.steps
    assert first.gemm is not None and first.gemm.segments[0].place is Place.STREAM
    assert all(step.gemm is not None and step.gemm.segments[0].place is Place.REGISTERS for step in rest)
    assert s.slot_features == (256,), "a layer's output takes the place of its operand"
    assert s.buffer_features == ()


def test_fp32_tiles_wait_in_shared_memory() -> None:
    s = schedule(chain(3, 64, dtype="f32"))
    assert s.slot_features == () and s.buffer_features == (64,)


def test_nerf_takes_the_skip_and_the_view_as_segments() -> None:
    s = schedule(nerf())
    segments = {g.weight: g.segments for g in (step.gemm for step in s.steps) if g is not None and len(g.segments) > 1}
    assert [[(seg.place, seg.features, seg.weight_column) for seg in segs] for segs in segments.values()] == [
        [(Place.STREAM, 63, 0), (Place.REGISTERS, 256, 63)],
        [(Place.STREAM, 27, 256), (Place.REGISTERS, 256, 0)],
    ]


def test_a_value_kept_over_two_layers_leaves_the_registers_when_they_run_out() -> None:
    p = Program("residual")
    x = p.load("x", 256)
    h = p.linear(x, 256, "relu")
    y = p.op("add", 256, h, p.linear(p.linear(h, 256, "relu"), 256))
    p.store(y)
    s = schedule(p.build())
    assert Place.SHARED in s.places.values() and s.registers <= REGISTER_LIMIT


def test_layer_norm_is_three_passes_that_keep_the_centred_value() -> None:
    p = Program("norm")
    p.store(p.layer_norm(p.linear(p.load("x", 128), 128)))
    (step,) = schedule(p.build()).steps
    assert [len(phase.reduces) for phase in step.phases] == [1, 1, 0]
    assert [phase.keep.endswith(".centred") for phase in step.phases] == [False, True, False]
    assert [[s.kind for s in phase.sinks] for phase in step.phases] == [[], [], ["staged"]]


def test_softmax_keeps_the_exponentials() -> None:
    p = Program("softmax")
    p.store(p.op("softmax", 64, p.linear(p.load("x", 64), 64)))
    (step,) = schedule(p.build()).steps
    assert [phase.keep.rpartition(".")[2] for phase in step.phases] == ["", "grown", ""]


def test_a_residual_input_is_streamed_again_in_the_last_pass() -> None:
    s = schedule(edge_block(128, 3, "relu"))
    assert [phase.streams for phase in s.steps[-1].phases][:-1] == [(), ()]
    assert len(s.steps[-1].phases[-1].streams) == 1


def test_outputs_of_odd_width_are_stored_element_by_element() -> None:
    p = Program("odd")
    x = p.load("x", 64)
    p.store(p.linear(x, 3))
    p.store(p.linear(x, 8))
    kinds = [sink.kind for step in schedule(p.build()).steps for phase in step.phases for sink in phase.sinks]
    assert kinds == ["direct", "staged"]


def test_a_slice_of_a_product_is_read_from_shared_memory_in_a_later_step() -> None:
    p = Program("split")
    h = p.linear(p.load("x", 64), 128)
    a, b = (p.op("slice", 64, h, start=k, stop=k + 64) for k in (0, 64))
    p.store(p.op("mul", 64, a, p.op("sigmoid", 64, b)))
    s = schedule(p.build())
    assert s.places[h.name] is Place.SHARED and len(s.steps) == 2 and s.steps[1].gemm is None


@pytest.mark.parametrize(("dim", "width"), [(0, 257), (1, 513)])
def test_too_wide_a_tile_names_the_line_and_the_way_out(dim: int, width: int) -> None:
    p = Program("wide")
    p.store(p.linear(p.load("x", 64), width))
    with pytest.raises(VerifyError, match=rf"linear at model.py:1 makes {width} features") as e:
        schedule(staged(p.build(), placement=Shard(dim)))
    assert "split the layer" in e.value.remedy


def test_pairs_need_an_even_number_of_replicas_and_streamed_weights() -> None:
    with pytest.raises(IRError, match="3 replicas in groups of 2"):
        staged(chain(2, 64), group=2, replicas=3)
    with pytest.raises(VerifyError, match="group 2"):
        schedule(staged(chain(2, 64), group=2, replicas=2, residency=Residency.RESIDENT))


@pytest.mark.parametrize("products", [0, 3])
def test_one_or_two_products_are_in_flight(products: int) -> None:
    with pytest.raises(VerifyError, match=f"has {products} products in flight.*Remedy: use 1 or 2"):
        schedule(staged(chain(2, 64), in_flight=products))


@pytest.mark.parametrize("p", [chain(8, 256), nerf(), edge_block(128, 3, "relu")], ids=lambda p: p.name)
def test_layouts_fit_and_say_what_they_are_made_of(p: Pipeline) -> None:
    layout = lay_out(schedule(p))
    assert layout.total <= SHARED_LIMIT
    assert sum(size for _, size in layout.parts) == layout.total == footprint(p.stages[0], p).shared_bytes
    places = [layout.page_data, layout.in_data, layout.out_data, *layout.buffers]
    assert all(at % 1024 == 0 for at in places), "swizzled tiles start on 1024 bytes"


def test_a_smaller_limit_gives_smaller_rings() -> None:
    p = chain(8, 256)
    assert footprint(p.stages[0], p, 160 * 1024).shared_bytes <= 160 * 1024 < footprint(p.stages[0], p).shared_bytes


def test_the_output_of_a_shared_tile_is_staged_where_its_operand_was() -> None:
    p = staged(edge_block(512, 2, "silu"), placement=Shard(1))
    layout = lay_out(schedule(p))
    assert layout.out_buffer == 0 and layout.out_data == layout.buffers[0]
    assert layout.out_slots * 2 * CHUNK == layout.buffer_bytes[0]


def test_register_splits_fit_what_the_cta_starts_with() -> None:
    # 168 registers of 384 threads: what ptxas allows under __launch_bounds__(384, 1)
    assert all(256 * consumer + 128 * loader <= 168 * 384 for consumer, loader in REGISTER_SPLITS)


def test_parameters_of_a_program_are_never_streams() -> None:
    p = nerf()
    streams = schedule(p).streams.values()
    assert {s.tensor for s in streams} <= {t.name for t in p.by_role(Role.INPUT)}
