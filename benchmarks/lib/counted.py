"""Nsight Compute's counters of several ranges of one process, from its CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

METRICS = {
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "lts__t_bytes.sum": "l2",
}
"""Bytes that DRAM gives and takes, and that the L2's tags see; they fit one pass."""
DSM = {"l1tex__m_l1tex2xbar_write_bytes_mem_dshared.sum": "dsm"}
"""Bytes that SMs write into shared memory of others; counted in a run of its own, so that nothing is replayed."""
MARK = "spin_kernel"
"""Part of the name of ``torch.cuda._sleep``'s kernel, with which a range begins."""


def ranges(text: str, metrics: Mapping[str, str] = METRICS) -> list[dict[str, float]]:
    """Each range's sums over its kernels, the mark aside, and how many ``kernels`` there are.

    >>> head = '"ID","Kernel Name","Metric Name","Metric Value"'
    >>> ranges(head + '\\n"0","spin_kernel","lts__t_bytes.sum","9"\\n"1","k","lts__t_bytes.sum","1,024"\\n')
    [{'read': 0.0, 'written': 0.0, 'l2': 1024.0, 'kernels': 1}]
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: list[dict[str, float]] = []
    seen: set[str] = set()
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        new = row["ID"] not in seen
        seen.add(row["ID"])
        if MARK in row["Kernel Name"]:
            if new:
                found.append(dict.fromkeys(metrics.values(), 0.0) | {"kernels": 0})
            continue
        if not found:
            continue
        found[-1]["kernels"] += new
        if (name := metrics.get(row["Metric Name"])) is not None:
            found[-1][name] += float(row["Metric Value"].replace(",", ""))
    return found
