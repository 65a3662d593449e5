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
constexpr u32 CHUNK_BYTES = ROWS * 128;

template <class T>
constexpr int CHUNK_BLOCKS = 16 / T::BYTES;  // blocks of 8 columns in a chunk

template <int BLOCKS>
using Fragment = Registers<float, 4 * BLOCKS>;
template <int BLOCKS>
using Packed = Registers<u32, 2 * BLOCKS>;
using RowVector = Registers<float, 2>;  // one value for each of a lane's two rows

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
template <int SLOTS, int BYTES>
struct Ring {
  u32 bars, data;
  int slot = 0, behind = 0;
  u32 parity = 0;
  TS_DEV Ring(u32 bars, u32 data) : bars(bars), data(data) {}
  TS_DEV u32 addr() const { return data + (u32)slot * BYTES; }
  TS_DEV u32 full() const { return bars + (u32)slot * 16; }
  TS_DEV u32 empty() const { return full() + 8; }
  TS_DEV void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
  TS_DEV void wait_full() { bar_wait(full(), parity); }
  TS_DEV void wait_empty() { bar_wait(empty(), parity ^ 1); }
  // Consumers free slots in order, one product behind the one in flight.
  TS_DEV void release() {
    group_arrive(bars + (u32)behind * 16 + 8);
    skip_release();
  }
  TS_DEV void skip_release() {
    if (++behind == SLOTS) behind = 0;
  }
};

// Weights that stay: as a ring of all pages, filled once and never freed.
template <int SLOTS, int BYTES>
struct Resident {
  u32 bars, data;
  int slot = 0;
  TS_DEV Resident(u32 bars, u32 data) : bars(bars), data(data) {}
  TS_DEV u32 addr() const { return data + (u32)slot * BYTES; }
  TS_DEV void advance() {
    if (++slot == SLOTS) slot = 0;
  }
  TS_DEV void wait_full() { bar_wait(bars + (u32)slot * 16, 0); }
  TS_DEV void release() {}
  TS_DEV void skip_release() {}
};

// Tiles of one replica: units of TILES tiles, taken round robin.
template <int TILES>
struct Units {
  int unit, count, stride;
  TS_DEV Units(int rows, int replica, int replicas) : unit(replica), stride(replicas) {
    int tiles = (rows + ROWS - 1) / ROWS;
    count = (tiles + TILES - 1) / TILES;
  }
  TS_DEV bool more() const { return unit < count; }
  TS_DEV void next() { unit += stride; }
  TS_DEV bool last() const { return unit + stride >= count; }
  TS_DEV int tile(int g) const { return unit * TILES + (TILES == 2 ? g : 0); }
};

template <class M, int KSTEPS, int BLOCKS>
TS_DEV void product_shared(Fragment<BLOCKS>& acc, u32 a, u32 b) {
  u64 da = mma_desc(a), db = mma_desc(b);
  mma_fence();
#pragma unroll
  for (int k = 0; k < KSTEPS; ++k) M::shared(acc.v, da + 2 * k, db + 2 * k);
  mma_commit();
}
// A from registers: KSTEPS steps of 16 columns, from column block `first` of `a`.
template <class M, int KSTEPS, int BLOCKS, int ABLOCKS>
TS_DEV void product_registers(Fragment<BLOCKS>& acc, const Packed<ABLOCKS>& a, int first, u32 b) {
  u64 db = mma_desc(b);
  mma_fence();
#pragma unroll
  for (int k = 0; k < KSTEPS; ++k) M::registers(acc.v, a.v, 2 * first + 4 * k, db + 2 * k);
  mma_commit();
}

}  // namespace ts
