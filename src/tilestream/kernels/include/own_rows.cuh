// Rows through an index that a consumer's lanes load themselves, into the registers that products take. Of a block of eight
// columns four lanes load 16 bytes of a row; the next block's are the other half of the sector.
#pragma once

namespace ts {

using OwnRows = Registers<int, 2>;  // which rows of a table a lane's two rows of a tile are, or -1

// An index that names no row counts as none: the loader warp ends the kernel for it.
template <class P>
TS_DEV void find_own_rows(OwnRows& rows, const P& p, const LoadOp& op, int tile) {
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = tile * ROWS + row_of(t, j);
      const long long at = row < p.rows ? said_name(p, op, row) : -1;
      TS_REG(rows, j) = (u64)at < (u64)p.strides[op.queue] ? (int)at : -1;
    }
  }
}
template <int COUNT, class P, int BLOCKS>
TS_DEV void load_own_rows(Packed<BLOCKS>& a, const OwnRows& rows, const P& p, const LoadOp& op) {
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = TS_REG(rows, j);
      const char* const from = (const char*)p.pointers[op.tensor] + (u64)(u32)row * (u32)p.strides[op.tensor];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) TS_REG(a, 2 * i + j) = row < 0 ? 0 : load_global((const u32*)from + 4 * i + (t & 3));
    }
  }
}

}  // namespace ts
