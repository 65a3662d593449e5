"""Compiled kernels on disk: warm second processes, and folders and files that are no good."""

from __future__ import annotations

import errno
import importlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiled import compile_source
from programs import chain

from tilestream import cuda, devices, reference
from tilestream.cuda import building, cache, compile_only
from tilestream.cuda.compile import KernelReport
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.parts.headers import included
from tilestream.kernels.stream.emit import emit
from tilestream.options import Options
from tilestream.run.executable import Executable, Interpreted
from tilestream.run.target import Target

pytestmark = pytest.mark.nvrtc
SOURCE = emit(chain(1, 16))


@pytest.fixture(scope="module")
def report() -> KernelReport:
    return compile_source(SOURCE)


@pytest.fixture(autouse=True)
def nvrtc(monkeypatch: pytest.MonkeyPatch, report: KernelReport) -> Iterator[list[str]]:
    """Names of the kernels that were really compiled; nothing is known in memory."""
    calls: list[str] = []

    def counted(source, index):
        calls.append(source.name)
        return report

    monkeypatch.setattr(building, "compile_split", counted)
    cache.forget()
    yield calls
    cache.forget()


def new_process() -> KernelReport:
    cache._memory.clear()
    return cache.compiled(SOURCE)


def kept(folder: Path) -> dict[str, Path]:
    return {p.suffix: p for p in (folder / "kernels").glob("*") if p.suffix in (".cubin", ".json")}


def test_a_second_process_compiles_nothing(cache_dir: Path, nvrtc: list[str], report: KernelReport):
    assert new_process() == report and new_process() == report
    assert len(nvrtc) == 1 and set(kept(cache_dir)) == {".cubin", ".json"}
    assert kept(cache_dir)[".cubin"].read_bytes() == report.cubin


def test_a_thread_that_compiles_reads_no_files(monkeypatch: pytest.MonkeyPatch):
    """Of ten threads at once each would wait 5 ms for the interpreter behind every file."""
    included()  # as the key of any kernel asks for them

    def refused(path: Path, *_: object, **__: object) -> str:
        raise AssertionError(f"{path} is read")

    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr(Path, "read_bytes", refused)
    assert compile_source(SOURCE).cubin


def test_other_headers_or_another_compiler_are_another_kernel(nvrtc: list[str], monkeypatch: pytest.MonkeyPatch):
    new_process()
    monkeypatch.setattr(cache, "headers_digest", lambda: "edited")
    new_process()
    monkeypatch.setattr(cache, "compiler_package", lambda: "99.0")
    new_process()
    assert len(nvrtc) == 3


@pytest.mark.parametrize("suffix", [".json", ".cubin"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe\x00", b'{"digest": "0"}'])
def test_a_damaged_file_is_announced_and_made_again(
    cache_dir: Path,
    nvrtc: list[str],
    report: KernelReport,
    caplog: pytest.LogCaptureFixture,
    suffix: str,
    content: bytes,
):
    new_process()
    path = kept(cache_dir)[suffix]
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert new_process() == report
    assert "compiling again" in caplog.text
    assert len(nvrtc) == 2
    new_process()
    assert len(nvrtc) == 2


def test_one_flipped_bit_is_seen(cache_dir: Path, nvrtc: list[str], report: KernelReport):
    new_process()
    path = kept(cache_dir)[".cubin"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert new_process() == report and len(nvrtc) == 2


@pytest.mark.parametrize("suffix", [".json", ".cubin"])
def test_half_an_entry_is_none(cache_dir: Path, nvrtc: list[str], suffix: str):
    new_process()
    kept(cache_dir)[suffix].unlink()
    new_process()
    assert len(nvrtc) == 2 and set(kept(cache_dir)) == {".cubin", ".json"}


def refused(number: int):
    def call(*_, **__):
        raise OSError(number, os.strerror(number), f"some/file{os.urandom(4).hex()}")

    return call


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("os.replace", errno.ENOSPC),
        ("os.fdopen", errno.ENOSPC),
        ("tempfile.mkstemp", errno.EROFS),
        ("tempfile.mkstemp", errno.EACCES),
    ],
)
def test_full_disks_and_read_only_folders(
    cache_dir: Path,
    nvrtc: list[str],
    report: KernelReport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    number: int,
):
    """The kernel is there all the same; it is said once; nothing half-written stays."""
    module, name = where.split(".")
    monkeypatch.setattr(importlib.import_module(module), name, refused(number))
    with caplog.at_level(logging.WARNING):
        assert new_process() == report and new_process() == report
    assert len(nvrtc) == 2
    assert caplog.text.count("kernels are not kept") == 1
    assert os.strerror(number) in caplog.text and "TILESTREAM_CACHE_DIR" in caplog.text
    assert list((cache_dir / "kernels").glob("*")) == []


def test_a_file_in_the_place_of_the_folder(
    tmp_path: Path, report: KernelReport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TILESTREAM_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert new_process() == report
    assert caplog.text.count("kernels are not kept") == 1 and "cannot be used" not in caplog.text


def test_caching_can_be_turned_off(cache_dir: Path, nvrtc: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESTREAM_CACHE", "0")
    new_process()
    new_process()
    assert len(nvrtc) == 2 and kept(cache_dir) == {}


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TILESTREAM_CACHE_DIR")
    monkeypatch.setattr(Path, "home", homeless)
    folder = cache.folder()
    assert folder is not None and folder.name == "kernels" and "tilestream-" in folder.parent.name
    assert Options().cache_folder == folder.parent


@pytest.mark.parametrize(
    ("given", "where"), [({"cache_dir": "mine"}, "mine"), ({"cache": False}, None), ({}, "default")]
)
def test_kernels_go_where_the_options_say(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, given: dict, where: str | None
):
    from on_reference import compiled
    from torch import nn

    from tilestream.run import backend

    def build(pipeline: Pipeline, device: torch.device, dependent: bool) -> Executable:
        compile_only(pipeline)
        return Interpreted(pipeline, reference.run)

    monkeypatch.setattr(cuda, "build", build)
    target = Target("cuda", torch.device("cpu"), devices.get("h200"))
    monkeypatch.setattr(backend, "resolve", lambda *_: target)
    mine = tmp_path / "mine"
    if "cache_dir" in given:
        given = {"cache_dir": mine}
    module = nn.Sequential(nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 5)).bfloat16()
    with torch.no_grad():
        compiled(module, strategy="vertical", measure=False, **given)(torch.randn(37, 9).bfloat16())
    assert bool(kept(mine)) == (where == "mine")
    assert bool(kept(cache_dir)) == (where == "default")
