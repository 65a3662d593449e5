"""What lies around a graph's regions, said otherwise where it runs faster so: by rewrites, and by what was timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.options import Options
from tilestream.run import device_ops
from tilestream.run.attention import replace_attention, runs_here
from tilestream.run.early_launches import start_early
from tilestream.run.epilogues import tunes
from tilestream.run.few_queries import STREAMED
from tilestream.run.library_attention import EFFICIENT_ATTENTION, FLASH_ATTENTION
from tilestream.run.short_attention import SHORT_ATTENTION
from tilestream.run.target import Target
from tilestream.run.tiled_attention import TILED_ATTENTION
from tilestream.run.written_attention import fuse_written


def rewrite_around(
    graph: fx.GraphModule, options: Options, target: Target, patches: Mapping[str, Any], inference: bool
) -> None:
    """Rewrite a graph whose regions are calls, in place.

    Args:
        patches: changes of Inductor's configuration for the graph.
    """
    settings = Settings(library_epilogues=target.kind == "cuda" and not tunes(patches), runs=runs_here)
    if inference:
        rewrite(graph, When.AROUND_INFERENCE, settings)
    rewrite(graph, When.AROUND, settings)
    device_ops.begin(graph.graph)
    if inference:
        fuse_written(graph, options, target)
        for kernel in (STREAMED, FLASH_ATTENTION, EFFICIENT_ATTENTION, SHORT_ATTENTION, TILED_ATTENTION):
            replace_attention(graph, kernel, options, target)
        start_early(graph, options)
