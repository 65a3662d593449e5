"""``tilestream reproduce kitsune``, a paper's designs, and ``tilestream sweep``: those beside the compiler's plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from tilestream.cli.console import out, reported, write_json
from tilestream.cli.progress import Progress
from tilestream.errors import OptionError
from tilestream.studies.kitsune.outcome import Outcome
from tilestream.studies.kitsune.sweep import ALL_STRATEGIES, USUAL, Swept, points, sweep

MOST = 2**40
"""Of a size: beyond, bytes of a tensor are no 64-bit number."""

reproduce = typer.Typer(no_args_is_help=True, help="Run a paper's evaluation and set it beside the paper's figures.")


def _jobs(given: int) -> int:
    if given < 1 and given != -1:
        raise typer.BadParameter("give 1 or more, or -1 for one a core")
    return given


Jobs = Annotated[int, typer.Option(callback=_jobs, help="Processes; -1 is one a core.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@reproduce.command("kitsune")
@reported
def kitsune(
    device: Annotated[str, typer.Option(help="The device; the paper's is a100.")] = "a100",
    apps: Annotated[str, typer.Option(help="Only these applications, separated by commas.")] = "",
    modes: Annotated[str, typer.Option(help="Only these modes: inference, training.")] = "",
    sensitivity: Annotated[bool, typer.Option(help="Also twice the SMs and L2, and twice the DRAM.")] = True,
    folder: Annotated[Path | None, typer.Option("--out", help="Write the HTML report and its pictures here.")] = None,
    jobs: Jobs = -1,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Table 2, speedups, utilisation and sensitivity of Kitsune, beside the paper's."""
    from tilestream.studies.kitsune import report
    from tilestream.studies.kitsune.reproduce import VARIANTS, reproduce
    from tilestream.studies.kitsune.summary import BASE

    with Progress() as progress:
        variants = tuple(VARIANTS) if sensitivity else (BASE,)
        made = reproduce(device, listed(apps), listed(modes), jobs, variants, progress)
        if folder is not None:
            progress("drawing")
            page = report.save(folder, made)
    out.print(report.text(made))
    if folder is not None:
        out.print(f"report: {page}")
    write_json(json_, made.json())


@reported
def sweep_command(
    models: Annotated[list[str], typer.Argument(help="Whole models: names, or FILE.py:FUNCTION.")],
    devices: Annotated[str, typer.Option(help="As a100,h200+kitsune,a100+sms*2, or device files.")] = "a100",
    strategies: Annotated[
        str,
        typer.Option(help=f"Some of {', '.join(ALL_STRATEGIES)}; paper: is for Kitsune's designs."),
    ] = ",".join(USUAL),
    modes: Annotated[str, typer.Option(help="Some of inference, training.")] = "inference",
    size: Annotated[list[str] | None, typer.Option(help="NAME=V1,V2: a size of the models; repeatable.")] = None,
    jobs: Jobs = -1,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Simulate whole models over devices, sizes and strategies: the compiler's plans, and a paper's designs."""
    wanted = points(models, listed(devices), listed(strategies), listed(modes), sizes(size or ()))
    with Progress() as progress:
        made = sweep(wanted, jobs, progress)
    out.print(table(made))
    write_json(json_, {"rows": [s.json() for s in made]})


def table(made: Sequence[Swept]) -> Table:
    """One line a simulation; what is the same in all of them stands in the title."""
    about = {
        "model": [s.point.app for s in made],
        "mode": [s.point.mode for s in made],
        "sizes": [" ".join(f"{n}={v}" for n, v in s.point.sizes) for s in made],
        "device": [s.point.device for s in made],
        "strategy": [s.point.strategy for s in made],
    }
    same = [values[0] for values in about.values() if len(set(values)) == 1 and values[0]]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=", ".join(same) or None, title_justify="left")
    told = {heading: values for heading, values in about.items() if len(set(values)) > 1}
    for heading in told:
        shown.add_column(heading, overflow="fold")
    for heading in ("us", "speedup", "launches", "tensor", "SIMT", "L2", "DRAM", "DRAM MB"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for index, s in enumerate(made):
        busy = s.outcome.busy() if isinstance(s.outcome, Outcome) else {}
        shown.add_row(
            *(values[index] for values in told.values()),
            "no pipeline" if s.outcome.time_s is None else f"{s.outcome.time_s * 1e6:,.1f}",
            "" if s.speedup is None else f"{s.speedup:.2f}",
            str(s.launches),
            *(f"{busy[what]:.0%}" if busy else "" for what in ("tensor", "simt", "l2", "dram")),
            f"{s.outcome.dram_bytes / 1e6:,.1f}",
        )
    return shown


def listed(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def sizes(given: Sequence[str]) -> dict[str, list[int]]:
    """``NAME=V1,V2`` entries by name.

    Raises:
        OptionError: an entry has no such form, or a value is no whole number from 1 to ``MOST``.
    """
    found: dict[str, list[int]] = {}
    for entry in given:
        name, _, values = entry.partition("=")
        numbers = listed(values)
        if not name or not numbers or not all(v.isdigit() and 0 < int(v) <= MOST for v in numbers):
            remedy = f"give whole numbers from 1 to {MOST:,}, as batch=32,64"
            raise OptionError(f"--size {entry!r} is not NAME=V1,V2", remedy)
        found[name] = [int(v) for v in numbers]
    return found


def one_of_each(given: Sequence[str]) -> dict[str, int]:
    """``NAME=VALUE`` entries by name.

    Raises:
        OptionError: as ``sizes``, or an entry has several values.
    """
    found = sizes(given)
    if any(len(values) > 1 for values in found.values()):
        raise OptionError("--size takes one value here", "use tilestream sweep for several")
    return {name: value for name, (value,) in found.items()}
