// What tiles over the grid read of rows that bulk copies cannot address: copies, which warps make and announce by flags.
#pragma once
#include "collectives.cuh"
#include "odd_rows.cuh"

namespace ts {

constexpr int OPERAND_ROWS = 4;  // made by a warp before it says so

// Columns of an input and a first weight whose rows are no multiple of 16 bytes, and rows of that weight. Bulk copies read
// copies of both, which warps make: of the input the operand, of the weights all rows. None where bulk copies can read both.
template <class K, class = void>
constexpr int ODD_COLUMNS = 0;
template <class K>
constexpr int ODD_COLUMNS<K, decltype((void)K::ODD)> = K::ODD;
template <class K, class = void>
constexpr int ODD_WEIGHTS = 0;
template <class K>
constexpr int ODD_WEIGHTS<K, decltype((void)K::ODD)> = K::WEIGHT_ROWS;
constexpr int weight_flags(int rows) { return (rows + OPERAND_ROWS - 1) / OPERAND_ROWS; }

// What a warp has stored may be loaded by bulk copies.
TS_DEV void announce_rows(u64* flag, u64 ticket) {
  sync_warp();
  if (lane_in_warp() == 0) {
    fence_async_global();
    flag_release(flag, ticket);
  }
}
// OPERAND_ROWS rows from row `row` of `all` on, to row `to` of their copies.
struct OddRows {
  const char* data;
  long long stride;  // bytes
};
template <class K>
TS_DEV void copy_four(const OddRows& from, int row, int all, void* copies, int to) {
  constexpr int BYTES = (ODD_COLUMNS<K> + 7) / 8 * 16;
  copy_odd_rows<OPERAND_ROWS, ODD_COLUMNS<K>>((char*)copies + (u64)to * BYTES, from.data + row * from.stride, from.stride, all - row);
}

}  // namespace ts
