"""FuseFlow's results again: each study's rows beside the published ones.

A study is a function of ``Options`` that gives a ``Study``. ``STUDIES`` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilestream.sparse.reproduce import attention, estimates, fusion, kernels, schedules, traffic
from tilestream.sparse.reproduce.study import Options, Study, Timer

STUDIES: dict[str, tuple[str, Callable[[Options], Study]]] = {
    "kernels": ("reference cycle counts of hand-wired kernels", kernels.reference),
    "sddmm": ("sampled dense-dense products, fused and not", kernels.sddmm),
    "gcn": ("GCN: unfused, partial and full fusion (Figure 12)", fusion.gcn),
    "traffic": ("GCN: operations and words moved (Figure 14)", traffic.words),
    "defaults": ("GCN and GraphSAGE on Cora, orders by default", fusion.by_default),
    "counting": ("how many index orders there are (Table 4)", schedules.counting),
    "gcn-notes": ("GCN: order, locating, weights, self loops", fusion.variants),
    "graphsage": ("GraphSAGE: unfused, partial and full fusion (Figure 12)", fusion.graphsage),
    "sae": ("sparse autoencoder: 50 % and 90 % pruned (Figure 12)", fusion.sae),
    "gpt3": ("GPT-3 with BigBird attention at block 16, 32, 64 (Figure 12)", attention.gpt3),
    "parallel": ("BigBird attention in parallel (Figures 16a and 16b)", attention.parallel),
    "blocking": ("attention on scalars and on blocks (Figure 17)", attention.blocking),
    "order": ("all index orders of two nested products (Figure 18)", schedules.orders),
    "sparsity": ("GCN against the sparsity and structure of its graph (Figure 15)", schedules.sparsity),
    "heuristic": ("the estimate against simulation (Table 3)", estimates.accuracy),
    "search": ("the front that search finds for a GCN", schedules.pareto),
    "channels": ("cycles against the depth of the channels", schedules.channels),
}


def run(name: str, options: Options) -> Study:
    """The study called ``name``; its ``seconds`` are what it took."""
    words, function = STUDIES[name]
    options.progress(f"{name}: {words}")
    timer = Timer()
    made = function(options)
    return replace(made, name=name, seconds=timer.seconds)


__all__ = ["STUDIES", "Options", "Study", "run"]
