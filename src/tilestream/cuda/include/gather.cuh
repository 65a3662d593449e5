// Rows of a table that an index names, into the places of a chunk where a bulk copy would have put them.
//
// Hopper's bulk copies cannot gather, so each lane of a loader warp copies 16 bytes at a time past the registers
// (cp.async). Those are ordinary writes to the bulk copies' and the products' eyes: the warp waits until they are there,
// fences, and only then says that the slot is full. So that it need not wait for each chunk, up to GATHERS_AHEAD of them
// are on their way at once; before it waits for anything else, it hands over all that it has.
#pragma once

namespace ts {

// Whether a kind of stage takes rows through an index; kernels specialise it where it does.
template <class S>
constexpr bool GATHERS = false;

constexpr int GATHERED = -2;     // a load's map, where its rows are taken through an index
constexpr int GATHERS_AHEAD = 4;
constexpr int PIECE = 16, PIECES = 128 / PIECE;  // bytes that a lane copies, and how many of them a chunk's row has
constexpr int NAMES = ROWS / WARP;               // of a tile's rows, in each lane

TS_DEV void index_outside(const Sync& s, int pointer, int row, long long rows, long long found) {
  if (claim(&s.dump->claimed)) {
    s.dump->stage = s.stage;
    s.dump->sm = sm_id();
    s.dump->queue = pointer;
    s.dump->tile = row;
    s.dump->waits_for_free = INDEX_OUTSIDE;
    s.dump->expected = (u64)rows;
    s.dump->found = (u64)found;
    fence_system();
    trap();
  }
  hold_back();
}

// Which row of the table each row of the tile is; beyond the last row, -1. Below zero an index counts from the table's end.
template <class P>
TS_DEV void read_names(const P& p, const Sync& sync, const LoadOp& op, int tile, int (&names)[NAMES]) {
  const long long rows = p.strides[op.queue];
#pragma unroll
  for (int k = 0; k < NAMES; ++k) {
    const int row = tile * ROWS + k * WARP + (int)lane_in_warp();
    names[k] = -1;
    if (row >= p.rows) continue;
    const void* const index = p.pointers[op.queue];
    const long long found = op.features == 8 ? load_global((const long long*)index + row) : load_global((const int*)index + row);
    const long long at = found < 0 ? found + rows : found;
    if (at < 0 || at >= rows) index_outside(sync, op.queue, row, rows, found);
    names[k] = (int)at;
  }
}

// One piece of fp32, rounded to tf32 on its way, as a tensor map of that type does.
TS_DEV void copy_rounded(u32 dst, const char* src, int bytes) {
#pragma unroll
  for (int k = 0; k < 4; ++k) stsf(dst + 4 * k, 4 * k < bytes ? f32::to_tf32(load_global((const float*)src + k)) : 0.0f);
}

template <class T, class P>
TS_DEV void gather_chunk(u32 dst, const P& p, const LoadOp& op, const int (&names)[NAMES]) {
  const char* const table = (const char*)p.pointers[op.tensor] + op.col;
  const u64 stride = (u64)p.strides[op.tensor];
#pragma unroll
  for (int k = 0; k < ROWS * PIECES / WARP; ++k) {
    const int at = k * WARP + (int)lane_in_warp(), row = at / PIECES, piece = at % PIECES;
    const int name = warp_value(names[k / PIECES], row - k / PIECES * WARP);
    const int left = op.cols - piece * PIECE, inside = left < 0 ? 0 : left > PIECE ? PIECE : left;
    const int bytes = name < 0 ? 0 : inside;
    const char* const src = table + (u64)(name < 0 ? 0 : name) * stride + (inside == 0 ? 0 : piece * PIECE);
    const u32 to = dst + (u32)row * 128 + (u32)((piece ^ (row & 7)) * PIECE);
    if (T::BYTES == 4 && op.form == ROUNDED)
      copy_rounded(to, src, bytes);
    else
      copy_async(to, src, (u32)bytes);
  }
}

// What a loader warp has on its way, and the names that it has read.
struct Gathers {
  int coming = 0;  // chunks that are not handed over
  int index = -1, tile = -1;
  int names[NAMES];

  // Hand over the oldest `chunks`: all copies but those of the last LEFT chunks have come.
  template <int LEFT, class R>
  TS_DEV void hand_over(R& ring, int chunks) {
    copies_wait<LEFT>();
    fence_async_shared();
    sync_warp();
    for (int k = 0; k < chunks; ++k) {
      const u32 bar = ring.published();
      if (lane_in_warp() == 0) bar_arrive(bar);
    }
    coming -= chunks;
  }
  template <class R>
  TS_DEV void hand_over_all(R& ring) {
    if (coming > 0) hand_over<0>(ring, coming);
  }
  // Before the warp may have to wait for the slot at hand.
  template <class R>
  TS_DEV void before_wait(R& ring) {
    if (coming > 0 && !warp_value((int)bar_ready(ring.empty(), ring.parity ^ 1), 0)) hand_over_all(ring);
  }
  template <class T, class P, class R>
  TS_DEV void load(const P& p, const Sync& sync, const LoadOp& op, int at, R& ring) {
    if (op.queue != index || at != tile) {
      read_names(p, sync, op, at, names);
      index = op.queue;
      tile = at;
    }
    before_wait(ring);
    ring.wait_empty();
    gather_chunk<T>(ring.addr(), p, op, names);
    copies_commit();
    if (++coming == GATHERS_AHEAD) hand_over<GATHERS_AHEAD - 1>(ring, 1);
  }
};

}  // namespace ts
