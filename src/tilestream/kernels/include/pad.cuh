// Matrices of 16-bit elements, rows of any width at any place, copied with zeros behind their columns up to whole pieces of
// 16 bytes: what bulk copies and libraries' fast kernels want of rows. One launch for all; a warp a row, a lane a piece.
//
// Compiled for MATRICES, behind PadMatrix and PadParams (pad.py).
#pragma once
#include "lanes.cuh"

constexpr int WARPS = 8, LANES = 32, PIECE = 16;

// 16 bytes of a row, `shift` bytes behind an address that is a multiple of 16, out of the two vectors that they lie in.
struct Piece {
  u32 first[4] = {}, second[4] = {};

  // `left` bytes of it are in the row. A vector that has none of them may be in nobody's memory.
  TS_DEV void load(const char* from, int shift, int left) {
    if (left > 0) lanes::load128(from, first);
    if (shift + (left < PIECE ? left : PIECE) > PIECE) lanes::load128(from + PIECE, second);
  }
  TS_DEV void store(char* to, int shift, int left) const {
    if (left <= 0) return;
    u32 words[8], made[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = first[k], words[4 + k] = second[k];
#pragma unroll
    for (int k = 0; k < 6; ++k) words[k] = shift & 8 ? words[k + 2] : words[k];
#pragma unroll
    for (int k = 0; k < 5; ++k) words[k] = shift & 4 ? words[k + 1] : words[k];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 both = shift & 2 ? words[k] >> 16 | words[k + 1] << 16 : words[k];
      made[k] = left >= 4 * k + 4 ? both : left >= 4 * k + 2 ? both & 0xffff : 0;
    }
    lanes::store128(to, made);
  }
};

TS_LANES_KERNEL(32 * WARPS, 6) tilestream_pad(const TS_PARAM PadParams p) {
  int row = lanes::block() * WARPS + lanes::warp(), m = 0;
  for (; m < MATRICES && row >= p.matrices[m].rows; ++m) row -= p.matrices[m].rows;
  if (m == MATRICES) return;
  const PadMatrix& mine = p.matrices[m];
  const char* const from = mine.from + row * mine.stride;
  char* const to = mine.to + (long long)row * p.pieces * PIECE;
  const int shift = (int)((u64)from & (PIECE - 1));
  for (int k = lanes::lane(); k < p.pieces; k += 2 * LANES) {  // two at once
    const int next = k + LANES;
    Piece a, b;
    a.load(from - shift + k * PIECE, shift, p.row_bytes - k * PIECE);
    b.load(from - shift + next * PIECE, shift, p.row_bytes - next * PIECE);
    a.store(to + k * PIECE, shift, p.row_bytes - k * PIECE);
    b.store(to + next * PIECE, shift, p.row_bytes - next * PIECE);
  }
}
