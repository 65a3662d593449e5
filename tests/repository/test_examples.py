"""Every example runs, and says what it should."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from places import EXAMPLES

from tilestream.run import fallback

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: Inductor needs it on a CPU")


def test_handmade_pipeline(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(EXAMPLES / "handmade_pipeline.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "3 stages, legal on an H200" in said
    assert "VerifyError: queue of 'code' from 'encode' has depth 1 < 2" in said
    assert "PipelineDeadlock: no stage of pipeline 'handmade' can go on" in said
    assert "the same bits" in said
    assert "GPU: " in said


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_recorded_timeline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tilestream.cuda.host.build.default_folder", lambda: folder)
    monkeypatch.setattr("sys.argv", ["recorded_timeline.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "recorded_timeline.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "steps of 3 stages" in said or "steps of 2 stages" in said
    assert "work of a mean SM" in said
    assert (tmp_path / "timeline.json").exists()


def run(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU all goes to Inductor, whose C++ would take most of the time: its graphs run eagerly."""
    monkeypatch.setattr("sys.argv", [name, *words.split()])
    if not torch.cuda.is_available():
        monkeypatch.setattr(fallback, "whole", lambda graph, *_: graph.forward)
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward)
    torch.compiler.reset()
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@compiles
def test_fit_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run("fit_picture.py", f"--steps 60 --points 512 --side 24 --out {tmp_path / 'fit.png'}", monkeypatch)
    first, last = map(float, re.findall(r"0\.\d+", capsys.readouterr().out)[:2])
    assert last < 0.9 * first
    assert (tmp_path / "fit.png").stat().st_size > 1000


@compiles
def test_train_mesh(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    run("train_mesh.py", "--nodes 120 --message-steps 1 --steps 30", monkeypatch)
    said = capsys.readouterr()
    first, last = map(float, re.findall(r"\d+\.\d+", said.out)[:2])
    assert last < 0.5 * first
    assert "compiling: the first of 30 training steps" in said.err and "step 28 of 30: loss" in said.err


@compiles
def test_serve_dlrm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    run("serve_dlrm.py", "--batches 16 --tables 100", monkeypatch)
    said = capsys.readouterr()
    assert "DLRM on" in said.out and re.search(r"16\s.*\d.*\d.*\d", said.out)
    assert "batch 16, tilestream: the first call" in said.err


@compiles
def test_pyg_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed (pip install 'tilestream[dev]')")
    run("pyg_models.py", "--nodes 200 --edges 900", monkeypatch)
    said = capsys.readouterr().out
    assert len(re.findall(r"(GraphSAGE|GIN): 0\.\d\d % off eager", said)) == 2


def test_hugging_face_without_transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"this example needs transformers .*pip install 'tilestream\[models\]'"):
        run("hugging_face.py", "", monkeypatch)


@compiles
def test_hugging_face(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'tilestream[models]')")
    run("hugging_face.py", "--layers 1 --width 48 --hidden 520 --batch 3", monkeypatch)
    assert re.search(r"GPT-2: 0\.\d\d % off eager; \d+% of its FLOPs in kernels", capsys.readouterr().out)


@compiles
def test_generate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'tilestream[models]')")
    words = "--layers 2 --width 128 --heads 2 --key-heads 1 --vocabulary 500 --tokens 4"
    run("generate.py", words, monkeypatch)
    said = capsys.readouterr().out
    assert re.search(r"greedy, 4 tokens: [01]\.\d\d % off float32 eager's logits, (75|100)% of the tokens", said)
    assert re.search(r"sampled, 4 tokens: [01]\.\d\d % off", said)


def test_generate_without_transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"this example needs transformers .*pip install 'tilestream\[models\]'"):
        run("generate.py", "", monkeypatch)


@compiles
@pytest.mark.parametrize("words", ["", "--pyg"])
def test_train_gnn(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    if words:
        pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed")
    run("train_gnn.py", f"--nodes 500 --steps 30 {words}", monkeypatch)
    said = capsys.readouterr().out
    right, chance = map(float, re.findall(r"(\d+\.\d) %", said))
    assert right > 4 * chance


def test_train_gnn_without_torch_geometric(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    with pytest.raises(SystemExit, match=r"--pyg needs torch-geometric .*pip install torch-geometric"):
        run("train_gnn.py", "--pyg", monkeypatch)
