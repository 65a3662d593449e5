"""The generated CUDA of a model's pipelines, each step with its operations and the user's line."""

from __future__ import annotations

from tilestream.plan.analysis import Analysis


def text(a: Analysis) -> str:
    """Source of every kernel of every region that runs as dataflow, as NVRTC gets it but for the comments."""
    from tilestream import cuda

    parts: list[str] = []
    for region in a.regions:
        runs = region.runs
        if runs is None or runs.pipeline is None:
            parts.append(f"// {region.name}: no kernel, {region.problem or 'Inductor is the fastest'}\n")
            continue
        launches = [source for p in region.pipelines(runs) for source in cuda.sources(p, annotate=True)]
        for number, source in enumerate(launches):
            parts.append(f"// {region.name}, {runs.name}, launch {number}: {source.name}\n{source.text}")
    return "\n".join(parts) or "// no region: no kernel of tilestream's\n"
