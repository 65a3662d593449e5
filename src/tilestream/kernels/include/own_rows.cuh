// Rows through an index that a consumer's lanes load themselves, into the registers that products take. Of a block of eight
// columns four lanes load 16 bytes of a row; the next block's are the other half of the sector.
#pragma once

namespace ts {

using OwnRows = Registers<int, 2>;  // which rows of a table a lane's two rows of a tile are

// An index that names no row counts as 0: the loader warp ends the kernel for it, and what is beyond the last row is stored
// by nobody.
template <class P>
TS_DEV void find_own_rows(OwnRows& rows, const P& p, const LoadOp& op, int tile) {
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = tile * ROWS + row_of(t, j);
      const long long at = row < p.rows ? said_name(p, op, row) : 0;
      TS_REG(rows, j) = (u64)at < (u64)p.strides[op.queue] ? (int)at : 0;
    }
  }
}
// Of the first tile. A table without rows has no row 0 either: the loader warp is about to say so.
template <class P>
TS_DEV void find_first_rows(OwnRows& rows, const P& p, const LoadOp& op, int tile) {
  if (p.strides[op.queue] == 0 && p.rows > 0) hold_back();
  find_own_rows(rows, p, op, tile);
}
template <int COUNT, class P, int BLOCKS>
TS_DEV void load_own_rows(Packed<BLOCKS>& a, const OwnRows& rows, const P& p, const LoadOp& op) {
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u64 from = (u64)(u32)TS_REG(rows, j) * (u32)p.strides[op.tensor] + 4 * (t & 3);
      const u32* const words = (const u32*)((const char*)p.pointers[op.tensor] + from);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) TS_REG(a, 2 * i + j) = load_global(words + 4 * i);
    }
  }
}

}  // namespace ts
