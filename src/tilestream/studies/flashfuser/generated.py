"""Generated kernels that were timed (``benchmarks/run/few_rows.py``), and what the cost model says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tilestream import devices
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.kernels.coefficients.shared_tile import Coefficients
from tilestream.kernels.product.shared_tile import SharedTile, Tail, build
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split, share_tile, tiles_for
from tilestream.studies.flashfuser import paper
from tilestream.studies.flashfuser.dataflow.chain import Chain
from tilestream.studies.flashfuser.measured import few_rows

FIT = ("G4", "G8", "S2")
"""Shapes that the constants of generated kernels were fitted on, with any number of rows. All others judge them."""

ARM = re.compile(
    r"shared (?:(\d+) x (\d+) rows, )?(\d+) groups? of (\d+)(, middle (?:over a cluster|made by each))?,"
    r" ([a-z ]+?)(?:, stages of (\d+))?"
)
TAILS = {
    "sums in one place": Tail.NONE,
    "partial sums in order": Tail.PARTIALS,
    "sums added in any order": Tail.REDUCE_ADD,
    "sums over a cluster": Tail.CLUSTER,
}
MIDDLES = {"": Middle.L2, ", middle over a cluster": Middle.DSM, ", middle made by each": Middle.NONE}
"""As ``Split`` says them."""


@dataclass(frozen=True)
class Timed:
    """A kernel: microseconds with the weights in the L2 (where they fit), and from DRAM."""

    shape: str
    rows: int
    split: Split
    schedule: SharedTile
    warm_us: float
    cold_us: float

    def predicted_us(self, cold: bool, rates: Coefficients | None = None) -> float:
        return 1e6 * shared_tile_cost(self.schedule, self.rows, devices.get("h200"), cold, rates).seconds


@dataclass(frozen=True)
class Score:
    """One shape at one number of rows, weights from DRAM: mean error of the prediction, the place that it gives to the
    kernel that is truly best, from 1, and how much slower than that the kernel is that it calls best."""

    shape: str
    rows: int
    held_out: bool
    count: int
    error: float
    rank: int
    lost: float


def split_of(arm: str, rows: int) -> Split | None:
    """The split that an arm's name says; None if it is none."""
    found = ARM.fullmatch(arm)
    if found is None:
        return None
    tiles, height, groups, columns, gathered, how, depth = found.groups()
    tile_rows = int(height) if height else tiles_for(rows)[0]
    middle = MIDDLES[gathered or ""]
    return Split(
        int(groups), int(columns), TAILS[how], tile_rows, int(tiles or 1), int(depth) if depth else None, middle
    )


@cache
def generated() -> tuple[Timed, ...]:
    """Every generated kernel that was timed."""
    return tuple(_timed())


def _timed() -> Iterator[Timed]:
    chains = {w.key: w.chain for w in paper.WORKLOADS}
    for row in few_rows():
        split = split_of(row["arm"], row["rows"])
        if split is not None:
            p = share_tile(program(chains[row["workload"]]), split)
            schedule = build(p.stages[0], p)
            yield Timed(row["workload"], row["rows"], split, schedule, row["warm_us"], row["cold_us"])


def scores(rates: Coefficients | None = None) -> list[Score]:
    """Of every shape and number of rows that was timed, in the order of the file."""
    kernels = generated()
    made = []
    for shape, rows in dict.fromkeys((t.shape, t.rows) for t in kernels):
        pairs = [(t.predicted_us(True, rates), t.cold_us) for t in kernels if (t.shape, t.rows) == (shape, rows)]
        best, chosen = min(pairs, key=lambda p: p[1]), min(pairs)
        error = sum(abs(predicted / true - 1) for predicted, true in pairs) / len(pairs)
        rank = 1 + sum(p[0] < best[0] for p in pairs)
        made.append(Score(shape, rows, not _fitted(shape), len(pairs), error, rank, chosen[1] / best[1] - 1))
    return made


def _fitted(shape: str) -> bool:
    """Whether constants were fitted on kernels of the shape: where no middle is exchanged, on all that there are."""
    return shape in FIT or any(t.shape == shape and t.split.middle is Middle.NONE for t in generated())


def program(chain: Chain) -> Pipeline:
    """``act(x W1) W2``, or gated, as a region's program."""
    tensors = [
        Tensor.of("x", Role.INPUT, (chain.k,), "bf16"),
        Tensor.of("up", Role.PARAMETER, (chain.n, chain.k), "bf16"),
        Tensor.of("down", Role.PARAMETER, (chain.l, chain.n), "bf16"),
        Tensor.of("y", Role.OUTPUT, (chain.l,), "bf16"),
    ]
    ops = [TileOp("load", Tile.of("a", chain.k, "bf16"), (), ("x",)), _op("linear", "u", chain.n, ("a",), ("up",))]
    if chain.branches == 2:
        tensors.append(Tensor.of("gate", Role.PARAMETER, (chain.n, chain.k), "bf16"))
        ops += [_op("linear", "g", chain.n, ("a",), ("gate",)), _op("silu", "s", chain.n, ("g",))]
        ops.append(_op("mul", "h", chain.n, ("s", "u")))
    else:
        ops.append(_op("relu", "h", chain.n, ("u",)))
    ops += [_op("linear", "r", chain.l, ("h",), ("down",)), TileOp("store", None, ("r",), ("y",))]
    return Pipeline("ffn", tuple(tensors), (Stage.of("all", tuple(ops)),))


def _op(kind: str, name: str, width: int, ins: tuple[str, ...], params: tuple[str, ...] = ()) -> TileOp:
    return TileOp(kind, Tile.of(name, width, "bf16"), ins, params)
