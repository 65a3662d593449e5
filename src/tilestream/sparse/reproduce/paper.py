"""FuseFlow's figures (arXiv 2511.04768) and those of its released code, as data. Cycles, unless said otherwise."""

from __future__ import annotations

from dataclasses import dataclass

ARTIFACT = "the released code's Figure 12"


@dataclass(frozen=True)
class Kernel:
    """Section 6 of the notes: one kernel at n rows and density 1/d. ``sam``, ``comal``: cycles of two simulators. The
    last two rows were counted since by a restatement of SAM's blocks, which gives the notes' 745 and 755 as well."""

    name: str
    n: int
    d: int
    comal: int | None
    sam: int | None = None
    values: int | None = None
    total: int | None = None


KERNELS = (
    Kernel("matmul ijk", 50, 20, 12731, 12730, 2024, 7366),
    Kernel("matmul ikj", 50, 20, 2145, 2149, 282, 7366),
    Kernel("matmul jik", 50, 20, None, 12730),
    Kernel("matmul jki", 50, 20, None, 2101),
    Kernel("matmul kij", 50, 20, None, 745),
    Kernel("matmul kji", 50, 20, None, 755),
    Kernel("elemmul", 50, 20, 266, None, 6),
    Kernel("matmul ikj dense", 50, 20, 2062, None, 736, 25766),
    Kernel("chain ikjl", 50, 20, 2238, None, 554, 85641),
    Kernel("chain second", 50, 20, 2047),
    Kernel("matmul ikj x2", 50, 20, 1096, None, 282, 7366),
    Kernel("matmul ijk", 50, 4, 55135, None, 2500, 185949),
    Kernel("matmul ikj", 50, 4, 7969, None, 2372, 185949),
    Kernel("elemmul", 50, 4, 1120),
    Kernel("elemadd", 50, 4, 1120, None, 1062, 6009),
    Kernel("matmul ikj dense", 50, 4, 9903, None, 800, 140205),
    Kernel("chain ikjl", 50, 4, 33874, None, 2500, 12375037),
    Kernel("chain second", 50, 4, 33708),
    Kernel("matmul ikj x2", 50, 4, 4276, None, 2372, 185949),
    Kernel("matmul kij", 20, 8, None, 303),
    Kernel("matmul kij diagonal", 64, 64, None, 270),
)

SDDMM = {
    "co-iteration fused": {1: 2367, 10: 2367, 100: 11894},
    "locate fused": {1: 294, 10: 1347, 100: 11877},
    "unfused": {1: 7418, 10: 29918, 100: 254918},
}
"""Variant to inner size K to cycles of SAM's Python simulator; n=50, d=20, C and D dense ones."""

FIGURE12 = {
    "GCN": {
        "cora": (48_998_261, 29_997_611, 166_361_105),
        "cora_ml": (115_435_265, 61_259_360, 842_383_059),
        "dblp": (934_042_655, 627_775_406, 3_589_346_391),
        "collab": (1_056_927_396, 409_951_944, 55_634_377_783),
        "mag": (16_012_893_504, 7_505_550_758, 185_792_502_899),
    },
    "GraphSAGE": {
        "cora": (79_355_629, 37_798_698, 166_361_105),
        "cora_ml": (183_474_564, 99_243_656, 842_388_679),
        "dblp": (1_269_087_780, 627_775_394, 3_589_346_391),
        "collab": (1_569_940_814, 505_455_837, 55_634_376_841),
        "mag": (29_409_284_934, 7_505_550_758, 849_409_284_934),
    },
    "GPT-3": {
        "16": (98_511_714_108, 56_340_821_076, 36_439_754_748),
        "32": (99_652_522_812, 60_497_286_996, 40_596_220_668),
        "64": (102_275_175_360, 60_497_286_996, 40_596_220_668),
    },
    "SAE": {
        "imagenet": (109_113, 108_595, 162_480),
        "nih": (134_241, 133_723, 212_147),
        "luna16": (134_241, 133_723, 212_147),
    },
}
"""Model to data set to cycles (unfused, partial, full), as the released plotting script has them."""

FUSIONS = ("unfused", "partial", "full")

SAE_SPEEDUP = 1.94
"""Of full fusion over unfused, as the paper's text says; the released cycles say 0.63 to 0.67."""

SAE_PARTIAL_SPEEDUP = 1.01
"""Of partial fusion over unfused, as the text says."""

PARALLEL = {
    "none": 806_101_226,
    "heads x2": 403_087_023,
    "heads x4": 201_560_883,
    "rows x2": 403_054_894,
    "rows x4": 201_531_826,
    "both x4": 50_390_209,
}
"""Figure 16b: BigBird attention at block 64: lanes to cycles. Heads are the paper's level 1, rows its level 2."""

ORDER_SPREAD = 29.0
"""Figure 18: cycles of the worst order over the best of two nested matrix products."""

HEURISTIC = {"GPT-3 (block 16)": (1.8, 5.7), "GCN": (2.8, 9.6), "GraphSAGE": (2.6, 11.5)}
"""Table 3: mean error of the estimate on OGB-Collab, in percent: FLOPs, bytes."""

FIGURE14 = {
    "cora_ml": {
        "unfused": (292_409_800, 493_723_691),
        "layer 1": (240_329_975, 305_549_531),
        "layer 2": (292_489_512, 493_297_493),
        "partial": (240_409_687, 305_123_333),
        "full": (2_477_724_772, 3_422_625_009),
    },
    "dblp": {
        "unfused": (843_958_845, 1_340_794_982),
        "layer 1": (841_903_789, 1_046_957_403),
        "layer 2": (844_201_668, 1_339_169_398),
        "partial": (842_146_612, 1_045_331_819),
        "full": (9_901_253_852, 13_815_099_378),
    },
    "collab": {
        "unfused": (1_374_001_080, 2_177_719_999),
        "layer 1": (1_377_303_232, 1_750_798_916),
        "layer 2": (1_371_642_400, 2_156_020_138),
        "partial": (1_374_944_552, 1_729_099_055),
        "full": (25_541_873_568, 34_440_972_179),
    },
}
"""GCN: data set to fusion to (operations, words moved). ``layer 1``: only the first layer is fused."""


ORDERS = {"GCN": (2.0e8, 6.3e7), "GraphSAGE": (3.9e7, 1.1e3)}
"""Table 4: index orders without and with the constraints of formats. GCN's first was cut off; it is about 1e15."""


def walks(model: str, data: str, features: int) -> int:
    """Walks of two edges that the released full-fusion cycles imply: it streams a row of features for each. A row that
    is told them is a fit."""
    return FIGURE12[model][data][FUSIONS.index("full")] // (features + 1)


def speedup(model: str, data: str, fusion: str) -> float:
    """Unfused over ``fusion`` in Figure 12."""
    cycles = FIGURE12[model][data]
    return cycles[0] / cycles[FUSIONS.index(fusion)]
