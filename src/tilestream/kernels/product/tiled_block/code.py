"""What is a tiled block's own in its code: constants, vectors in registers, and fields of the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import accumulate
from typing import Any

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.parts.params import MAP, Field, Struct
from tilestream.kernels.parts.tensor_maps import MatrixMap
from tilestream.kernels.product.before import Makers
from tilestream.kernels.product.epilogue import Epilogue, Words, epilogues, vector_words
from tilestream.kernels.product.operands import Operands
from tilestream.kernels.product.tiled_block.model import COLUMNS, DEPTH, ROWS, STEPS, TiledBlock, Walk

WALK = Struct("Walk", tuple(Field("int", field.name) for field in fields(Walk)), declared=False)
EARLY_WORDS, BESIDE_WORDS = 128, 64
"""Registers of a lane for rows and a norm's weights: of the warps that multiply, before they do, and of a loader. On an
H200 with them, and with narrow tiles: 24,579 rows of a gated 320-864-320 with a float32 stream 156.7 us, 259.8 where
rows were made one by one; 12,608 of 384-1536-384 93.0 and 166.8; 16,384 of 768-3072-768, of no narrow tiles, 275.6 and
279.3. Which numbers are best is assumed."""
MOST_BESIDE = 2
"""A loader with four rows spills."""
SIZES = ("hid_blocks", "out_blocks", "first_steps", "second_steps", "second_columns")
GROUP_ROWS = ROWS // 2
"""Of a warpgroup, whose tiles are stored 64 columns at a time."""


class TiledBlockCode:
    """Vectors come in words, a lane some columns, while a tile is multiplied."""

    name = "tiled_block"
    head = "const u32* w"
    even_rows = True
    starts = True
    blocks = (COLUMNS // 8,)
    makers = Makers(32, few_registers=True)
    register_splits = ((208, 88), (200, 104))
    """Sums take half of the former, rows of a norm want the latter."""

    def __init__(self, s: TiledBlock, pipeline: Pipeline) -> None:
        self.s, self.b = s, s.block
        made = epilogues(s.block)
        after = made[-len(s.block.lasts)]
        self.column = _inside(after.columns, s.result_columns)
        early, beside = (self.makers.most_rows(s.block, pipeline, words) for words in (EARLY_WORDS, BESIDE_WORDS))
        self.rows_at_once = early, min(MOST_BESIDE, beside)
        index, inside = "", self.column
        if len(s.block.lasts) > 1:  # all have the same epilogue: the vectors of one lie behind those of another
            index, inside = f" + last * {len(after.vectors)}", "c < columns_of(last) ? c : 0"
        self.result = after, vector_words(after, pipeline, index, inside)
        hidden = _inside(s.block.sizes[1], s.hidden_columns)
        self.hidden = (made[0], vector_words(made[0], pipeline, "", hidden)) if s.block.firsts else None
        self.blocks = tuple(dict.fromkeys((COLUMNS // 8, s.second_columns // 8)))

    def constants(self) -> Mapping[str, Mapping[str, object]]:
        s, hidden = self.s, self.hidden[1].count if self.hidden else 0
        sizes = {name.upper(): getattr(s, name) for name in SIZES}
        sizes |= {"STEPS": STEPS, "HIDDEN_WORDS": hidden, "RESULT_WORDS": self.result[1].count}
        sizes |= {"ROWS_EARLY": self.rows_at_once[0], "ROWS_BESIDE": self.rows_at_once[1]}
        return {
            "bool": {"DIRECT": s.direct},
            "int": sizes,
            "u32": {"BARS": "STEPS * STEP_BYTES + 2 * SLABS * CHUNK_BYTES"},
        }

    def lists(self) -> Mapping[str, Sequence[int]]:
        return {"end_of": list(accumulate(self.s.result_blocks))}  # in blocks of columns

    def reads(self) -> Sequence[tuple[str, Sequence[str]]]:
        hidden = [("hidden_words(const Params& p, int c, u32* w)", self.hidden[1].loads)] if self.hidden else []
        return [*hidden, ("result_words(const Params& p, int last, int c, u32* w)", self.result[1].loads)]

    def middle(self) -> str:
        assert self.hidden is not None
        return _body(*self.hidden)

    def after(self) -> str:
        return _body(*self.result)

    def maps(self) -> Sequence[Field]:
        middle = [Field(MAP, "hidden_in"), Field(MAP, "hidden_out")] if self.b.firsts else []
        return [*middle, *([] if self.s.direct else [Field(MAP, "results", len(self.b.lasts))])]

    def fields(self) -> Sequence[Field]:
        lasts = len(self.b.lasts)
        rows = [Field("float*", "results", lasts), Field("long long", "result_strides", lasts)] if self.s.direct else []
        return [*rows, Field(WALK, "walk"), Field("int", "ctas")]

    def values(self, given: Operands) -> dict[str, Any]:
        s, b, call = self.s, self.b, given.call
        k, hid, _ = b.sizes
        hidden, operand = call.at["hidden"], call.at["operand"]

        def ring(address: int, columns: int, box: int) -> bytes:
            return call.encode(MatrixMap(b.dtype, address, columns, s.slots * ROWS, 2 * columns, box))

        middle = {"hidden_in": ring(hidden, hid, ROWS), "hidden_out": ring(hidden, hid, GROUP_ROWS)} if b.firsts else {}
        return {
            "input": ring(operand, k, ROWS) if b.before else given.matrix(b.input, k, ROWS),
            **given.weights(b, COLUMNS // 2, [s.second_columns // 2] * len(b.lasts), DEPTH),
            **middle,
            **self._results(given),
            "operand_data": operand,
            "walk": asdict(s.walk(call.part.rows)),
            "ctas": s.ctas,
        }

    def _results(self, given: Operands) -> dict[str, Any]:
        if not self.s.direct:
            return {"results": [given.matrix(x.output, x.columns, GROUP_ROWS) for x in self.b.lasts]}
        rows = [given.rows(x.output) for x in self.b.lasts]
        return {"results": [r[0] for r in rows], "result_strides": [r[1] for r in rows]}


def _body(e: Epilogue, words: Words) -> str:
    return e.body(words.values)


def _inside(size: int, block: int) -> str:
    """Column ``c``, or the first where tiles go beyond the last one: nobody stores what becomes of those."""
    return "c" if size % block == 0 else f"c < {size} ? c : 0"
