"""Operators outside of pipelines as kernels: cuBLAS's, fused attention, Inductor's, PyTorch's own.

A kernel is one operator that Inductor leaves to others, or operators that it fuses. What each takes is
``simulator.library``'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

import torch
from torch import fx

from tilestream.graph.convolutions import is_convolution
from tilestream.graph.costs import flops
from tilestream.graph.costs.table import GEMMS, Kind, row
from tilestream.graph.costs.work import (
    dtype_of,
    elements,
    gemm,
    goes_over,
    layout,
    operands,
    query_key,
    reduced,
    results,
    size,
    work,
)
from tilestream.graph.decode import STEP
from tilestream.graph.depthwise import DEPTHWISE, site_of
from tilestream.graph.eager import EagerOp
from tilestream.graph.nodes import name as target_name
from tilestream.graph.nodes import packet, value
from tilestream.graph.provenance import source
from tilestream.graph.rewrites.epilogues import is_linear, missing_columns
from tilestream.graph.rewrites.norm_sums import NORM_GRADIENTS
from tilestream.graph.sizes import hint
from tilestream.graph.squeeze import SQUEEZE
from tilestream.plan import concatenations, depthwise, interaction, messages, squeeze
from tilestream.plan.concatenations import is_cat
from tilestream.plan.indexed import accesses, by_atomics, is_table_gradient, scatters
from tilestream.plan.values import Moved, Readers, moved, producer, reads
from tilestream.simulator.library import Attention, Gemm, Kernel, Own, Product, Stream
from tilestream.simulator.library.padding import behind_copies

aten = torch.ops.aten
Bytes = tuple[tuple[str, float], ...]

QUERIES = 128
"""Of one tile of fused attention."""
NORM_INSTRUCTIONS = 20
"""An element of a norm's gradients (``norm_gradients.cuh``), counted in its text."""
TENSOR_DTYPES = ("bf16", "f16", "f32")
OWN_REDUCTIONS = ("scatter_fill", "scatter_reduce")
OURS: dict[Any, Callable[[fx.Node], Stream]] = {
    **dict.fromkeys(interaction.TARGETS, interaction.work_of),
    DEPTHWISE: depthwise.work_of,
    SQUEEZE: squeeze.work_of,
    NORM_GRADIENTS: lambda node: Stream(goes_over(node), NORM_INSTRUCTIONS * goes_over(node)),
}
"""What the simulator runs for a call of an operator of ours."""
POINTWISE_CAT = 8
"""Parts up to which Inductor computes a concatenation; of more, each part's kernel writes where it belongs."""


def alone(node: fx.Node) -> bool:
    """Whether Inductor makes no kernel of its own of an operator, or none with its neighbours.

    Products and attention are libraries'; some additions by an index are PyTorch's (``plan.indexed``); a sum over rows
    goes over its operand the other way. A concatenation of many parts is memory that others write into.
    """
    if node.target in (*OURS, *messages.TARGETS, STEP):
        return True
    summed, over_rows = reduced(node)
    own = scatters(node) and not by_atomics(node)
    return own or (over_rows and summed > 1) or joins(node) or flops.of_node(node) > 0


def reduces(node: fx.Node) -> bool:
    """Whether an operator reduces rows: what it makes is no function of one element."""
    return row(packet(node)).kind in (Kind.NORM, Kind.SOFTMAX) or reduced(node)[0] > 1


def joins(node: fx.Node) -> bool:
    """Whether a concatenation is no kernel: those that make its parts write them in place."""
    parts = node.args[0] if node.args else ()
    return is_cat(node) and isinstance(parts, list | tuple) and len(parts) > POINTWISE_CAT


def kernels(nodes: Sequence[fx.Node], readers: Readers, tf32: bool) -> tuple[Kernel, ...]:
    """The kernels that ``nodes`` are, one after another: one, also of a product with its activation
    (``rewrites.epilogues``), behind a copy of operands whose rows are odd; several for gradients of tables; none for
    ``joins``.

    Args:
        tf32: whether tensor cores take float32 products.
    """
    first = nodes[0]
    touched = interaction.moved_by(first) if first.target in interaction.TARGETS else moved(nodes, readers)
    if first.target in OURS:
        return (_kernel((first,), OURS[first.target](first), touched),)
    if (site := site_of(first)) is not None:
        return (_kernel((first,), depthwise.library_work(site), touched),)
    if first.target in messages.TARGETS:
        return messages.kernels_of(first, touched)
    if amount := flops.of_node(first):
        made = _with_epilogue(_product(first, amount, touched, tf32), nodes[1:])
        padded = len(nodes) > 1 and is_linear(first) and missing_columns(first)
        return behind_copies(made) if padded else (made,)
    if len(nodes) == 1 and scatters(first) and not by_atomics(first):
        return _scatter(first, touched)
    if len(nodes) == 1 and joins(first):
        return _copies(first)
    done = [work(n) for n in nodes]
    lanes, special = sum(w.lanes for w in done), sum(w.special for w in done)
    lanes += sum(concatenations.lanes(n) * elements(n) for n in nodes if is_cat(n))
    streamed = Stream(max(map(goes_over, nodes)) or 1.0, lanes, special, by_index=accesses(nodes))
    return _with_sums(nodes, _kernel(nodes, streamed, concatenations.without_products(nodes, touched)))


def _with_epilogue(product: Kernel, epilogue: Sequence[fx.Node]) -> Kernel:
    if not epilogue or not isinstance(product.work, Gemm):
        return product
    done = work(epilogue[-1])
    beside = replace(product.work.beside, simt_ops=done.lanes, sfu_ops=done.special)
    return replace(product, work=replace(product.work, beside=beside))


def _with_sums(nodes: Sequence[fx.Node], fused: Kernel) -> tuple[Kernel, ...]:
    """``fused``, between what clears the sums that it makes by atomics and what rounds those of a table's gradient."""
    summed = [n for n in nodes if by_atomics(n)]
    before, behind, writes = [], [], dict(fused.writes)
    for node in summed:
        made = results(node)[0]
        whole, itemsize = size(made), made.element_size()
        if is_table_gradient(node) and itemsize < 4:
            wide = (f"{node.name}.sum", 4 * whole)
            behind.append(_part(node, "cast", whole, (wide,), ((node.name, whole * itemsize),)))
            writes.pop(node.name, None)
            writes |= (wide,)
            before.append(_part(node, "zeros", whole, (), (wide,)))
        else:
            before.append(_part(node, "zeros", whole, (), ((node.name, whole * itemsize),)))
    return (*before, replace(fused, writes=tuple(writes.items())), *behind)


def _part(node: fx.Node, name: str, elements: float, reads: Bytes, writes: Bytes) -> Kernel:
    """A kernel beside an addition: zeros, or a conversion."""
    return Kernel(f"{node.name}.{name}", Stream(elements), reads, writes, (target_name(node),), source(node))


def _copies(node: fx.Node) -> tuple[Kernel, ...]:
    """Of a concatenation of many parts, those that no kernel of Inductor's makes are copied."""
    parts = [r for r in reads(node) if (made := producer(r.node)) is None or alone(made)]
    if not parts:
        return ()
    taken = tuple((r.node.name, r.bytes) for r in parts)
    moved_bytes = sum(r.bytes for r in parts)
    return (_kernel((node,), Stream(max(1.0, moved_bytes / 2)), Moved(taken, ((node.name, moved_bytes),))),)


def eager_kernel(op: EagerOp, tf32: bool) -> Kernel:
    """An operator outside of every graph, of which only FLOPs and bytes are known: a product is a cube."""
    touched = Moved((("operands", 2 * op.bytes / 3),), (("result", op.bytes / 3),))
    work: Gemm | Stream = Stream(max(1.0, op.bytes / 4), slots=None)
    if op.flops:
        side = max(8, 8 * round((op.flops / 2) ** (1 / 3) / 8))
        work = _on_cores(Product(1, side, side, max(1, round(op.flops / 2 / side**2)), op.dtype), tf32)
    return Kernel(op.op, work, touched.reads, touched.writes, (op.op,), op.source)


def _kernel(nodes: Sequence[fx.Node], work: Gemm | Stream | Own | Attention, touched: Moved) -> Kernel:
    names = tuple(target_name(n) for n in nodes)
    title = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name}..{nodes[-1].name}"
    return Kernel(title, work, touched.reads, touched.writes, names, source(nodes[-1]))


def _product(node: fx.Node, amount: int, touched: Moved, tf32: bool) -> Kernel:
    if "scaled_dot_product" in str(node.target):
        attention = _attention(node, amount, touched)
        if attention is not None:
            return _kernel((node,), attention, touched)
    batch, m, n, k = _sizes(node, amount)
    made = Product(batch, m, n, k, dtype_of(_first(node)), layout(node), concatenations.pitch(node))
    return _kernel((node,), _on_cores(made, tf32), touched)


def _first(node: fx.Node) -> object:
    """What an operator multiplies: the operand of most dimensions' dtype is that of all."""
    return next((v for n in node.all_input_nodes if (v := value(n)) is not None and v.dim() > 1), node.meta.get("val"))


def _on_cores(product: Product, tf32: bool) -> Gemm | Stream:
    """A GEMM; where tensor cores do not take the dtype, a kernel whose lanes do a multiply-add an operation."""
    if product.dtype in TENSOR_DTYPES and (product.dtype != "f32" or tf32):
        return Gemm(product)
    return Stream(float(product.batch * product.m * product.n), slots=product.flops / 2)


def _sizes(node: fx.Node, amount: int) -> tuple[int, int, int, int]:
    """(batch, m, n, k). Of what is no product of matrices: rows and columns of the result, and as deep as its FLOPs."""
    if packet(node) in GEMMS:
        return gemm(node)
    made, n = next((t for t in results(node) if t.dim()), None), 1
    if made is not None:
        first = "conv" in str(packet(node)) and not is_convolution(node) and made.dim() > 2  # channels lie
        n = max(1, hint(made.shape[1 if first else -1]))
    m = max(1, round(elements(node) / n))
    return 1, m, n, max(1, round(amount / (2 * m * n)))


def _attention(node: fx.Node, amount: int, touched: Moved) -> Attention | None:
    both = query_key(node)
    if both is None:
        return None
    query, done = both[0], work(node)
    tiles = prod(hint(d) for d in query.shape[:-2]) * ceil(hint(query.shape[-2]) / QUERIES)
    read = sum(b for _, b in touched.reads)
    return Attention(float(amount), dtype_of(query), max(1, tiles), done.lanes, done.special, read)


def _scatter(node: fx.Node, touched: Moved) -> tuple[Kernel, ...]:
    """PyTorch's own additions by an index, an atomic an element; other reductions write where they begin first."""
    given = [t for t in operands(node) if t.is_floating_point()]
    if not given or not results(node):
        return (_kernel((node,), Stream(max(1.0, elements(node))), touched),)
    added = given[-1]  # not the tensor that it is added to, which comes first
    width = max(1.0, float(hint(added.shape[-1]))) if added.dim() else 1.0
    kinds = OWN_REDUCTIONS if packet(node) is aten.scatter_reduce else ("scatter_add",)
    return tuple(_kernel((node,), Own(kind, size(added) / width, width), touched) for kind in kinds)
