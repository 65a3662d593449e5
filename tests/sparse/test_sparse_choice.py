"""``fuse="auto"``: the fusion that is expected to take the fewest cycles, and for the loops the least time."""

import time

import pytest
import scipy.io
import scipy.sparse
import torch
from sparse_modules import Call, rand
from torch import nn
from typer.testing import CliRunner

from tilestream.apps.sparse import GCN
from tilestream.cli.sparse import app
from tilestream.sparse import Schedule, compile, graphs
from tilestream.sparse.cpu import CpuProgram

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def test_the_fewest_cycles_are_chosen_and_the_alternatives_are_said():
    graph = graphs.karate()
    given = GCN(features=34, hidden=16, classes=2), graph.torch(), torch.rand(34, 34, dtype=torch.float64)
    program = compile(*given)
    cycles = program.run().cycles
    assert program.choice is not None and list(program.choice.expected) == ["none", "layers", "all"]
    others = [compile(*given, schedule=Schedule(fuse=fuse)).run().cycles for fuse in ("none", "all")]
    assert cycles <= min(others) and str(program.choice) in str(program)
    for fuse, simulated in zip(("none", "all"), others, strict=True):
        assert program.choice.expected[fuse] == pytest.approx(simulated, rel=0.1)
    again = compile(*given, schedule=program.schedule)
    assert program.schedule.fuse != "auto" and again.run().cycles == cycles


def test_an_order_that_only_one_fusion_has_chooses_it():
    program = compile(Call(lambda a, b, c: a @ b @ c), *(rand(6, 6, seed=s) for s in range(3)))
    order = compile(Call(lambda a, b, c: a @ b @ c), *program.inputs, schedule=Schedule(fuse="all")).regions[0].order
    made = compile(Call(lambda a, b, c: a @ b @ c), *program.inputs, schedule=Schedule(order=order))
    assert made.regions[-1].order == tuple(i for i in order if i in made.regions[-1].order)


def test_twelve_residual_layers_compile_in_time():
    """It took 200 seconds: every cut planned all that was left with hundreds of orders of thousands of views."""
    size, links = 30, rand(30, 30, density=0.1)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.near = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
            self.own = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

        def forward(self, a, x):
            for near, own in zip(self.near, self.own, strict=True):
                x = x + torch.relu(near(a @ x) + own(x))
            return x

    given = Layers().double(), links.to_sparse_csr(), rand(size, 8)
    began = time.process_time()
    compile(*given, schedule=Schedule(fuse="all"))
    assert time.process_time() - began < 20  # about 4 on a quiet core
    program = compile(*given)
    torch.testing.assert_close(CpuProgram(program, compiled=False).run().output, given[0](links, given[2]).detach())


def test_loops_join_elementwise_operators_and_leave_products_to_the_library():
    def layer(a, x, w, b):
        return torch.relu(a @ x @ w + b)

    given = rand(400, 400, density=0.02).to_sparse_csr(), rand(400, 60), rand(60, 8), rand(8)
    loops = CpuProgram(compile(Call(layer), *given), compiled=True)
    made = [type(one).__name__ for one in loops.regions.values()]
    assert made == ["Matmul", "Loops"]  # X W first, whose rows are narrower; then A (X W), the bias and relu
    assert "matmul after" in loops.program.choice.name and len(loops.program.choice.expected) == 3
    torch.testing.assert_close(loops.run(*given).output, layer(given[0].to_dense(), *given[1:]))
    wide = (given[0], given[1][:, :8].contiguous(), given[2][:8].repeat(1, 9), rand(72))
    kept = CpuProgram(compile(Call(layer), *wide), compiled=False)
    assert kept.program.choice.name in ("none", "joined")  # A X has narrower rows
    torch.testing.assert_close(kept.run(*wide).output, layer(wide[0].to_dense(), *wide[1:]))


def test_the_command_line_says_what_it_chose(tmp_path):
    files = []
    for seed, name in enumerate("BCD"):
        files.append(str(tmp_path / f"{name}.mtx"))
        scipy.io.mmwrite(files[-1], scipy.sparse.random(30, 30, 0.2, random_state=seed))
    for target in ("streams", "cpu"):
        done = CliRunner().invoke(app, ["run", "ik,kj,jl->il", *files, "--target", target])
        assert done.exit_code == 0 and "fuse=" in done.output and " (" in done.output, done.output


def test_a_product_of_gathered_rows_side_by_side_is_made_before_they_are_gathered():
    """As EdgeConv has it: the weights meet the nodes, and the edges only what came out."""
    ends = torch.randint(0, 40, (2, 600), generator=torch.Generator().manual_seed(0))

    def edges(x, w, v):
        return torch.cat([x[ends[0]], x[ends[1]] - x[ends[0]]], 1) @ w + v

    given = rand(40, 30), rand(60, 8), rand(8)
    loops = CpuProgram(compile(Call(edges), *given), compiled=False)
    assert "after" in loops.program.choice.name
    assert not any(step.name.startswith("cat") for step in loops.program.steps)
    torch.testing.assert_close(loops.run(*given).output, edges(*given))
