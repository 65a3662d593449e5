"""Tokens a second of the sparse engine on one core, beside the specification and SAM's Python simulator.

    python -m benchmarks.run.sparse_speed [--json OUT] [--big] [--sam PATH]

A token counts once for each node that takes it. Times are CPU seconds of this process, the best of three runs.
``--big`` adds a run of 10^9 cycles; ``--sam`` takes a checkout of github.com/weiya711/sam and times its array and
multiplier on the same streams.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilestream.sparse import engine, run_spec
from tilestream.sparse.kernels import Kernel, Wiring, chain, elementwise, matmul, matmul_dense, matmul_parallel
from tilestream.sparse.memory import SIMPLE_HBM, hbm
from tilestream.sparse.storage import Format, SparseTensor, pack
from tilestream.sparse.stream.graph import Graph, with_broadcasts
from tilestream.sparse.stream.result import Result

Shapes = Mapping[str, tuple[tuple[int, ...], Format]]


def scattered(n: int, share: float, seed: int) -> np.ndarray:
    """[n, n], about ``share`` of it not zero."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((n, n)) < share, rng.integers(1, 9, (n, n)), 0).astype(np.float64)


def vector(n: int) -> tuple[Graph, dict[str, SparseTensor], Shapes]:
    """X_i = B_i C_i of dense vectors: one long stream through every node."""
    w = Wiring()
    crd, ref = w.scan("B", "i", 0, w.root("B"))
    w.write("X", w.alu("mul", w.array("B", ref), w.array("C", ref)), crd)
    form = Format(("dense",))
    values = np.arange(1.0, n + 1)
    tensors = {t: pack(t, values, form) for t in "BC"}
    return with_broadcasts("vector", tuple(w.nodes)), tensors, {"X": ((n,), form)}


def wired(kernel: Kernel, n: int, share: float) -> tuple[Graph, dict[str, SparseTensor], Shapes]:
    arrays = {name: scattered(n, share, seed) for seed, name in enumerate("BCW")}
    return kernel.graph, kernel.tensors(arrays), {kernel.result: ((n, n), kernel.format)}


def timed(run: Callable[..., Result], case: tuple, repeats: int = 3, **options: Any) -> dict[str, float]:
    graph, tensors, shapes = case
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.process_time()
        result = run(graph, tensors, shapes=shapes, **options)
        best = min(best, time.process_time() - start)
    assert result is not None
    tokens = sum(node.tokens_in for node in result.nodes)
    return {"cycles": result.cycles, "tokens": tokens, "seconds": best, "tokens_per_s": tokens / best}


def cases() -> dict[str, tuple[tuple, dict[str, Any]]]:
    n, share = 400, 0.1
    dense = wired(matmul_dense(), n, share)
    rows = wired(matmul("ikj"), n, share)
    return {
        "vector product, 2M elements": (vector(2_000_000), {}),
        "elementwise sum": (wired(elementwise("add"), 1000, 0.3), {}),
        "rows times dense (locate)": (dense, {}),
        "  channels of depth 64": (dense, {"depth": 64}),
        "  channels of depth 2": (dense, {"depth": 2}),
        "  times only": (dense, {"values": False}),
        "inner products (ijk)": (wired(matmul("ijk"), n, share), {}),
        "rows (ikj)": (rows, {}),
        "  simple HBM": (rows, {"memory": SIMPLE_HBM}),
        "  HBM in bursts, scratchpad": (rows, {"memory": hbm(scratchpad_bytes=1 << 20)}),
        "outer products (kij)": (wired(matmul("kij"), n, share), {}),
        "chain of two": (wired(chain(), n, share), {}),
        "rows, 8 ways": (wired(matmul_parallel(8), n, share), {}),
    }


def sam(path: Path, n: int) -> dict[str, float]:
    """SAM's array and multiplier on two streams of references, a cycle at a time."""
    sys.path.insert(0, str(path))
    from sam.sim.src.array import Array  # pyright: ignore[reportMissingImports]
    from sam.sim.src.compute import Multiply2  # pyright: ignore[reportMissingImports]

    values = [float(i) for i in range(n)]
    left, right, product = Array(init_arr=values), Array(init_arr=values), Multiply2()
    stream = [*range(n), "S0", "D"]
    start = time.process_time()
    cycle = 0
    while not product.out_done():
        token = stream[cycle] if cycle < len(stream) else ""
        left.set_load(token)
        right.set_load(token)
        left.update()
        right.update()
        product.set_in1(left.out_val())
        product.set_in2(right.out_val())
        product.update()
        cycle += 1
    seconds = time.process_time() - start
    tokens = 4 * len(stream)
    return {"cycles": cycle, "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def first_run() -> float:
    """CPU seconds of a first run in a new process whose cache is empty, less those of a second one."""
    code = (
        "import time, numpy as np; from tilestream.sparse import engine; from tilestream.sparse.kernels import matmul\n"
        "start = time.process_time(); matmul().run(engine.run, {'B': np.eye(3), 'C': np.eye(3)}, (3, 3))\n"
        "print(time.process_time() - start)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        cold, warm = (
            float(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
            for _ in range(2)
        )
    return cold - warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--big", action="store_true", help="a run of 10^9 cycles too")
    parser.add_argument("--sam", type=Path, help="a checkout of SAM")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, row: dict[str, float]) -> None:
        rows[name] = row
        print(
            f"{name:32} {row['cycles']:>13,} cycles {row['tokens']:>13,} tokens {row['seconds']:8.3f} s"
            f" {row['tokens_per_s'] / 1e6:9.2f} M tokens/s",
            flush=True,
        )

    compile_s = first_run()
    print(f"compiling, once per installation: {compile_s:.1f} s of CPU time")
    timed(engine.run, vector(10), 1)  # loads what is compiled
    for name, (case, options) in cases().items():
        add(name, timed(engine.run, case, **options))
    add("specification, vector product", timed(run_spec.run, vector(50_000), 1))
    add("specification, rows (ikj)", timed(run_spec.run, wired(matmul("ikj"), 60, 0.1), 1))
    if arguments.sam:
        add("SAM, vector product", sam(arguments.sam, 50_000))
    if arguments.big:
        add("inner products, n = 1750", timed(engine.run, wired(matmul("ijk"), 1750, 0.1), 1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"largest resident set: {peak:,.0f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"compile_s": compile_s, "peak_mib": peak, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
