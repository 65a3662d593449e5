"""Modules of one operator each, as a user types them: which of them the sparse compiler runs, and what it says of the
others. ``x`` [6, 4], ``y`` [6, 4] and ``s`` [4, 4] are matrices, ``v`` a row [4], ``c`` a column [6], ``b`` [2, 6, 4]
a batch, ``q`` [2, 4, 5, 8] heads, ``p`` [1, 2, 6, 6] pictures; indices are ``E`` and ``ROWS``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sparse_modules import Call, rand
from torch.utils._pytree import tree_leaves

from tilestream.errors import TilestreamError
from tilestream.sparse import Schedule, compile
from tilestream.sparse.cpu import CpuProgram

ROWS = torch.tensor([3, 0, 5, 3])
"""Rows of a matrix of six."""
E = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 3, 2], [1, 2, 0, 5, 3, 4, 5, 0, 3]])
"""Edges of a graph of six nodes."""
LABELS = torch.tensor([0, 3, 1, 2, 2, 0])
COLUMNS = torch.tensor([[0, 1], [3, 2], [1, 1], [2, 0], [0, 3], [1, 2]])

INPUTS = {
    "x": rand(6, 4, density=0.6, seed=1) + 0.0,  # no zero has a sign, of which sparse tensors know nothing
    "y": rand(6, 4, seed=2),
    "s": rand(4, 4, seed=3),
    "v": rand(4, seed=4),
    "c": rand(6, seed=5),
    "b": rand(2, 6, 4, seed=6),
    "d": rand(2, 4, 3, seed=7),
    "q": rand(2, 4, 5, 8, seed=8),
    "k": rand(2, 2, 5, 8, seed=9),
    "p": rand(1, 2, 6, 6, seed=10),
    "w": rand(3, 2, 3, 3, seed=11),
    "e": rand(9, 4, seed=12),
}

ELEMENTWISE = {
    "abs": lambda x: x.abs(),
    "neg": lambda x: -x,
    "exp": lambda x: x.exp(),
    "exp2": lambda x: torch.exp2(x),
    "log": lambda x: (x.abs() + 1).log(),
    "log2": lambda x: (x.abs() + 1).log2(),
    "log10": lambda x: (x.abs() + 1).log10(),
    "log1p": lambda x: x.abs().log1p(),
    "sqrt": lambda x: x.abs().sqrt(),
    "reciprocal": lambda y: y.reciprocal(),
    "sin": lambda x: x.sin(),
    "tan": lambda x: x.tan(),
    "asin": lambda x: (x / 9).asin(),
    "atan": lambda x: x.atan(),
    "atan2": lambda x, y: torch.atan2(x, y),
    "sinh": lambda x: x.sinh(),
    "cosh": lambda x: x.cosh(),
    "atanh": lambda x: (x / 9).atanh(),
    "erf": lambda x: x.erf(),
    "erfinv": lambda x: (x / 9).erfinv(),
    "lgamma": lambda y: y.lgamma(),
    "sigmoid": lambda x: x.sigmoid(),
    "logit": lambda x: x.sigmoid().logit(),
    "sign": lambda x: x.sign(),
    "floor": lambda x: x.floor(),
    "ceil": lambda x: x.ceil(),
    "round": lambda x: x.round(),
    "round_decimals": lambda x: x.round(decimals=1),
    "trunc": lambda x: x.trunc(),
    "frac": lambda x: x.frac(),
    "fmod": lambda x: x.fmod(0.7),
    "remainder": lambda x: x % 0.7,
    "floor_divide": lambda x: x // 0.7,
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "pow_number": lambda y: y.abs() ** 1.5,
    "pow_tensor": lambda x, y: y.abs() ** x,
    "number_pow": lambda x: 2**x,
    "hypot": lambda x, y: torch.hypot(x, y),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
    "sinc": lambda x: x.sinc(),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "maximum": lambda x, y: torch.maximum(x, y),
    "fmax": lambda x, y: torch.fmax(x, y),
    "copysign": lambda x, y: torch.copysign(x, y),
    "heaviside": lambda x, y: torch.heaviside(x, y),
    "nan_to_num": lambda x: (1 / x).nan_to_num(0.0, 5.0, -5.0),
    "isfinite": lambda x: (1 / x).isfinite().double(),
    "isclose": lambda x, y: torch.isclose(x, y, atol=0.5).double(),
    "rad2deg": lambda x: x.rad2deg(),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "logical_xor": lambda x, y: torch.logical_xor(x > 0, y > 0).double(),
    "to_int": lambda x: (3 * x).int(),
}

ACTIVATIONS = {
    "relu": lambda x: F.relu(x),
    "leaky_relu": lambda x: F.leaky_relu(x),
    "elu": lambda x: F.elu(x),
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "mish": lambda x: F.mish(x),
    "softplus": lambda x: F.softplus(x),
    "hardtanh": lambda x: F.hardtanh(x),
    "hardswish": lambda x: F.hardswish(x),
    "softshrink": lambda x: F.softshrink(x),
    "hardshrink": lambda x: F.hardshrink(x),
    "tanhshrink": lambda x: F.tanhshrink(x),
    "prelu": lambda x, v: F.prelu(x, v),
    "rrelu": lambda x: F.rrelu(x),
    "glu": lambda x: F.glu(x),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
}

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum_rows": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(0),
    "prod": lambda y: y.prod(),
    "prod_rows": lambda y: y.prod(1),
    "max_all": lambda x: x.max(),
    "max_values": lambda x: x.max(-1).values,
    "max_indices": lambda x: x.max(-1).indices,
    "min_all": lambda x: x.min(),
    "min_values": lambda x: x.min(0).values,
    "amin": lambda x: x.amin(0),
    "aminmax": lambda x: torch.aminmax(x),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda y: y.argmin(),
    "any": lambda x: (x > 1).any(1).double(),
    "all": lambda x: (x > -2).all().double(),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "norm": lambda x: x.norm(),
    "norm_of_order_3": lambda x: x.norm(3, 1),
    "norm_of_order_0": lambda x: x.norm(0, 1),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "logsumexp": lambda x: x.logsumexp(1),
    "median": lambda y: y.median(1).values,
    "quantile": lambda y: y.quantile(0.3, dim=1),
    "kthvalue": lambda y: y.kthvalue(2, 1).values,
    "nansum": lambda x: x.nansum(1),
    "count_nonzero": lambda x: x.count_nonzero(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda y: y.cumprod(1),
    "cummax": lambda y: y.cummax(0).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "diff": lambda x: x.diff(dim=1),
    "trace": lambda s: s.trace(),
}

VIEWS = {
    "view": lambda x: x.view(3, 8),
    "flatten": lambda b: b.flatten(1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "transpose": lambda b: b.transpose(1, 2),
    "T": lambda x: x.T,
    "permute": lambda b: b.permute(2, 0, 1),
    "movedim": lambda b: b.movedim(0, -1),
    "swapdims": lambda b: b.swapdims(0, 1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "expand": lambda v: v.expand(6, 4),
    "repeat": lambda x: x.repeat(2, 1),
    "tile": lambda x: x.tile(2),
    "slice": lambda x: x[1:5:2, 1:],
    "select": lambda x: x[2],
    "ellipsis": lambda b: b[..., -1],
    "none_index": lambda x: x[:, None] - x[None],
    "chunk": lambda x: x.chunk(2, 1),
    "unbind": lambda x: x.unbind(1),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "hstack": lambda x, y: torch.hstack([x, y]),
    "vstack": lambda x, v: torch.vstack([x, v]),
    "column_stack": lambda x, c: torch.column_stack([x, c]),
    "roll": lambda x: x.roll(1, 0),
    "roll_two": lambda x: x.roll((1, -1), (0, 1)),
    "flip": lambda x: x.flip(0),
    "rot90": lambda x: x.rot90(),
    "diagonal": lambda s: s.diagonal(),
    "diag_of_matrix": lambda s: s.diag(),
    "diag_of_vector": lambda v: v.diag(),
    "diag_embed": lambda x: torch.diag_embed(x),
    "tril": lambda s: s.tril(),
    "triu": lambda x: x.triu(1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_reflect": lambda x: F.pad(x.unsqueeze(0), (1, 1), mode="reflect"),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "block_diag": lambda x, s: torch.block_diag(x, s),
    "meshgrid": lambda v, c: torch.meshgrid(v, c, indexing="ij"),
    "pixel_shuffle": lambda b: F.pixel_shuffle(b.reshape(4, 3, 4), 2),
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y)),
}

PRODUCTS = {
    "mm": lambda x, s: x @ s,
    "mv": lambda x, v: x @ v,
    "bmm": lambda b, d: torch.bmm(b, d),
    "addmm": lambda y, x, s: torch.addmm(y, x, s, beta=0.5),
    "addbmm": lambda b, d: torch.addbmm(torch.zeros(6, 3, dtype=b.dtype), b, d),
    "addr": lambda x, c, v: torch.addr(x, c, v),
    "outer": lambda c, v: torch.outer(c, v),
    "inner": lambda x, v: torch.inner(x, v),
    "dot": lambda v: torch.dot(v, v.exp()),
    "vdot": lambda v: torch.vdot(v, v.exp()),
    "tensordot": lambda b, d: torch.tensordot(b, d, dims=([0, 2], [0, 1])),
    "kron": lambda x, s: torch.kron(x, s),
    "einsum": lambda b, d: torch.einsum("bij,bjk->bik", b, d),
    "einsum_ellipsis": lambda b, s: torch.einsum("...ij,jk->...ik", b, s),
    "einsum_diagonal": lambda s: torch.einsum("ii->i", s),
    "einsum_three": lambda c, x, v: torch.einsum("i,ij,j->", c, x, v),
    "linear": lambda x, s, v: F.linear(x, s, v),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.ones(3, 4, 4, dtype=x.dtype)),
    "multi_dot": lambda x, s: torch.linalg.multi_dot([x, s, s]),
    "matrix_power": lambda s: torch.linalg.matrix_power(s, 3),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y),
    "cdist": lambda x, y: torch.cdist(x, y),
    "sparse_mm": lambda x, s: torch.sparse.mm(x, s),
    "inv": lambda s: torch.linalg.inv(s),
    "det": lambda s: torch.linalg.det(s),
    "solve": lambda s, v: torch.linalg.solve(s, v),
    "svd_values": lambda s: torch.linalg.svdvals(s),
    "fft": lambda v: torch.fft.rfft(v).abs(),
}

NORMS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "softmin": lambda x: F.softmin(x, dim=1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x, v: F.batch_norm(x, v, v.abs() + 1),
    "batch_norm_of_the_batch": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda b: F.instance_norm(b),
    "local_response_norm": lambda b: F.local_response_norm(b, 2),
    "normalize": lambda x: F.normalize(x, dim=1),
}

INDEXING = {
    "rows": lambda x: x[ROWS],
    "columns": lambda x: x[:, LABELS[:3]],
    "pairs": lambda x: x[ROWS, COLUMNS[:4, 0]],
    "rows_of_slice": lambda b: b[:, ROWS, 1:],
    "index_select": lambda x: x.index_select(0, ROWS),
    "gather": lambda x: x.gather(1, COLUMNS),
    "take": lambda x: x.take(COLUMNS),
    "take_along_dim": lambda y: torch.take_along_dim(y, y.argsort(1), 1),
    "embedding": lambda x: F.embedding(COLUMNS, x),
    "embedding_bag": lambda x: F.embedding_bag(COLUMNS, x, mode="sum"),
    "scatter": lambda x, y: x.scatter(1, COLUMNS[:, :1], y),
    "scatter_add": lambda x, y: x.scatter_add(0, LABELS[:, None].expand(6, 4), y),
    "scatter_mean": lambda x, y: x.scatter_reduce(0, LABELS[:, None].expand(6, 4), y, "mean"),
    "scatter_prod": lambda x, y: x.scatter_reduce(0, LABELS[:, None].expand(6, 4), y, "prod"),
    "index_add": lambda x, y: x.index_add(0, ROWS, y[:4]),
    "index_copy": lambda x, y: x.index_copy(0, LABELS[1:4], y[:3]),
    "index_fill": lambda x: x.index_fill(0, ROWS, 2.0),
    "assignment": lambda x: _assigned(x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask_index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_of_scalars": lambda x: torch.where(x > 0, 1.0, -1.0),
    "topk": lambda y: y.topk(2).values,
    "topk_gate": lambda y: _gated(y),
    "topk_equal": lambda y: _chosen(y),
    "sort": lambda y: y.sort(1).values,
    "argsort": lambda y: y.argsort(1),
    "msort": lambda y: y.msort(),
    "unique": lambda x: x.unique(),
    "one_hot": lambda x: x * F.one_hot(LABELS, 4),
    "one_hot_of_argmax": lambda y: F.one_hot(y.argmax(-1), 4) * y,
    "bucketize": lambda x, v: torch.bucketize(x, v.sort().values),
    "searchsorted": lambda x, v: torch.searchsorted(v.sort().values, x),
    "histc": lambda x: x.histc(4, -2, 2),
    "item": lambda x: x * x.sum().item(),
}

PICTURES = {
    "conv1d": lambda b: F.conv1d(b, torch.ones(2, 6, 3, dtype=b.dtype)),
    "conv2d": lambda p, w: F.conv2d(p, w, padding=1),
    "conv_transpose2d": lambda p, w: F.conv_transpose2d(p, w.transpose(0, 1)),
    "avg_pool2d": lambda p: F.avg_pool2d(p, 2),
    "max_pool1d": lambda b: F.max_pool1d(b, 2),
    "max_pool2d": lambda p: F.max_pool2d(p, 2),
    "adaptive_avg_pool2d": lambda p: F.adaptive_avg_pool2d(p, 3),
    "interpolate": lambda p: F.interpolate(p, scale_factor=2),
    "interpolate_bilinear": lambda p: F.interpolate(p, size=(4, 4), mode="bilinear"),
    "im2col": lambda p: F.unfold(p, 3),
}

LOSSES = {
    "mse": lambda x, y: F.mse_loss(x, y),
    "l1": lambda x, y: F.l1_loss(x, y),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y),
    "huber": lambda x, y: F.huber_loss(x, y),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), LABELS),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "cross_entropy_smoothed": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "cosine_embedding": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6)),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)),
    "poisson_nll": lambda x, y: F.poisson_nll_loss(x, y.abs()),
    "gaussian_nll": lambda x, y: F.gaussian_nll_loss(x, y, y.abs() + 0.1),
}

ATTENTION = {
    "attention": lambda q: F.scaled_dot_product_attention(q, q, q),
    "attention_causal": lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "attention_mask": lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5).tril().bool()),
    "attention_gqa": lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
    "multi_head": lambda b: HEADS(b, b, b)[0],
    "encoder_layer": lambda b: LAYER(b),
    "lstm_cell": lambda x: CELL(x),
    "gru": lambda b: GRU(b)[0],
}

GRAPHS = {
    "neighbours": lambda x: x.new_zeros(6, 4).index_add(0, E[1], x[E[0]]),
    "neighbours_mean": lambda x: x.new_zeros(6, 4).scatter_reduce(0, _spread(), x[E[0]], "mean", include_self=False),
    "neighbours_max": lambda x: x.new_zeros(6, 4).scatter_reduce(0, _spread(), x[E[0]], "amax", include_self=False),
    "degrees": lambda x: x / torch.bincount(E[1], minlength=6).clamp(min=1)[:, None],
    "edge_scores": lambda x: (x[E[0]] * x[E[1]]).sum(-1),
    "edge_softmax": lambda e: _edge_softmax(e),
    "segments": lambda e: torch.segment_reduce(e, "sum", lengths=torch.tensor([2, 3, 4])),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
}


def _assigned(x):
    x = x.clone()
    x[1:3, ::2] = 5.0
    return x


def _gated(scores):
    """The weights of a mixture of experts."""
    values, places = scores.topk(2)
    return torch.zeros_like(scores).scatter(1, places, values.softmax(-1))


def _chosen(scores):
    """The same, expert by expert."""
    values, places = scores.topk(2)
    return torch.stack([(values * (places == n)).sum(-1) for n in range(4)], 1)


def _edge_softmax(scores):
    powers = scores.exp()
    return powers / scores.new_zeros(6, 4).index_add(0, E[1], powers)[E[1]]


def _spread():
    return E[1][:, None].expand(9, 4)


def _owned(module):
    """A module with the same weights every time."""
    for n, one in enumerate(module.double().eval().parameters()):
        one.requires_grad_(False).copy_(rand(*one.shape, seed=20 + n))
    return module


HEADS = _owned(torch.nn.MultiheadAttention(4, 2, batch_first=True))
LAYER = _owned(torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
CELL, GRU = _owned(torch.nn.LSTMCell(4, 3)), _owned(torch.nn.GRU(4, 3, batch_first=True))


KINDS: dict[str, dict[str, Callable]] = {
    "elementwise": ELEMENTWISE,
    "activations": ACTIVATIONS,
    "reductions": REDUCTIONS,
    "views": VIEWS,
    "products": PRODUCTS,
    "norms": NORMS,
    "indexing": INDEXING,
    "pictures": PICTURES,
    "losses": LOSSES,
    "attention": ATTENTION,
    "graphs": GRAPHS,
}


@dataclass(frozen=True)
class One:
    """A module of one operator: ``function`` of the ``inputs`` that its arguments name."""

    name: str
    kind: str
    function: Callable

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(INPUTS[name] for name in inspect.signature(self.function).parameters)


MODULES = [One(name, kind, function) for kind, group in KINDS.items() for name, function in group.items()]


@dataclass(frozen=True)
class Outcome:
    """``refused``: why, or nothing. ``eager``: operators that PyTorch runs between regions."""

    refused: str = ""
    eager: tuple[str, ...] = ()


def outcome(one: One, sparse: bool = False, fuse: str = "all") -> Outcome:
    """Compile a module and, if that is not refused, hold streams and loops against PyTorch in float64.

    ``sparse``: the first input that is a matrix is stored sparse.

    Raises:
        AssertionError: other values than PyTorch's. Anything else that is not a typed error passes through.
    """
    first = next((n for n, x in enumerate(one.inputs) if x.ndim == 2), -1) if sparse else -1
    given = [x.to_sparse() if n == first else x for n, x in enumerate(one.inputs)]
    wanted = [x.double() for x in tree_leaves(one.function(*[x.clone() for x in one.inputs]))]
    try:
        program = compile(Call(one.function), *given, schedule=Schedule(fuse=fuse))
    except TilestreamError as error:
        assert error.remedy and re.search(r"sparse_one_operator.py:\d+", error.cause), error
        return Outcome(
            re.sub(r" \(sparse_one_operator.py:\d+\)", "", error.cause).removeprefix("Call cannot be captured: ")
        )
    for got in (program.run(*given).outputs, CpuProgram(program, compiled=False).run(*given).outputs):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-9, atol=1e-9, equal_nan=True)
    return Outcome(eager=tuple(dict.fromkeys(step.operator for step in program.eager)))
