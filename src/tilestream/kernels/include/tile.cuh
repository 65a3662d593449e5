// Tiles in registers and in shared memory.
//
// A warpgroup's accumulators of a 64 x N product ("fragment"): lane t holds, of each block i of 8
// columns and each half j of its warp's 16 rows, the two columns 8i + 2(t%4) + {0, 1} of row
// 16(t/32) + (t%32)/4 + 8j. Rounded to 16 bits and packed in the same order it is the A operand of
// the next product, so a chain of layers never leaves the registers.
//
// In shared memory a tile is chunks of 64 rows x 128 bytes with the 128-byte swizzle of TMA and wgmma.
#pragma once

namespace ts {

constexpr int ROWS = 64;
// Named barriers: one a warpgroup, one for both.
constexpr int GROUP_BARRIER = 1, BOTH_GROUPS = 3;
constexpr u32 CHUNK_BYTES = ROWS * 128;

template <class T>
constexpr int CHUNK_BLOCKS = 16 / T::BYTES;  // blocks of 8 columns in a chunk

template <int BLOCKS>
struct Fragment : Registers<float, 4 * BLOCKS> {};
template <int BLOCKS>
struct Packed : Registers<u32, 2 * BLOCKS> {};
using RowVector = Registers<float, 2>;  // one value for each of a lane's two rows

// Another thread is writing its record of an expired wait: a trap now would cut it off.
TS_DEV void hold_back() {
  for (u64 start = now_ns(); now_ns() - start < 500000000ull;) {
  }
  trap();
}

template <int BLOCKS>
TS_DEV void clear(Fragment<BLOCKS>& acc) {
#pragma unroll
  for (int k = 0; k < 4 * BLOCKS; ++k) {
    TS_LANES { TS_REG(acc, k) = 0.0f; }
  }
  pin(acc);
}

TS_DEV int row_of(u32 t, int j) { return (int)((t >> 5) * 16 + ((t & 31) >> 2)) + 8 * j; }
TS_DEV int col_of(u32 t, int i) { return 8 * i + 2 * (int)(t & 3); }

// Address of lane t's pair (i, j) in a tile that starts at `base`.
template <class T>
TS_DEV u32 pair_addr(u32 base, u32 t, int i, int j) {
  u32 row0 = (t >> 5) * 16 + ((t & 31) >> 2), quad = t & 3, swizzle = row0 & 7;
  u32 chunk = (u32)(i / CHUNK_BLOCKS<T>), block = (u32)(i % CHUNK_BLOCKS<T>);
  u32 line = base + chunk * CHUNK_BYTES + row0 * 128 + (u32)j * 1024;
  if (T::BYTES == 2) return line + ((block ^ swizzle) << 4) + quad * 4;
  return line + (((block * 2 + (quad >> 1)) ^ swizzle) << 4) + (quad & 1) * 8;
}
// Address of one element, for columns that do not start on a block.
template <class T>
TS_DEV u32 element_addr(u32 base, u32 row, u32 col) {
  constexpr u32 COLS = 128 / T::BYTES;
  u32 byte = (col % COLS) * T::BYTES;
  return base + (col / COLS) * CHUNK_BYTES + row * 128 + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15);
}

// Address of lane t's word `word` of a parked tile: words lie as they do in its packed registers, so that lanes read what
// they wrote, and no two banks collide.
TS_DEV u32 parked_addr(u32 base, u32 t, int word) { return base + (u32)word * 512 + t * 4; }

template <class T>
struct Io;
template <class T>
struct Io16 {
  static TS_DEV void store(u32 addr, float a, float b) { sts32(addr, T::pack(a, b)); }
  static TS_DEV void store1(u32 addr, float a) { sts16(addr, (u16)T::pack(a, 0.0f)); }
  static TS_DEV float load1(u32 addr) { return T::low(lds16(addr)); }
  static TS_DEV void load(u32 addr, float& a, float& b) {
    u32 v = lds32(addr);
    a = T::low(v);
    b = T::high(v);
  }
  static TS_DEV float round(float a) { return T::low(T::pack(a, 0.0f)); }
  static TS_DEV float param(const void* p, int k) { return T::low(load_global((const u16*)p + k)); }
  static TS_DEV void param2(const void* p, int k, float& a, float& b) {  // k even, p on 4 bytes
    u32 v = load_global((const u32*)p + (k >> 1));
    a = T::low(v);
    b = T::high(v);
  }
  static TS_DEV void global1(void* p, u64 k, float a) { store_global((u16*)p + k, (u16)T::pack(a, 0.0f)); }
  static TS_DEV void global2(void* p, u64 k, float a, float b) { store_global((u32*)((u16*)p + k), T::pack(a, b)); }
};
template <>
struct Io<bf16> : Io16<bf16> {};
template <>
struct Io<f16> : Io16<f16> {};
template <>
struct Io<f32> {
  static TS_DEV void store(u32 addr, float a, float b) { sts64(addr, a, b); }
  static TS_DEV void store1(u32 addr, float a) { stsf(addr, a); }
  static TS_DEV float load1(u32 addr) { return ldsf(addr); }
  static TS_DEV void load(u32 addr, float& a, float& b) {
    a = ldsf(addr);
    b = ldsf(addr + 4);
  }
  static TS_DEV float round(float a) { return a; }
  static TS_DEV float param(const void* p, int k) { return load_global((const float*)p + k); }
  static TS_DEV void param2(const void* p, int k, float& a, float& b) {
    a = param(p, k);
    b = param(p, k + 1);
  }
  static TS_DEV void global1(void* p, u64 k, float a) { store_global((float*)p + k, a); }
  static TS_DEV void global2(void* p, u64 k, float a, float b) {
    global1(p, k, a);
    global1(p, k + 1, b);
  }
};

// One side's view of a ring in shared memory. Slot i has two barriers: full at bars + 16i, empty behind it.
// With PAIR, consumers free a slot in both CTAs of a cluster: a multicast fills both.
template <int SLOTS, int BYTES, bool PAIR = false>
struct Ring {
  static constexpr int COUNT = SLOTS;
  u32 bars, data;
  int slot = 0, behind = 0;
  u32 parity = 0;
  TS_DEV Ring(u32 bars, u32 data) : bars(bars), data(data) {}
  TS_DEV void start() {}
  TS_DEV u32 addr() const { return data + (u32)slot * BYTES; }
  TS_DEV u32 full() const { return bars + (u32)slot * 16; }
  TS_DEV u32 empty() const { return full() + 8; }
  TS_DEV void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
  TS_DEV void skip(int slots) { slot = (slot + slots) % SLOTS; }  // by who needs to know no parity
  TS_DEV void wait_full() { bar_wait(full(), parity); }
  TS_DEV u32 take() {
    wait_full();
    return addr();
  }
  TS_DEV void wait_empty() { bar_wait(empty(), parity ^ 1); }
  // Every slot has come back: what they are made of may be used for something else.
  TS_DEV void wait_all_empty() {
    for (int i = 0; i < SLOTS; ++i) bar_wait(bars + (u32)i * 16 + 8, parity ^ 1);
  }
  // The slot that was advanced past first and has not been announced yet.
  TS_DEV u32 published() {
    u32 bar = bars + (u32)behind * 16;
    next_behind();
    return bar;
  }
  // Consumers free slots in order, one product behind the one in flight.
  TS_DEV void release() {
    if (PAIR)
      group_arrive_pair(bars + (u32)behind * 16 + 8);
    else
      group_arrive(bars + (u32)behind * 16 + 8);
    next_behind();
  }
  TS_DEV void next_behind() {
    if (++behind == SLOTS) behind = 0;
  }
};

// Weights that stay: as a ring of all pages, filled once and never freed.
template <int SLOTS, int BYTES>
struct Resident {
  static constexpr u32 parity = 0;
  u32 bars, data;
  int slot = 0;
  TS_DEV Resident(u32 bars, u32 data) : bars(bars), data(data) {}
  TS_DEV void start() { slot = 0; }  // a tile takes every page once, so addresses are constants
  TS_DEV u32 addr() const { return data + (u32)slot * BYTES; }
  TS_DEV u32 full() const { return bars + (u32)slot * 16; }
  TS_DEV void advance() { ++slot; }
  TS_DEV u32 take() {
    bar_wait(full(), parity);
    return addr();
  }
  TS_DEV void release() {}
};

// Tiles of one replica: units of TILES tiles, taken round robin.
template <int TILES>
struct Units {
  int unit, count, stride;
  template <class W>
  TS_DEV Units(int rows, const W& w) : unit(w.replica), stride(w.replicas) {
    int tiles = (rows + ROWS - 1) / ROWS;
    count = (tiles + w.step - 1) / w.step * w.step / TILES;
  }
  TS_DEV bool more() const { return unit < count; }
  TS_DEV void next() { unit += stride; }
  TS_DEV bool last() const { return unit + stride >= count; }
  TS_DEV int tile(int g) const { return unit * TILES + (TILES == 2 ? g : 0); }
};

// The two columns of a vector parameter that a lane needs; zeros beyond its end.
template <class V, int FEATURES>
TS_DEV void vector_pair(const void* v, int col, bool whole, float& a, float& b) {
  if (whole) {
    Io<V>::param2(v, col, a, b);
  } else {
    a = col < FEATURES ? Io<V>::param(v, col) : 0.0f;
    b = col + 1 < FEATURES ? Io<V>::param(v, col + 1) : 0.0f;
  }
}

// Accumulators start from the bias, which is loaded while the other warpgroup multiplies.
template <class V, int FEATURES, int BLOCKS, bool WHOLE>
TS_DEV void start_from(Fragment<BLOCKS>& acc, const void* bias, int col0) {
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      float a, b;
      vector_pair<V, FEATURES>(bias, col0 + col_of(t, i), WHOLE || (col0 == 0 && 8 * i + 8 <= FEATURES), a, b);
      TS_REG(acc, 4 * i) = TS_REG(acc, 4 * i + 2) = a;
      TS_REG(acc, 4 * i + 1) = TS_REG(acc, 4 * i + 3) = b;
    }
  }
}
template <int FROM, int TO, int BLOCKS>
TS_DEV void zero_blocks(Packed<BLOCKS>& a) {
  TS_LANES {
    const u32 t = TS_LANE;
    (void)t;
#pragma unroll
    for (int k = 2 * FROM; k < 2 * TO; ++k) TS_REG(a, k) = 0;
  }
}
// COUNT blocks of a parked tile, as blocks FROM and later of an operand.
template <int FROM, int COUNT, int BLOCKS>
TS_DEV void unpark(Packed<BLOCKS>& a, u32 base) {
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
#pragma unroll
    for (int k = 0; k < 2 * COUNT; ++k) TS_REG(a, 2 * FROM + k) = lds32(parked_addr(base, t, k));
  }
}
// Chunk c of a tile in shared memory as a part of an operand.
template <class T, int BLOCKS>
TS_DEV void pack_chunk(Packed<BLOCKS>& a, int c, u32 chunk) {
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
#pragma unroll
    for (int i = 0; i < CHUNK_BLOCKS<T>; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (c * CHUNK_BLOCKS<T> + i < BLOCKS) TS_REG(a, 2 * (c * CHUNK_BLOCKS<T> + i) + j) = lds32(pair_addr<T>(chunk, t, i, j));
  }
}
// Columns of the last chunk beyond a tile's last block: products read the whole chunk.
template <class T, int FROM, int TO>
TS_DEV void zero_columns(u32 base) {
  TS_LANES {
    const u32 t = TS_LANE;
    for (int i = FROM; i < TO; ++i)
      for (int j = 0; j < 2; ++j) Io<T>::store(pair_addr<T>(base, t, i, j), 0.0f, 0.0f);
  }
}
// Columns after a concatenation whose width is no multiple of a product's depth.
template <class T, int FROM, int TO>
TS_DEV void zero_tail(u32 base) {
  TS_LANES {
    const u32 t = TS_LANE;
    for (u32 col = FROM + (t >> 6); col < TO; col += 2) Io<T>::store1(element_addr<T>(base, t & 63, col), 0.0f);
  }
}
// What max_of_rows left of 64 columns from `column` on, of an output [rows / 16, FEATURES]: a warp's 16 rows are one there.
template <int FEATURES>
TS_DEV void store_maxima(void* out, Registers<u32, 8>& m, int tile, int column, int rows) {
  TS_LANES {
    const u32 t = TS_LANE;
    const int group = tile * 4 + (int)(t >> 5);
    if (16 * group + 16 <= rows) store_global((u32*)out + (u64)group * (FEATURES / 2) + column / 2 + (t & 31), TS_REG(m, 0));
  }
}
TS_DEV void fill_rows(RowVector& r, float v) {
  TS_LANES {
    const u32 t = TS_LANE;
    (void)t;
    TS_REG(r, 0) = TS_REG(r, 1) = v;
  }
}

// Under Shard(1) each warpgroup has reduced its own columns: add or compare with the other's, in one order.
template <bool MAX>
TS_DEV void combine_halves(RowVector& r, u32 scratch, int g) {
  TS_LANES {
    const u32 t = TS_LANE;
    if ((t & 3) == 0) {
      stsf(scratch + (u32)g * 256 + 4 * row_of(t, 0), TS_REG(r, 0));
      stsf(scratch + (u32)g * 256 + 4 * row_of(t, 1), TS_REG(r, 1));
    }
  }
  named_sync(BOTH_GROUPS, 256);
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float a = ldsf(scratch + 4 * row_of(t, j)), b = ldsf(scratch + 256 + 4 * row_of(t, j));
      TS_REG(r, j) = MAX ? max_nan(a, b) : a + b;
    }
  }
}

// acc[block AT ...] += A B.T over one page; M says how many blocks and which. A page of several chunks of A's columns has
// STRIDE bytes of weights of each; a chunk has four steps.
template <class M, int KSTEPS, int STRIDE = 0, int BLOCKS>
TS_DEV void product_shared(Fragment<BLOCKS>& acc, u32 a, u32 b) {
  static_assert(STRIDE > 0 || KSTEPS <= 4);
  u64 da = mma_desc(a), db = mma_desc(b);
  mma_fence();
#pragma unroll
  for (int k = 0; k < KSTEPS; ++k)
    M::shared(acc, da + (k / 4) * (CHUNK_BYTES / 16) + 2 * (k % 4), db + (k / 4) * (STRIDE / 16) + 2 * (k % 4));
  mma_commit();
}
// A from registers: KSTEPS steps of 16 columns, from column block `first` of `a`.
template <class M, int KSTEPS, int STRIDE = 0, int BLOCKS, int ABLOCKS>
TS_DEV void product_registers(Fragment<BLOCKS>& acc, const Packed<ABLOCKS>& a, int first, u32 b) {
  static_assert(STRIDE > 0 || KSTEPS <= 4);
  u64 db = mma_desc(b);
  mma_fence();
#pragma unroll
  for (int k = 0; k < KSTEPS; ++k) M::registers(acc, a, 2 * first + 4 * k, db + (k / 4) * (STRIDE / 16) + 2 * (k % 4));
  mma_commit();
}

}  // namespace ts
