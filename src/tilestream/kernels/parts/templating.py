"""Templates of kernels: text with constants and generated functions filled in."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jinja2


def template(name: str, **filters: Callable[..., Any]) -> jinja2.Template:
    """The template of that file name, with its filters."""
    # PTX operands look like Jinja's default delimiters ({%0).
    env = jinja2.Environment(
        block_start_string="<%", block_end_string="%>", variable_start_string="@{", variable_end_string="}@",
        comment_start_string="<#", comment_end_string="#>", trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, autoescape=False,
    )  # fmt: skip
    env.filters.update(filters)
    return env.from_string((files("tilestream.kernels") / "templates" / name).read_text())
