"""Modules to programs: every operator against eager PyTorch in float64, formats, errors with the user's line."""

import builtins
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from places import DOCS
from sparse_modules import Call, agree, rand
from torch import nn

from tilestream.errors import CaptureError, SparseError
from tilestream.sparse import Format, Schedule, SparseTensor, compile, compressed, from_torch

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


agree = functools.partial(agree, engine="spec")


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, adjacency, features):
        hidden = torch.relu(self.first(torch.sparse.mm(adjacency, features)))
        return torch.softmax(self.second(adjacency @ hidden), dim=-1)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.strided])
@pytest.mark.every(2)
def test_gcn(layout):
    torch.manual_seed(0)
    adjacency = (rand(8, 8, density=0.3) != 0).double()
    given = adjacency if layout == torch.strided else adjacency.to_sparse(layout=layout)
    program = agree(GCN(), given, rand(8, 6, seed=1), formats={"first.weight": compressed(2)})
    if layout != torch.sparse_csc:  # by columns, the second product cannot stream the first one's rows
        assert len(program.regions) == 1 and len(program.regions[0].einsums) == 12
    assert "test_sparse_frontend.py" in program.regions[0].source


def test_unfused_regions_are_operators():
    program = compile(GCN(), rand(8, 8, density=0.3).to_sparse(), rand(8, 6), schedule=Schedule(fuse="none"))
    names = [region.name for region in program.regions]
    assert names == [
        "mm", "linear", "linear_bias", "relu", "matmul", "linear_1", "linear_1_bias", "softmax"
    ]  # fmt: skip
    partial = (tuple(names[:4]), tuple(names[4:]))
    program = compile(GCN(), rand(8, 8, density=0.3).to_sparse(), rand(8, 6), schedule=Schedule(fuse=partial))
    assert [region.name for region in program.regions] == ["mm..relu", "matmul..softmax"]


class Attention(nn.Module):
    """Two heads; what the mask does not store gets no weight."""

    def __init__(self, mask, spelling):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.spelling = spelling
        self.register_buffer("mask", mask)
        self.double()

    def forward(self, x):
        q, k, v = (t.view(-1, 2, 4).transpose(0, 1) for t in self.qkv(self.norm(x)).split(8, dim=-1))
        mask = self.mask.to_dense()
        if self.spelling == "sdpa":
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask != 0)
        elif self.spelling == "where":
            scores = torch.where(mask.bool(), q @ k.mT / math.sqrt(4), -math.inf)
            made = torch.einsum("hij,hjd->hid", scores.softmax(-1), v)
        else:
            scores = (q @ k.transpose(-1, -2)).masked_fill(mask == 0, float("-inf")) / math.sqrt(4)
            made = torch.softmax(scores, -1) @ v
        return x + F.gelu(self.out(made.transpose(0, 1).reshape(-1, 8)))


@pytest.mark.parametrize("spelling", ["masked_fill", "where", "sdpa"])
def test_attention(spelling):
    torch.manual_seed(0)
    mask = (rand(6, 6, density=0.3) != 0).double().fill_diagonal_(1)
    module = Attention(mask.to_sparse(), spelling)
    dense = Attention(mask, spelling)
    dense.load_state_dict({**module.state_dict(), "mask": mask})
    x = rand(6, 8, seed=3)
    for fuse in ("none", "all"):
        program = compile(module, x, schedule=Schedule(fuse=fuse))
        torch.testing.assert_close(program.run(x, engine="spec").output, dense(x).detach(), rtol=1e-9, atol=1e-9)
    assert module.mask.layout == torch.sparse_coo, "the module is left as it was"


@pytest.mark.parametrize("fuse", ["none", "all"])
def test_attention_in_blocks(fuse):
    """Heads stay scalar, sequence and features become tiles, and the layer norm's rows are reduced within them."""
    torch.manual_seed(0)
    mask = torch.block_diag(*[torch.ones(2, 2, dtype=torch.float64)] * 3)
    module, x = Attention(mask, "masked_fill"), rand(6, 8, seed=3)
    program = compile(module, x, schedule=Schedule(fuse=fuse, block=2))
    torch.testing.assert_close(program.run(x, engine="spec").output, module(x).detach(), rtol=1e-9, atol=1e-9)
    scalar = compile(module, x, schedule=Schedule(fuse=fuse)).run(x, engine="spec")
    assert 2 * program.run(x, engine="spec").cycles < scalar.cycles


@pytest.mark.parametrize("fuse", ["none", "all"])
@pytest.mark.parametrize("block", [3, 4, 16])
@pytest.mark.every(3)
def test_attention_in_blocks_that_do_not_divide(fuse, block):
    """Seven tokens and heads of four: softmax and layer norm leave the padding out; the last mask block is smaller."""
    torch.manual_seed(0)
    mask = torch.ones(7, 7, dtype=torch.float64)
    mask[block:, :block] = 0
    module, x = Attention(mask, "masked_fill"), rand(7, 8, seed=3)
    program = compile(module, x, schedule=Schedule(fuse=fuse, block=block))
    for engine in ("fast", "spec"):
        torch.testing.assert_close(program.run(x, engine=engine).output, module(x).detach(), rtol=1e-9, atol=1e-9)


class Residual(nn.Module):
    """Layers that read their input twice, once row by row and once as it is."""

    def __init__(self, layers):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.double()

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + torch.relu(linear(norm(x)))
        return x


def test_residual_layers_are_computed_once_and_side_by_side():
    torch.manual_seed(0)
    x, sizes, cycles = rand(5, 6), [], []
    for layers in (1, 2, 4):
        module = Residual(layers)
        program = compile(module, x, schedule=Schedule(fuse="all"))
        result = program.run(x, engine="spec")
        torch.testing.assert_close(result.output, module(x).detach(), rtol=1e-9, atol=1e-9)
        sizes.append(len(program.regions[0].graph.nodes))
        cycles.append(result.cycles)
    assert sizes[2] < 5 * sizes[0] and cycles[2] < 3 * cycles[0]


UNARY = {
    "relu": torch.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "exp": torch.exp,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": F.silu, "abs": torch.abs, "neg": torch.neg, "sin": torch.sin,
    "cos": torch.cos, "square": torch.square, "pow": lambda x: x**2, "leaky": lambda x: F.leaky_relu(x, 0.1),
    "clamp": lambda x: x.clamp(-0.5, 0.5), "scalar": lambda x: (2 - 3 * x) / 4 + 1, "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x * x + 1).rsqrt(), "reciprocal": lambda x: 1 / (x.abs() + 1),
    "dropout": lambda x: F.dropout(x, 0.5, False),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.every(3)
def test_elementwise(name):
    agree(Call(UNARY[name]), rand(5, 4, density=0.4).to_sparse())


SHAPES = {
    "softmax_rows": lambda x, y: x.softmax(0), "log_softmax": lambda x, y: F.log_softmax(x, -1),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,)), "rms_norm": lambda x, y: F.rms_norm(x, (4,), eps=1e-5),
    "sum": lambda x, y: (x.sum(), x.sum(0), x.sum(1, keepdim=True)), "mean": lambda x, y: (x.mean(), x.mean(-1)),
    "amax": lambda x, y: (x.amax(1), x.amin(0, keepdim=True)),
    "maximum": lambda x, y: torch.maximum(x, y) - torch.minimum(x, y),
    "broadcast": lambda x, y: x + y[0] * y[:, :1] - 1, "divide": lambda x, y: x / (y.abs() + 1),
    "transpose": lambda x, y: x.t() @ y, "permute": lambda x, y: torch.stack([x, y]).permute(2, 0, 1),
    "reshape": lambda x, y: x.reshape(2, 10) @ y.reshape(10, 2), "cat": lambda x, y: torch.cat([x, y], 1).relu(),
    "slice": lambda x, y: x[1:4, ::2] * y[:3, 1:3], "select": lambda x, y: (x[2], y[:, -1]),
    "split": lambda x, y: tuple(p.sum(-1) for p in x.split([1, 3], dim=1)), "unbind": lambda x, y: sum(x.unbind(1)),
    "expand": lambda x, y: x[:, None, :].expand(5, 3, 4).reshape(15, 4) + 1, "flatten": lambda x, y: x.flatten() * 2,
    "einsum": lambda x, y: torch.einsum("ij,kj,kl->il", x, y, y),
    "einsum_sum": lambda x, y: torch.einsum("ij,ij->", x, y),
    "addmm": lambda x, y: torch.addmm(x, x @ y.t(), y, beta=0.5, alpha=2), "mv": lambda x, y: x @ y[0],
    "bmm": lambda x, y: torch.bmm(torch.stack([x, y]), torch.stack([y.t(), x.t()])),
    "input_back": lambda x, y: (y, x.t(), x[None] + y), "no_region": lambda x, y: y.t(),
    "same_twice": lambda x, y: x @ x.t() + y @ x.t(), "residual": lambda x, y: x + (x - x.mean(-1, keepdim=True)) * y,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.every(3)
def test_shapes_and_reductions(name):
    agree(Call(SHAPES[name]), rand(5, 4, density=0.4).to_sparse_csr(), rand(5, 4, seed=1))


def test_dense_masks_count_by_their_values():
    x, mask = rand(4, 4), (rand(4, 4, density=0.5, seed=2) != 0).double().fill_diagonal_(1)
    program = agree(Call(lambda x, m: x.masked_fill(m == 0, -torch.inf).softmax(-1)), x, mask)
    assert program.run(x, mask, engine="spec").tensors["softmax"].nnz == int(mask.sum())
    agree(Call(lambda x, m: x.masked_fill(m @ m - 1 == 0, 0)), x, mask)  # computed: chosen by value


def test_dimensions_of_size_one():
    agree(Call(lambda x, y: (x * y).sum(0, keepdim=True) @ y.t()), rand(1, 4), rand(3, 4, density=0.5).to_sparse())


def test_sparse_weights_and_formats():
    linear = nn.Linear(6, 4).double()
    linear.weight = nn.Parameter(rand(4, 6, density=0.4).to_sparse_csr(), requires_grad=False)
    dense = nn.Linear(6, 4).double()
    dense.load_state_dict({"weight": linear.weight.to_dense(), "bias": linear.bias})
    x = rand(3, 6)
    program = compile(linear, x, formats={"input": Format(("dense", "compressed"))})
    torch.testing.assert_close(program.run(x, engine="spec").output, dense(x).detach())
    assert program.constants["weight"].format.levels == ("dense", "compressed")
    assert isinstance(program.inputs[0], SparseTensor) and program.inputs[0].format.levels == ("dense", "compressed")
    stored = from_torch("input", x, compressed(2))
    torch.testing.assert_close(compile(linear, stored).run(stored, engine="spec").output, dense(x).detach())


def test_default_order_walks_no_row_for_every_column():
    """An inner product of two compressed operands would walk a row of the first for every column of the second."""
    x, module = rand(20, 30), nn.Linear(30, 16, bias=False).double()
    with torch.no_grad():
        module.weight.mul_(torch.rand_like(module.weight) < 0.4)
    stored = {"input": compressed(2), "weight": compressed(2)}
    program = compile(module, x, formats=stored)
    assert program.regions[0].order == ("i", "k", "j") and not program.regions[0].notes
    inner = compile(module, x, formats=stored, schedule=Schedule(order=("i", "j", "k")))
    assert program.run(x, engine="spec").cycles < inner.run(x, engine="spec").cycles


def test_inputs_may_change_between_runs():
    module = Call(lambda a, x: torch.relu(a @ x))
    first, second = rand(4, 4, density=0.5), rand(4, 4, density=0.3, seed=5)
    x = rand(4, 3)
    program = compile(module, first.to_sparse(), x)
    for matrix in (first, second, torch.zeros(4, 4, dtype=torch.float64)):
        torch.testing.assert_close(program.run(matrix.to_sparse(), x, engine="spec").output, torch.relu(matrix @ x))
    with pytest.raises(SparseError, match="shape"):
        program.run(rand(5, 5).to_sparse(), x)
    with pytest.raises(SparseError, match="inputs for 2"):
        program.run(x)
    with pytest.raises(SparseError, match="engine"):
        program.run(engine="gpu")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: torch.complex(x, x),
            r"aten.complex.default \(test_sparse_frontend.py:\d+\) is about complex numbers",
        ),
        (lambda x: torch.bernoulli(x), r"test_sparse_frontend.py:\d+\) draws random numbers"),
        (lambda x: x.masked_select(x > 0), r"cannot be captured.*test_sparse_frontend.py:\d+"),
        (lambda x: x.sum().item() * x, r"looks at a value.*test_sparse_frontend.py:\d+|cannot be captured"),
    ],
)
def test_errors_name_operator_and_line(function, message):
    with pytest.raises((SparseError, CaptureError), match=message):
        compile(Call(function), rand(4, 4))


def test_errors_of_the_call():
    with pytest.raises(CaptureError, match="forward takes 2"):
        compile(GCN(), rand(2, 2), rand(2, 2), rand(2, 2))
    with pytest.raises(SparseError, match="format for 'weight'"):
        compile(GCN(), rand(8, 8), rand(8, 6), formats={"weight": compressed(2)})
    with pytest.raises(CaptureError, match="cannot be captured"):
        compile(Call(lambda x: x if x.sum() > 0 else -x), rand(3, 3))


def test_example_of_the_page_runs(capsys):
    page = (DOCS / "sparse-compiler.md").read_text()
    exec(builtins.compile(page.split("```python\n")[1].split("```")[0], "docs/sparse-compiler.md", "exec"), {})
    assert "mm..relu\n|" in capsys.readouterr().out
