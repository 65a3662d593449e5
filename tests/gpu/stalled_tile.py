"""A shared tile whose CTA 5 never says that its middle is there, run in a process of its own: the context is lost.

Prints what the user gets to see, and exits with 0 if that is a QueueTimeout.
"""

from __future__ import annotations

from other_headers import compile_with
from shared_tiles import Ffn
from stalled import leave, told_by

from tilestream import cuda
from tilestream.kernels.parts.headers import headers
from tilestream.plan.passes.share_tile import Split, share_tile


def broken() -> dict[str, str]:
    """Our headers with an ``announce`` that does nothing in CTA 5."""
    made = headers()
    right = "{ flag_release(flag(phase, cta), epoch); }"
    assert made["collectives.cuh"].count(right) == 1, "announce is not where this script looks for it"
    made["collectives.cuh"] = made["collectives.cuh"].replace(
        right, "{ if (cta != 5) flag_release(flag(phase, cta), epoch); }"
    )
    return made


def main() -> int:
    texts = broken()
    compile_with(texts)
    block = Ffn(512, 128, 192)
    kernel = cuda.build(share_tile(block.program(), Split(4, 8)))
    tensors = block.tensors(64, "cuda")
    return told_by(lambda: kernel(tensors, 64))


if __name__ == "__main__":
    leave(main())
