"""Files that commands write are whole or not there, and an error names them; names are printed as they are."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from tilestream import files
from tilestream.cli import console
from tilestream.errors import OptionError
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.parts import Excluded
from tilestream.plan.whole import Launch, WholePlan
from tilestream.report import launches
from tilestream.report.explain import Report


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A file may grow to 1,000 bytes, then the system refuses, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("content", ["x" * 5000, b"x" * 5000])
def test_a_full_disk_names_the_file_and_leaves_nothing(content: str | bytes, tmp_path: Path, full_disk: None) -> None:
    path = tmp_path / "new" / "result.json"
    with pytest.raises(OptionError, match=r"result\.json cannot be written: .*free some space"):
        files.write(path, content)
    assert list(path.parent.iterdir()) == []


def test_what_was_there_stays_where_the_new_file_does_not_fit(tmp_path: Path, full_disk: None) -> None:
    path = tmp_path / "result.json"
    path.write_text("before")
    with pytest.raises(OptionError):
        files.write(path, "x" * 5000)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_command_ends_with_one_line_that_names_the_file(
    tmp_path: Path, full_disk: None, capsys: pytest.CaptureFixture[str]
) -> None:
    @console.reported
    def command(json_: Path) -> None:
        console.write_json(json_, {"launches": list(range(1000))})

    path = tmp_path / "out.json"
    with pytest.raises(typer.Exit) as ended:
        command(json_=path)
    said = capsys.readouterr()
    assert ended.value.exit_code == 2 and said.out == ""
    assert said.err.startswith(f"error: {path} cannot be written: ") and "Remedy: free some space" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "real", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write(link, "after")
    assert path.read_text() == "after" and link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        assert stat.S_IMODE(files.write(tmp_path / "new", b"x").stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_full_device_is_named_too() -> None:
    with pytest.raises(OptionError, match=r"/dev/full cannot be written"):
        files.write(Path("/dev/full"), "x")


@pytest.mark.parametrize("name", ["mine.py:ok", "net[red]x[/red]", ":smile: [bold]", "a[/b]"])
def test_names_are_printed_as_they_are(name: str) -> None:
    table = Table()
    table.add_column(name)
    table.add_row(name)
    with console.out.capture() as shown:
        console.out.print(f"{name}:ok: model")
        console.out.print(table)
    assert f"{name}:ok: model" in shown.get() and shown.get().count(name) == 3


def test_a_report_keeps_names_on_every_console() -> None:
    """Also on one that reads markup, as ``rich.print`` has."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16().eval()
    made = analyse(net, (torch.zeros(4096, 64, dtype=torch.bfloat16),), Options(device="h200"))
    launch = Launch("library", "a[red]b", 0, ("aten.mm.default",), "", 1.0, modules=("blocks[red].:ok:",))
    object.__setattr__(made, "whole", WholePlan("h200", (launch, launch)))
    left = Excluded("aten.odd[red]", "f.py:1 in g: x[:ok:]", "why [bold]", "path[dim]")
    reading = Console(width=300, color_system=None)
    with reading.capture() as shown:
        reading.print(Report(replace(made, model="net[red]")), *launches.render(made))
        reading.print(Report(replace(made, exclusions=(left,))))
    for name in ("net[red]", "a[red]b", "blocks[red].:ok:", "aten.odd[red]", "x[:ok:]", "why [bold]", "path[dim]"):
        assert name in shown.get(), name
