"""Kernels of shared tiles without a GPU: they compile, machine code, text, and what an expired wait says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sass
import torch
from places import GOLDEN
from shared_tiles import Ffn

from tilestream import cuda
from tilestream.cuda.diagnose import Record
from tilestream.errors import QueueTimeout
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.families import kernel_of
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split, share_tile

G4 = Ffn(3072, 768, 768)
S2 = Ffn(5632, 2048, 2048, gated=True, act="silu")
TEXT = GOLDEN / "shared_tile.cu"


def shared(block: Ffn, split: Split) -> Pipeline:
    return share_tile(block.program(), split)


def test_a_wait_that_expired_is_told_with_both_ctas() -> None:
    p = shared(G4, Split(8, 16))
    kernel = kernel_of(p)
    dump = Record(kernel.frame.words, kernel.error)
    dump.check()
    words = (1 | 1 << 32, 18 | 21 << 32, 40, 7, 6)  # claimed, phase | CTA, peer | SM | expected, found
    dump.words[: len(words)] = torch.tensor(words)
    with pytest.raises(
        QueueTimeout, match="CTA 18 of 128 .8 groups of 16. on SM 40 .* columns of the middle of CTA 21"
    ):
        dump.check()
    dump.words.zero_()  # or the process says at its end what it found


KERNELS = [
    (G4, Split(8, 16, Tail.REDUCE_ADD)),
    (S2, Split(4, 32)),
    (Ffn(16384, 4096, 4096), Split(8, 16)),
    (Ffn(768, 192, 192, gated=True, act="silu", bias=True, residual=True), Split(4, 6, Tail.CLUSTER)),
    (Ffn(640, 200, 136, act="gelu", residual=True, dtype="f16"), Split(1, 6, Tail.NONE)),
    (Ffn(520, 72, 77, bias=True), Split(2, 8, row_tiles=4)),
    (S2, Split(8, 16, tile_rows=64)),
    (G4, Split(1, 96, Tail.NONE, tile_rows=8)),
    (G4, Split(8, 16, Tail.REDUCE_ADD, tile_rows=16)),
    (S2, Split(2, 64, tile_rows=32)),
    (Ffn(640, 200, 136, bias=True), Split(4, 6, Tail.CLUSTER, tile_rows=8)),
    (replace(G4, norm="layer", act="gelu", bias=True, residual=True), Split(8, 16)),
    (replace(S2, norm="rms", sum_first=True, residual=True), Split(2, 64, tile_rows=8)),
    (G4, Split(8, 8, Tail.REDUCE_ADD, middle=Middle.DSM)),
    (Ffn(1536, 384, 384, gated=True, act="silu"), Split(7, 16, middle=Middle.DSM)),
    (
        Ffn(640, 200, 136, act="gelu", bias=True, residual=True, dtype="f16"),
        Split(1, 6, Tail.NONE, 8, middle=Middle.DSM),
    ),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("block", "split"), KERNELS, ids=str)
@pytest.mark.every(4)
def test_kernels_compile_without_spills(block: Ffn, split: Split) -> None:
    assert [r.spills for r in cuda.compile_only(shared(block, split))] == [0]


@pytest.mark.nvrtc
@pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")
def test_products_of_a_gathered_middle_wait_for_no_memory() -> None:
    """No fence of the whole GPU between the first and the last product."""
    (report,) = cuda.compile_only(shared(G4, Split(8, 8, middle=Middle.DSM)))
    code = sass.disassemble(report.cubin)
    products = [i.address for i in code.having("HGMMA")]
    assert len(products) == 4 * 2
    assert not [i for i in code.having("MEMBAR") if products[0] < i.address < products[-1] and "GPU" in i.opcode]


def golden_text() -> str:
    """What ``golden/shared_tile.cu`` holds: a gated block with biases and a residual."""
    block = Ffn(768, 192, 192, gated=True, act="silu", bias=True, residual=True)
    return cuda.sources(share_tile(block.program(), Split(4, 8)))[0].text


def test_text_of_a_kernel() -> None:
    assert golden_text() == TEXT.read_text(), "it changed; if that is meant, write it again: see golden_text"
