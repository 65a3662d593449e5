// What products of a warpgroup are told of operands in shared memory: 64 bits of 14-bit fields, all of bytes over 16, where the
// operand begins (0), its pitch along the depth (16) and along its rows (32), and the swizzle (62). Swizzled operands lie side
// by side along the depth, and their pitch there is not looked at.
//
// In a cluster a shared address has the CTA's rank above its 24 lower bits: a field that is looked at must not take that in.
#pragma once

namespace ts {

// Of an operand with the depth along its rows, with the 128-byte swizzle.
TS_DEV u64 mma_desc(u32 addr) { return ((u64)((addr & 0x3FFFF) >> 4)) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62); }
// The same from a shared address over 16: steps along K and to other stages are plain additions to it.
TS_DEV u64 mma_desc_over_16(u32 low) { return (u64)0x40000040 << 32 | (low | 0x10000); }
// Of an operand in blocks of 8 rows x 16 bytes, one behind the other along its rows; along the depth `pitch` apart. Both over 16.
TS_DEV u64 mma_desc_blocks_over_16(u32 low, u32 pitch) { return (u64)8 << 32 | (u64)pitch << 16 | (low & 0x3FFF); }
// Of an operand that lies [depth, columns], in chunks of 64 columns that are `chunk` bytes apart: eight rows of the depth
// are 1024 bytes.
TS_DEV u64 mma_desc_columns(u32 addr, u32 chunk) {
  return ((u64)((addr & 0x3FFFF) >> 4)) | ((u64)(chunk >> 4) << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}
// The same with both over 16.
TS_DEV u64 mma_desc_columns_over_16(u32 low, u32 chunk) { return (u64)0x40000040 << 32 | (u64)chunk << 16 | (low & 0x3FFF); }

}  // namespace ts
