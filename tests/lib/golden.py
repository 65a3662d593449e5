"""Write the golden files of ``test_passes.py`` again: ``python tests/lib/golden.py``. Read the difference first."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from places import GOLDEN
from programs import chain, edge_block, elementwise, nerf
from splits import H200, SPLITS, after_split

from tilestream.ir.text import show
from tilestream.plan.passes.cleaning import order_memory_ops

PROGRAMS = (chain, nerf, edge_block, partial(edge_block, 512, 2, "silu"), elementwise)


def main() -> None:
    Path(GOLDEN).mkdir(exist_ok=True)
    for make in PROGRAMS:
        program = make()
        for split in ("bulk", "vertical", "spatial"):
            if split == "spatial" and program.name == "elementwise":
                continue
            text = show(after_split(SPLITS[split](order_memory_ops(program), device=H200)))
            (GOLDEN / f"{program.name}.{split}.txt").write_text(text)


if __name__ == "__main__":
    main()
