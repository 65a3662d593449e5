"""Bad input on the command line: one line that says what is wrong and what to do, exit code 2, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilestream.cli.console import no_memory
from tilestream.cli.main import app

MODEL = """
import sys
import torch
from torch import nn
def make(rows=100):
    return nn.Linear(24, 40), torch.randn(rows, 24)
def leaves():
    sys.exit(1)
def none():
    return None
class Three(nn.Module):
    def forward(self, x):
        return 3
def three():
    return Three(), torch.randn(2, 2)
"""
MATRIX = "%%MatrixMarket matrix coordinate real general\n4 4 2\n1 1 2\n2 2 1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model, a script that ends its process, matrices, device files, damaged ones among them."""
    monkeypatch.chdir(tmp_path)
    files = {
        "my.py": MODEL,
        "leaves.py": "raise SystemExit(1)",
        "broken.py": "def make(:",
        "ok.mtx": MATRIX,
        "outside.mtx": MATRIX.replace("2 2 1", "9 9 1"),
        "empty.mtx": "",
        "broken.toml": "[device",
        "nan.toml": 'base = "h200"\nsms = nan\n',
        "unknown.toml": 'base = "h200"\nsm = 3\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "few_rows.json").write_text("{damaged")
    return tmp_path


def error_of(call: str) -> str:
    """What the command says on its standard error, in one line; nothing was loaded, planned or written before."""
    done = CliRunner().invoke(app, call.split(), catch_exceptions=False)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("explain nerff", "no model called 'nerff'. Remedy: did you mean 'nerf'?"),
        ("explain nothing.py:make", "there is no file 'nothing.py'"),
        ("explain my.py", "does not name a function in a file"),
        ("explain my.py:mak", "my.py has no function 'mak'"),
        ("explain my.py:none", "my.py:none returned NoneType"),
        ("explain my.py:leaves", "my.py:leaves raised SystemExit: 1 at my.py:8"),
        ("explain leaves.py:make", "leaves.py could not be imported: SystemExit: 1"),
        ("explain broken.py:make", "broken.py could not be imported: SyntaxError"),
        ("explain my.py:make --rows -1", "--rows is -1"),
        ("explain chain --rows nan", "Invalid value for '--rows'"),
        ("explain chain --rows 99999999999999999999", "less than or equal to 1099511627776"),
        ("explain dlrm --size batch=99999999999999999", "whole numbers from 1 to 1,099,511,627,776"),
        ("explain dlrm --size batch=nan", "is not NAME=V1,V2"),
        ("explain chain --dtype f64", "use one of bf16, f16, f32"),
        ("explain chain --device h300", "unknown device 'h300'"),
        ("explain chain --device h200+sms*nan", "sms cannot be scaled by nan"),
        ("explain chain --device h200+sms*1e30", "use a factor above 0, of at most 1,000"),
        ("explain chain --device broken.toml", "broken.toml is not TOML"),
        ("explain chain --device nan.toml", "sms is nan"),
        ("explain chain --device unknown.toml", "unknown key 'sm'"),
        ("check chain --seed -1", "Invalid value for '--seed'"),
        ("check chain --seed 99999999999999999999", "Invalid value for '--seed'"),
        ("sweep dlrm --jobs 0", "give 1 or more, or -1 for one a core"),
        ("sweep dlrm --jobs -7", "give 1 or more, or -1 for one a core"),
        ("reproduce flashfuser --results .", "--results . has no few_rows.json"),
        ("reproduce flashfuser --results damaged", "damaged/few_rows.json is no JSON: Expecting"),
        ("sparse run my.py:three", "my.py:three returns no tensor"),
        ("sparse run my.py:three --target cpu", "my.py:three returns no tensor"),
        ("sparse simulate ik,kj->ij nothing.mtx ok.mtx", "there is no file 'nothing.mtx'"),
        ("sparse simulate ik,kj->ij outside.mtx ok.mtx", "Row index out of bounds"),
        ("sparse simulate ik,kj->ij empty.mtx ok.mtx", "empty.mtx is no Matrix Market file"),
        ("sparse simulate ik,kj->ij ok.mtx ok.mtx --parallel i=0", "write INDEX=FACTOR"),
        ("sparse search ik,kj->ij ok.mtx ok.mtx --budget nan", "--budget is nan seconds"),
        ("sparse search ik,kj->ij ok.mtx ok.mtx --budget 0", "--budget is 0 seconds"),
        ("sparse search ik,kj->ij ok.mtx ok.mtx --depth 0", "--depth is 0"),
    ],
)
@pytest.mark.every(3)
def test_what_is_wrong_is_said_in_a_line(call: str, says: str) -> None:
    assert says in error_of(call)


@pytest.mark.parametrize(
    "call",
    [
        "explain chain --json",
        "explain chain --html",
        "explain chain --kernel-file",
        "trace chain --out",
        "check chain --json",
        "sparse run ik,kj->ij ok.mtx ok.mtx --out",
        "sparse simulate ik,kj->ij ok.mtx ok.mtx --timeline",
        "sparse search ik,kj->ij ok.mtx ok.mtx --plot",
    ],
)
@pytest.mark.parametrize(("path", "why"), [("/proc/no/file", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_written_is_told_before_the_work(call: str, path: str, why: str) -> None:
    said = error_of(f"{call} {path}")
    assert f"{path} cannot be written: {why}" in said and "loading" not in said


@pytest.mark.parametrize(
    "call", ["demo --out", "reproduce kitsune --out", "reproduce flashfuser --out", "sparse reproduce kernels --out"]
)
@pytest.mark.parametrize(("path", "why"), [("/proc/no", "No such file"), ("my.py", "it is no folder")])
def test_a_folder_that_cannot_be_written_is_told_before_the_work(call: str, path: str, why: str) -> None:
    assert error_of(f"{call} {path}").startswith(f"error: no files can be put into {path}: {why}")


def test_folders_on_the_way_to_a_file_are_made(folder: Path) -> None:
    done = CliRunner().invoke(app, "explain chain --device h200 --kernel-file new/folder/x.cu".split())
    assert done.exit_code == 0 and "Generated by tilestream" in (folder / "new" / "folder" / "x.cu").read_text()


def test_an_output_that_nothing_came_of_is_not_left_behind(folder: Path) -> None:
    error_of("explain my.py:none --html page.html --json facts.json")
    assert not {"page.html", "facts.json"} & {p.name for p in folder.iterdir()}


def test_a_model_that_does_not_fit_the_memory() -> None:
    said = error_of("check chain --rows 999999999999")
    assert "no memory for the model and its inputs: torch tried to allocate 1023999999998976 bytes" in said
    assert "Remedy: give fewer --rows" in said


def test_other_errors_are_not_taken_for_a_full_memory() -> None:
    assert no_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert no_memory(MemoryError()) is not None
