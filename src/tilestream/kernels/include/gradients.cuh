// Gradients of layers: dW[out, k] = sum over rows of dY[rows, out] X[rows, k], db[out] = sum over rows of dY, and dX from layer
// to layer, which is the next layer's dY, where a kernel makes it.
//
// Sums stay in the registers of the consumer warpgroups while a CTA's share of the rows streams past through rings of shared
// memory. How a warpgroup multiplies what has come is the emitter's (`S::consume` of a kind of stage S), and so is who holds
// which block of a sum: the layouts of kernels/gradients/layouts.py. What fills the rings, and what becomes of the sums, is
// here. When the rows are over, CTAs leave their sums in memory, and each adds a part of those that CTAs of the same block have
// left: always in one order, so that the same input gives the same bits.
//
// Operands lie [rows, features], and rows are what is summed: products take them by columns (MN-major descriptors). A bias
// gradient is one more product, with ones: a fragment of eight columns, all equal.
#pragma once
#include "roles.cuh"

namespace ts {

constexpr u32 ONES_BYTES = 1024;  // eight rows of a K-major operand
constexpr int STEPS = ROWS / 16;  // products a tile: instructions sum over 16 rows

// What a slot is filled with, or a chunk of weights: by a tensor map, or, where that is -1, from rows that bulk copies cannot
// address.
struct Box {
  int map, pointer, features, column, row;
};
// Where fours of floats of a CTA's sums go, those before `end`: to a tensor of `type` [out, k], or, of a bias, [out].
enum Lies : int { AS_WEIGHT, TURNED, AS_BIAS };  // TURNED: rows of the sum are columns of X
struct Result {
  int end, type, lies, pointer, out, k, row, column;
};
// A stage of a launch: its CTAs are splits x (parts of out) x (parts of k), the last one fastest, each with `out_step` x `k_step`
// of the result. Where its tables and, in fours, its partial results begin; sums of `width` fours are added at once.
struct Stage {
  int kind, first, parts, k_parts, splits, out_step, k_step, boxes, results, partials, fours, weight_fours, width;
};
// Which block and which rows a CTA has.
struct Share {
  Stage stage;
  int index, part, split, out0, k0;
};
TS_DEV Share share_of(const Stage& s, int index, int cta) {
  const int part = (cta - s.first) % s.parts;
  return {s, index, part, (cta - s.first) / s.parts, part / s.k_parts * s.out_step, part % s.k_parts * s.k_step};
}

template <class S>
using Slots = Ring<S::SLOTS, (S::LEFT + S::RIGHT) * CHUNK_BYTES>;
template <class S>
TS_DEV Slots<S> ring_of(u32 smem, int r) {
  return Slots<S>(smem + S::BARS + (u32)(r * S::SLOTS * 16), smem + S::RING + (u32)(r * S::SLOTS * (S::LEFT + S::RIGHT)) * CHUNK_BYTES);
}
template <class S>
TS_DEV u32 weights_bar(u32 smem) {
  return smem + S::BARS + (u32)(S::RINGS * S::SLOTS * 16);
}
// The steps of a ring, of STEP_TILES tiles each; the rings of all CTAs of a block take them in turns.
template <class S>
TS_DEV int steps_of(int rows) {
  return (rows + S::STEP_TILES * ROWS - 1) / (S::STEP_TILES * ROWS);
}

template <class S>
TS_DEV void init_stage(u32 smem, int warp) {
  if (S::BIAS && warp < 4) {
    TS_LANES {
      for (u32 k = 0; k < ONES_BYTES; k += 512) sts32(smem + S::ONES + k + 4 * TS_LANE, S::T::pack(1.0f, 1.0f));
    }
    fence_async_shared();
  }
  if (!cta_leader()) return;
  for (int i = 0; i < S::RINGS * S::SLOTS; ++i) {
    bar_init(smem + S::BARS + i * 16, 1);
    bar_init(smem + S::BARS + i * 16 + 8, 4 * S::GROUPS / S::RINGS);  // arrivals: one a warp
  }
  if (S::WEIGHTS > 0) bar_init(weights_bar<S>(smem), 1);
  bar_init_done();
}

// ---- in: the weights once, then what each step takes. What lies outside of a matrix is zero, and adds nothing.
// A slot is LEFT chunks of a tensor and RIGHT of another: side by side, or those of a step's tiles. What follows is of one side.
template <class S, class P>
TS_DEV void load_bulk(const P& p, const Share& at, const Box& box, int side, int row, u32 data, u32 full) {
  // Rows that CTAs of other blocks read too are to stay in the L2 until they have.
  const u64 hint = (side ? at.stage.parts > at.stage.k_parts : at.stage.k_parts > 1) ? EVICT_NORMAL : EVICT_FIRST;
  const int column = box.column + (side ? at.k0 : at.out0);
  data += (u32)(side * S::LEFT) * CHUNK_BYTES;
  for (int c = 0; c < (side ? S::RIGHT : S::LEFT); ++c)
    tma_load(data + (u32)c * CHUNK_BYTES, &p.maps[box.map], column + (S::STEP_TILES == 1 ? c * 64 : 0),
             row + (S::STEP_TILES == 1 ? 0 : c * ROWS), full, hint);
}
template <class S, class P>
TS_DEV void load_odd(const P& p, const Share& at, const Box& box, int side, int row, u32 data) {
  using T = typename S::T;
  int column = box.column + (side ? at.k0 : at.out0);
  data += (u32)(side * S::LEFT) * CHUNK_BYTES;
  for (int c = 0; c < (side ? S::RIGHT : S::LEFT); ++c, data += CHUNK_BYTES, (S::STEP_TILES == 1 ? column : row) += 64) {
    const int beyond = box.features - column, cols = beyond < 0 ? 0 : beyond < 64 ? beyond : 64;
    const int left = p.rows - row < 0 ? 0 : p.rows - row < ROWS ? p.rows - row : ROWS;
    load_odd_rows<T>(data, p.pointers[box.pointer], box.features, (int)p.strides[box.pointer], row, p.rows, cols == 0 ? 0 : column, cols,
                     64, false);
    for (int r = (int)lane_in_warp() + left; r < ROWS; r += WARP)
      for (int i = 0; i < cols; ++i) Io<T>::store1(element_addr<T>(data, (u32)r, (u32)i), 0.0f);
  }
}
// The slot whose boxes begin at `first`: what ordinary loads bring is there before its barrier is told what copies will. Boxes
// are looked up again and again: kept in registers they spilled.
template <class S, class P>
TS_DEV void load_odd_slot(const P& p, const Share& at, int first, int row, u32 data, u32 full) {
  constexpr int SIDES = S::RIGHT > 0 ? 2 : 1;
  u32 bulk = 0;
#pragma unroll 1
  for (int side = 0; side < SIDES; ++side) {
    const Box box = S::box(first + side);
    if (box.map < 0)
      load_odd<S>(p, at, box, side, row, data);
    else
      bulk += (u32)(side ? S::RIGHT : S::LEFT) * CHUNK_BYTES;
  }
  fence_async_shared();
  sync_warp();
  if (lane_in_warp() == 0) {
    bar_expect(full, bulk);
#pragma unroll 1
    for (int side = 0; side < SIDES; ++side) {
      const Box box = S::box(first + side);
      if (box.map >= 0) load_bulk<S>(p, at, box, side, row, data, full);
    }
  }
  sync_warp();  // a lane that ran ahead would find the parity of a turn ago
}
template <class S, class P>
TS_DEV void load_stage(const P& p, u32 smem, const Share& at, int r) {
  const bool leads = lane_in_warp() == 0;
  if (!S::ODD && !leads) return;
  const int steps = steps_of<S>(p.rows);
  if (leads && r == 0 && S::RINGS * at.split < steps && S::WEIGHTS > 0) {
    const u32 bar = weights_bar<S>(smem);
    bar_expect(bar, S::WEIGHTS * CHUNK_BYTES);
#pragma unroll 1
    for (int k = 0; k < S::WEIGHTS; ++k) {
      const Box box = S::box(at.stage.boxes + k);
      tma_load(smem + (u32)k * CHUNK_BYTES, &p.maps[box.map], box.column, box.row, bar, EVICT_LAST);
    }
  }
  auto ring = ring_of<S>(smem, r);
#pragma unroll 1
  for (int step = S::RINGS * at.split + r; step < steps; step += S::RINGS * at.stage.splits)
#pragma unroll 1
    for (int k = 0; k < S::STEP_SLOTS; ++k) {
      const int box = at.stage.boxes + S::WEIGHTS + k, row = step * S::STEP_TILES * ROWS;
      const Box left = S::box(box), right = S::box(S::RIGHT > 0 ? box + 1 : box);  // looked up while the slot is waited for
      ring.wait_empty();
      if (S::ODD) {
        load_odd_slot<S>(p, at, box, row, ring.addr(), ring.full());
      } else {
        bar_expect(ring.full(), (u32)(S::LEFT + S::RIGHT) * CHUNK_BYTES);
        load_bulk<S>(p, at, left, 0, row, ring.addr(), ring.full());
        if (S::RIGHT > 0) load_bulk<S>(p, at, right, 1, row, ring.addr(), ring.full());
      }
      ring.advance();
    }
}

// ---- products; sixteen rows of an operand that lies [depth, columns] are 2048 bytes
constexpr u64 SIXTEEN_ROWS = 2048 >> 4;

// acc[64, 8 BLOCKS] += a w over 16 DEPTH columns of a; w[out, k] as it lies.
template <class T, int DEPTH, int BLOCKS>
TS_DEV void times_weight(Fragment<BLOCKS>& acc, const Packed<8>& a, u32 weight) {
  const u64 w = mma_desc_columns(weight, CHUNK_BYTES);
#pragma unroll
  for (int k = 0; k < DEPTH; ++k) MmaRows<T, BLOCKS>::registers(acc, a, 4 * k, w + SIXTEEN_ROWS * k);
}
// The same, a in shared memory, in one chunk or two.
template <class T, int DEPTH>
TS_DEV void times_weight(Fragment<8>& acc, u32 first, u32 second, u32 weight) {
  const u64 w = mma_desc_columns(weight, CHUNK_BYTES);
#pragma unroll
  for (int k = 0; k < DEPTH; ++k) MmaMixed<T, 8>::shared(acc, mma_desc(k < 4 ? first : second) + 2 * (k % 4), w + SIXTEEN_ROWS * k);
}
// sum[64, 8 BLOCKS] += left.T right over the rows of TILES tiles
template <class T, int TILES, int BLOCKS>
TS_DEV void add_rows(Fragment<BLOCKS>& sum, u32 left, u32 right) {
  const u64 a = mma_desc_columns(left, CHUNK_BYTES), b = mma_desc_columns(right, CHUNK_BYTES);
#pragma unroll
  for (int k = 0; k < TILES * STEPS; ++k) MmaColumns<T, BLOCKS, true>::shared(sum, a + SIXTEEN_ROWS * k, b + SIXTEEN_ROWS * k);
}
// The same, and left times ones, to `bias`: small products one behind the other would wait for each other.
template <class T, int TILES, int BLOCKS>
TS_DEV void add_rows(Fragment<BLOCKS>& sum, Fragment<1>& bias, u32 left, u32 right, u32 ones) {
  const u64 a = mma_desc_columns(left, CHUNK_BYTES), b = mma_desc_columns(right, CHUNK_BYTES);
#pragma unroll
  for (int k = 0; k < TILES * STEPS; ++k) {
    MmaColumns<T, BLOCKS, true>::shared(sum, a + SIXTEEN_ROWS * k, b + SIXTEEN_ROWS * k);
    MmaColumns<T, 1, false>::shared(bias, a + SIXTEEN_ROWS * k, mma_desc(ones));
  }
}
// left times ones alone: eight equal columns of the sum of its rows.
template <class T, int TILES>
TS_DEV void add_ones(Fragment<1>& sum, u32 left, u32 ones) {
  const u64 a = mma_desc_columns(left, CHUNK_BYTES), b = mma_desc(ones);
#pragma unroll
  for (int k = 0; k < TILES * STEPS; ++k) MmaColumns<T, 1, false>::shared(sum, a + SIXTEEN_ROWS * k, b);
}

// ---- sums of both warpgroups over rows of their own: each gives the other what that one adds
template <int BLOCKS>
TS_DEV void give(const Fragment<BLOCKS>& sum, u32 to) {
  TS_LANES {
    const u32 at = to + 16 * TS_LANE;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      sts64(at + (u32)i * 2048, TS_REG(sum, 4 * i), TS_REG(sum, 4 * i + 1));
      sts64(at + (u32)i * 2048 + 8, TS_REG(sum, 4 * i + 2), TS_REG(sum, 4 * i + 3));
    }
  }
}
template <int BLOCKS>
TS_DEV void add_given(Fragment<BLOCKS>& sum, u32 given) {
  TS_LANES {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      u32 v[4];
      lds_words(given + 16 * TS_LANE + (u32)i * 2048, v);
#pragma unroll
      for (int n = 0; n < 4; ++n) TS_REG(sum, 4 * i + n) += float_of(v[n]);
    }
  }
}

// ---- partial sums of a CTA: the fours of a lane side by side, lane by lane; of a bias one column
template <class P>
TS_DEV float* partials_of(const P& p, const Share& at, int split) {
  return p.partials + ((u64)at.stage.partials + ((u64)at.part * (u32)at.stage.splits + (u32)split) * (u32)at.stage.fours) * 4;
}
template <int BLOCKS>
TS_DEV void leave(const Fragment<BLOCKS>& sum, float* partials) {
  TS_LANES {
    const u64 to = (u64)(partials + 4 * TS_LANE);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      store_global_words((void*)(to + (u64)i * 2048), {bits_of(TS_REG(sum, 4 * i)), bits_of(TS_REG(sum, 4 * i + 1)),
                                                       bits_of(TS_REG(sum, 4 * i + 2)), bits_of(TS_REG(sum, 4 * i + 3))});
  }
}
TS_DEV void leave_column(const Fragment<1>& sum, float* partials) {
  TS_LANES {
    if ((TS_LANE & 3) == 0) {
#pragma unroll
      for (int j = 0; j < 2; ++j) store_global(partials + row_of(TS_LANE, j), TS_REG(sum, 2 * j));
    }
  }
}

// ---- the sum of all CTAs of a block
// Accumulators 4i to 4i + 3 of lane t of a sum: two columns of two rows.
template <class W>
TS_DEV void write_four(void* to, long long stride, const Result& r, int out0, int k0, int four, const float (&v)[4]) {
  if (r.lies == AS_BIAS) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (out0 + r.row + 4 * four + n < r.out) Io<W>::global1(to, (u64)(out0 + r.row + 4 * four + n), v[n]);
    return;
  }
  const u32 t = (u32)(four % 128);
  const int col = r.column + col_of(t, four / 128);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = r.row + row_of(t, j);
    const int o = out0 + (r.lies == TURNED ? col : row), k = k0 + (r.lies == TURNED ? row : col);
    const u64 where = (u64)o * (u64)stride + (u64)k;
    if (o >= r.out || k >= r.k) continue;
    if (r.lies == AS_WEIGHT && k + 1 < r.k && stride % 2 == 0) {
      Io<W>::global2(to, where, v[2 * j], v[2 * j + 1]);
      continue;
    }
    Io<W>::global1(to, where, v[2 * j]);
    if (r.lies == TURNED ? o + 1 < r.out : k + 1 < r.k) Io<W>::global1(to, where + (r.lies == TURNED ? (u64)stride : 1), v[2 * j + 1]);
  }
}
template <class L, class P>
TS_DEV void write(const P& p, const Share& at, int four, const float (&v)[4]) {
  int begin = 0;
#pragma unroll
  for (int k = 0; k < L::RESULTS; ++k) {
    const Result r = L::result(at.stage.results + k);
    if (four < r.end) {
      void* const to = p.pointers[r.pointer];
      const long long stride = p.strides[r.pointer];
      if (r.type == 0) return write_four<bf16>(to, stride, r, at.out0, at.k0, four - begin, v);
      if (r.type == 1) return write_four<f16>(to, stride, r, at.out0, at.k0, four - begin, v);
      return write_four<f32>(to, stride, r, at.out0, at.k0, four - begin, v);
    }
    begin = r.end;
  }
}

// All CTAs of a block have left their sums: a flag each, raised by one in every launch. Nothing is reset, so that a captured
// launch can be replayed. Stores of all threads come before the barrier, and that before the release. The warps that neither
// load nor multiply do it: with a trap behind the products ptxas gives these 168 registers, not what was asked for, and where
// the warps that load went on to it, two layers of 128 took 1.07 of their time.
constexpr int LEFT = 4, MET = 5, LOADING = 2, WAITING = 2, MEMBERS = 256 + WAITING * WARP_MEMBERS;

TS_DEV void meet(const Sync& sync, const Share& at, int warp) {
  const int cta = cta_index();
  u64* const mine = sync.flags + (u64)cta * LINE;
  const u64 launch = flag_acquire(mine) + 1;
  sync_warp();
  named_sync(LEFT, MEMBERS);
  if (warp == 0 && lane_in_warp() == 0) flag_release(mine, launch);
  for (int s = warp * WARP + (int)lane_in_warp(); s < at.stage.splits; s += WAITING * WARP) {
    const int peer = at.stage.first + s * at.stage.parts + at.part;
    flag_wait(sync, peer, launch, cta, peer, 0);
  }
  sync_warp();
  named_arrive(MET, MEMBERS);
}

// Threads hold sums of the same `width` fours, `slices` each: those of a four are added by the first one.
TS_DEV void add_slices(Registers<float, 4>& sum, u32 scratch, int width, int slices, int g) {
  TS_LANES {
    const u32 to = scratch + (u32)(g * 128 + (int)TS_LANE) * 16;
    sts64(to, TS_REG(sum, 0), TS_REG(sum, 1));
    sts64(to + 8, TS_REG(sum, 2), TS_REG(sum, 3));
  }
  named_sync(BOTH_GROUPS, 256);
  TS_LANES {
    const int thread = g * 128 + (int)TS_LANE;
    for (int s = 1; thread < width && s < slices; ++s) {
      u32 v[4];
      lds_words(scratch + (u32)(s * width + thread) * 16, v);
#pragma unroll
      for (int n = 0; n < 4; ++n) TS_REG(sum, n) += float_of(v[n]);
    }
  }
  sync_warp();
  named_sync(BOTH_GROUPS, 256);
}
// Each CTA adds, and writes, its part; bias gradients those of the first part of k. The latency of the L2 is what counts, so
// that loads go out together: a four of many CTAs is added by several threads, `width` fours at once.
template <class L, class P>
TS_DEV void add_partials(const P& p, u32 scratch, const Share& at, int g) {
  sync_warp();
  named_arrive(LEFT, MEMBERS);  // this warp has left its sums,
  named_sync(MET, MEMBERS);     // and so have all others, of all CTAs of the block
  const int splits = at.stage.splits, width = at.stage.width, slices = 256 / width;
  const int fours = at.k0 == 0 ? at.stage.fours : at.stage.weight_fours;
  const int first = (int)((long long)fours * at.split / splits), last = (int)((long long)fours * (at.split + 1) / splits);
  const u64 from = (u64)partials_of(p, at, 0), pitch = (u64)at.stage.fours * 16;
#pragma unroll 1
  for (int begin = first; begin < last; begin += width) {
    Registers<float, 4> sum;
    TS_LANES {
      const int thread = g * 128 + (int)TS_LANE, slice = thread / width, own = begin + thread % width, four = own < last ? own : last - 1;
      float v[L::LOADS][4], made[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k < L::LOADS; ++k) {  // the last turns load again what they do not add
        const int s = slice + k * slices;
        load_shared_floats((const float*)(from + (u64)(s < splits ? s : 0) * pitch + (u64)four * 16), v[k]);
      }
#pragma unroll
      for (int k = 0; k < L::LOADS; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n) made[n] = slice + k * slices < splits ? made[n] + v[k][n] : made[n];
#pragma unroll
      for (int n = 0; n < 4; ++n) TS_REG(sum, n) = made[n];
    }
    if (slices > 1) add_slices(sum, scratch, width, slices, g);
    TS_LANES {
      const int thread = g * 128 + (int)TS_LANE, four = begin + thread;
      if (thread < width && four < last) {
        const float made[4] = {TS_REG(sum, 0), TS_REG(sum, 1), TS_REG(sum, 2), TS_REG(sum, 3)};
        write<L>(p, at, four, made);
      }
    }
  }
}

}  // namespace ts
