"""Launch one kernel of every shape, without checking values: what compute-sanitizer watches (sanitize.py).

python tests/gpu/every_shape.py --build               compile them side by side, without a GPU, and keep them
python tests/gpu/every_shape.py --only gathers        some shapes
python tests/gpu/every_shape.py --every-lane          kernels in which every lane arrives (every_lane.py)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import every_lane
import torch
from attention_cases import case as attended
from backward_chains import data as chained
from depthwise_blocks import given
from gpu_pipelines import NAMED
from heads import HEAD, head
from interactions import F16, Case
from oracle_runs import to_gpu
from random_pipelines import tensors_for
from shared_tiles import Ffn
from stationary import data
from test_gpu_backward_chains import CASES as CHAINS
from test_gpu_blocks import KERNELS as BLOCKS
from test_gpu_blocks import held
from test_gpu_convolutions import WINDOWS, chain, one_stage
from test_gpu_convolutions import tensors as pictures
from test_gpu_depthwise import CASES as DEPTHWISE
from test_gpu_gathers import CASES as GATHERS
from test_gpu_gathers import tensors as gathered
from test_gpu_shared_layer import CASES as LAYERS
from test_gpu_shared_pixels import CASES as PIXELS
from test_gpu_shared_tile import TAILS
from test_gpu_stationary import CASES as SUMS
from test_gpu_tiled_block import GATED
from torch import Tensor

from tilestream import cuda
from tilestream.apps.layers import Layer
from tilestream.bench.collectives import Runner
from tilestream.bench.exchange import BLOCK_BYTES, Exchange, Kind
from tilestream.bench.exchange import GATHERS as GATHER_KINDS
from tilestream.cuda import few_queries
from tilestream.cuda.cache import compile_ahead, compiled
from tilestream.cuda.depthwise import convolved
from tilestream.cuda.interaction import backward, forward
from tilestream.cuda.pad import padded
from tilestream.devices import get
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes import tile_block
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.run.device_ops import segment_reduce, segments

ROWS = 300
Made = tuple[Pipeline, Callable[[], Mapping[str, Tensor]], int]
"""A pipeline, its tensors on the GPU, and rows."""


def named(*names: str) -> list[Made]:
    return [(p, lambda p=p: to_gpu(tensors_for(p, ROWS)), ROWS) for p in (NAMED[name]() for name in names)]


def on_gpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cuda() for name, t in tensors.items()}


def taps(name: str, channels: int, bulk: bool) -> Made:
    window = WINDOWS[name]
    pipeline = one_stage(chain(window, channels, 64, 128, residual=True, bulk=bulk))
    return pipeline, lambda: to_gpu(pictures(pipeline, window, 3)), 3 * window.out[0] * window.out[1]


def pixels(name: str) -> Made:
    program, window, split, counts = PIXELS[name]
    rows = counts[0] * window.out[0] * window.out[1]
    return share_tile(program, split), lambda: to_gpu(pictures(program, window, counts[0])), rows


def blocks(name: str) -> Made:
    program, over = BLOCKS[name]
    pipeline = held(program, 132, over)
    return pipeline, lambda: to_gpu(tensors_for(pipeline, ROWS)), ROWS


def shared(middle: Middle) -> list[Made]:
    block = Ffn(1000, 264, 328)
    chosen = [split for split in TAILS if split.middle is middle]
    return [(share_tile(block.program(), split), lambda: block.tensors(63, "cuda"), 63) for split in chosen]


def single(layer: Layer, split: Split, rows: int) -> Made:
    return share_tile(layer.program(), split), lambda: layer.tensors(rows, "cuda"), rows


BY_NAME: dict[str, tuple[str, ...]] = {
    "row streams": ("chain", "chain_tf32", "chain_resident", "nerf", "edge_block_512", "reductions"),
    "tiles by columns": ("narrow_by_columns", "views_by_columns", "wide", "mixed_odd_inputs_by_columns"),
    "pairs of CTAs": ("chain_pairs", "odd_widths_pairs_f16", "wide_pairs"),
    "odd rows": ("odd_widths", "odd_widths_f16", "views", "mixed_odd_inputs", "mixed_slices_of_fp32"),
    "queues in L2": ("spatial_chain_tight", "spatial_multicast", "spatial_heads_f16", "spatial_hybrid"),
    "layers over SMs by columns": ("layers_by_columns", "layers_by_columns_f16"),
    "queues in DRAM": ("bulk_chain", "bulk_odd_f16", "l2_and_dram"),
}
"""Pipelines of ``gpu_pipelines.NAMED``, by their shape; the others of these are a shape by themselves."""
LISTED = {name for names in BY_NAME.values() for name in names}
PIPELINES: dict[str, Callable[[], Sequence[Made]]] = {
    **{shape: partial(named, *names) for shape, names in BY_NAME.items()},
    "the others by name": partial(named, *(name for name in NAMED if name not in LISTED)),
    "gathers": lambda: [
        (p, lambda p=p: on_gpu(gathered(p, ROWS)), ROWS)
        for p in (GATHERS[n]() for n in ("message128", "message512", "f32", "everywhere"))
    ],
    "taps of pixels": lambda: [taps("same", 64, False), taps("strided", 72, False), taps("same", 64, True)],
    "wide layers in place": lambda: [blocks(name) for name in ("odd", "norm", "streamed", "points")],
    "shared tiles": lambda: shared(Middle.L2),
    "shared tiles over clusters": lambda: shared(Middle.DSM),
    "heads of one column": lambda: [(share_tile(head(), HEAD), lambda: to_gpu(tensors_for(head(), ROWS)), ROWS)],
    "single layers": lambda: [single(layer, split, min(counts)) for layer, split, counts in LAYERS],
    "single layers of pixels": lambda: [pixels(name) for name in PIXELS],
    "tiled blocks": lambda: [
        (tile_block(block.program(), get("h200")), lambda block=block: block.tensors(ROWS, "cuda"), ROWS)
        for block in (Ffn(1032, 520, 520, act="gelu", norm="layer", residual=True, dtype="f16"), GATED)
    ],
    "backward chains": lambda: [(p, lambda p=p: chained(p, ROWS, device="cuda"), ROWS) for p in CHAINS.values()],
    "stationary sums": lambda: [(p, lambda p=p: data(p, ROWS, device="cuda"), ROWS) for p in SUMS.values()],
}


def sums() -> None:
    """An empty sum, short and long segments, and rows that many edges name."""
    for edges, nodes, features, dtype in ((0, 7, 64, torch.bfloat16), (900, 70, 128, torch.float32), (999, 5, 72, F16)):
        rows, index = torch.randn(edges, features, device="cuda"), torch.randint(nodes, (edges,), device="cuda")
        order, *starts = segments(index, nodes)
        segment_reduce(None, rows.to(dtype), order, *starts)
        segment_reduce(torch.randn(nodes, features, device="cuda").to(dtype), rows.to(dtype), order // 2, *starts)


def interactions() -> None:
    for case in (
        Case(27, 128, 130),
        Case(27, 64, 130, diagonal=True, twice=True),
        Case(18, 24, 100, head=5, dtype=F16),
    ):
        forward(*case.operands("cuda"), case.head)
        backward(*case.operands("cuda"), case.given("cuda"))


def attention() -> None:
    """Heads alone on an SM and side by side, with positions that no group has, with masks and without."""
    for *sizes, mask in ((3, 2, 128, 70, "one"), (140, 4, 64, 33, "each"), (2, 8, 32, 5, "")):
        q, k, v, added = (None if t is None else t.cuda() for t in attended(*sizes, mask=mask))
        few_queries.attention(q, k, v, added, 0.1)  # pyright: ignore[reportArgumentType]


def pads() -> None:
    """Rows of one piece and of many, which end where their tensor does."""
    for k, dtype in ((7, F16), (479, torch.bfloat16), (1030, torch.bfloat16)):
        padded([torch.randn(rows, k, device="cuda").to(dtype) for rows in (1024, 33)], -(-k // 8) * 8)


def depthwise() -> None:
    """Tiles that fill a picture and that stick out, operands with all their vectors and without."""
    for case in DEPTHWISE:
        x, weight, *vectors = given(case, "cuda")
        slid = case[2:6]
        convolved(x, weight, *vectors, *slid, True)
        convolved(x, weight, None, None, None, *slid, False)


EXCHANGES = [Exchange(kind, 4, 4096 if kind in GATHER_KINDS else 2 * BLOCK_BYTES) for kind in Kind]


def collectives() -> None:
    for exchange in EXCHANGES:
        Runner(exchange).error()


def stamps() -> None:
    (pipeline, tensors, rows), *_ = named("spatial_chain_tight")
    cuda.build(pipeline, stamped=True)(tensors(), rows)


def turned_weights() -> None:
    """Weights that lie transposed, of even and of odd sizes."""
    for pipeline, tensors, rows in named("chain", "odd_widths"):
        compiled, given = cuda.build(pipeline), dict(tensors())
        for weight in pipeline.by_role(Role.PARAMETER):
            if len(weight.shape) == 2:
                given[weight.name] = given[weight.name].t().contiguous().t()
        results = [compiled.empty(t, rows, {}) for t in compiled.outputs]
        compiled.bind(given, rows, [t.name for t in compiled.outputs])(results)


OTHERS: dict[str, Callable[[], None]] = {
    "sums by segments": sums, "interactions": interactions, "collectives": collectives, "stamps": stamps,
    "turned weights": turned_weights, "attention": attention, "pads": pads, "depthwise": depthwise,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PIPELINES, *OTHERS], default=[*PIPELINES, *OTHERS])
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--every-lane", action="store_true")
    given = parser.parse_args()
    if given.every_lane:
        every_lane.use()
    made = {shape: make() for shape, make in PIPELINES.items() if shape in given.only}
    pipelines = [p for shape in made.values() for p, _, _ in shape]
    exchanges = EXCHANGES if "collectives" in given.only else []
    cuda.start(pipelines)
    compile_ahead(exchanges)
    if given.build:
        reports = [*(r for p in pipelines for r in cuda.compile_only(p)), *map(compiled, exchanges)]
        spills = [report.spills for report in reports]
        print(f"{len(spills)} kernels, {sum(s > 0 for s in spills)} of them spill")
        return
    for shape, launches in made.items():
        for pipeline, tensors, rows in launches:
            cuda.build(pipeline)(tensors(), rows)
        torch.cuda.synchronize()
        print(f"launched: {shape}", flush=True)
    for shape, launch in OTHERS.items():
        if shape in given.only:
            launch()
            torch.cuda.synchronize()
            print(f"launched: {shape}", flush=True)


if __name__ == "__main__":
    main()
