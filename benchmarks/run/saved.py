"""What the five applications save from forward to backward, by Inductor's partition and by ours, and what lives at most
in the backward graph, by both: MiB, Inductor's peak before it fuses. No GPU is needed.

python -m benchmarks.run.saved [nerf_65536 mgn ...]
"""

from __future__ import annotations

import argparse
from typing import Any

from tilestream.apps.models import find
from tilestream.bench.saved import saved

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nerf_65536": ("nerf", {"rows": 65536}),
    "mgn": ("mgn", {"batch": 8}),
    "graphcast_cut": ("graphcast_cut", {}),
    "graphcast_small": ("graphcast_small", {"steps": 4}),
    "dlrm_2048": ("dlrm", {"batch": 2048, "max_rows": 100_000}),
    "llama_layer": ("llama_prefill", {"layers": 1, "layers_only": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    for name in parser.parse_args().cases or CASES:
        model, sizes = CASES[name]
        found = saved(*find(model).make(training=True, **sizes))
        counts = (found.inductor.saved, found.ours.saved, found.inductor.peak, found.ours.peak)
        print(f"{name:16s}", *(f"{count / 2**20:9.1f}" for count in counts), flush=True)


if __name__ == "__main__":
    main()
