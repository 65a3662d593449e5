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
from decode_steps import made_up as step_of
from depthwise_blocks import given as convolution
from gates import given as gate_operands
from gathers import message, with_index
from given_bounds import lookup
from gpu_pipelines import NAMED
from heads import HEAD, head
from interactions import F16, Case
from masked_cases import BANDS
from masked_cases import CASES as MASKS
from masked_cases import Case as Masked
from modules import linear
from norms import CASES as NORMS
from norms import given as norm_operands
from one_rows import cell
from oracle_runs import guarded, to_gpu
from ragged_programs import Case as Ragged
from ragged_programs import Graph, aggregators, dot_products, gather_sum, weighted
from ragged_programs import attention as by_edges
from random_pipelines import tensors_for
from shared_tiles import Ffn
from short_attentions import CASES as SHORT
from short_attentions import WHOLE_HEADS, given_gradient
from short_attentions import Case as Short
from stationary import data
from test_gpu_backward_chains import CASES as CHAINS
from test_gpu_blocks import KERNELS as BLOCKS
from test_gpu_blocks import held
from test_gpu_convolutions import WINDOWS, chain, one_stage
from test_gpu_convolutions import tensors as pictures
from test_gpu_decode_step import SHAPES as STEPS
from test_gpu_decode_step import run as decoded
from test_gpu_depthwise import CASES as DEPTHWISE
from test_gpu_edges import staged
from test_gpu_gathers import CASES as GATHERS
from test_gpu_gathers import tensors as gathered
from test_gpu_shared_layer import CASES as LAYERS
from test_gpu_shared_pixels import CASES as PIXELS
from test_gpu_shared_tile import TAILS
from test_gpu_squeeze import CASES as SQUEEZED
from test_gpu_stationary import CASES as SUMS
from test_gpu_tiled_block import GATED, by_columns
from torch import Tensor, nn

from benchmarks.lib.edge_layers import edge_conv
from benchmarks.lib.edge_layers import tensors as of_edges
from tilestream import cuda
from tilestream.apps.layers import Layer
from tilestream.bench.collectives import Runner
from tilestream.bench.exchange import BLOCK_BYTES, Exchange, Kind
from tilestream.bench.exchange import GATHERS as GATHER_KINDS
from tilestream.cuda import few_queries, masked_attention, short_attention, sorted_keys, weight_parts
from tilestream.cuda.cache import compile_ahead, compiled
from tilestream.cuda.compile import Source
from tilestream.cuda.depthwise import convolved
from tilestream.cuda.interaction import backward, forward
from tilestream.cuda.pad import padded
from tilestream.cuda.squeeze import gated
from tilestream.devices import get
from tilestream.graph.capture import capture
from tilestream.graph.rewrites.norm_sums import NORM_GRADIENTS
from tilestream.graph.selection import partition
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Pipeline, Residency, Role
from tilestream.kernels.operators.lanes import LaneKernel
from tilestream.kernels.parts.source import BesideSource
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.options import Options
from tilestream.plan.passes.divide_columns import divide_columns
from tilestream.plan.passes.forms import load_directly
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.passes.tile_block import tile_block
from tilestream.plan.planner import plan
from tilestream.run.device_ops import segment_reduce, segments, sorted_index

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


LYING = Layer(264, (136,), act="silu", gated=True)
"""Of weights by columns."""

DEGREES = [0, 3000, 3, 70, *[16] * 60, 0, 5]
"""Edges of nodes: of none, within a tile of rows and across two, and a hub that further launches add up."""


def edge_network(*sizes: int, sums: Sequence[str] = (), direct: bool = True, resident: bool = True) -> Made:
    program = edge_conv(*sizes, sums)
    pipeline = staged(program, direct, Residency.RESIDENT if resident else Residency.STREAMED)
    return pipeline, lambda: of_edges(program, torch.tensor(DEGREES, device="cuda")), sum(DEGREES)


def own_rows(pipeline: Pipeline) -> Made:
    """Rows that lanes load, beside rows that come in order."""
    return one_stage(load_directly(pipeline)), lambda: on_gpu(gathered(pipeline, ROWS)), ROWS


def by_parts(width: int) -> Made:
    """A chain of float32 whose products are of parts of bf16."""
    module = nn.Sequential(linear(width, width), nn.SiLU(), linear(width, width))
    (region,) = partition(capture(module, [torch.randn(ROWS, width)]).graphs[0]).regions
    pipeline = plan(region.program, 65536, get("h200"), Options(strategy="vertical")).chosen.pipeline
    assert pipeline is not None
    return pipeline, lambda: to_gpu(tensors_for(pipeline, ROWS)), ROWS


def edges_of_nodes() -> Graph:
    """Nodes without edges, with some, and with so many that several CTAs sum them."""
    index = torch.randint(300, (4000,))
    index[:900], index[900:2400] = 3, 4
    return Graph(301, index[torch.randperm(4000)])


def ragged(case: Ragged, busy: bool = True) -> Made:
    def tensors() -> Mapping[str, Tensor]:
        given = case.given(edges_of_nodes())
        return on_gpu({name: t for name, t in given.items() if busy or name != "starts.busy"})

    return case.pipeline(busy), tensors, 301


def bags(shares: bool) -> Made:
    """Rows of a table over bounds that are given, named by int64; a bag is empty and one is long."""
    starts, indices = torch.tensor([0, 4, 4, 900, *range(905, 1400, 5)]), torch.randint(50, (1400,))
    pipeline, given = lookup(torch.randn(50, 24), indices, starts, torch.randn(1400) if shares else None)
    return pipeline, lambda: on_gpu(given), len(starts) - 1


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
    "columns of one row": lambda: [(divide_columns(cell(), get("h200")), lambda: to_gpu(tensors_for(cell(), 1)), 1)],
    "single layers": lambda: [single(layer, split, min(counts)) for layer, split, counts in LAYERS],
    "single layers of pixels": lambda: [pixels(name) for name in PIXELS],
    "weights by columns": lambda: [
        (made, lambda: LYING.tensors(ROWS, "cuda"), ROWS)
        for made in (tile_block(by_columns(LYING), get("h200")), share_tile(by_columns(LYING), Split(1, 3, Tail.NONE)))
    ],
    "tiled blocks": lambda: [
        (tile_block(block.program(), get("h200")), lambda block=block: block.tensors(ROWS, "cuda"), ROWS)
        for block in (
            Ffn(1032, 520, 520, act="gelu", norm="layer", residual=True, dtype="f16"),
            GATED,
            Layer(264, (520,), act="silu", gated=True),
            Layer(264, (320,), residual=True, stream="f32"),
        )
    ],
    "backward chains": lambda: [(p, lambda p=p: chained(p, ROWS, device="cuda"), ROWS) for p in CHAINS.values()],
    "networks of edges": lambda: [
        edge_network(16, 64, 64, sums=("max", "sum", "min")),
        edge_network(8, 24, 33, sums=("sum",), direct=False),
        edge_network(64, 64, 128, sums=("max",), resident=False),
        edge_network(8, 24, 33, resident=False),
        own_rows(message(64, 2)),
        own_rows(with_index(message(72, 2, dtype="f16"), "i32")),
    ],
    "float32 by parts": lambda: [by_parts(width) for width in (50, 128)],
    "sums over ragged axes": lambda: [
        *(ragged(gather_sum(*of)) for of in ((64, "bf16"), (33, "bf16", "max"), (300, "f16", "min"), (1, "f32"))),
        ragged(gather_sum(36, "f32", base=False), busy=False),
        ragged(aggregators(75, "bf16")),
        *(ragged(weighted(*of)) for of in ((24, "bf16"), (17, "f32", 3))),
    ],
    "softmax over ragged axes": lambda: [
        ragged(by_edges(4, 64, "bf16", fused=True)),
        ragged(by_edges(3, 24, "bf16", fused=False, highest=True)),
        ragged(by_edges(16, 6, "f32", fused=False, alpha=True)),
        *(ragged(dot_products(*of)) for of in ((2, 16, "bf16"), (3, 20, "f32"), (1, 300, "f16"))),
    ],
    "bags": lambda: [bags(shares) for shares in (False, True)],
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


def short() -> None:
    """Sequences after one another and one each, what is added held and read; keys and queries that stick out."""
    for case in (*SHORT.values(), *WHOLE_HEADS.values()):
        q, k, v = case.operands("cuda")
        short_attention.attention(q, k, v, case.terms("cuda"), 0.1, True)
    case = Short(1100, 1, 49, 32, ((1, 1, 49, 49), (4, 1, 49, 49)))
    short_attention.attention(*case.operands("cuda"), case.terms("cuda"), 0.1, False)  # pyright: ignore
    for c in (case, *(c for c in SHORT.values() if max(c.keys, c.queries) <= 128 and c.features < 128)):
        summed = len(c.added) > 0 and c.added[0][0] == 1 and c.queries <= 64
        given = (given_gradient(c, "cuda"), *c.operands("cuda"), c.terms("cuda"), 0.1, True, summed, 2)
        short_attention.gradients(*given)
    c = Short(40, 2, 200, 32, (), 49)
    given = (given_gradient(c, "cuda"), *c.operands("cuda"), [], 0.1, True, False, 2)
    short_attention.gradients(*given)


def pads() -> None:
    """Rows of one piece and of many, the last of which is read in a vector that ends behind the tensor."""
    for k, dtype in ((7, F16), (479, torch.bfloat16), (1030, torch.bfloat16)):
        padded([guarded(torch.randn(rows, k).to(dtype)) for rows in (1024, 33)], -(-k // 8) * 8)


def masked() -> None:
    """Masks of every kind, those of blocks that are listed among them; rows of which no pair is kept."""
    for case in (*MASKS.values(), *BANDS.values()):
        query, key, value = case.operands("cuda")
        read, blocks = [t.cuda() for t in case.read], case.blocks("cuda")
        out = torch.empty_like(query)
        masked_attention.attention(query, key, value, case.mask, read, blocks, case.differs, 0.1, out)


def sorted_lists() -> None:
    """By one launch, by one, two and three digits, with few edges for many nodes; indices picked.

    Of a list in order later passes ask for what the first does not write, before they know that they need not: torch
    fills what it allocates.
    """
    for edges, nodes in ((3000, 200), (20_000, 1000), (20_000, 100_000), (20_000, 2**20 + 1), (9000, 5_000_000)):
        for in_order in (False, True):
            index = torch.randint(-nodes, nodes, (edges,)).int().cuda()
            index = index.abs().long().clamp(max=nodes - 1).sort().values if in_order else index
            torch.use_deterministic_algorithms(in_order)
            order, *_ = segments(index, nodes)
            torch.use_deterministic_algorithms(False)
            sorted_index(index, order, nodes)


def experts() -> None:
    """A router's choice as a sort of few numbers, and what each token's experts made added up."""
    for tokens, features, dtype in ((400, 128, torch.bfloat16), (9000, 72, torch.float32)):
        chosen = torch.randn(tokens, 16, device="cuda").topk(2).indices.flatten()
        order, *_ = segments(chosen, 16)
        made = torch.randn(2 * tokens, features, device="cuda").to(dtype)
        starts = 2 * torch.arange(tokens + 1, device="cuda", dtype=torch.int32)
        segment_reduce(None, made, order.long().argsort().int(), starts, None)
        segment_reduce(None, made, None, starts, None, "max")


def parts_of_weights() -> None:
    """Rows of any width, transposed ones, and of one column."""
    weights = [torch.randn(300, 130), torch.randn(70, 64).t(), torch.randn(5, 9), torch.randn(33, 1)]
    weight_parts.made([w.cuda() for w in weights])


def depthwise() -> None:
    """Tiles that fill a picture and that stick out, operands with all their vectors and without."""
    for case in DEPTHWISE:
        x, weight, *vectors = convolution(case, "cuda")
        slid = case[2:6]
        convolved(x, weight, *vectors, *slid, True)
        convolved(x, weight, None, None, None, *slid, False)


def decode_steps() -> None:
    """Llama's, Qwen3's and GPT-2's, of one sequence and of several, rows of one piece a warp and of two."""
    for shape, place in STEPS.values():
        decoded(step_of(shape, place, device="cuda"))


def squeezed() -> None:
    """Fewer channels than lanes and more."""
    for case in SQUEEZED[1:]:
        gated(*gate_operands(case, "cuda"))


def norm_gradients() -> None:
    """A vector a lane and several, lanes without one, means and none, rows beside and none."""
    for case in NORMS.values():
        NORM_GRADIENTS(*norm_operands(case, "cuda"))


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
    "turned weights": turned_weights, "attention": attention, "pads": pads, "attention over masks": masked,
    "sorted lists": sorted_lists, "experts": experts, "parts of weights": parts_of_weights,
    "depthwise convolutions": depthwise, "decode steps": decode_steps, "attention over few keys": short,
    "gates": squeezed, "gradients of norms": norm_gradients,
}  # fmt: skip
SORTS = BesideSource("sorted keys", sorted_keys.text(), sorted_keys.SHARED_BYTES)
NOT_FOLLOWED = {"decode steps"}
"""By racecheck (docs/testing.md): left out of ``--every-lane``."""
BESIDE: dict[str, Callable[[], Sequence[Source]]] = {
    "collectives": lambda: EXCHANGES,
    "sorted lists": lambda: [SORTS],
    "attention over masks": lambda: [kernel.source for case in MASKS.values() for kernel in _of_mask(case)],
}
"""Kernels of ``OTHERS`` that take long to compile, which is done ahead."""


def _of_mask(case: Masked) -> tuple[LaneKernel, LaneKernel]:
    dtypes = tuple(str(t.dtype) for t in case.read)
    attends = masked_attention.attention_kernel(case.sizes[-1], DTYPES[case.dtype])
    return attends, masked_attention.tiles_kernel(case.mask, dtypes, case.listed)


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
    beside = [source for shape, sources in BESIDE.items() if shape in given.only for source in sources()]
    cuda.start(pipelines)
    compile_ahead(beside)
    if given.build:
        reports = [*(r for p in pipelines for r in cuda.compile_only(p)), *map(compiled, beside)]
        spills = [report.spills for report in reports]
        print(f"{len(spills)} kernels, {sum(s > 0 for s in spills)} of them spill")
        return
    for shape, launches in made.items():
        for pipeline, tensors, rows in launches:
            cuda.build(pipeline)(tensors(), rows)
        torch.cuda.synchronize()
        print(f"launched: {shape}", flush=True)
    for shape, launch in OTHERS.items():
        if given.every_lane and shape in NOT_FOLLOWED:
            print(f"left out: {shape}, which racecheck does not follow", flush=True)
        elif shape in given.only:
            launch()
            torch.cuda.synchronize()
            print(f"launched: {shape}", flush=True)


if __name__ == "__main__":
    main()
