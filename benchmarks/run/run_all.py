"""Run the benchmark cases one after another, each by ``tilestream bench`` in a process of its own.

    python -m benchmarks.run.run_all             every case
    python -m benchmarks.run.run_all nerf chain  some of them
    python -m benchmarks.run.run_all --missing   those without a result file
    python -m benchmarks.run.run_all --others    README's ten other models
    python -m benchmarks.run.run_all --queues    the ring queues too

Needs an H100 or H200. Results go to ``benchmarks/results``, or to ``--out``; ``make_tables.py`` turns those of the
first into README's tables.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.lib.cases import CASES, OTHERS
from benchmarks.lib.places import RESULTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--queues", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"no case is called {unknown[0]!r}; the cases are {', '.join(CASES)}")
    named = given.cases or ([case.name for case in OTHERS] if given.others else list(CASES))
    chosen = [CASES[name] for name in named]
    if given.missing:
        chosen = [case for case in chosen if not (given.out / case.path.name).exists()]
    given.out.mkdir(parents=True, exist_ok=True)
    commands = [(case.name, case.command(given.out)) for case in chosen]
    if given.queues:
        commands.append(("queues", ["bench", "queues", "--json", str(given.out / "queues.json")]))
    failed = []
    for number, (name, words) in enumerate(commands, start=1):
        print(f"[{number}/{len(commands)}] {name}", flush=True)
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "tilestream", *words], check=False)
        print(f"[{number}/{len(commands)}] {name}: {time.perf_counter() - start:.0f} s", flush=True)
        if done.returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
