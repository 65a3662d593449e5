"""Time the fresh set's whole models: eager, Inductor and ours, inference and training steps (``fresh_models.py``).

    python -m benchmarks.run.fresh             all of them; one JSON file, written after each model
    python -m benchmarks.run.fresh siren mesh  some
    python -m benchmarks.run.fresh --compile siren compile all of a model's arms, and time nothing

The kernels are ``silicon.py --set fresh``'s. Arms are timed in turn, as ``whole_models.py`` does. A model that fails is
reported in the file and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import fresh_models
from benchmarks.lib.places import RESULTS
from benchmarks.lib.silicon_cases import size
from benchmarks.run.whole_models import compiled, inference, line, timed, training
from tilestream.bench.environment import environment

OUT = RESULTS / "fresh_models.json"
ARMS = ("eager", "inductor", "tilestream")


def runs(names: list[str]) -> list[tuple[str, bool]]:
    """Models, and whether as training steps."""
    chosen = names or list(fresh_models.MODELS)
    return [(n, t) for n in chosen for t in (False, True) if not t or n in fresh_models.TRAINED]


def measured(name: str, train: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module, inputs = fresh_models.make(name, train, "cuda")
    sizes = {"inputs": [list(x.shape) for x in inputs], "input_bytes": size(*inputs)}
    sizes["parameters"] = sum(p.numel() for p in module.parameters())
    made = timed(module, inputs, train, ARMS)
    del made["environment"]
    for arm in made["arms"].values():
        arm.pop("first_call_s", None)  # compiled before, side by side
        arm.pop("parts_s", None)
    return {"model": name, **sizes, **made}


def compile_arms(name: str, train: bool) -> None:
    module, inputs = fresh_models.make(name, train, "cuda")
    for arm in ARMS[1:]:
        torch.compiler.reset()
        (training if train else inference)(compiled(arm, module), module, inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(fresh_models.MODELS)}")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name, train in runs(given.models):
        title = f"{name} training" if train else name
        try:
            if given.compile:
                compile_arms(name, train)
                continue
            rows.append(measured(name, train))
            print(line(title, rows[-1]), flush=True)
        except Exception as failure:  # one model must not cost the others; the file says what failed
            failed[title] = f"{type(failure).__name__}: {failure}"
            print(f"{title} failed: {failed[title][:300]}", flush=True)
        if not given.compile:
            data = {"schema": 1, "environment": environment(), "rows": rows, "failed": failed}
            given.out.write_text(json.dumps(data, indent=1) + "\n")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
