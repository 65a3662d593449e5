// Clocks of a shared tile's phases.
#pragma once
#include "tile.cuh"

namespace ts {

// When a CTA came where, by the SM's clock, in a kernel that is compiled with TS_MARKS; the last two by the GPU's common
// time. benchmarks/run/few_rows_phases.py has the same names in the same order, and reads them.
enum Mark : int { STARTED, ROWS_MADE, FIRST_STAGE, FIRST_SUM, MIDDLE_STORED, MIDDLE_BACK, SECOND_SUM, ENDED, ROWS_THERE, SET_UP, VECTORS_THERE, START_NS, END_NS, MARKS = 16 };
#ifdef TS_MARKS
extern "C" __device__ u64 ts_marks[256 * MARKS];
TS_DEV void mark(Mark at, bool here) {
  if (here) ts_marks[cta_index() * MARKS + at] = at >= START_NS ? now_ns() : sm_clock();
}
#else
TS_DEV void mark(Mark, bool) {}
#endif

}  // namespace ts
