"""Kernels in which every lane arrives at barriers, where otherwise one arrives for its warp (docs/testing.md).

racecheck follows who arrives at an mbarrier, and does not see that ``__syncwarp`` orders the other lanes of a warp in
front of the lane that arrives for them. With every lane arriving it has nothing to miss: a hazard that is left is one.
Counts of barriers are 32 times as large; a lane that is by itself (a copy's, a store's) arrives 32 times.

Whole warpgroups that meet at a named barrier do so twice. Of a CTA in which one of them waits for the other for long,
the tool reported stores before the barrier and the first loads behind it, another number in each run: as we read it, it
notes that a warp has come when others go on already. What the first meeting did not order, it sees all the same.
"""

from __future__ import annotations

import hashlib

from other_headers import compile_with

from tilestream.cuda import cache
from tilestream.kernels.parts.headers import headers

ONE = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");'
PEER = "mbarrier.arrive.shared::cluster.b64 _, [r];"
SYNC = 'asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");'
OWN = 'asm volatile("cp.async.mbarrier.arrive.noinc'
WORD = "word_at<K>(smem, "
MUTATIONS = (
    ("ptx.cuh", f"{{ {SYNC} }}", f"{{ {SYNC} if (threads % 128 == 0) {SYNC} }}"),
    ("ptx.cuh", '[%0], %1;" ::"r"(bar), "r"(count));', '[%0], %1;" ::"r"(bar), "r"(32 * count));'),
    (
        "ptx.cuh",
        f"TS_DEV void bar_arrive(u32 bar) {{ {ONE} }}",
        f"TS_DEV void lane_arrive(u32 bar) {{ {ONE} }}\n"
        'TS_DEV void bar_arrive(u32 bar, u32 count = 32) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"'
        ' ::"r"(bar), "r"(count) : "memory"); }',
    ),
    (
        "ptx.cuh",
        "TS_DEV void bar_expect(u32 bar, u32 bytes) {",
        "TS_DEV void bar_expect(u32 bar, u32 bytes, u32 others = 31) {\n  if (others) bar_arrive(bar, others);",
    ),
    (
        "gradients.cuh",
        "  if (lane_in_warp() == 0) {\n    bar_expect(full, bulk);",
        "  if (lane_in_warp() != 0) lane_arrive(full);\n  if (lane_in_warp() == 0) {\n    bar_expect(full, bulk, 0);",
    ),
    ("ptx.cuh", "if ((threadIdx.x & 31) == 0) bar_arrive(bar);", "lane_arrive(bar);"),
    ("ptx.cuh", "  u32 lane = threadIdx.x & 31;\n  if (lane < 2)\n", "  for (u32 lane = 0; lane < 2; ++lane)\n"),
    ("ptx.cuh", "        \"r\"(count)\n", "        \"r\"(32 * count)\n"),
    ("roles.cuh", "if (lane_in_warp() == 0) bar_arrive(ring.full());", "lane_arrive(ring.full());"),
    (
        "gather.cuh",
        "  if (lane_in_warp() == 0)\n    for (int k = 1; k <= coming; ++k) bar_arrive(",
        "    for (int k = 1; k <= coming; ++k) lane_arrive(",
    ),
    # Each lane's own copies arrive once: 31 more.
    ("lanes.cuh", f"  {OWN}", f"  bar_arrive(bar, 31);\n  {OWN}"),
    ("step_rows.cuh", "if (lane == 0) lanes::arrive(base + FREE", "lanes::lane_arrive(base + FREE"),
    ("shared_tile.cuh", f"if (lane_in_warp() == 0) bar_arrive({WORD}MIDDLE", f"lane_arrive({WORD}MIDDLE"),
    ("shared_tile.cuh", f"if (lane_in_warp() == 0) bar_arrive({WORD}RESULT", f"lane_arrive({WORD}RESULT"),
)  # fmt: skip


def every_lane(texts: dict[str, str]) -> dict[str, str]:
    """Our headers, changed so."""
    made = dict(texts)
    for file, old, new in MUTATIONS:
        assert made[file].count(old) == 1, f"{file} has not one {old!r}"
        made[file] = made[file].replace(old, new)
    return made


def use() -> None:
    """Compile kernels so from now on; they are kept under keys of their own."""
    texts = every_lane(headers())
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    compile_with(texts)
    setattr(cache, "headers_digest", lambda: digest)  # noqa: B010
