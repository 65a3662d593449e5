"""Modules of one expression, and how a module is held against PyTorch in float64."""

from __future__ import annotations

import torch
from torch import nn

from tilestream.sparse import Schedule, compile
from tilestream.sparse.cpu import CpuProgram


class Call(nn.Module):
    """One expression as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def rand(*shape, density=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values * (torch.rand(shape, generator=generator) < density)


def agree(module, *inputs, engine="fast", equal_nan=False, **options):
    """Compile, run unfused and fused, as streams and as loops, and compare with the module on dense tensors."""
    dense = [x.to_dense() if isinstance(x, torch.Tensor) and x.layout != torch.strided else x for x in inputs]
    training = module.training
    module.eval()
    with torch.no_grad():
        wanted = module(*[x.clone() if isinstance(x, torch.Tensor) else x for x in dense])
    module.train(training)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    program = None
    for fuse in ("none", "all"):
        program = compile(module, *inputs, schedule=Schedule(fuse=fuse), **options)
        result = program.run(*[x for x in inputs if isinstance(x, torch.Tensor)], engine=engine)
        for got, want in zip(result.outputs, wanted, strict=True):
            torch.testing.assert_close(got, want.detach().double(), rtol=1e-9, atol=1e-9, equal_nan=equal_nan)
        loops = CpuProgram(program, compiled=False).run(*[x for x in inputs if isinstance(x, torch.Tensor)])
        for got, want in zip(loops.outputs, wanted, strict=True):
            torch.testing.assert_close(got, want.detach().double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    assert program is not None
    return program
