"""Templates of kernels: text with constants and generated functions filled in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.parts.source import kernel_name


def rendered(name: str, pipeline: Pipeline, **values: Any) -> str:
    """The text of a launch's kernel, by the template of that file name."""
    text = _template(name).render(name=kernel_name(pipeline), pipeline=pipeline, **values)
    return re.sub(r"\n{3,}", "\n\n", text)


@cache
def _template(name: str) -> jinja2.Template:
    # PTX operands look like Jinja's default delimiters ({%0).
    env = jinja2.Environment(
        block_start_string="<%", block_end_string="%>", variable_start_string="@{", variable_end_string="}@",
        comment_start_string="<#", comment_end_string="#>", trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, autoescape=False,
    )  # fmt: skip
    env.filters["entries"] = _entries
    return env.from_string((files("tilestream.kernels") / "templates" / name).read_text())


def _entries(rows: Sequence[Sequence[int]], last: Sequence[int]) -> str:
    """The rows of a table as C++ initialisers, as many a line as fit."""
    lines = [""]
    for row in (*rows, last):
        entry = "{" + ", ".join(map(str, row)) + "}, "
        if len(lines[-1]) + len(entry) > 116:
            lines.append("")
        lines[-1] += entry
    return "\n".join("    " + line.rstrip() for line in lines)
