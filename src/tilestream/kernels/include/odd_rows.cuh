// Rows whose width or place TMA cannot address. Columns up to `padded` become zero.
#pragma once

#include "tile.cuh"

namespace ts {

// Eight neighbouring elements of 16 bits, from any even address on, out of the five words that they lie in at most.
struct OddEight {
  u32 words[5];
  bool shifted;  // they begin in the middle of the first word

  // `valid` of them are there; nothing is read behind those, and the others are zeros.
  TS_DEV OddEight(const void* from, int valid) : shifted(((u64)from & 2) != 0) {
    const u16* first = (const u16*)((u64)from & ~3ull);
    const int halves = valid <= 0 ? 0 : (valid < 8 ? valid : 8) + (shifted ? 1 : 0);
#pragma unroll
    for (int k = 0; k < 5; ++k)
      words[k] = 2 * k + 1 < halves ? load_global((const u32*)first + k) : 2 * k < halves ? load_global(first + 2 * k) : 0u;
  }
  TS_DEV void put(u32 at) const {
    u32 made[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) made[k] = shifted ? words[k] >> 16 | words[k + 1] << 16 : words[k];
    sts_words(at, made);
  }
};
// Each lane makes 16 bytes of a row of shared memory at a time: no two banks collide, and one store takes the place of
// eight, beside products that want three quarters of what shared memory gives.
template <class T>
TS_DEV void load_odd_halves(u32 dst, const void* src, int stride, int row0, int left, int col, int cols, int padded) {
  const char* base = (const char*)src + ((u64)row0 * (u64)stride + (u64)col) * 2;
  const int wide = cols > padded ? cols : padded;
#pragma unroll 1
  for (int v = (int)lane_in_warp(); v < 8 * ROWS; v += 2 * WARP) {
    const int r = v / 8, c = v % 8 * 8, s = (v + WARP) / 8, d = (v + WARP) % 8 * 8;
    const OddEight a(base + ((u64)r * (u64)stride + (u64)c) * 2, r < left ? cols - c : 0);
    const OddEight b(base + ((u64)s * (u64)stride + (u64)d) * 2, s < left ? cols - d : 0);
    if (c < wide) a.put(element_addr<T>(dst, (u32)r, (u32)c));
    if (d < wide) b.put(element_addr<T>(dst, (u32)s, (u32)d));
  }
}
template <class T>
TS_DEV float rounded(float x, bool rounds) {
  return T::BYTES == 4 && rounds ? f32::to_tf32(x) : x;
}
// Elements of a flat vector, each to its place.
template <class T>
TS_DEV void scatter(u32 dst, uint4 v, int element, int features, int col, int cols, bool rounds) {
  int r = element / features, c = element - r * features - col;
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int k = 0; k < 16 / T::BYTES; ++k) {
    if ((u32)c < (u32)cols) {
      u32 at = element_addr<T>(dst, (u32)r, (u32)c);
      if (T::BYTES == 2)
        sts16(at, (u16)(words[k / 2] >> (16 * (k & 1))));
      else
        stsf(at, rounded<T>(float_of(words[k % 4]), rounds));
    }
    if (++c == features - col) {
      c = -col;
      ++r;
    }
  }
}
// Which vector of PER elements a lane reads as its i-th: the i-th of all, or of `each` a row, those that hold columns of
// the chunk; `none` where there is no such vector.
template <int PER>
TS_DEV int vector_of(int i, int each, int features, int col, int cols, int none) {
  if (each == 0) return i;
  const int r = i / each, from = r * features + col, v = from / PER + i - r * each;
  return v * PER < from + cols ? v : none;
}
// Whole contiguous rows of more than eight elements, and rows that are not contiguous, are made in shared memory 16 bytes
// at a time, if they are of 16 bits. Other contiguous rows are read 16 bytes at a time (64 rows always start on 16 bytes),
// flat or, where a chunk is a part of them, that part of each, and scattered: of narrow ones one vector a lane is all there
// is. What is left, rows of 32 bits that are not contiguous, comes element by element.
template <class T>
TS_DEV void load_odd_rows(u32 dst, const void* src, int features, int stride, int row0, int rows, int col, int cols, int padded,
                          bool rounds) {
  const int left = rows - row0 < ROWS ? rows - row0 : ROWS;
  const int lane = (int)lane_in_warp();
  if (T::BYTES == 2 && (stride != features || (cols == features && features > 8)))
    return load_odd_halves<T>(dst, src, stride, row0, left, col, cols, padded);
  int flat = 0;
  if (stride == features && left > 0) {
    constexpr int PER = 16 / T::BYTES;
    const uint4* base = (const uint4*)((const char*)src + (u64)row0 * (u64)features * T::BYTES);
    const int vectors = left * features / PER;
    // That hold a row's part, where that is not all.
    const int each = cols < features && features > PER ? (cols + PER - 2) / PER + 1 : 0;
    const int wanted = each > 0 ? left * each : vectors;
    for (int i = lane; i < wanted; i += 2 * WARP) {
      const int v = vector_of<PER>(i, each, features, col, cols, vectors);
      const int w = i + WARP < wanted ? vector_of<PER>(i + WARP, each, features, col, cols, vectors) : vectors;
      uint4 a = {}, b = {};
      if (v < vectors) a = load_global(base + v);
      if (w < vectors) b = load_global(base + w);
      if (v < vectors) scatter<T>(dst, a, v * PER, features, col, cols, rounds);
      if (w < vectors) scatter<T>(dst, b, w * PER, features, col, cols, rounds);
    }
    flat = vectors * PER;
  }
  const int first = flat / features;  // rows before it are whole
  for (int r = first; r < left; ++r)
    for (int c = lane; c < cols; c += WARP)
      Io<T>::store1(element_addr<T>(dst, (u32)r, (u32)c),
                    rounded<T>(Io<T>::param((const char*)src + (u64)(row0 + r) * (u64)stride * T::BYTES, col + c), rounds));
  for (int r = lane; r < ROWS; r += WARP)
    for (int c = cols; c < padded; ++c) Io<T>::store1(element_addr<T>(dst, (u32)r, (u32)c), 0.0f);
}

}  // namespace ts
