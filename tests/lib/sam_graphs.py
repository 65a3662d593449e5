"""Graphs in SAM's dialect of DOT, from short lines, and how they are run."""

from __future__ import annotations

import numpy as np

from tilestream.sparse.dot import DotGraph
from tilestream.sparse.run_spec import run
from tilestream.sparse.storage import pack


def run_dot(got: DotGraph, arrays: dict[str, np.ndarray], shape: tuple[int, ...]):
    tensors = {name: pack(name, arrays[name], got.formats[name]) for name in got.graph.tensors()}
    return run(got.graph, tensors, shapes={name: (shape, got.formats[name]) for name in got.graph.results()})


def sam(nodes: str, edges: str, comment: str) -> str:
    """A file in SAM's way, from short lines ``id type key=value ...`` and ``from to label``."""
    lines = []
    for line in filter(None, map(str.strip, nodes.splitlines())):
        name, kind, *rest = line.split()
        attrs = " ".join(f'{k}="{v}"' for k, v in (x.split("=") for x in rest))
        lines.append(f'  {name} [comment="type={kind}" label="{kind}\n{name}" type="{kind}" {attrs}]')
    for line in filter(None, map(str.strip, edges.splitlines())):
        src, dst, label = line.split()
        kind, _, tag = label.partition("_")
        lines.append(f'  {src} -> {dst} [label="{label}" type="{kind}" comment="{tag}"]')
    return "\n".join(["digraph SAM {", f'  comment="{comment}"', "  # a line that is left out", *lines, "}"])
