"""compute-sanitizer over one kernel of every shape (every_shape.py). Needs an H100 or H200 and two minutes.

    python tests/gpu/sanitize.py                           memcheck, initcheck, synccheck, and racecheck of kernels in
                                                           which every lane arrives (every_lane.py)
    python tests/gpu/sanitize.py racecheck --only gathers  some tools and shapes

Prints what each tool reports by kernel, and exits with 1 where there is anything. Kernels are compiled before, and
kept where ``TILESTREAM_CACHE_DIR`` says.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
TOOLS: dict[str, list[str]] = {
    # cuda-bindings asks for functions that a driver may lack: errors of the API are not the kernels'.
    "memcheck": ["--tool", "memcheck", "--report-api-errors", "no"],
    "racecheck": ["--tool", "racecheck"],
    "initcheck": ["--tool", "initcheck"],
    # A decode step has more barriers than are followed unless told, and then what is reported may be wrong.
    "synccheck": ["--tool", "synccheck", "--num-cuda-barriers", "4096"],
    "racecheck-every-lane": ["--tool", "racecheck"],
}
BLIND = "racecheck"
"""Reports what every_lane.py shows to be no races (docs/testing.md): it runs where it is asked for."""
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: .*", re.MULTILINE)
REPORT = re.compile(r"^=+ (?:Error|Warning|Invalid|Uninitialized|Barrier|Trace|Misaligned|Divergent|Potential)")
KERNEL = re.compile(r"\bat (tilestream\w+|[\w:<>~]+)(?:\(.*?\))?\+0x")


def run(tool: str, only: list[str], limit_s: float, logs: Path | None) -> tuple[str, bool]:
    """What a tool says of the shapes, and whether that is nothing."""
    start = time.perf_counter()
    script = [sys.executable, str(HERE / "every_shape.py"), *(["--only", *only] if only else [])]
    script += ["--every-lane"] if tool.endswith("every-lane") else []
    try:
        done = subprocess.run(
            ["compute-sanitizer", "--print-limit", "100000", *TOOLS[tool], *script],
            env=environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s, check=False,
        )  # fmt: skip
        text, code = done.stdout.decode(errors="replace"), str(done.returncode)
    except subprocess.TimeoutExpired as late:
        text, code = (late.stdout or b"").decode(errors="replace"), f"none after {limit_s:.0f} s"
    if logs is not None:
        (logs / f"{tool}.log").write_text(text)
    summary, launched = SUMMARY.search(text), re.findall(r"launched: (.*)", text)
    clean = code == "0" and summary is not None and reports(text) == Counter()
    said = [f"{tool}: {summary[0].strip('= ') if summary else 'no summary'}; exit code {code}; {len(launched)} shapes"]
    said += [f"  {count} x {what}" for what, count in reports(text).most_common(40)]
    if not launched or code != "0":
        said += ["  " + line for line in text.splitlines()[-12:]]
    return "\n".join([*said, f"  {time.perf_counter() - start:.0f} s"]), clean


def reports(text: str) -> Counter[str]:
    """Reports by kind and kernel."""
    found: Counter[str] = Counter()
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if REPORT.match(line):
            kind = re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d+ hazards?", "..", line.strip("= "))
            kernel = next((m[1] for each in lines[k : k + 6] if (m := KERNEL.search(each))), "?")
            found[f"{kind[:110]} in {kernel}"] += 1
    return found


def environ() -> dict[str, str]:
    root = HERE.parents[1]
    paths = [*map(str, (HERE, HERE.parent / "lib", root / "src", root)), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"some of {', '.join(TOOLS)}")
    parser.add_argument("--only", nargs="+", default=[], metavar="SHAPE")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each tool")
    parser.add_argument("--logs", type=Path, help="a folder for all that the tools say")
    given = parser.parse_args()
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
    if unknown := [tool for tool in given.tools if tool not in TOOLS]:
        parser.error(f"no tool is called {unknown[0]!r}")
    with tempfile.TemporaryDirectory() as kept:
        os.environ.setdefault("TILESTREAM_CACHE_DIR", kept)
        tools = given.tools or [tool for tool in TOOLS if tool != BLIND]
        variants = {tool.endswith("every-lane") for tool in tools}
        build = [sys.executable, str(HERE / "every_shape.py"), "--build"]
        build += ["--only", *given.only] if given.only else []
        builds = [subprocess.Popen([*build, *["--every-lane"] * every], env=environ()) for every in variants]
        if any(each.wait() for each in builds):
            return 1
        with ThreadPoolExecutor(len(tools)) as pool:  # one GPU holds them all: nothing is timed
            clean = True
            for made in [pool.submit(run, tool, given.only, given.seconds, given.logs) for tool in tools]:
                said, good = made.result()
                print(said, flush=True)
                clean &= good
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
