"""Collectives by themselves: microseconds of an exchange, and what an SM takes in, by sizes of cluster and tile.

    python -m benchmarks.run.collectives             all kinds, within two minutes
    python -m benchmarks.run.collectives gather_dsm  some
    python -m benchmarks.run.collectives --compare   what was kept, beside the device's description; needs no GPU
    python -m benchmarks.run.collectives --dry-run   compiles all kernels; needs no GPU

A launch does the exchange 100 or 1100 times; a time is the median difference. All groups that the device holds at once,
which it is asked, exchange side by side. Of DSM kinds an exchange has one barrier of the cluster in it (``barrier``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.lib.places import RESULTS
from tilestream import cuda, devices
from tilestream.bench import collectives
from tilestream.bench.environment import environment
from tilestream.bench.exchange import Kind
from tilestream.cuda.cache import compiled

OUT = RESULTS / "collectives.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *Kind], default=[])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if given.compare:
        rows = collectives.load(given.out)
        for what, described, measured in collectives.compared(rows, devices.get("h200")):
            print(f"{what:36} {described:12.4g} {measured:12.4g}  x{measured / described:.2f}")
        return 0 if rows else _say(f"{given.out} is not there: not measured")
    some = [e for e in collectives.exchanges() if not given.kinds or e.kind in given.kinds]
    if given.dry_run:
        for e in some:
            report = compiled(e)
            print(
                f"{e.kind:12} {e.peers:3} {e.tile_bytes:6} bytes  {report.registers} registers, {report.spills} spilled"
            )
        return 0
    if reason := cuda.available():
        return _say(reason)
    rows = []
    for row in collectives.measure(some, given.seconds):
        rows.append(row)
        mark = "" if row.right else "  WRONG"
        print(
            f"{row.kind:12} {row.peers:3} x {row.tile_bytes:6} bytes, {row.ctas:3} CTAs: {row.us:7.3f} us,"
            f" {row.gb_per_s:7.1f} GB/s an SM, error {row.error:.1e}{mark}",
            flush=True,
        )
    if len(rows) < len(some):
        print(f"{len(some) - len(rows)} of {len(some)} were not reached, or are not resident")
    given.out.write_text(collectives.dump(rows, environment()), encoding="utf-8")
    return int(any(not row.right for row in rows))


def _say(reason: str) -> int:
    print(reason)
    return 1


if __name__ == "__main__":
    sys.exit(main())
