"""FlashFuser's G and S workloads (Tables VI and VII), and the splits of each that ``few_rows.py`` times by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.shared_tile.model import TILES
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split, tiles_for


@dataclass(frozen=True)
class Workload:
    """``[rows, k]`` to ``hid`` to ``out``; gated ones have two first layers."""

    hid: int
    k: int
    out: int
    gated: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.hid * (self.k * (1 + self.gated) + self.out)


WORKLOADS = {
    "G1": Workload(512, 32, 256),
    "G3": Workload(512, 416, 256),
    "G4": Workload(3072, 768, 768),
    "G5": Workload(16384, 4096, 4096),
    "G6": Workload(4096, 1024, 1024),
    "G8": Workload(8192, 2048, 2048),
    "G10": Workload(1536, 384, 384),
    "S1": Workload(8192, 3072, 3072, True),
    "S2": Workload(5632, 2048, 2048, True),
    "S3": Workload(11008, 4096, 4096, True),
    "S4": Workload(8192, 2048, 2048, True),
    "S5": Workload(11008, 2048, 2048, True),
    "S7": Workload(9728, 2560, 2560, True),
}

SPLITS = {  # the best of those that were timed
    "G1": [(4, 8), (8, 4)],
    "G3": [(4, 16), (4, 8)],
    "G4": [(8, 16), (4, 32)],
    "G5": [(4, 32), (8, 16)],
    "G6": [(8, 16), (4, 32)],
    "G8": [(8, 16), (4, 32)],
    "G10": [(4, 24), (8, 12)],
    "S1": [(5, 24), (4, 32), (8, 16)],
    "S2": [(8, 16), (4, 32)],
    "S3": [(4, 32), (8, 16)],
    "S4": [(8, 16), (4, 32)],
    "S5": [(8, 16), (4, 32)],
    "S7": [(6, 20), (4, 32), (8, 16)],
}
CLUSTERS = {"G4": [(6, 16)], "G10": [(4, 24)], "G8": [(4, 24)], "S2": [(4, 24)]}
"""Groups and columns of kernels that add sums over a cluster."""
GATHERED = {
    "G4": [(15, 4, 64, 2)],
    "G6": [(15, 4, 64, 2)],
    "G10": [(15, 4, 64, 2), (7, 8, 64, 2)],
    "S2": [(7, 8, 64, 2)],
}
"""Groups, columns, rows of a tile and tiles of kernels whose middle goes over a cluster."""
MADE_BY_EACH = {
    "G1": [(4, 4, 32, 4), (8, 2, 32, 4), (8, 1, 16, 8), (8, 7, 64, 2), (8, 8, 128, 1)],
    "G3": [(4, 4, 32, 4), (8, 3, 32, 4), (4, 2, 16, 8), (8, 4, 64, 2), (8, 8, 128, 1)],
    "G10": [(16, 3, 64, 2)],
}
"""The same of kernels without an exchange of the middle, each CTA of a group making all of it; sums over a cluster."""
SIDE_BY_SIDE = {  # shorter tiles of the 128 rows
    "G1": [(4, 8, 64, 2), (4, 4, 64, 2), (1, 8, 16, 8)],
    "G3": [(4, 8, 64, 2), (1, 8, 16, 8), (4, 8, 32, 4)],
    "G4": [(8, 8, 64, 2), (4, 16, 64, 2)],
    "G6": [(8, 8, 64, 2)],
    "G10": [(8, 8, 64, 2), (4, 16, 64, 2)],
}
"""Groups, columns, rows of a tile and tiles; one group of up to 8 hands its middle over through a cluster too."""


def chosen_splits(name: str, rows: int) -> list[Split]:
    tile_rows, row_tiles = tiles_for(rows)
    made = []
    for groups, columns in SPLITS[name]:
        groups = max(1, groups // row_tiles)
        for tail in (Tail.REDUCE_ADD, Tail.PARTIALS) if groups > 1 else (Tail.NONE,):
            made.append(Split(groups, columns, tail, tile_rows, row_tiles))
    if rows <= 64:  # the middle is short: groups may have many CTAs
        out = WORKLOADS[name].out // 8
        made += [Split(2, 64, tail, tile_rows) for tail in (Tail.REDUCE_ADD, Tail.PARTIALS, Tail.CLUSTER)]
        made += [Split(1, min(columns, out), Tail.NONE, tile_rows) for columns in (96, 128)]
        made = list(dict.fromkeys(made))
    if rows == TILES[-1]:
        for groups, columns, height, tiles in SIDE_BY_SIDE.get(name, []):
            tails = (Tail.REDUCE_ADD, Tail.PARTIALS) if groups > 1 else (Tail.NONE,)
            made += [Split(groups, columns, tail, height, tiles) for tail in tails]
            if groups == 1 and columns <= 8:
                made.append(Split(1, columns, Tail.NONE, height, tiles, middle=Middle.DSM))
        for groups, columns, height, tiles in GATHERED.get(name, []):
            tails = (Tail.REDUCE_ADD, Tail.PARTIALS)
            made += [Split(groups, columns, tail, height, tiles, middle=Middle.DSM) for tail in tails]
        for groups, columns, height, tiles in MADE_BY_EACH.get(name, []):
            made.append(Split(groups, columns, Tail.CLUSTER, height, tiles, middle=Middle.NONE))
            made.append(replace(made[-1], depth=64))
    if row_tiles == 1:
        made += [Split(g, c, Tail.CLUSTER, tile_rows) for g, c in CLUSTERS.get(name, [])]
    return made
