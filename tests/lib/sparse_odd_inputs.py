"""Odd inputs, by seed: dtypes, shapes, sizes, damaged files, wrong options. An answer, or an error of ours."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from sparse_modules import Call
from typer.testing import CliRunner

from tilestream.cli.sparse import app
from tilestream.errors import TilestreamError
from tilestream.sparse import Format, Schedule, compile, compile_einsum, compressed, dense, from_coo, from_torch
from tilestream.sparse.cpu import CpuProgram

DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn".split()
SHAPES = [(), (0,), (1,), (3,), (0, 3), (3, 0), (1, 1), (3, 4), (4, 4), (4, 3), (2, 3, 4), (1, 1, 1, 1), (2, 0, 3)]
EINSUMS = (
    "ik,kj->ij ij->i ij->ji ij-> i,i-> ij,ij->ij ij,jk,kl->il ii->i ij,k->ijk ->  ij->ijk a ij,jk->ij... ,->".split()
)
FORMATS = [
    "compressed",
    "dense",
    "compressed,compressed",
    "dense,compressed",
    "compressed,compressed:1,0",
    "",
    "full,dense",
    "compressed:x",
    "dense,dense:0,0",
    "compressed,dense,dense",
]
OPTIONS = [
    ("--fuse", ("none", "all", "auto", "T0", "T,T", "//", "", "x/y")),
    ("--order", ("i,k,j", "k,i,j", "0", "-1", "99", "i", "i,i,k", "j,k", ",", "é")),
    ("--parallel", ("i=2", "i=0", "i=-1", "i", "=2", "i=99999999999999999999", "q=2", "i=1.5", "i=1024")),
    ("--block", ("1", "2", "0", "-1", "3", "64", "4096", "99999999999", "x")),
    ("--depth", ("1", "0", "-1", "2", "64", "1e3", "99999999999999999999")),
    ("--engine", ("fast", "spec", "slow", "")),
    ("--target", ("streams", "cpu", "gpu", "")),
    ("--memory", ("none", "simple", "hbm", "hbm:channels=0", "hbm:latency=nan", "hbm:x=1", "hbm:channels=-1", "")),
    ("--timing", ("comal", "sam", "x")),
    ("--format", FORMATS),
    ("--out", ("", "/", "no/such/folder/\0/x.mtx", "/dev/null")),
]
HEADS = [
    "%%MatrixMarket matrix coordinate real general",
    "%%MatrixMarket matrix coordinate complex general",
    "%%MatrixMarket matrix coordinate pattern symmetric",
    "%%MatrixMarket matrix array real general",
    "%%MatrixMarket matrix coordinate integer skew-symmetric",
    "%%MatrixMarket vector coordinate real general",
    "",
    "%%",
]
SIZES = ["4", "3", "1", "0", "-1", "99999999999999999999", "1000000000000", "3000000000", "nan", "x", "", "4.5"]
NUMBERS = ["1", "1.5", "nan", "inf", "-inf", "1e400", "", "x", "0", "1 2", "9223372036854775808"]


def operand(rng: random.Random) -> object:
    """Something that may be a tensor."""
    kind = rng.randrange(12)
    if kind == 0:
        return rng.choice([None, 3, "x", [1.0], (1, 2), object(), {}, float("nan"), np.float64(2), np.array(["a"])])
    if kind == 1:
        return rng.choice(
            [scipy.sparse.random(4, 4, 0.5), scipy.sparse.csr_array(np.eye(4, dtype=bool)), np.eye(4)[::-1]]
        )
    dtype = getattr(torch, rng.choice(DTYPES))
    value = torch.randint(0, 2, rng.choice(SHAPES)).to(dtype)
    if kind == 2 and value.is_floating_point() and value.numel():
        value = value.double()
        value.view(-1)[0] = rng.choice([torch.nan, torch.inf, -torch.inf, 1e308, 5e-324])
    if kind == 3 and value.ndim > 1:
        value = value.transpose(0, 1)
    if kind == 4:
        value = value.expand(2, *value.shape)
    if kind == 5:
        return value.to("meta")
    if kind == 6:
        return torch.sparse_coo_tensor(
            torch.zeros(2, 3, dtype=torch.int64), torch.ones(3), (rng.choice([1, 1 << 40]), 4)
        )
    if kind in (7, 8):
        layout = rng.choice([torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
        try:
            return (
                value.to_sparse(layout=layout, blocksize=(2, 2))
                if layout == torch.sparse_bsr
                else value.to_sparse(layout=layout)
            )
        except (RuntimeError, NotImplementedError, IndexError):
            return value
    return value


def _einsum(rng: random.Random) -> None:
    text = rng.choice([*EINSUMS, "ik,kj->ij", "ij->i"])
    count = text.count(",") + 1 if rng.random() < 0.9 else rng.randrange(4)
    schedule = Schedule(fuse=rng.choice(["none", "all"]), block=rng.choice([1, 1, 1, 2]))
    program = compile_einsum(text, [operand(rng) for _ in range(count)], schedule)
    given = [operand(rng)] if rng.random() < 0.2 else []
    program.run(*given)
    CpuProgram(program, compiled=False).run(*given)


FUNCTIONS = [
    lambda x: x + x,
    lambda x: x * 2,
    lambda x: x.sum(-1),
    lambda x: x @ x,
    lambda x: torch.relu(x),
    lambda x: x.softmax(-1),
    lambda x: x.t(),
    lambda x: x[0],
    lambda x: ~x,
    lambda x: x.half(),
    lambda x: x.long(),
    lambda x: x / 0,
    lambda x: x == x,
    lambda x: None,
    lambda x: 3,
    lambda x: x.unknown(),
    lambda x: [x, (x,)],
    lambda x: x.reshape(-1),
    lambda x: 1 // 0,
    lambda x: x.masked_fill(x == 0, -torch.inf).softmax(-1),
    lambda x: x.max(-1).values,
    lambda x: bool(x.sum() > 0),
]


def _module(rng: random.Random) -> None:
    given = operand(rng)
    formats = {"args0": Format(("compressed",) * rng.randrange(4))} if rng.random() < 0.2 else None
    program = compile(Call(rng.choice(FUNCTIONS)), given, formats=formats)
    program.run(given)
    CpuProgram(program, compiled=False).run(given)


def _stored(rng: random.Random) -> None:
    shape = rng.choice([*SHAPES, (1 << 40, 3), (3_000_000_000, 3_000_000_000), (-1, 2), (10**12, 10**12)])
    form = rng.choice([compressed, dense])(rng.choice([len(shape), 2]), rng.choice([1, 1, 2, 0]))
    entries = rng.randrange(4)
    at = np.random.default_rng(rng.randrange(99)).integers(-1 if rng.random() < 0.2 else 0, 3, (entries, len(shape)))
    tensor = from_coo("B", at, np.ones(entries), shape, form)
    compile_einsum(f"{'ijklmn'[: len(shape)]}->", [tensor]).run()
    from_torch("C", torch.ones(3, 4), rng.choice([compressed, dense])(rng.randrange(4)))


def _file(rng: random.Random, folder: Path) -> Path:
    path = folder / f"{rng.choice('ab')}.mtx"
    if rng.random() < 0.4:
        path.write_text(f"{HEADS[0]}\n4 4 3\n1 1 1.5\n2 3 2.5\n4 2 -1\n")
        return path
    lines = [
        rng.choice(HEADS),
        " ".join(rng.choice(SIZES[: rng.choice([2, 12])]) for _ in range(rng.choice([2, 3, 3, 3]))),
    ]
    lines += [f"{rng.choice(SIZES[:5])} {rng.choice(SIZES[:5])} {rng.choice(NUMBERS)}" for _ in range(rng.randrange(5))]
    data = "\n".join(lines).encode()
    if rng.random() < 0.2:
        data = bytes(rng.randrange(256) for _ in range(60))
    path.write_bytes(data)
    return path if rng.random() < 0.95 else folder


def _shell(rng: random.Random, folder: Path) -> None:
    text = rng.choice([*EINSUMS, "ik,kj->ij", "ij->i", "ij->j"])
    files = [str(_file(rng, folder)) for _ in range(text.count(",") + 1)]
    words = [rng.choice(["run", "run", "simulate"]), text, *files]
    for name, values in rng.sample(OPTIONS, rng.choice([0, 1, 1, 2])):
        words += [name, rng.choice(values)]
    found = CliRunner().invoke(app, words)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise AssertionError(f"{words}") from found.exception
    assert found.exit_code in (0, 1, 2), f"{words}: {found.exit_code}"


def verdict(seed: int, folder: Path) -> str:
    """``answer`` or ``refused``; any other exception is raised."""
    rng = random.Random(seed)
    kind = rng.randrange(5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind < 2:
                _shell(rng, folder)
            else:
                (_einsum, _module, _stored)[kind - 2](rng)
    except TilestreamError as error:
        assert error.remedy, f"seed {seed}: no remedy for {error.cause}"
        return "refused"
    return "answer"
