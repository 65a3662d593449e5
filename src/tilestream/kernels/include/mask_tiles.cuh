// Which pairs of queries and keys a mask keeps: of each tile of 64 queries and 64 keys a state (masked_attention.cuh), and of
// tiles of which some pairs are kept, their bits. `Mask::keeps(p, batch, head, query, key)` is written by parts/pairs.py.
//
// A CTA has 128 queries and some blocks of 128 keys: four warps beside each other along the keys, two below each other. Where
// blocks are listed (a BlockMask's) pairs of the others are not looked at, and pairs of full ones are all kept.
#pragma once

namespace ts {

enum : u32 { NONE, SOME, ALL, EDGE };  // edge: all pairs of a block, some of which are not there
constexpr int BLOCK = 128, WARPS = 8, MASK_TILE = 64;
constexpr int AT_ONCE = 16;  // rows whose pairs are read before any is looked at

// Of torch: rounded down, and what is left has the divisor's sign.
TS_DEV long long floor_divide(long long a, long long b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
TS_DEV long long remainder(long long a, long long b) { return a - b * floor_divide(a, b); }
// An index as torch takes it: from the end if it is negative.
TS_DEV long long index_of(long long at, long long size) { return at < 0 ? at + size : at; }
template <class T>
TS_DEV long long element(const char* p, long long at) {
  return ((const T*)p)[at];
}

TS_DEV int least(int a, int b) { return a < b ? a : b; }

// What the listed blocks of a row say of this CTA's: blocks of the list may be several of ours.
TS_DEV void mark(u32 flags, const int* list, int count, int ours, int first, int blocks, u32 state) {
  for (int k = lanes::thread(); k < count; k += 32 * WARPS) {
    const long long from = (long long)list[k] * ours - first, to = from + ours;
    for (long long block = from > 0 ? from : 0; block < to && block < blocks; ++block) lanes::put32(flags + 4 * (u32)block, state);
  }
}

// The bits of 64 queries and a warp's 32 keys, two words a row apart, and the state of these. `edge`: all pairs that are there.
template <class Mask, class P>
TS_DEV u32 look(const P& p, int batch, int head, int query, int key, bool edge, u32* bits) {
  const int mine = key + lanes::lane();
  const u32 there = lanes::vote(mine < p.keys);
  bool any = false, all = true;
#pragma unroll 1
  for (int r = 0; r < MASK_TILE; r += 32) {
    u32 word = ~0u;  // of row r + lane
#pragma unroll 1
    for (int ahead = 0; ahead < 32 && !edge; ahead += AT_ONCE) {
      bool kept[AT_ONCE];  // pairs beyond the last are as the last
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        kept[i] = Mask::keeps(p, batch, head, least(query + r + ahead + i, p.queries - 1), least(mine, p.keys - 1));
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const u32 voted = lanes::vote(kept[i]);
        if (ahead + i == lanes::lane()) word = voted;
      }
    }
    const bool beyond = query + r + lanes::lane() >= p.queries;  // such rows keep no tile from being whole
    word = beyond ? 0 : word & there;
    any |= lanes::vote(word != 0) != 0;
    all &= lanes::vote(beyond || word == ~0u) == ~0u;
    lanes::store32(bits + 2 * (r + lanes::lane()), word);
  }
  return !any ? NONE : all ? ALL : SOME;
}

template <class Mask, bool LISTED, class P>
TS_DEV void mask_tiles(const P& p, u32 smem) {
  const u32 flags = smem + 4 * WARPS;  // behind what each warp found
  const int chunk = lanes::block() % p.chunks, row = lanes::block() / p.chunks % p.query_blocks;
  const int unit = lanes::block() / p.chunks / p.query_blocks, batch = unit / p.mask_heads, head = unit % p.mask_heads;
  const int first = chunk * p.chunk_blocks, left = p.key_blocks - first, blocks = left < p.chunk_blocks ? left : p.chunk_blocks;
  for (int k = lanes::thread(); k < blocks; k += 32 * WARPS) lanes::put32(flags + 4 * k, LISTED ? NONE : SOME);
  lanes::all_together();
  if (LISTED) {
    const int listed = ((p.list_batches > 1 ? batch : 0) * p.list_heads + (p.list_heads > 1 ? head : 0)) * p.list_rows + row / p.rows_a_list;
    mark(flags, p.some + (long long)listed * p.list_length, p.some_count[listed], p.blocks_a_list, first, blocks, SOME);
    lanes::all_together();
    if (p.all_count != nullptr)
      mark(flags, p.all + (long long)listed * p.list_length, p.all_count[listed], p.blocks_a_list, first, blocks, ALL);
    lanes::all_together();
  }
  const int half = lanes::warp() / 4, segment = lanes::warp() % 4;
  const u64 tiles = ((u64)unit * p.query_blocks + row) * 2;  // of queries, in front of this CTA's
#pragma unroll 1
  for (int k = 0; k < blocks; ++k) {
    const int block = first + k;
    u32 flag = lanes::get32(flags + 4 * k);
    if (flag == ALL && ((block + 1) * BLOCK > p.keys || (row + 1) * BLOCK > p.queries)) flag = EDGE;
    u32* const bits = p.bits + ((tiles + half) * p.state_row + 2 * block + segment / 2) * (2 * MASK_TILE) + segment % 2;
    u32 state = flag;
    if (flag == SOME || flag == EDGE) {  // for all of the CTA
      state = look<Mask>(p, batch, head, row * BLOCK + MASK_TILE * half, block * BLOCK + 32 * segment, flag == EDGE, bits);
      if (lanes::lane() == 0) lanes::put32(smem + 4 * lanes::warp(), state);
      lanes::all_together();
      const u32 other = lanes::get32(smem + 4 * (lanes::warp() ^ 1));  // of the tile's other keys
      state = state == other ? state : SOME;
      lanes::all_together();
    }
    if (segment % 2 == 0 && lanes::lane() == 0) lanes::store8(p.states + (tiles + half) * p.state_row + 2 * block + segment / 2, state);
  }
}

}  // namespace ts
