"""A benchmark's result as the terminal shows it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilestream.report.whole import error
from tilestream.report.words import microseconds


def host(result: dict[str, Any]) -> RenderableType:
    """The host's time of a call, by arm and by part."""
    env = result["environment"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("a plain loop over", "us a call"):
        table.add_column(heading, justify="right" if "us" in heading else "left")
    for name, us in result["us"].items():
        told = {"dynamo": "Dynamo alone: guards, no kernel", "aot": "with AOTAutograd, no kernel"}.get(name, name)
        table.add_row(told, microseconds(us))
    parts: list[RenderableType] = [
        Text(f"{result['model']}, {result['rows']:,} rows, {env['gpu'] or 'no GPU'}", style="bold"),
        table,
    ]
    if result["regions"]:
        each = ", ".join(microseconds(us) for us in result["regions"])
        parts.append(Text(f"of tilestream's, until a region's kernels are enqueued: {each} us"))
    return Group(*parts)


def render(result: dict[str, Any]) -> RenderableType:
    """Arms with times and errors, then predictions, then DRAM bytes."""
    env = result["environment"]
    where = env["gpu"] or "no GPU: executed on the reference machine"
    heading = Text(f"{result['model']}, {result['rows']:,} rows, {result['dtype']}, {where}", style="bold")
    parts: list[RenderableType] = [heading, Text(result["whole"])]
    if result["planned_rows"] != result["rows"]:
        parts.append(Text(f"predictions, here and below, and bytes are for {result['planned_rows']:,} rows"))
    parts.append(_arms(result))
    if result["speedup"]:
        best, times = result["best_alternative"], result["speedup"]
        parts.append(Text(f"tilestream takes 1/{times:.2f} of the time of {best}, the best of the others\n"))
    parts.append(_predictions(result))
    bytes_ = result["dram_bytes"]
    for name, counted in bytes_.items():
        if isinstance(counted, dict):
            parts.append(
                Text(f"DRAM, {name}: {counted['read'] / 1e6:,.1f} MB read, {counted['write'] / 1e6:,.1f} written")
            )
        elif counted:
            parts.append(Text(f"DRAM, {name}: {counted}"))
    if "first_call" in result:
        first = result["first_call"]
        parts.append(Text("from torch.compile to the first result, torch and the model loaded:"))
        for name, says in (
            ("cold", "empty caches"),
            ("warm", "full caches, a second process"),
            ("capture", "torch's own capture, nothing compiled"),
        ):
            own = ", ".join(f"{part} {seconds:.2f}" for part, seconds in first[name].items())
            parts.append(Text(f"  {first[f'{name}_s']:.2f} s: {says} ({own})"))
    return Group(*parts)


def _arms(result: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm")
    for heading in ("us", "error", "eager's error", "first call s"):
        table.add_column(heading, justify="right")
    table.add_column("", overflow="fold")
    for name, arm in result["arms"].items():
        if "failed" in arm:
            table.add_row(name, "", "", "", "", Text(arm["failed"].splitlines()[0]), style="red")
            continue
        verdict = "within tolerance" if arm["ok"] else "OUTSIDE TOLERANCE"
        table.add_row(
            name,
            microseconds(arm["us"]),
            f"{arm['error']:.2e}",
            f"{result['eager_error']:.2e}",
            f"{arm['compile_s']:.1f}",
            verdict + ("" if arm["repeatable"] else ", not repeatable"),
            style="" if arm["ok"] else "red",
        )
    return table


def _predictions(result: dict[str, Any]) -> Table:
    found: dict[str, dict[str, float]] = result["predictions"]
    strategies = list(dict.fromkeys(s for by in found.values() for s in by))
    table = Table(
        title="whole model, predicted us by the simulator",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("device")
    for strategy in strategies:
        table.add_column(strategy, justify="right")
    table.add_column("")
    for device, by in found.items():
        table.add_row(device, *(microseconds(by.get(s)) for s in strategies), error(device))
    return table
