"""``tilestream reproduce flashfuser``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilestream.cli.console import out, reported, write_json
from tilestream.cli.kitsune import Debug, Json, listed
from tilestream.cli.progress import Progress


@reported
def reproduce_command(
    device: Annotated[str, typer.Option(help="The device; times were measured on an h200.")] = "h200",
    workloads: Annotated[str, typer.Option(help="Only these of Tables V to VII, separated by commas.")] = "",
    folder: Annotated[Path | None, typer.Option("--out", help="Write the HTML report here.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="A folder with few_rows.json, measured times; the checkout's if left out.")
    ] = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Search space, workloads and ablation of FlashFuser, beside the paper's; needs no GPU."""
    from tilestream.studies.flashfuser import report
    from tilestream.studies.flashfuser.reproduce import reproduce

    with Progress() as progress:
        made = reproduce(device, listed(workloads), results, progress)
        if folder is not None:
            page = report.save(folder, made)
    out.print(report.text(made))
    if folder is not None:
        out.print(f"report: {page}")
    write_json(json_, made.json())
