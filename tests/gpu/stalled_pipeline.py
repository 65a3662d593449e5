"""A pipeline whose producer never publishes one tile, run in a process of its own: the CUDA context is lost.

    python stalled_pipeline.py full|free [LIMIT_NS]

``full``: the producer does not publish tile 30, the last but one. ``free``: the consumer does not give the slot of
tile 5 back.
Prints what the user gets to see, and exits with 0 if that is a QueueTimeout.
"""

from __future__ import annotations

import re
import sys

from gpu_pipelines import spread
from other_headers import compile_with
from programs import chain
from random_pipelines import tensors_for
from stalled import leave, told_by

from tilestream import cuda
from tilestream.cuda import one_launch
from tilestream.kernels.parts.headers import headers

ROWS = 2000
LOST = {"full": ("queue_publish", 30), "free": ("queue_free", 5)}


def broken(function: str, tile: int) -> dict[str, str]:
    """Our headers with a ``function`` that does nothing for ``tile``."""
    made = headers()
    pattern = re.compile(rf"(TS_DEV void {function}\([^)]*\) {{)")
    made["roles.cuh"], count = pattern.subn(rf"\1 if (tile == {tile}) return;", made["roles.cuh"])
    assert count == 1, f"{function} is not where this script looks for it"
    return made


def main(what: str, limit_ns: int | None) -> int:
    texts = broken(*LOST[what])
    compile_with(texts)
    if limit_ns is not None:
        one_launch.TIMEOUT_NS = limit_ns
    pipeline = spread(chain(2, 64), replicas=1)
    compiled = cuda.build(pipeline)
    tensors = {k: t.cuda() for k, t in tensors_for(pipeline, ROWS).items()}
    return told_by(lambda: compiled(tensors, ROWS))


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None))
