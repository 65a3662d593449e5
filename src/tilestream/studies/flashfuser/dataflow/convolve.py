"""The chain of a convolution and a 1 x 1 behind it, with its matrix A as a view of the image: implicit im2col."""

from __future__ import annotations

import re
from dataclasses import replace

from tilestream.errors import OptionError
from tilestream.ir.axes import Loop
from tilestream.ir.pipeline import Stage
from tilestream.studies.flashfuser.dataflow.chain import Chain, Image

INSTEAD = {"m": "y,x", "k": "ky,kx,c"}
"""Axes of the image and its taps for those of the product. Blocks are whole rows of the image, rounds of K a tap."""


def convolve(
    chain: Chain, image: Image, rows: int, words: str, tensors: str, sizes: dict[str, int], stage: Stage
) -> tuple[str, str, dict[str, int], Stage]:
    """The program, tensors, sizes, loops and mesh of a chain of products, in axes of the image.

    Args:
        rows: of a block of M.

    Raises:
        OptionError: a block of M is no whole rows of the image, or a round of K not one tap with all channels.
    """
    loops = {loop.axis: loop.tile for loop in stage.loops}
    over = 1
    for d in stage.mesh:
        over *= d.size if d.axes[0] == "k" else 1
    if rows % image.width:
        raise OptionError(
            f"chain {chain.name!r}: a block of {rows} pixels is {rows}/{image.width} rows of the image",
            f"use tiles of M that are multiples of {image.width}",
        )
    if "k" in loops and loops["k"] * over != image.channels:
        raise OptionError(
            f"chain {chain.name!r}: a round of K takes {loops['k']} x {over} of {image.channels} channels of a tap",
            f"use blk_k x cls_k = {image.channels}",
        )
    if any(d.axes == ("k",) for d in stage.mesh):
        raise OptionError(f"chain {chain.name!r}: the taps of a convolution are no parts of a grid", "let K be a loop")
    reach = (image.taps - 1) // 2
    view = f"A[y+ky-{reach},x+kx-{reach},c]" if reach else "A[y+ky,x+kx,c]"
    words = _renamed(words).replace("A[y,x,ky,kx,c]", view)
    made = {"y": image.height, "x": image.width, "ky": image.taps, "kx": image.taps, "c": image.channels}
    made |= {a: n for a, n in sizes.items() if a not in INSTEAD}
    kinds = _renamed(tensors).replace("A[y,x,ky,kx,c]", "A[y,x,c]")
    mesh = tuple(replace(d, axes=tuple({"m": "y", "k": "c"}.get(a, a) for a in d.axes)) for d in stage.mesh)
    return words, kinds, made, replace(stage, loops=_loops(stage.loops, image), mesh=mesh)


def _renamed(text: str) -> str:
    def inside(found: re.Match[str]) -> str:
        return ",".join(INSTEAD.get(a, a) for a in found.group()[1:-1].split(",")).join("[]")

    return re.sub(r"\[[^\]]*\]", inside, text)


def _loops(loops: tuple[Loop, ...], image: Image) -> tuple[Loop, ...]:
    made: list[Loop] = []
    for loop in loops:
        if loop.axis == "m":
            made.append(Loop("y", loop.tile // image.width))
        elif loop.axis == "k":
            made += [Loop("ky", 1), Loop("kx", 1)]
        else:
            made.append(loop)
    return tuple(made)
