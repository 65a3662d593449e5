// Rows of a table that an index names, into the places of a chunk where a bulk copy would have put them.
//
// Hopper's bulk copies cannot gather, so each lane of a loader warp copies 16 bytes at a time past the registers
// (cp.async). Those are ordinary writes to the bulk copies' and the products' eyes: the warp waits until they are there,
// fences, and only then says that the slot is full. So that it need not wait for each chunk, up to GATHERS_AHEAD of them
// are on their way at once; before it waits for a slot or a flag, it hands over all that it has.
#pragma once

// What a loader's registers allow: to read a tile's indices once, before it waits for a slot, and to unroll the copies.
#if LOADER_REGISTERS >= 88
#define TS_NAMES_AHEAD true
#define TS_UNROLL_WARPS 2
#else
#define TS_NAMES_AHEAD false
#define TS_UNROLL_WARPS 1
#endif
#if LOADER_REGISTERS >= 88
#define TS_UNROLL_COPIES(tiles) (tiles == 2 ? 8 : 4)
#elif LOADER_REGISTERS >= 56
#define TS_UNROLL_COPIES(tiles) 4
#else
#define TS_UNROLL_COPIES(tiles) 1
#endif

namespace ts {

// Whether a kind of stage takes rows through an index; kernels specialise it where it does.
template <class S>
constexpr bool GATHERS = false;

// Whether lanes of a kind of stage load rows themselves (own_rows.cuh).
template <class S>
constexpr bool OWN_ROWS = false;

constexpr int GATHERED = -2;     // a load's map, where its rows are taken through an index
constexpr int OWN = -5;          // where consumers take them: the loader, which may record what is wrong, looks at the index
constexpr int GATHERS_AHEAD = 4;
constexpr int PIECE = 16, PIECES = 128 / PIECE;  // bytes that a lane copies, and how many of them a chunk's row has

// Which row of the table a row of the tile, which there is, says that it is. Below zero an index counts from the table's end.
template <class P>
TS_DEV long long said_name(const P& p, const LoadOp& op, int row) {
  const void* const index = p.pointers[op.queue];
  const long long at = op.features == 8 ? load_global((const long long*)index + row) : load_global((const int*)index + row);
  return at < 0 ? at + p.strides[op.queue] : at;
}
// The same of any row; beyond the last one, -1.
template <class P>
TS_DEV int read_name(const P& p, const Sync& sync, const LoadOp& op, int row) {
  if (row >= p.rows) return -1;
  const long long at = said_name(p, op, row), rows = p.strides[op.queue];
  if ((u64)at >= (u64)rows) expire(sync, op.queue, row, INDEX_OUTSIDE, (u64)rows, (u64)at);
  return (int)at;
}
// One piece of fp32, rounded to tf32 on its way, as a tensor map of that type does.
TS_DEV void copy_rounded(u32 dst, const char* src, u32 bytes) {
  for (int k = 0; k < 4; ++k) stsf(dst + 4 * k, 4 * (u32)k < bytes ? f32::to_tf32_as_copied(load_global((const float*)src + k)) : 0.0f);
}

// The names of the rows that a warp copies next, where it reads them ahead.
struct Names {
  static constexpr bool AHEAD = TS_NAMES_AHEAD;
  static constexpr int COUNT = AHEAD ? ROWS / WARP : 1;
  int index = -1, tile = -1;
  int rows[COUNT];
  template <class P>
  TS_DEV void read(const P& p, const Sync& sync, const LoadOp& op, int at) {
    if (!AHEAD || (index == op.queue && tile == at)) return;
    index = op.queue;
    tile = at;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) rows[k] = read_name(p, sync, op, at * ROWS + k * WARP + (int)lane_in_warp());
  }
};

// A warp copies AT_ONCE rows at once, a piece a lane; on the host, where it is one thread, piece after piece. The rows are
// those of a table with `stride` bytes a row; name_of(k) is the one that this lane's k-th row of the tile takes, or -1.
template <class S, int UNROLL, class P, class F>
TS_DEV void copy_rows(u32 dst, const P& p, const LoadOp& op, u32 stride, F name_of) {
  constexpr int AT_ONCE = WARP < PIECES ? 1 : WARP / PIECES;
  const int lane = (int)lane_in_warp(), first = lane / PIECES;
  for (int piece = lane % PIECES; piece < PIECES; piece += WARP) {
    const int left = op.cols - piece * PIECE;
    const u32 inside = left < 0 ? 0 : left < PIECE ? left : PIECE;
    const char* const table = (const char*)p.pointers[op.tensor] + (inside == 0 ? 0 : op.col + piece * PIECE);
#pragma unroll TS_UNROLL_WARPS
    for (int k = 0; k < ROWS / WARP; ++k) {
      const int mine = name_of(k);
#pragma unroll UNROLL
      for (int i = 0; i < WARP; i += AT_ONCE) {
        const int row = k * WARP + i + first, name = warp_value(mine, i + first);
        const char* const src = table + (u64)(u32)(name < 0 ? 0 : name) * stride;
        const u32 to = dst + (u32)row * 128 + (u32)((piece ^ (row & 7)) * PIECE), bytes = name < 0 ? 0 : inside;
        if (S::T::BYTES == 4 && op.form == ROUNDED)
          copy_rounded(to, src, bytes);
        else
          copy_async(to, src, bytes);
      }
    }
  }
}
template <class S, class P>
TS_DEV void gather_chunk(u32 dst, const P& p, const Sync& sync, const LoadOp& op, int tile, const Names& names) {
  copy_rows<S, TS_UNROLL_COPIES(S::TILES)>(dst, p, op, (u32)p.strides[op.tensor], [&](int k) {
    return Names::AHEAD ? names.rows[k] : read_name(p, sync, op, tile * ROWS + k * WARP + (int)lane_in_warp());
  });
}

// A chunk has been copied behind `coming` others that are on their way in the slots before it. All are handed over where
// there are enough of them, where none `follows`, and where the next slot is not free: the consumers may need these first.
template <class S, class R>
TS_DEV void hand_over(bool follows, int& coming, R& ring) {
  ring.advance();
  ++coming;
  // One lane asks for all: the answer may change from one to the next.
  if (follows && coming < GATHERS_AHEAD && warp_value((int)bar_ready(ring.empty(), ring.parity ^ 1), 0)) return;
  copies_wait();
  fence_async_shared();
  sync_warp();
  if (lane_in_warp() == 0)
    for (int k = 1; k <= coming; ++k) bar_arrive(ring.bars + (u32)(ring.slot - k + (ring.slot < k ? S::IN_SLOTS : 0)) * 16);
  coming = 0;
}
template <class S, class P, class R>
TS_DEV void load_gathered(const P& p, const Sync& sync, const LoadOp& op, int tile, bool follows, Names& names, int& coming, R& ring) {
  names.read(p, sync, op, tile);
  ring.wait_empty();
  gather_chunk<S>(ring.addr(), p, sync, op, tile, names);
  hand_over<S>(follows, coming, ring);
}

}  // namespace ts
