// What a decode step (step.cuh) consists of: the table of its stages, words and how they are waited for, who has which tiles.
#pragma once
#include "lanes.cuh"
#include "math.cuh"

using Element = ts::bf16;

constexpr int LANES = 32, THREADS = WARPS * LANES;  // that multiply; one more warp loads weights
constexpr int TILE = 8, DEPTH = 32;                 // rows of a product that a CTA has at once; columns that a warp multiplies at once
constexpr int QUERY = HEADS * FEATURES, KEYS = KEY_HEADS * FEATURES, QKV = QUERY + 2 * KEYS;
constexpr int GROUP = HEADS / KEY_HEADS, OF_HEAD = (GROUP + 2) * FEATURES;  // queries, key, value of a head of keys
constexpr int AT_ONCE = BATCH * 16 <= THREADS && WARPS % 4 == 0 ? 4 : BATCH * 8 <= THREADS && WARPS % 2 == 0 ? 2 : 1;  // threads that add
constexpr int EIGHTS = (BATCH + 7) / 8;                                      // of sequences
constexpr int UNDER_WAY = EIGHTS == 2 ? 8 : 4;                               // groups of four words of a lane
constexpr int CHAINS = EIGHTS == 1 ? 2 : 1;                                  // of products that wait for each other
enum { PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD };                          // stages: five of a layer, and one
enum { NO_POSITION = 16 };                                                   // in a record: the index is not one of the cache
// ---- the table of stages: what each product has
TS_DEV constexpr int rows(int stage) { return stage == PROJECT ? QKV : stage == GATE ? HIDDEN : stage == HEAD ? VOCABULARY : WIDTH; }
TS_DEV constexpr int columns(int stage) { return stage == OUTPUT ? QUERY : stage == DOWN ? HIDDEN : WIDTH; }
TS_DEV constexpr bool is_normed(int stage) { return stage == PROJECT || stage == GATE || stage == HEAD; }
TS_DEV constexpr bool is_turned(int stage) { return TURNED && stage != HEAD; }  // weights [inputs, outputs]
TS_DEV constexpr bool is_biased(int stage) { return BIASED >> stage & 1; }
TS_DEV constexpr bool reads_row(int stage) { return stage == PROJECT || (PARALLEL && stage == GATE); }  // what goes into the layer
TS_DEV constexpr int halves(int stage) { return GATED && stage == GATE ? 2 : 1; }
// Columns of a warp's piece: each warp has as many pieces of a row, one unless it were too large.
TS_DEV constexpr int over(int n, int by) { return (n + by - 1) / by; }
TS_DEV constexpr int chunk(int stage) { return over(columns(stage), WARPS * DEPTH * over(columns(stage), WARPS * CHUNK)) * DEPTH; }
TS_DEV constexpr int chunks(int stage) { return over(columns(stage), chunk(stage)); }
// A slot of the ring has a piece of every warp: eight rows of so many columns, of which 16 bytes a row meet no bank twice.
TS_DEV constexpr int segments(int stage) { return over(chunks(stage), WARPS); }
TS_DEV constexpr int wide(int stage) { return columns(stage) < WARPS * chunk(stage) ? columns(stage) : WARPS * chunk(stage); }
TS_DEV constexpr int pitch(int stage) { return wide(stage) * 2 + 16; }
// Words of a buffer. There are two, of even and of odd layers. A word is two values of a sequence's row, or one of PROJECTED; of
// SUMS one is for eight columns of a share, so that lanes read words of their own.
constexpr int ROW = 0, PROJECTED = ROW + BATCH * WIDTH / 2, ATTENDED = PROJECTED + BATCH * QKV,
              SUMS = ATTENDED + SPLITS * BATCH * QUERY / 2, MIDDLE = SUMS + SPLITS * BATCH * QUERY / 8,
              GATED_ROW = MIDDLE + BATCH * WIDTH / 2;
TS_DEV constexpr int input(int stage) {
  return stage == OUTPUT ? ATTENDED : stage == GATE && !PARALLEL ? MIDDLE : stage == DOWN ? GATED_ROW : ROW;
}
// Shared memory: the ring; attention's parts; warps' sums of tiles; parts of norms; limits of sequences; barriers, which say
// that a slot is full and that it is free.
constexpr u32 SUMS_OF_TILE = 2 * WARPS * BATCH * TILE * 4;
constexpr u32 ATTENTION_AT = SLOTS * SLOT, SUMS_AT = ATTENTION_AT + ATTENTION, MOMENTS = SUMS_AT + BUFFERS * SUMS_OF_TILE,
              LIMITS = MOMENTS + 2 * chunks(PROJECT) * BATCH * 8, FULL = LIMITS + BATCH * 8, FREE = FULL + SLOTS * 8,
              LIMITS_THERE = FREE + SLOTS * 8;
constexpr int OF_SLOT = SLOT / (FEATURES * 4) / 8 * 8;  // positions of the cache, keys and then values
static_assert(GATED_ROW + BATCH * HIDDEN / 2 == WORDS && LIMITS_THERE + 8 == SHARED_BYTES);
static_assert(TILE * pitch(DOWN) <= SLOT && TILE * pitch(PROJECT) <= SLOT && TILE * pitch(OUTPUT) <= SLOT && SLOT % 128 == 0);
static_assert(FEATURES % 64 == 0 && FEATURES <= 256 && GROUP <= 8 && BATCH * 4 * AT_ONCE <= THREADS);
static_assert(WIDTH % DEPTH == 0 && HIDDEN % DEPTH == 0);
constexpr float LOG2_E = 1.44269504f, NOTHING = -3.0e38f;  // below every score

// Where word i of a row lies: of 16 columns, each lane's first word and its second, which it reads together.
TS_DEV int spot(int i) { return (i & ~7) | (i & 3) << 1 | (i >> 2 & 1); }
TS_DEV u32 tag_of(u64 v) { return (u32)(v >> 32); }
TS_DEV float value_of(u64 v) { return ts::float_of((u32)v); }
TS_DEV void store_word(u64* p, u32 bits, u32 tag) { lanes::post(p, (u64)tag << 32 | bits); }
TS_DEV void put_float(u32 at, float v) { lanes::put32(at, ts::bits_of(v)); }
TS_DEV float get_float(u32 at) { return ts::float_of(lanes::get32(at)); }
TS_DEV float over_lanes(float v) {
#pragma unroll
  for (int far = 16; far; far >>= 1) v += lanes::across(v, far);
  return v;
}
TS_DEV float single(const char* of, int i) { return Element::low(lanes::load16(of + i * 2ll)); }

template <int A, int B, int C, class Do>
TS_DEV void each(Do what) {
#pragma unroll
  for (int a = 0; a < A; ++a)
#pragma unroll
    for (int b = 0; b < B; ++b)
#pragma unroll
      for (int c = 0; c < C; ++c) what(a, b, c);
}

struct Pair {
  float a, b;
  TS_DEV Pair operator+(const Pair& other) const { return {a + other.a, b + other.b}; }
  TS_DEV Pair operator*(float by) const { return {a * by, b * by}; }
};
TS_DEV Pair both(const char* of, long long i) {
  u32 w[1];
  lanes::load_words<4>(of + i * 2, w);
  return {Element::low(w[0]), Element::high(w[0])};
}
TS_DEV Pair get_pair(u32 at) {
  u32 w[2];
  lanes::get_words<8>(at, w);
  return {ts::float_of(w[0]), ts::float_of(w[1])};
}

// Who waits for what, for the record.
struct Wanted {
  u64* record;
  u32 tag;
  int stage, layer;
};
// Somebody has waited for too long: the first word that is missing is told, or the last one, which has come since.
TS_APART void give_up(Wanted w, const u64* from, int count) {
  int i = 0;
  while (i + 1 < count && tag_of(lanes::peek(from + i)) == w.tag) ++i;
  lanes::give_up(w.record, w.stage, w.layer << 16 | lanes::block(), i, tag_of(lanes::peek(from + i)));
}
[[noreturn]] TS_DEV void search(Wanted w, const u64* from, int count) {
  give_up(w, from, count);
  lanes::stop();
}
// How long something was tried.
struct Patience {
  u64 start = 0;
  u32 tries = 0;
  TS_DEV bool is_over() {
    lanes::rest();
    if (++tries % lanes::BETWEEN_CLOCKS) return false;
    const u64 now = lanes::now_ns();
    if (start == 0) start = now;
    return now - start > TIMEOUT;
  }
};
// A warp goes on together, or reads all again: lanes that went on alone would do alone what comes behind.
TS_DEV bool all_right(u32 wrong) { return lanes::vote(wrong != 0) == 0; }
// Words that have come are not read again: what everybody polls slows down all that is on its way.
TS_DEV u64 missing(u32 tag) { return (u64)~tag << 32; }
TS_DEV u32 is_wrong(u32 tag, u64 a, u64 b) { return (tag_of(a) ^ tag) | (tag_of(b) ^ tag); }
// COUNT words of a lane, a warp's apart.
template <int COUNT>
TS_DEV void waited(u64 (&v)[COUNT], const u64* from, const Wanted& w) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) v[j] = missing(w.tag);
  for (Patience patience;;) {
    u32 wrong = 0;
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
      if (is_wrong(w.tag, v[j], v[j])) v[j] = lanes::peek(from + j * LANES);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) wrong |= is_wrong(w.tag, v[j], v[j]);
    if (all_right(wrong)) return;
    if (patience.is_over()) search(w, from, (COUNT - 1) * LANES + 1);
  }
}

// Of attention's work: a head of keys, a sequence, a share of the positions from `start` on.
struct Share {
  int head, sequence, share, each, start, end;
  long long row;  // of the cache
};

// Who has which tiles of a product's rows, and what of attention.
struct Tiles {
  const int block, grid;
  // CTAs that have the rows of the same heads of keys, and attend to them.
  const int teams, members, team, member, heads, items;
  TS_DEV Tiles()
      : block(lanes::block()),
        grid(lanes::blocks()),
        teams(KEY_HEADS < grid ? KEY_HEADS : grid),
        members(grid / teams),
        team(block % teams),
        member(block / teams),
        heads(member < members ? (KEY_HEADS - team + teams - 1) / teams : 0),
        items(heads * BATCH * SPLITS) {}
  // Those of this CTA: of its heads, or spread over the grid; gate's from its other end on.
  TS_DEV int first_tile(int stage) const { return stage == PROJECT ? member : stage == GATE ? grid - 1 - block : is_paired(stage) ? 2 * block : block; }
  TS_DEV int apart(int stage) const { return is_paired(stage) ? 1 : stage == PROJECT ? members : grid; }  // of two at once
  TS_DEV int round(int stage) const { return at_once(stage) * (stage == PROJECT ? members : grid); }
  TS_DEV int tiles(int stage) const { return stage == PROJECT ? heads * (OF_HEAD / TILE) : over(rows(stage), TILE); }
  // A tile of QKV: its head of keys, and its first row among those of this head.
  TS_DEV int head_of(int tile) const { return team + teams * (tile / (OF_HEAD / TILE)); }
  TS_DEV static int within(int tile) { return tile % (OF_HEAD / TILE) * TILE; }
  TS_DEV Share share_of(u32 base, int item) const {
    Share s = {team + teams * (item / (BATCH * SPLITS)), item / SPLITS % BATCH, item % SPLITS};
    const int limit = (int)lanes::get32(base + LIMITS + s.sequence * 4);
    s.each = (limit + SPLITS - 1) / SPLITS, s.start = s.share * s.each, s.end = s.start + s.each < limit ? s.start + s.each : limit;
    s.row = ((long long)s.sequence * KEY_HEADS + s.head) * POSITIONS;
    return s;
  }
  TS_DEV static constexpr bool is_kept(int stage) { return chunks(stage) <= WARPS; }
  // Neighbours at once: half as many CTAs then read all values.
  TS_DEV static constexpr bool is_paired(int stage) { return stage == OUTPUT || stage == DOWN; }
  // Tiles whose sums warps put together at once: fewer waits for each other, and fewer gathers where values are not kept.
  TS_DEV static constexpr int at_once(int stage) { return halves(stage) > 1 ? 1 : 2; }
  // The same of three parts that lie apart, and the row there; or of one, in which a head's rows are together.
  TS_DEV const char* of_three(int tile, const char* query, const char* key, const char* value, int& row) const {
    const int head = head_of(tile), first = within(tile);
    if (BY_HEADS) return row = head * OF_HEAD + first, query;
    row = first < GROUP * FEATURES ? head * (GROUP * FEATURES) + first : head * FEATURES + first % FEATURES;
    return first < GROUP * FEATURES ? query : first < (GROUP + 1) * FEATURES ? key : value;
  }
};
