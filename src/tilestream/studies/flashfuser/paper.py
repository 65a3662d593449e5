"""What the FlashFuser paper states (arXiv 2512.12949v1): workloads, results, and where it contradicts itself."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate


@dataclass(frozen=True)
class Workload:
    """A row of Tables V to VII, and the model that it is taken from."""

    key: str
    model: str
    chain: Chain

    @property
    def family(self) -> str:
        return {"G": "GEMM chain", "S": "gated FFN", "C": "convolutions"}[self.key[0]]


def _chain(key: str, model: str, m: int, n: int, k: int, l: int) -> Workload:  # noqa: E741
    return Workload(key, model, Chain(key, m, n, k, l, Gate.SEQUENTIAL if key[0] == "S" else Gate.NONE))


def _conv(key: str, *sizes: int) -> Workload:
    return Workload(key, "ResNet", Chain.convolutions(key, *sizes))


WORKLOADS = (
    _chain("G1", "DLRM-0", 128, 512, 32, 256),
    _chain("G3", "DLRM-2", 128, 512, 416, 256),
    _chain("G4", "GPT-2-small", 128, 3072, 768, 768),
    _chain("G5", "GPT-6.7B", 128, 16384, 4096, 4096),
    _chain("G6", "GPT-2-medium", 128, 4096, 1024, 1024),
    _chain("G8", "OPT-1.3B", 128, 8192, 2048, 2048),
    _chain("G10", "BERT", 128, 1536, 384, 384),
    _chain("S1", "Llama-3.2-3B", 128, 8192, 3072, 3072),
    _chain("S2", "Llama-1.1B", 128, 5632, 2048, 2048),
    _chain("S3", "Llama-2-7B", 128, 11008, 4096, 4096),
    _chain("S4", "Qwen2.5-2.1B", 128, 8192, 2048, 2048),
    _chain("S5", "Qwen2.5-3B", 128, 11008, 2048, 2048),
    _chain("S7", "Qwen3-4B", 128, 9728, 2560, 2560),
    _conv("C1", 64, 56, 56, 256, 64, 1),
    _conv("C2", 128, 28, 28, 512, 128, 1),
    _conv("C3", 256, 14, 14, 1024, 256, 1),
    _conv("C4", 512, 7, 7, 2048, 512, 1),
    _conv("C5", 64, 56, 56, 64, 256, 3),
    _conv("C7", 256, 14, 14, 256, 1024, 3),
    _conv("C8", 512, 7, 7, 512, 2048, 3),
)
"""Tables VII (G), VI (S) and V (C). C: channels in, height, width, channels between, taps, channels out, taps 1."""

SEARCH_SECONDS = {"G3": (362.1, 1.2), "G4": (380.3, 3.0), "G5": (381.0, 8.1)}
"""Table VIII: seconds of its engine, hours by brute force. The cost model takes 1 to 2 s of it, compiling the rest."""

SPEEDUPS = {"GEMM chain": 3.1, "gated FFN": None, "convolutions": 3.9}
"""Averages over PyTorch 2.6 with torch.compile (section VI). Of gated FFNs there is a picture alone."""

LIBRARIES = 3.3
"""Average over libraries (abstract)."""

MISSING = (
    ("workloads G2, G7, G9, S6, S8, C6", "in Tables V to VII", "their shapes are not in the restatement that we have"),
    (
        "Table I: share of FFNs in the time of inference",
        "41.64 to 61.28 %",
        "a measurement of whole models on an H100 under PyTorch; no kernel of the paper's is in it",
    ),
    (
        "Fig. 4: latency and bandwidth of DSM by size of cluster",
        "a picture",
        "no numbers to compare with; ours on an H200 are in few-rows.md (collectives by themselves)",
    ),
    ("Fig. 5: where Chimera fails at M = 128", "a picture", "Chimera's source was given to the authors privately"),
    (
        "benchmark of the primitives: a 32,768 x 32,768 tensor in tiles of 128 x 128",
        "a picture",
        "no numbers to compare with; ours, of other sizes, are in few-rows.md (collectives by themselves)",
    ),
    (
        "GEMM chains over BOLT, Chimera, Relay, TASO, TensorRT",
        "5.4x, 4.6x, 4.7x, 3.4x, 2.4x",
        "not run: BOLT, Relay (TVM 0.9) and TASO are older than the device, Chimera is not public, TensorRT was not"
        " tried; CUTLASS's fused examples stand in",
    ),
    (
        "convolutions over BOLT, Chimera, Relay, TASO, TensorRT",
        "6.3x, 6.4x, 5.6x, 4.3x, 3.3x",
        "not run, as above; nothing stands in",
    ),
    ("Fig. 14: gated FFNs over Mirage and PipeThreader", "a picture", "no numbers to compare with; neither was run"),
    ("over compilers, abstract", "4.1x", "an average over competitors that were not run"),
    (
        "end to end: SGLang, small models; large models; all",
        "1.32x; 1.16x; 1.24x",
        "SGLang was not run, and the number of GPUs is not stated; whole models of ours are in results.md",
    ),
    ("Table VIII: brute force", "1.2 to 8.1 h", "hours of compiling on an H100; the engines' seconds are above"),
)
"""What the paper has and we have not: what it is, the paper's figure, and why."""

TRAFFIC = 2.4
"""Times the global memory traffic of PyTorch over its own, by Nsight Compute: the 58 % of the abstract."""

ABLATION = {"all": 3.29, "random": 2.11, "no DSM": 1.52}
"""Over no fusion: everything; a random configuration; shared and global memory alone."""

INCONSISTENT = (
    "The search space is counted for M = 256; its tables have M = 128.",
    "Table VIII: 1.2 h over 362.1 s is 11.9, printed 12.25; 8.1 h over 381.0 s is 76.5, printed 68.26; the 864x of the"
    " text is in no row.",
    "Algorithm 1 as printed multiplies a tensor's traffic only by loops that index it: the re-reads of A for every tile"
    " of N, and of D for every tile of M, are missing. Spatial axes count as one tile, so nothing is read twice there"
    " either, and nothing models the L2.",
    "Rule 4 rejects schedules that split L because tiles that need the same C cannot talk, while cls_l > 1 inside of a"
    " cluster is what shuffle is for. It must mean L split over clusters.",
    "One primitive is dsm_reduce_scatter in the text and dsm_scatter_reduce elsewhere; three levels of tiles are"
    " announced and two named.",
    "TVM 0.9, one of the baselines, is older than the H100. There is no tolerance, no section on correctness; dtype,"
    " timing method and the use of CUDA graphs are not stated.",
    "58 % less traffic cannot be DRAM's for most of its shapes (what bytes allow, above): C of G5 is 4.2 of 279 MB, and"
    " fits into the L2.",
)
"""Contradictions, and what a reader cannot check."""
