// A feed-forward block on many rows, of layers wider than a CTA holds: two products, each as tiles of 128 rows by 256
// columns, in one kernel. The hidden layer goes from the first to the second through a ring in device memory that is small
// enough to stay in the L2: rows of the second follow those of the first by a few hundred tiles, in an order that is the
// same for all CTAs (Walk). One layer by itself is the second product alone, of a tensor (K::FIRSTS is zero).
//
// A CTA takes an SM. Two consumer warpgroups have 64 rows each, a fragment of 64 x 256; both operands stream through one
// ring. A pair of CTAs takes two tiles of rows and the same columns: each loads half of a page of weights, for both.
// Producers: warp 0 loads; warps 1 and 2 store what the warpgroups leave, and say so; warp 3 makes the rows of the operand
// where something, a norm, stands in front of the first layer. The first of them all warps make.
#pragma once
#include "product.cuh"
#include "tiled_order.cuh"

namespace ts {

constexpr int TILE_ROWS = 2 * ROWS, TILE_COLUMNS = 256, TILE_DEPTH = 64, TILE_BLOCKS = TILE_COLUMNS / 8;
constexpr int HALF_COLUMNS = TILE_COLUMNS / 2;  // of weights, a box
constexpr u32 LEFT_BYTES = TILE_ROWS * 128, HALF_BYTES = HALF_COLUMNS * 128, STEP_BYTES = LEFT_BYTES + 2 * HALF_BYTES;
constexpr u32 WEIGHT_PANEL = TILE_DEPTH * 128;  // of a weight that lies by columns: 64 of them
constexpr int SLABS = 2;               // of 64 columns, on their way out, a warpgroup; as many more through a page of the ring
constexpr int OPERAND_ROWS = 4;        // made by a warp before it says so
constexpr int OPERAND_FLAGS = TILE_ROWS / OPERAND_ROWS;
constexpr int MAKERS = 2 * 128 / WARP_MEMBERS;  // warps that multiply, and make rows before; on the host a group is one

// Where the flags are: those of the operand by fours of rows, of the hidden layer and of its readers by tiles of 64 rows.
struct Flags {
  u64 *operand, *hidden, *read;
};
template <class K, class P>
TS_DEV Flags flags_of(const P& p) {
  u64* operand = p.flags + p.ctas;
  u64* hidden = operand + (K::BEFORE ? p.walk.slots * OPERAND_FLAGS : 0);
  return {operand, hidden, hidden + p.walk.slots * 2 * K::HID_BLOCKS};
}
// What a flag of row tile `tile` says when it is raised in a launch before which all were at most `epoch`.
TS_DEV u64 ticket_of(const Walk& w, u64 epoch, int tile) { return epoch + (u64)(tile / w.slots) + 1; }

// Tiles of rows, of whole clusters.
template <class K>
TS_DEV int tiles_of(const Walk& w) { return w.all_seconds / K::OUT_BLOCKS * PAIR; }

TS_DEV void await_flags(const Team& team, Phase phase, const u64* flags, int count, u64 wanted, int tile) {
  await_all<1>(team, phase, wanted, count, [&](int k) { return flags + k; }, [&](int) { return tile; });
}

template <class K>
using StepRing = Ring<K::STEPS, STEP_BYTES, true>;
using SlabRing = Ring<SLABS, CHUNK_BYTES>;
template <class K>
TS_DEV StepRing<K> step_ring(u32 smem) { return StepRing<K>(smem + K::BARS, smem); }
template <class K>
TS_DEV u32 slab_bars(u32 smem, int g) { return smem + K::BARS + 16 * (K::STEPS + g * 2 * SLABS); }
template <class K>
TS_DEV SlabRing early_slabs(u32 smem, int g) {
  return SlabRing(slab_bars<K>(smem, g), smem + K::STEPS * STEP_BYTES + g * SLABS * CHUNK_BYTES);
}
// Nobody waits for a tile's first slabs to leave: the others lie in a page of the ring, which is not loaded then and is free
// again when they were stored.
template <class K>
TS_DEV SlabRing late_slabs(u32 smem, int g, u32 page) {
  return SlabRing(slab_bars<K>(smem, g) + 16 * SLABS, page + g * SLABS * CHUNK_BYTES);
}
template <class K>
TS_DEV int slabs_of(const Unit& x) {  // of its columns
  return x.second ? K::SECOND_COLUMNS / 64 / K::PRODUCTS : TILE_COLUMNS / 64 / (K::FIRSTS < 2 ? 1 : 2);
}
// Those that leave through shared memory.
template <class K>
TS_DEV int staged_of(const Unit& x) { return K::DIRECT && x.second ? 0 : slabs_of<K>(x); }
template <class K>
TS_DEV void init_tiled(u32 smem) {
  for (int i = 0; i < K::STEPS; ++i) {
    bar_init(smem + K::BARS + 16 * i, 1);
    bar_init(smem + K::BARS + 16 * i + 8, 8 * PAIR);  // one a warp, of both CTAs
  }
  for (int i = K::STEPS; i < K::STEPS + 4 * SLABS; ++i) {
    bar_init(smem + K::BARS + 16 * i, 4);
    bar_init(smem + K::BARS + 16 * i + 8, 1);
  }
  bar_init_done();
}

// Where a unit's operands and what it leaves are; `half` of its page of weights.
template <class K, class P>
TS_DEV const TensorMap* left_of(const P& p, const Unit& x) {
  if constexpr (K::FIRSTS > 0)
    if (x.second) return &p.hidden_in;
  return &p.input;
}
template <class K, class P>
TS_DEV const TensorMap* right_of(const P& p, const Unit& x, int half, int& row) {
  const int columns = x.second ? K::SECOND_COLUMNS : TILE_COLUMNS;
  row = x.block * columns + half * (columns / 2);
  if constexpr (K::FIRSTS == 2)
    if (!x.second) row = K::offset(half) + x.column * HALF_COLUMNS;
  if constexpr (K::FIRSTS > 0)
    if (!x.second) return &p.firsts[K::FIRSTS == 2 ? half : 0];
  if constexpr (K::PRODUCTS == 2) row = x.block * HALF_COLUMNS;
  return &p.lasts[K::PRODUCTS == 2 ? half : x.last];
}
template <class K, class P>
TS_DEV const TensorMap* to_of(const P& p, const Unit& x) {
  if constexpr (K::FIRSTS > 0)
    if (!x.second) return &p.hidden_out;
  if constexpr (K::DIRECT)
    return nullptr;
  else
    return &p.results[x.last];
}
template <class K>
TS_DEV bool reads_hidden(const Unit& x) { return K::FIRSTS > 0 && x.second; }

// ---- producers
template <class K, class P>
TS_DEV void load_steps(const P& p, const Team& team, u64 epoch, u32 smem, int cluster, int rank) {
  const Walk& w = p.walk;
  const Flags flags = flags_of<K>(p);
  auto ring = step_ring<K>(smem);
#pragma unroll 1
  for (Deal<K> deal(w, cluster, p.ctas / PAIR, rank); deal.more();) {
    const Unit x = deal.take();
    const int slot = x.rows % w.slots;
    if (reads_hidden<K>(x))
      await_flags(team, MIDDLE, flags.hidden + slot * 2 * K::HID_BLOCKS, 2 * K::HID_BLOCKS, ticket_of(w, epoch, x.rows), x.rows);
    else if (K::BEFORE)
      await_flags(team, OPERAND, flags.operand + slot * OPERAND_FLAGS, OPERAND_FLAGS, ticket_of(w, epoch, x.rows), x.rows);
    fence_async_global();
    if (lane_in_warp() != 0) continue;
    const TensorMap* left = left_of<K>(p, x);
    const int y = (reads_hidden<K>(x) || K::BEFORE ? slot : x.rows) * TILE_ROWS;
    const int h = rank;  // its half of the page of weights, for both CTAs
    int row;
    const TensorMap* right = right_of<K>(p, x, h, row);
    const int steps = x.second ? K::SECOND_STEPS : K::FIRST_STEPS;
    const u32 half_bytes = x.second ? K::SECOND_COLUMNS / 2 * 128 : HALF_BYTES;
#pragma unroll 1
    for (int i = 0; i < steps; ++i, ring.advance()) {
      ring.wait_empty();
      bar_expect(ring.full(), LEFT_BYTES + 2 * half_bytes);
      tma_load(ring.addr(), left, i * TILE_DEPTH, y, ring.full(), EVICT_NORMAL);
      const u32 half = ring.addr() + LEFT_BYTES + h * half_bytes;
      if constexpr (K::BY_COLUMNS) {
#pragma unroll
        for (int q = 0; q < HALF_COLUMNS / 64; ++q) tma_multicast(half + q * WEIGHT_PANEL, right, row + 64 * q, i * TILE_DEPTH, ring.full(), 3, EVICT_LAST);
      } else {
        tma_multicast(half, right, i * TILE_DEPTH, row, ring.full(), 3, EVICT_LAST);
      }
    }
    if (staged_of<K>(x) > SLABS) {
      ring.wait_empty();
      bar_arrive(ring.full());
      ring.advance();
    }
  }
}

// Stores what warpgroup g leaves in its slabs, and says so when it is there.
template <class K, class P>
TS_DEV void store_slabs(const P& p, const Team& team, u64 epoch, u32 smem, int cluster, int rank, int g) {
  const Walk& w = p.walk;
  const Flags flags = flags_of<K>(p);
  auto early = early_slabs<K>(smem, g);
  auto late = late_slabs<K>(smem, g, 0);
  auto pages = step_ring<K>(smem);
#pragma unroll 1
  for (Deal<K> deal(w, cluster, p.ctas / PAIR, rank); deal.more();) {
    const Unit x = deal.take();
    const int slot = x.rows % w.slots, mine = 2 * slot + g;
    if (!x.second && x.rows >= w.slots)  // the slot's last rows were read
      await_flags(team, CLEARED, flags.read + mine * K::OUT_BLOCKS, K::OUT_BLOCKS, ticket_of(w, epoch, x.rows) - 1, x.rows);
    fence_async_global();
    if (lane_in_warp() != 0) continue;
    const int slabs = staged_of<K>(x), y = (x.second ? x.rows : slot) * TILE_ROWS + g * ROWS;
    const auto store = [&](SlabRing& ring, int s) {
      ring.wait_full();
      tma_store(to_of<K>(p, x), (x.block * slabs + s) * 64, y, ring.addr(), x.second ? EVICT_FIRST : EVICT_NORMAL);
      store_commit();
    };
#pragma unroll 1
    for (int s = 0; s < SLABS && s < slabs; ++s, early.advance()) {
      store(early, s);
      store_wait_read<0>();
      bar_arrive(early.empty());
    }
    pages.skip(x.second ? K::SECOND_STEPS : K::FIRST_STEPS);
    if (slabs > SLABS) {
      late.data = late_slabs<K>(smem, g, pages.addr()).data;
#pragma unroll 1
      for (int s = SLABS; s < slabs; ++s, late.advance()) store(late, s);
      store_wait_read<0>();
      arrive_pair(pages.empty(), 4);
      pages.skip(1);
    }
    if (x.second) continue;
    store_wait<0>();
    fence_async_global();
    flag_release(flags.hidden + mine * K::HID_BLOCKS + x.column, ticket_of(w, epoch, x.rows));
  }
  if (lane_in_warp() == 0) store_wait<0>();
}

// Rows of the operand, a warp N at a time; a slot of the ring is free when the hidden layer of its last rows is made.
template <class K, int N, class P>
TS_DEV void make_operand(const P& p, const Team& team, u64 epoch, int first, int end, int stride) {
  const Walk& w = p.walk;
  const Flags flags = flags_of<K>(p);
#pragma unroll 1
  for (int r = N; r < OPERAND_ROWS; ++r) {  // of the first time; its first N are loaded at once
    const int row = first * OPERAND_ROWS + r;
    if (first < end * OPERAND_FLAGS && row < p.rows) K::prefetch(p, row, lane_in_warp());
  }
#pragma unroll 1
  for (int job = first; job < end * OPERAND_FLAGS; job += stride) {
    const int tile = job / OPERAND_FLAGS, slot = tile % w.slots, part = job % OPERAND_FLAGS;
    const u64 ticket = ticket_of(w, epoch, tile);
    if (tile >= w.slots) await_flags(team, MIDDLE, flags.hidden + slot * 2 * K::HID_BLOCKS, 2 * K::HID_BLOCKS, ticket - 1, tile);
#pragma unroll
    for (int r = 0; r < OPERAND_ROWS; ++r) {  // of the next time
      const int row = (job + stride) * OPERAND_ROWS + r;
      if (row < p.rows) K::prefetch(p, row, lane_in_warp());
    }
#pragma unroll 1
    for (int r = 0; r < OPERAND_ROWS; r += N) {
      const int row = tile * TILE_ROWS + part * OPERAND_ROWS + r;
      const u64 at = slot * TILE_ROWS + part * OPERAND_ROWS + r;
      const RowsInMemory to = {(u16*)p.operand_data + at * K::INNER, K::INNER};
      if (row < p.rows) K::template before<N>(p, to, row, 0, lane_in_warp());
    }
    sync_warp();
    if (lane_in_warp() == 0) {
      fence_async_global();
      flag_release(flags.operand + slot * OPERAND_FLAGS + part, ticket);
    }
  }
}

// ---- consumers
// What an epilogue reads of a tile's columns is on its way while the tile is multiplied: lane l of each warp has columns
// 64 q + 2 l and the next, and asks the other lanes for its own.
constexpr int COLUMN_PARTS = TILE_COLUMNS / 64;
template <class K>
constexpr int COLUMN_WORDS = K::HIDDEN_WORDS > K::RESULT_WORDS ? K::HIDDEN_WORDS : K::RESULT_WORDS;
template <class K>
struct ColumnWords : Registers<u32, COLUMN_PARTS * COLUMN_WORDS<K> + 1> {};
template <class K, class P>
TS_DEV void load_columns(const P& p, ColumnWords<K>& columns, const Unit& x) {
  const int wide = 64 * slabs_of<K>(x);
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int q = 0; q < COLUMN_PARTS; ++q) {
      const int c = x.block * wide + (64 * q) % wide + 2 * (int)(t & 31);
      u32 w[COLUMN_WORDS<K> + 1];
      if constexpr (K::FIRSTS > 0)
        if (!x.second) K::hidden_words(p, c, w);
      if (x.second) K::result_words(p, x.last, c, w);
#pragma unroll
      for (int n = 0; n < COLUMN_WORDS<K>; ++n) TS_REG(columns, q * COLUMN_WORDS<K> + n) = w[n];
    }
  }
  pin(columns);
}

template <class K>
constexpr int HIDDEN_SLABS = TILE_BLOCKS / 8 / K::FIRSTS;
template <class K>
constexpr int RESULT_SLABS = K::SECOND_COLUMNS / 64 / K::PRODUCTS;

// Where a warpgroup leaves its tiles, slab by slab.
template <class K>
struct Slabs {
  StepRing<K>& ring;
  SlabRing early, late;
  u32 smem;
  int g;
  TS_DEV Slabs(StepRing<K>& ring, u32 smem, int g)
      : ring(ring), early(early_slabs<K>(smem, g)), late(late_slabs<K>(smem, g, 0)), smem(smem), g(g) {}
  TS_DEV u32 open(int s) {
    if (s < SLABS) {
      early.wait_empty();
      return early.addr();
    }
    if (s == SLABS) {
      late.data = late_slabs<K>(smem, g, ring.take()).data;
      ring.advance();
      ring.next_behind();  // the page is given back by who stores
    }
    return late.addr();
  }
  TS_DEV void close(int s) {
    SlabRing& slabs = s < SLABS ? early : late;
    fence_async_shared();
    group_arrive(slabs.full());
    slabs.advance();
  }
};
// What is read beside a result: words of one slab, each loaded anew, for the next slab, as soon as it was used.
template <class K>
struct Beside : Registers<u32, 8 * 2 * K::BESIDE_WORDS + 1> {};
template <class K, class P>
TS_DEV void load_beside(const P& p, u32* w, const Unit& x, int g, u32 t, int block, int j) {
  const int row = x.rows * TILE_ROWS + g * ROWS + row_of(t, j);
  K::beside_words(p, row < p.rows ? row : p.rows - 1, x.block * 64 * RESULT_SLABS<K> + col_of(t, block), w);
}
template <class K, class P>
TS_DEV void first_beside(const P& p, Beside<K>& beside, const Unit& x, int g) {
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
#pragma unroll
    for (int i = 0; i < 16; ++i) load_beside<K>(p, &TS_REG(beside, i * K::BESIDE_WORDS), x, g, t, i / 2, i % 2);
  }
  pin(beside);
}
// Two columns of a row of a result that leaves from registers: of fp32, so that four lanes write 32 bytes.
template <class K, class P>
TS_DEV void store_pair(const P& p, const Unit& x, int row, int column, const float (&v)[2]) {
  if constexpr (K::DIRECT)
    if (row < p.rows && column < K::columns_of(x.last))
      store_global((u64*)(p.results[x.last] + (u64)row * p.result_strides[x.last] + column), (u64)bits_of(v[1]) << 32 | bits_of(v[0]));
}
// Slab s of a tile, 64 columns, rounded: of the result, or of the hidden layer.
template <class K, bool SECOND, class P, int BLOCKS>
TS_DEV void leave_slab(const P& p, const Fragment<BLOCKS>& acc, Slabs<K>& slabs, const ColumnWords<K>& columns, Beside<K>& beside,
                       const Unit& x, int g, int s) {
  constexpr bool STAGED = !(SECOND && K::DIRECT);
  u32 slab = 0;
  if constexpr (STAGED) slab = slabs.open(s);
  TS_PASS
  TS_LANES {
    const u32 t = TS_PASS_LANE;
    u32 made[2][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      u32 w[COLUMN_WORDS<K> + 1];
#pragma unroll
      for (int n = 0; n < (SECOND ? K::RESULT_WORDS : K::HIDDEN_WORDS); ++n) w[n] = TS_REG_OF(columns, s * COLUMN_WORDS<K> + n, 4 * i + (t & 3));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto sum = [&](int block, int e) { return TS_REG(acc, 4 * (block + i) + 2 * j + e); };
        float both[2];
        if constexpr (SECOND) {
          u32* const words = &TS_REG(beside, (2 * i + j) * K::BESIDE_WORDS);
          float r[2][K::LOADS + 1], y[2][K::PRODUCTS];
#pragma unroll
          for (int n = 0; n < K::PRODUCTS; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) y[e][n] = sum(8 * (n * RESULT_SLABS<K> + s), e);
          K::beside_values(words, r);
          if (K::LOADS > 0 && s + 1 < RESULT_SLABS<K>) load_beside<K>(p, words, x, g, t, 8 * s + 8 + i, j);
          K::after(w, y, r, both);
          if constexpr (STAGED)
            made[i & 1][j] = K::Result::pack(both[0], both[1]);
          else
            store_pair<K>(p, x, x.rows * TILE_ROWS + g * ROWS + row_of(t, j), x.block * 64 * RESULT_SLABS<K> + col_of(t, 8 * s + i), both);
        } else {
          float sums[2][K::FIRSTS];
#pragma unroll
          for (int f = 0; f < K::FIRSTS; ++f)
#pragma unroll
            for (int e = 0; e < 2; ++e) sums[e][f] = sum(8 * (f * HIDDEN_SLABS<K> + s), e);
          K::middle(w, sums, both);
          made[i & 1][j] = K::T::pack(both[0], both[1]);
        }
      }
      if (STAGED && (i & 1)) sts_blocks(slab, t, i - 1, made);
    }
  }
  if (SECOND) pin(beside);
  if constexpr (STAGED) slabs.close(s);
}

// A tile's sums; its first page begins them.
template <class K, int BLOCKS>
TS_DEV void sum_tile(Fragment<BLOCKS>& acc, StepRing<K>& ring, u32 mine, int steps) {
  const auto left = [&] { return (ring.addr() + mine) >> 4; };
  const auto right = [&] { return (ring.addr() + LEFT_BYTES) >> 4; };
  ring.wait_full();
  mma_fence();
  multiply<typename K::T, TILE_DEPTH, ROWS, false, true, K::BY_COLUMNS>(acc, left(), right(), WEIGHT_PANEL / 16);
  mma_commit();
  ring.advance();
  sum_pages(ring, 1, steps, [&](int) {
    mma_fence();
    multiply<typename K::T, TILE_DEPTH, ROWS, false, false, K::BY_COLUMNS>(acc, left(), right(), WEIGHT_PANEL / 16);
  });
}

// One unit, of BLOCKS times eight columns: of the FIRST product, of the SECOND, or of either, as it says itself.
template <class K, int BLOCKS, bool FIRST, bool SECOND, class P>
TS_DEV void make_unit(const P& p, StepRing<K>& ring, Slabs<K>& slabs, u64 epoch, const Unit& x, int g) {
  Fragment<BLOCKS> acc;
  ColumnWords<K> columns;
  Beside<K> beside;
  load_columns<K>(p, columns, x);
  const bool second = SECOND && (!FIRST || x.second);
  const int steps = second ? K::SECOND_STEPS : K::FIRST_STEPS;
  sum_tile<K>(acc, ring, (u32)g * CHUNK_BYTES, steps);
  if (K::LOADS > 0 && second) first_beside<K>(p, beside, x, g);
  mma_wait<0>();
  pin(acc);  // or what reads them moves in front of the wait (C7514)
  ring.release();
  if (second) {
    // Its bulk loads have completed (mbarriers said so): a relaxed store cannot overtake those waits.
    u64* const read = flags_of<K>(p).read + (x.rows % p.walk.slots * 2 + g) * K::OUT_BLOCKS + x.column;
    if (K::FIRSTS > 0 && group_leader()) flag_relaxed(read, ticket_of(p.walk, epoch, x.rows));
    if constexpr (SECOND) {
#pragma unroll
      for (int s = 0; s < RESULT_SLABS<K>; ++s) {
        if (K::DIRECT && 64 * (x.block * RESULT_SLABS<K> + s) >= K::columns_of(x.last)) break;
        leave_slab<K, true>(p, acc, slabs, columns, beside, x, g, s);
      }
    }
  } else if constexpr (K::FIRSTS > 0 && FIRST) {
#pragma unroll
    for (int s = 0; s < HIDDEN_SLABS<K>; ++s) leave_slab<K, false>(p, acc, slabs, columns, beside, x, g, s);
  }
}

template <class K, class P>
TS_DEV void consume_tiles(const P& p, u64 epoch, u32 smem, int cluster, int rank, int g) {
  constexpr int SECOND_BLOCKS = K::SECOND_COLUMNS / 8;
  auto ring = step_ring<K>(smem);
  Slabs<K> slabs(ring, smem, g);
#pragma unroll 1
  for (Deal<K> deal(p.walk, cluster, p.ctas / PAIR, rank); deal.more();) {
    const Unit x = deal.take();
    if constexpr (SECOND_BLOCKS == TILE_BLOCKS) {
      make_unit<K, TILE_BLOCKS, true, true>(p, ring, slabs, epoch, x, g);
    } else if (x.second) {
      make_unit<K, SECOND_BLOCKS, false, true>(p, ring, slabs, epoch, x, g);
    } else {
      make_unit<K, TILE_BLOCKS, true, false>(p, ring, slabs, epoch, x, g);
    }
  }
}

template <class K, class P>
TS_DEV void run_tiled_block(const P& p, u32 smem) {
  const int warp = warp_index(), group = warp >> 2;
  const int cta = cta_index(), rank = (int)cluster_rank(), cluster = cta / PAIR;
  const Team team = {p.flags, p.dump, p.limit_ns, cta, p.ctas};
  const u64 epoch = flag_acquire(p.flags + cta);
  if (cta_leader()) init_tiled<K>(smem);
  cluster_sync();
  if (group == 2) {
    registers_dec<LOADER_REGISTERS>();
    const int role = warp & 3;
    if (role == 0)
      load_steps<K>(p, team, epoch, smem, cluster, rank);
    else if (role < 3)
      store_slabs<K>(p, team, epoch, smem, cluster, rank, role - 1);
    else if constexpr (K::BEFORE)
      make_operand<K, K::ROWS_BESIDE>(p, team, epoch, p.walk.early * OPERAND_FLAGS + cta, tiles_of<K>(p.walk), p.ctas);
  } else {
    registers_inc<CONSUMER_REGISTERS>();
    const int maker = cta * MAKERS + warp * 32 / WARP_MEMBERS;
    if constexpr (K::BEFORE) make_operand<K, K::ROWS_EARLY>(p, team, epoch, maker, p.walk.early, p.ctas * MAKERS);
    consume_tiles<K>(p, epoch, smem, cluster, rank, group);
  }
  sync_warp();
  cluster_sync();  // nothing comes to this CTA any more
  if (cta_leader()) flag_relaxed(p.flags + cta, ticket_of(p.walk, epoch, tiles_of<K>(p.walk) - 1));
}

}  // namespace ts
