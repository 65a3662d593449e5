// Products of pairs of vectors: each sample has VECTORS rows of FEATURES elements, looked up in tables or given, and
// wants the products of PAIRS pairs of them (DLRM's interaction, Naumov et al. 2019, section 2.1.3).
//
// A warp has a sample. Its lanes copy the rows into shared memory, 16 bytes a lane; products of rows with rows are
// m16n8k16, the lower triangle of blocks alone; what is wanted of them is picked by the pairs and written 16 bytes a lane.
// Warps share nothing but the table of pairs: while one multiplies, the others' rows are on their way.
//
// Compiled forward or BACKWARD, for DTYPE, VECTORS, FEATURES, PAIRS, HEAD (the vector that results start with, or -1) and WARPS a CTA, of which RESIDENT fit an SM,
// behind Source and InteractionParams (interaction.py).
#pragma once
#include "lanes.cuh"

constexpr int LANES = 32, PIECE = 16, HALF = 8;  // bytes that a lane copies, and elements of them
constexpr int DEPTH = (FEATURES + 15) / 16 * 16, BLOCKS = (VECTORS + 15) / 16;
constexpr int PITCH = DEPTH * 2 + PIECE;  // bytes from row to row: eight rows of a matrix lie in different banks
constexpr int SQUARE = BLOCKS * 16 + 8;   // elements from row to row of products, for the same reason
constexpr int ROWS_BYTES = VECTORS * PITCH, SQUARE_BYTES = BLOCKS * 16 * SQUARE * 2;
constexpr int PIECES = DEPTH / HALF, HEAD_PIECES = HEAD < 0 ? 0 : FEATURES / HALF;
constexpr int TABLE_ENTRIES = (PAIRS + HALF - 1) / HALF * HALF, NAMES = (VECTORS + LANES - 1) / LANES;
constexpr int WIDTH = HEAD_PIECES * HALF + TABLE_ENTRIES;  // elements of a row of results: a multiple of 16 bytes
static_assert(FEATURES % HALF == 0 && VECTORS > 1 && VECTORS <= 64 && PAIRS > 0 && PAIRS <= 4096);

using Element = ts::DTYPE;

// The lower, then the higher vector of a pair. Below zero they count from the end.
TS_DEV void read_pair(const InteractionParams& p, int k, u32& low, u32& high) {
  long long at[2] = {lanes::load_index(p.first, k, p.wide), lanes::load_index(p.second, k, p.wide)};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const long long found = at[j];
    if (found < 0) at[j] += VECTORS;
    if (at[j] < 0 || at[j] >= VECTORS) lanes::give_up(p.record, VECTORS, k, VECTORS, found);
  }
  low = (u32)(at[0] < at[1] ? at[0] : at[1]);
  high = (u32)(at[0] < at[1] ? at[1] : at[0]);
}

// What the lanes of a warp know of a sample's rows: of vectors `lane` and `lane` + 32.
struct Names {
  long long at[NAMES];
  TS_DEV void read(const InteractionParams& p, int sample) {
#pragma unroll
    for (int n = 0; n < NAMES; ++n) {
      const int v = n * LANES + lanes::lane();
      at[n] = sample;
      if (v < VECTORS && sample < p.batch && p.sources[v].index != nullptr)
        at[n] = lanes::load_index(p.sources[v].index, sample, p.sources[v].wide);
    }
  }
};

// Begin to copy a sample's rows, zeros behind each to a depth of whole products.
TS_DEV void copy_rows(const InteractionParams& p, const Names& names, int sample, u32 to) {
  u64 from[NAMES];
#pragma unroll
  for (int n = 0; n < NAMES; ++n) {
    const int v = n * LANES + lanes::lane();
    from[n] = 0;
    if (v >= VECTORS) continue;
    if ((u64)names.at[n] >= (u64)p.sources[v].count) lanes::give_up(p.record, v, sample, p.sources[v].count, names.at[n]);
    from[n] = (u64)p.sources[v].rows + (u64)names.at[n] * (u64)p.sources[v].stride;
  }
#pragma unroll 4
  for (int first = 0; first < VECTORS * PIECES; first += LANES) {
    const int item = first + lanes::lane(), v = item / PIECES, piece = item % PIECES;
    u64 row = lanes::of_lane(from[0], v % LANES);
    if constexpr (NAMES > 1) {
      const u64 other = lanes::of_lane(from[NAMES - 1], v % LANES);
      if (v >= LANES) row = other;
    }
    const bool inside = piece * HALF < FEATURES;
    if (v < VECTORS) lanes::copy128(to + v * PITCH + piece * PIECE, (const char*)row + (inside ? piece * PIECE : 0), inside ? PIECE : 0);
  }
}

#if !BACKWARD

// Where in a square of products each of the wanted ones is, in the order of results.
TS_DEV void write_places(const InteractionParams& p, u32 table) {
  for (int k = lanes::thread(); k < TABLE_ENTRIES; k += WARPS * LANES) {
    u32 low = 0, high = 0;
    if (k < PAIRS) read_pair(p, k, low, high);
    lanes::put16(table + 2 * k, high * SQUARE + low);
  }
}

// All products of the lower triangle of blocks, in the place of the rows. Both operands are rows: one fragment serves as
// left and as right operand. Rows that a last block lacks are the last row again: nobody picks their products.
TS_DEV void multiply_rows(u32 rows) {
  const int lane = lanes::lane();
  float sums[BLOCKS * (BLOCKS + 1) / 2][2][4] = {};
  u32 at[BLOCKS];
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    const int v = i * 16 + lane % 16;
    at[i] = rows + (u32)(v < VECTORS ? v : VECTORS - 1) * PITCH + lane / 16 * PIECE;
  }
#pragma unroll
  for (int depth = 0; depth < DEPTH; depth += 16) {
    u32 part[BLOCKS][4];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) lanes::matrices(part[i], at[i] + depth * 2);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int j = 0; j <= i; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) lanes::product<Element>(sums[i * (i + 1) / 2 + j][h], part[i], part[j][h], part[j][2 + h]);
  }
  lanes::together();  // everybody has read the rows
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
    for (int j = 0; j <= i; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float(&s)[4] = sums[i * (i + 1) / 2 + j][h];
        const u32 to = rows + ((i * 16 + lane / 4) * SQUARE + j * 16 + h * 8 + lane % 4 * 2) * 2;
        lanes::put32(to, Element::pack(s[0], s[1]));
        lanes::put32(to + 8 * SQUARE * 2, Element::pack(s[2], s[3]));
      }
  lanes::together();
}

TS_DEV void write_head(u32 rows, char* to) {
  for (int piece = lanes::lane(); piece < HEAD_PIECES; piece += LANES) {
    u32 words[4];
    lanes::get128(rows + HEAD * PITCH + piece * PIECE, words);
    lanes::store128(to + piece * PIECE, words);
  }
}

TS_DEV void write_products(u32 table, u32 square, char* to) {
  for (int piece = lanes::lane(); piece < TABLE_ENTRIES / HALF; piece += LANES) {
    u32 places[4], words[4];
    lanes::get128(table + piece * PIECE, places);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 low = lanes::get16(square + (places[w] & 0xffffu) * 2), high = lanes::get16(square + (places[w] >> 16) * 2);
      if (piece * HALF + 2 * w >= PAIRS) low = 0;
      if (piece * HALF + 2 * w + 1 >= PAIRS) high = 0;
      words[w] = low | high << 16;
    }
    lanes::store128(to + (HEAD_PIECES + piece) * PIECE, words);
  }
}

TS_LANES_KERNEL(WARPS * 32, RESIDENT) tilestream_interaction(const TS_PARAM InteractionParams p) {
  constexpr u32 SLOT = ROWS_BYTES > SQUARE_BYTES ? ROWS_BYTES : SQUARE_BYTES;
  TS_LANES_SHARED(base);
  const u32 rows = base + TABLE_ENTRIES * 2 + lanes::warp() * SLOT;
  write_places(p, base);
  lanes::all_together();
  const int step = lanes::blocks() * WARPS;
  int sample = lanes::block() * WARPS + lanes::warp();
  Names names;
  names.read(p, sample);
  for (; sample < p.batch; sample += step) {
    copy_rows(p, names, sample, rows);
    names.read(p, sample + step);
    lanes::copies_here();
    lanes::together();
    char* const to = p.out + (long long)sample * (WIDTH * 2);
    write_head(rows, to);
    multiply_rows(rows);
    write_products(base, rows, to);
    lanes::together();
  }
}

#else  // dZ = (G + G.T) Z, with G the gradients of the products where the pairs say

constexpr u32 NO_OTHER = 0x7fff, NOT_FIRST = 0x8000;

TS_DEV bool is_first(u32 table, u32 first_of, int k) {
  const u32 place = lanes::get32(table + 4 * k) & 0xffffu, entry = place / SQUARE * VECTORS + place % SQUARE;
  return lanes::get32(first_of + 4 * entry) == (u32)k;
}

// The table: of each pair its two places in a square (32 bits); then which pair after it is the same one (15 bits), and
// whether one before it is. `first_of` is room for a word for each two vectors.
TS_DEV void write_scatter(const InteractionParams& p, u32 table, u32 first_of) {
  const u32 next = table + TABLE_ENTRIES * 4;
  const int thread = lanes::thread();
  for (int k = thread; k < VECTORS * VECTORS; k += WARPS * LANES) lanes::put32(first_of + 4 * k, 0xffffffffu);
  lanes::all_together();
  for (int k = thread; k < PAIRS; k += WARPS * LANES) {
    u32 low, high;
    read_pair(p, k, low, high);
    lanes::put32(table + 4 * k, (high * SQUARE + low) | (low * SQUARE + high) << 16);
    lanes::keep_smaller(first_of + 4 * (high * VECTORS + low), (u32)k);
  }
  lanes::all_together();
  for (int k = thread; k < PAIRS; k += WARPS * LANES)
    lanes::put16(next + 2 * k, NO_OTHER | (is_first(table, first_of, k) ? 0 : NOT_FIRST));
  lanes::all_together();
  for (int k = thread; k < PAIRS; k += WARPS * LANES) {
    if (is_first(table, first_of, k)) continue;
    int before = k - 1;
    while (lanes::get32(table + 4 * before) != lanes::get32(table + 4 * k)) --before;
    lanes::put16(next + 2 * before, (lanes::get16(next + 2 * before) & NOT_FIRST) | (u32)k);  // nobody else writes there
  }
  lanes::all_together();
}

// A sample's gradients into the warp's square, equal pairs added in their order; what no pair names stays zero.
TS_DEV void scatter(const InteractionParams& p, u32 table, const char* given, u32 square) {
  constexpr int AT_ONCE = 4;
  const u32 next = table + TABLE_ENTRIES * 4;
  for (int first = lanes::lane(); first < PAIRS; first += AT_ONCE * LANES) {
    u32 read[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int k = first + n * LANES;
      read[n] = k < PAIRS ? lanes::load16(given + 2 * k) : 0;
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int k = first + n * LANES;
      if (k >= PAIRS) continue;
      u32 other = lanes::get16(next + 2 * k);
      if (other & NOT_FIRST) continue;
      float sum = Element::low(read[n]);
      for (; other != NO_OTHER; other = lanes::get16(next + 2 * other) & NO_OTHER) sum += Element::low(lanes::load16(given + 2 * other));
      const u32 places = lanes::get32(table + 4 * k), low = places & 0xffffu, high = places >> 16;
      const u32 value = Element::pack(low == high ? 2 * sum : sum, 0.0f);
      lanes::put16(square + 2 * low, value);
      lanes::put16(square + 2 * high, value);
    }
  }
}

// The gradients of a sample's rows, in their place, 16 columns at a time.
TS_DEV void multiply_square(u32 square, u32 rows, u32 zeros) {
  const int lane = lanes::lane();
  u32 left[BLOCKS][BLOCKS][4], at[BLOCKS];
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    const int v = i * 16 + lane % 16;
    at[i] = (v < VECTORS ? rows + v * PITCH : zeros) + lane / 16 * PIECE;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) lanes::matrices(left[i][j], square + (v * SQUARE + j * 16) * 2 + lane / 16 * PIECE);
  }
#pragma unroll 2
  for (int column = 0; column < DEPTH; column += 16) {
    u32 part[BLOCKS][4];
    float sums[BLOCKS][2][4] = {};
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) lanes::matrices_turned(part[j], at[j] + column * 2);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) lanes::product<Element>(sums[i][h], left[i][j], part[j][2 * h], part[j][2 * h + 1]);
    lanes::together();  // everybody has read these columns
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int v = i * 16 + lane / 4;
        const u32 to = rows + v * PITCH + (column + h * 8 + lane % 4 * 2) * 2;
        if (v < VECTORS) lanes::put32(to, Element::pack(sums[i][h][0], sums[i][h][1]));
        if (v + 8 < VECTORS) lanes::put32(to + 8 * PITCH, Element::pack(sums[i][h][2], sums[i][h][3]));
      }
  }
  lanes::together();
}

TS_DEV void write_rows(const InteractionParams& p, int sample, u32 rows) {
  constexpr int WHOLE = FEATURES / HALF;
  for (int item = lanes::lane(); item < VECTORS * WHOLE; item += LANES) {
    const int v = item / WHOLE, piece = item % WHOLE;
    u32 words[4];
    lanes::get128(rows + v * PITCH + piece * PIECE, words);
    lanes::store128(p.out + (((long long)v * p.batch + sample) * WHOLE + piece) * PIECE, words);
  }
}

TS_LANES_KERNEL(WARPS * 32, RESIDENT) tilestream_interaction_backward(const TS_PARAM InteractionParams p) {
  constexpr u32 TABLE = TABLE_ENTRIES * 6, SLOT = ROWS_BYTES + SQUARE_BYTES;
  static_assert(WARPS * SLOT >= VECTORS * VECTORS * 4 && BLOCKS * 16 * SQUARE < 65536);
  TS_LANES_SHARED(base);
  const u32 zeros = base + TABLE, slots = zeros + PITCH;
  const u32 rows = slots + lanes::warp() * SLOT, square = rows + ROWS_BYTES;
  write_scatter(p, base, slots);
  for (u32 at = zeros + 4 * lanes::thread(); at < slots; at += 4 * WARPS * LANES) lanes::put32(at, 0);
  for (u32 at = square + 4 * lanes::lane(); at < square + SQUARE_BYTES; at += 4 * LANES) lanes::put32(at, 0);
  lanes::all_together();
  const int step = lanes::blocks() * WARPS;
  int sample = lanes::block() * WARPS + lanes::warp();
  Names names;
  names.read(p, sample);
  for (; sample < p.batch; sample += step) {
    copy_rows(p, names, sample, rows);
    names.read(p, sample + step);
    scatter(p, base, p.given + (long long)sample * p.given_stride, square);
    lanes::copies_here();
    lanes::together();
    multiply_square(square, rows, zeros);
    write_rows(p, sample, rows);
    lanes::together();
  }
}

#endif
