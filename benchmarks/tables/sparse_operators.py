"""Which modules of one operator the sparse compiler runs, into docs/sparse-operators.md. Takes half a minute."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from benchmarks.lib.marked import with_parts
from benchmarks.lib.places import DOCS, ROOT

PAGE = DOCS / "sparse-operators.md"
sys.path.insert(0, str(ROOT / "tests" / "lib"))

table: Any = importlib.import_module("sparse_one_operator")
Outcome = table.Outcome

HEAD = "| module | {} |\n|---|---|\n"


def page(text: str, found: Mapping[str, Any]) -> str:
    """The page with its three parts as ``found`` has them."""
    refused = {name: one for name, one in found.items() if one.refused}
    eager = {name: one for name, one in found.items() if one.eager}
    rows = ["| kind | modules | run | of these with a step by PyTorch | refused |", "|---|---:|---:|---:|---:|"]
    kinds = {kind: list(group) for kind, group in table.KINDS.items()}
    for kind, names in {**kinds, "all": list(found)}.items():
        out, steps = sum(n in refused for n in names), sum(n in eager for n in names)
        rows.append(f"| {kind} | {len(names)} | {len(names) - out} | {steps} | {out} |")
    alone = [
        f"{k}: {', '.join(f'`{n}`' for n in names if n not in refused and n not in eager)}."
        for k, names in kinds.items()
    ]
    steps = [f"| `{name}` | {', '.join(f'`{x}`' for x in one.eager)} |" for name, one in eager.items()]
    reasons = [f"| `{name}` | {one.refused} |" for name, one in refused.items()]
    parts = {
        "counts": "\n".join(rows),
        "whole": "\n".join(f"- {line}" for line in alone),
        "eager": HEAD.format("operators that PyTorch runs") + "\n".join(steps),
        "refused": HEAD.format("reason, before your line and a remedy") + "\n".join(reasons),
    }
    return _wrapped(with_parts(text, parts, "tables/sparse_operators.py", PAGE.name))


def _wrapped(text: str) -> str:
    from benchmarks.tables.prose import wrapped

    return wrapped(text)


def listed(text: str) -> dict[str, Any]:
    """What the page says of each module, in the order of the modules."""
    said = {}
    whole, eager, refused = (
        text.split(f"<!-- {part}:")[1].split("<!-- end -->")[0] for part in ("whole", "eager", "refused")
    )
    for name in re.findall(r"`(\w+)`", whole):
        said[name] = Outcome()
    for name, operators in re.findall(r"\| `(\w+)` \| (.*) \|", eager):
        said[name] = Outcome(eager=tuple(re.findall(r"`([^`]+)`", operators)))
    for name, reason in re.findall(r"\| `(\w+)` \| (.*) \|", refused):
        said[name] = Outcome(refused=reason)
    order = [one.name for one in table.MODULES]
    return dict(sorted(said.items(), key=lambda pair: order.index(pair[0]) if pair[0] in order else len(order)))


def main() -> None:
    warnings.simplefilter("ignore")
    found = {one.name: table.outcome(one) for one in table.MODULES}
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
