// Warpgroup products out of swizzled shared memory or packed registers, fp32 accumulation.
#pragma once
#include <cstring>

#include "state.h"

namespace ts_host {

namespace {

float from_half(u32 h) {
  const u32 e = (h >> 10) & 31, m = h & 0x3ff, sign = (h & 0x8000) << 16;
  if (e == 0) return (sign ? -1.0f : 1.0f) * (float)m * 5.9604644775390625e-08f;
  return __builtin_bit_cast(float, sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13);
}
float element_of(const unsigned char* bytes, int k, int element) {
  if (element == 2) {
    u32 v;
    std::memcpy(&v, bytes + 4 * k, 4);
    return __builtin_bit_cast(float, v & 0xffffe000u);
  }
  u16 v;
  std::memcpy(&v, bytes + 2 * k, 2);
  return element == 0 ? __builtin_bit_cast(float, (u32)v << 16) : from_half(v);
}
// 32 bytes of one row of an operand: swizzled, or in blocks of 8 rows x 16 bytes
void operand_row(u64 desc, int row, unsigned char* to) {
  const u32 start = (u32)(desc & 0x3fff) << 4, group = (u32)((desc >> 32) & 0x3fff) << 4;
  const u32 along = (u32)((desc >> 16) & 0x3fff) << 4;  // the depth; a swizzled row has it side by side
  const bool is_swizzled = desc >> 62 == 1;
  for (u32 k = 0; k < 2; ++k) {
    const u32 line = start + (u32)(row / 8) * group, at = is_swizzled ? line + (u32)(row % 8) * 128 + 16 * k : line + (u32)(row % 8) * 16 + along * k;
    const char* const from = shared + (is_swizzled ? at ^ ((at >> 3) & 0x70) : at);
    reads(from, 16);
    std::memcpy(to + 16 * k, from, 16);
  }
}
// One row of the depth of an operand that lies [depth, columns]: the first `columns` of it, to every `stride`-th float.
void operand_column(u64 desc, int k, int columns, int element, float* to, int stride) {
  const u32 start = (u32)(desc & 0x3fff) << 4, chunk = (u32)((desc >> 16) & 0x3fff) << 4, group = (u32)((desc >> 32) & 0x3fff) << 4;
  for (int n = 0; n < columns; n += 8) {
    const u32 at = start + (u32)(k / 8) * group + (u32)(k % 8) * 128 + (u32)(n / 64) * chunk + (u32)(n % 64) * 2;
    const char* const from = shared + (at ^ ((at >> 3) & 0x70));
    reads(from, 16);
    for (int i = 0; i < 8; ++i) to[(n + i) * stride] = element_of((const unsigned char*)from, i, element);
  }
}
void packed_rows(const Product& p, float* a) {
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < 16; ++c) {
      const int lane = r / 16 * 32 + r % 8 * 4 + c % 8 / 2;
      const u32 v = p.packed[(long)lane * p.packed_stride + c / 8 * 2 + r % 16 / 8];
      const u16 h = (u16)(c % 2 ? v >> 16 : v);
      a[r * 16 + c] = p.element == 0 ? __builtin_bit_cast(float, (u32)h << 16) : from_half(h);
    }
}
void accumulate(const Product& p, int depth, const float* a, const float* bt) {
  const int columns = 8 * p.blocks;
  static thread_local float sums[256];  // not on the stack, where the role's own calls have been
  for (int r = 0; r < 64; ++r) {
    for (int n = 0; n < columns; ++n) sums[n] = 0;
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < columns; ++n) sums[n] += a[r * 16 + k] * bt[k * 256 + n];
    for (int n = 0; n < columns; ++n) {
      const int lane = r / 16 * 32 + r % 8 * 4 + n % 8 / 2;
      p.acc[(long)lane * p.acc_stride + n / 8 * 4 + r % 16 / 8 * 2 + n % 2] += sums[n];
    }
  }
}
void execute(const Product& p) {
  const int depth = p.element == 2 ? 8 : 16;
  static thread_local float a[64 * 16], bt[16 * 256];
  unsigned char bytes[32];
  Role& r = *self;
  r.products.run([&] {
    for (int k = 0; k < depth && p.b_columns; ++k) operand_column(p.b, k, 8 * p.blocks, p.element, bt + k * 256, 1);
    for (int k = 0; k < depth && p.a_columns; ++k) operand_column(p.a, k, 64, p.element, a + k, 16);
    for (int n = 0; n < 8 * p.blocks && !p.b_columns; ++n) {
      operand_row(p.b, n, bytes);
      for (int k = 0; k < depth; ++k) bt[k * 256 + n] = element_of(bytes, k, p.element);
    }
    if (p.packed == nullptr && !p.a_columns)
      for (int m = 0; m < 64; ++m) {
        operand_row(p.a, m, bytes);
        for (int k = 0; k < depth; ++k) a[m * 16 + k] = element_of(bytes, k, p.element);
      }
    if (p.packed != nullptr) packed_rows(p, a);
    accumulate(p, depth, a, bt);
  });
}

}  // namespace

}  // namespace ts_host
