"""Comments for people on the steps of a generated kernel. What is compiled has none: its text is a cache's key."""

from __future__ import annotations

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.stream.model import Step


def comment(stage: str, step: Step, pipeline: Pipeline) -> str:
    """A line on a step: its stage and number, its tile operations, and the user's lines that they come from."""
    ops = [op for phase in step.phases for op in (*phase.nodes, *phase.reduces, *phase.row_nodes)]
    words = [op.kind for op in ops]
    if step.gemm is not None:
        outs, ins = pipeline.tensor(step.gemm.weight).shape
        words.insert(0, f"linear {ins}>{outs}")
    words += [f"store {s.target}" for phase in step.phases for s in phase.sinks if s.kind in ("direct", "staged")]
    sources = dict.fromkeys(s for s in (step.source, *(op.source for op in ops)) if s)
    text = f"    // {stage}, step {step.index}: {' + '.join(words)}" + "".join(f"; {s}" for s in sources)
    return text.replace("\\", "/")  # at the end of a line it would make the next one a comment
