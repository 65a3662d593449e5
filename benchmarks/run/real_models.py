"""Time whole models of transformers and timm: eager, Inductor, max-autotune and tilestream.

    python -m benchmarks.run.real_models                           those that the compiler is measured on
    python -m benchmarks.run.real_models fresh drawn               the twenty others, and 22 drawn by lot
    python -m benchmarks.run.real_models steps                     forward and backward of some of them
    python -m benchmarks.run.real_models bert-base gpt2            models by name, of either set
    python -m benchmarks.run.real_models --without max_autotune --seconds 300
    python -m benchmarks.run.real_models --cpu two-towers          a batch of one, on our reference machine

The models are those of ``benchmarks/lib/full_models.py``. Every model is compiled in a process of its own, all at once
(``benchmarks.run.gnn`` says how): so seconds of first calls are those beside others, and say something of each other
alone. Then each is timed while the others wait: all arms in one process, captured as CUDA graphs, rounds interleaved,
medians. Errors are relative, against float64; ``error_ratio`` is ours over eager's. ``floor_us``: FLOPs over 790
TFLOP/s, or bytes of inputs and parameters over 4.3 TB/s. Needs an H100 or H200, ``transformers`` and ``timm``.
Results go to ``benchmarks/results/real/NAME.json``, or to the folder ``--out``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from benchmarks.lib.full_models import EVERY, SETS
from benchmarks.lib.places import RESULTS
from benchmarks.run.gnn import Case, asked, began, measured, place, told_gains


def cases(name: str, cpu: bool) -> Iterator[Case]:
    """The one case of a model."""
    model = EVERY[name]
    module, inputs = model.problem("cpu" if cpu else "cuda", tiny=cpu)
    yield Case(name, module, inputs, training=model.training)


def main() -> int:
    parser = asked(__doc__)
    parser.set_defaults(module="run.real_models")
    given = parser.parse_args()
    if (code := began(given, cases)) is not None:
        return code
    wanted = [n for case in given.cases or ["seen"] for n in SETS.get(case, [case])]
    if unknown := set(wanted) - EVERY.keys():
        print(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(EVERY)}", file=sys.stderr)
        return 2
    given.cases = []  # each process has one model, and all of its cases
    from tilestream.bench.environment import environment

    installed = {d.name: d.version for d in metadata.distributions() if d.name in ("transformers", "timm")}
    where, folder = environment() | installed, place(given, RESULTS / "real")

    def write(rows: Sequence[dict[str, Any]]) -> None:
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        of = next(name for name, models in SETS.items() if rows[-1]["case"] in models)
        made = {"schema": 1, "environment": where, "set": of, **rows[-1]}
        (folder / f"{rows[-1]['case']}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")

    told_gains(measured(given, wanted, write))
    return 0


if __name__ == "__main__":
    sys.exit(main())
