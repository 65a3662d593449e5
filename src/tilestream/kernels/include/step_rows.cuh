// Rows of a decode step (step.cuh): weights on their way, products, values of other CTAs, norms.
#pragma once
#include "lanes.cuh"
#include "math.cuh"

using Element = ts::bf16;

constexpr int LANES = 32, THREADS = WARPS * LANES;
constexpr int TILE = 8, DEPTH = 32;  // rows of a product that a CTA has at once; columns that a warp multiplies at once
constexpr int UNDER_WAY = 4;         // groups of four words of a lane
constexpr int QUERY = HEADS * FEATURES, KEYS = KEY_HEADS * FEATURES, QKV = QUERY + 2 * KEYS;
constexpr int GROUP = HEADS / KEY_HEADS, OF_HEAD = (GROUP + 2) * FEATURES;  // queries, key, value of a head of keys
constexpr int EIGHTS = (BATCH + 7) / 8, TALL = (EIGHTS + 1) / 2;             // of sequences; products of sixteen
enum { PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD };                          // stages: five of a layer, and one
enum { NO_POSITION = 16 };                                                   // in a record: the index is not one of the cache
// ---- the table of stages: what each product has
TS_DEV constexpr int rows(int stage) { return stage == PROJECT ? QKV : stage == GATE ? HIDDEN : stage == HEAD ? VOCABULARY : WIDTH; }
TS_DEV constexpr int columns(int stage) { return stage == OUTPUT ? QUERY : stage == DOWN ? HIDDEN : WIDTH; }
TS_DEV constexpr bool is_normed(int stage) { return stage == PROJECT || stage == GATE || stage == HEAD; }
TS_DEV constexpr bool is_turned(int stage) { return TURNED && stage != HEAD; }  // weights [inputs, outputs]
TS_DEV constexpr int halves(int stage) { return GATED && stage == GATE ? 2 : 1; }
// Columns of a warp's piece: each warp has as many pieces of a row, one unless it were too large.
TS_DEV constexpr int over(int n, int by) { return (n + by - 1) / by; }
TS_DEV constexpr int chunk(int stage) { return over(columns(stage), WARPS * DEPTH * over(columns(stage), WARPS * CHUNK)) * DEPTH; }
TS_DEV constexpr int chunks(int stage) { return over(columns(stage), chunk(stage)); }
// Bytes of a row of a slot: two rows together meet no bank twice.
TS_DEV constexpr int pitch(int stage) { return chunk(stage) * 2 + (chunk(stage) * 2 % 128 ? 0 : 64); }
// Words of a buffer. There are two, of even and of odd layers. A word is two values of a sequence's row, or one of PROJECTED.
constexpr int ROW = 0, PROJECTED = ROW + BATCH * WIDTH / 2, ATTENDED = PROJECTED + BATCH * QKV,
              SUMS = ATTENDED + SPLITS * BATCH * QUERY / 2, MIDDLE = SUMS + (SPLITS * BATCH * HEADS + 1) / 2 * 2,
              GATED_ROW = MIDDLE + BATCH * WIDTH / 2;
TS_DEV constexpr int input(int stage) {
  return stage == OUTPUT ? ATTENDED : stage == GATE ? MIDDLE : stage == DOWN ? GATED_ROW : ROW;
}
// Shared memory: rings; parts of sums, or attention's; parts of norms and norms; limits of sequences; barriers.
constexpr u32 SCRATCH_AT = WARPS * SLOTS * SLOT, MOMENTS = SCRATCH_AT + SCRATCH, NORMS = MOMENTS + chunks(PROJECT) * BATCH * 8,
              LIMITS = NORMS + BATCH * 8, BARRIERS = LIMITS + BATCH * 8;
static_assert(GATED_ROW + BATCH * HIDDEN / 2 == WORDS && BARRIERS + WARPS * SLOTS * 8 == SHARED_BYTES);
static_assert(TILE * pitch(DOWN) <= SLOT && TILE * pitch(PROJECT) <= SLOT && TILE * pitch(OUTPUT) <= SLOT && SLOT % 128 == 0);
static_assert(FEATURES % 64 == 0 && FEATURES <= 256 && GROUP <= 8 && GROUP + 2 <= WARPS && BATCH * 4 <= THREADS);
static_assert(WIDTH % DEPTH == 0 && HIDDEN % DEPTH == 0);
constexpr float LOG2_E = 1.44269504f, NOTHING = -3.0e38f;  // below every score

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
};
TS_DEV Pair both(const char* of, long long i) {
  u32 w[1];
  lanes::load_words<4>(of + i * 2, w);
  return {Element::low(w[0]), Element::high(w[0])};
}
TS_DEV Pair get_pair(u32 at) { return {get_float(at), get_float(at + 4)}; }

// Who waits for what, for the record.
struct Wanted {
  u64* record;
  u32 tag;
  int stage, layer;
  TS_APART void expired(int element, u32 found) const {
    lanes::give_up(record, stage, layer << 16 | lanes::block(), element, found);
  }
};
// Polls until a word has its tag; a call of its own, since nearly all others find theirs at once.
TS_APART u64 waited(const u64* at, const Wanted& w, int element) {
  const u64 start = lanes::now_ns();
  for (u32 tries = 1;; ++tries) {
    const u64 v = lanes::peek(at);
    if (tag_of(v) == w.tag) return v;
    lanes::rest();
    if (tries % 1024 == 0 && lanes::now_ns() - start > TIMEOUT) w.expired(element, tag_of(v));
  }
}
TS_DEV u64 settled(u64 v, const u64* at, const Wanted& w, int element) {
  return tag_of(v) == w.tag ? v : waited(at, w, element);
}

// Who has which tiles of a product's rows.
struct Tiles {
  const int block, grid;
  // CTAs that have the rows of the same heads of keys, and attend to them.
  const int teams, members, team, member;
  TS_DEV Tiles()
      : block(lanes::block()),
        grid(lanes::blocks()),
        teams(KEY_HEADS < grid ? KEY_HEADS : grid),
        members(grid / teams),
        team(block % teams),
        member(block / teams) {}
  TS_DEV int heads() const { return member < members ? (KEY_HEADS - team + teams - 1) / teams : 0; }
  // Those of this CTA: of its heads, or spread over the grid; gate's from its other end on.
  TS_DEV int first_tile(int stage) const { return stage == PROJECT ? member : stage == GATE ? grid - 1 - block : block; }
  TS_DEV int step(int stage) const { return stage == PROJECT ? members : grid; }
  TS_DEV int tiles(int stage) const { return stage == PROJECT ? heads() * (OF_HEAD / TILE) : over(rows(stage), TILE); }
  // A tile of QKV: its head of keys, and its first row among those of this head.
  TS_DEV int head_of(int tile) const { return team + teams * (tile / (OF_HEAD / TILE)); }
  TS_DEV static int within(int tile) { return tile % (OF_HEAD / TILE) * TILE; }
  // The same of three parts that lie apart, and the row there.
  TS_DEV const char* of_three(int tile, const char* query, const char* key, const char* value, int& row) const {
    const int head = head_of(tile), first = within(tile);
    row = first < GROUP * FEATURES ? head * (GROUP * FEATURES) + first : head * FEATURES + first % FEATURES;
    return first < GROUP * FEATURES ? query : first < (GROUP + 1) * FEATURES ? key : value;
  }
};

// The weights that a warp will want, in its ring: a piece is a tile's rows and some of their columns.
struct Ring : Tiles {
  const StepParams& p;
  const int warp, lane;
  const u32 slots, bars;
  int stage, layer, tile, at, half, asked;  // the next piece to be asked for
  TS_DEV Ring(const StepParams& p, u32 base)
      : p(p),
        warp(lanes::warp()),
        lane(lanes::lane()),
        slots(base + warp * (SLOTS * SLOT)),
        bars(base + BARRIERS + warp * (SLOTS * 8)),
        stage(PROJECT),
        layer(0),
        tile(first_tile(PROJECT)),
        at(first(PROJECT)),
        half(0),
        asked(0) {}
  TS_DEV int first(int stage) const { return (warp + 5 * stage) & (WARPS - 1); }  // piece of a tile
  TS_DEV u32 slot(int n) const { return slots + n % SLOTS * SLOT; }
  TS_DEV u32 barrier(int n) const { return bars + n % SLOTS * 8; }
  // Ask for the next piece, if there is one: of gate and up in turns. A call of its own: inlined everywhere it takes registers.
  TS_APART void ask() {
    while (tile >= tiles(stage) || at >= chunks(stage)) {
      if (stage == HEAD) return;
      if (stage == DOWN) {
        stage = ++layer < LAYERS ? PROJECT : HEAD;
      } else {
        stage += stage == PROJECT ? 2 : 1;
      }
      tile = first_tile(stage), at = first(stage);
    }
    const StepLayer& l = p.layers[stage == HEAD ? 0 : layer];
    const char* of = stage == OUTPUT ? l.output : stage == GATE ? (half ? l.up : l.gate) : stage == DOWN ? l.down : p.head;
    int row = tile * TILE;
    if (stage == PROJECT) of = of_three(tile, l.query, l.key, l.value, row);
    const long long start = at * chunk(stage), left = columns(stage) - start;
    const int count = left < chunk(stage) ? (int)left : chunk(stage);
    if (is_turned(stage)) {
      // Inputs in the order in which `piece` has them: rows 2 m + 8 a + e of 32 lie at 8 m + 2 a + e.
      const char* const from = of + (start * rows(stage) + row) * 2;
      for (int k = lane; k < count; k += LANES)
        lanes::copy128(slot(asked) + ((k & ~31) + (k >> 1 & 3) * 8 + (k >> 3 & 3) * 2 + (k & 1)) * 16, from + (long long)k * rows(stage) * 2, 16);
      lanes::copies_arrive(barrier(asked));
    } else if (lane < TILE && (stage != HEAD || row + lane < VOCABULARY)) {
      const char* const from = of + ((long long)(row + lane) * columns(stage) + start) * 2;
      lanes::ask(slot(asked) + lane * pitch(stage), from, count * 2, barrier(asked));
    } else {
      lanes::arrive(barrier(asked));
    }
    ++asked;
    half = half + 1 < halves(stage);
    if (half) return;
    at += WARPS;
    if (at >= chunks(stage)) at = first(stage), tile += step(stage);
  }
};

struct StepRows : Tiles {
  const StepParams& p;
  const u32 base;
  const int thread, warp, lane;
  u32 tag;  // of this layer's values
  int layer, position, used;  // pieces of weights
  Ring& ring;  // apart, so that the rest stays in registers

  TS_DEV StepRows(const StepParams& p, u32 base, Ring& ring)
      : p(p), base(base), thread(lanes::thread()), warp(ring.warp), lane(ring.lane), layer(0), used(0), ring(ring) {}

  // ---- products: eight rows by all sequences. Lane 4 g + a has columns 8 a .. 8 a + 7 of 32 of sequence g and of row g.
  template <int STAGE>
  using Given = u32[chunk(STAGE) / DEPTH][EIGHTS][4];
  template <int STAGE>
  TS_DEV void piece(float (&sums)[TALL][4], const Given<STAGE>& x, int count) {
    lanes::await(ring.barrier(used), used / SLOTS & 1);
    const u32 from = ring.slot(used);
#pragma unroll
    for (int k = 0; k < chunk(STAGE) / DEPTH; ++k)
      if (k * DEPTH < count) {
        u32 w[4];
        if constexpr (is_turned(STAGE)) {
          lanes::matrices_turned(w, from + (k * DEPTH + lane) * 16);
        } else {
          lanes::get128(from + lane / 4 * pitch(STAGE) + (k * DEPTH + lane % 4 * 8) * 2, w);
        }
#pragma unroll
        for (int t = 0; t < TALL; ++t)
#pragma unroll
          for (int h = 0; h < 4; h += 2) {
            const bool two = 2 * t + 1 < EIGHTS;
            const auto& low = x[k][2 * t];
            const auto& high = x[k][two ? 2 * t + 1 : 2 * t];
            const u32 a[4] = {low[h], two ? high[h] : 0, low[h + 1], two ? high[h + 1] : 0};
            lanes::product<Element>(sums[t], a, w[h], w[h + 1]);
          }
      }
    lanes::together();
    ++used;
    ring.ask();
  }
  TS_DEV int sequence(int eight) const {  // whose values this lane multiplies; the last one's instead of none
    const int s = eight * 8 + lane / 4;
    return s < BATCH ? s : BATCH - 1;
  }
  template <int STAGE>
  TS_DEV int column(int at, int k) const {
    return at * chunk(STAGE) + k * DEPTH + lane % 4 * 8;
  }

  // ---- values of other CTAs
  TS_DEV u64* words(int layer, int part) const { return p.words + (layer & 1) * (long long)WORDS + part; }
  TS_DEV Wanted wanted(int stage) const { return {p.record, tag, stage, layer}; }
  TS_DEV void delay(int stage) const {
#if DELAYS
    u32 h = (tag * 6 + stage) * 2654435761u ^ block * 2246822519u;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    if (h % 8 == 0)
      for (const u64 start = lanes::now_ns(); lanes::now_ns() - start < h % 20000;) {
      }
#endif
  }
  // What this warp multiplies with piece `at`: many words under way at once. One that is missing is waited for, then all are
  // read again. Shares of attention are put together here.
  template <int STAGE>
  TS_DEV void gather(int at, Given<STAGE>& x) const {
    constexpr int DEEP = chunk(STAGE) / DEPTH, SHARES = STAGE == OUTPUT ? SPLITS : 1, LOADS = UNDER_WAY / (SHARES * EIGHTS);
    constexpr int ONCE = LOADS < 1 ? 1 : LOADS < DEEP ? LOADS : DEEP, K = columns(STAGE);
    const u64* const from = words(layer, input(STAGE));
    const Wanted w = wanted(STAGE);
#pragma unroll
    for (int first = 0; first < DEEP; first += ONCE) {
      u64 v[ONCE][EIGHTS][SHARES][4], sums[ONCE][EIGHTS][SHARES];
      for (int missing = 0; missing >= 0;) {
        missing = -1;
        each<ONCE, EIGHTS, SHARES>([&](int b, int e, int s) {
          const int c = column<STAGE>(at, first + b), row = s * BATCH + sequence(e), i = row * (K / 2) + c / 2;
          if (first + b >= DEEP || c >= K) return;
          u64(&to)[4] = v[b][e][s];
          lanes::peek_pair(from + i, to[0], to[1]), lanes::peek_pair(from + i + 2, to[2], to[3]);
          if (SHARES > 1) sums[b][e][s] = lanes::peek(from + SUMS - ATTENDED + row * HEADS + c / FEATURES);
        });
        each<ONCE, EIGHTS, SHARES>([&](int b, int e, int s) {
          const int c = column<STAGE>(at, first + b), row = s * BATCH + sequence(e);
          if (first + b >= DEEP || c >= K) return;
#pragma unroll
          for (int j = 0; j < 4; ++j) missing = tag_of(v[b][e][s][j]) == tag ? missing : row * (K / 2) + c / 2 + j;
          if (SHARES > 1) missing = tag_of(sums[b][e][s]) == tag ? missing : SUMS - ATTENDED + row * HEADS + c / FEATURES;
        });
        if (missing >= 0) waited(from + missing, w, missing);
      }
      each<ONCE, EIGHTS, 1>([&](int b, int e, int) {
        if (first + b >= DEEP) return;
        u32(&to)[4] = x[first + b][e];
        const auto& parts = v[b][e];
        const bool is_there = column<STAGE>(at, first + b) < K;
        if constexpr (SHARES == 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) to[j] = is_there ? (u32)parts[0][j] : 0;
        } else {
          float most = NOTHING, total = 0, merged[8] = {};
#pragma unroll
          for (int s = 0; s < SHARES; ++s) most = value_of(sums[b][e][s]) > most ? value_of(sums[b][e][s]) : most;
#pragma unroll
          for (int s = 0; s < SHARES; ++s) {
            const float sum = value_of(sums[b][e][s]), weight = sum > NOTHING ? ts::ex2(sum - most) : 0.0f;
            total += weight;
#pragma unroll
            for (int j = 0; j < 8; ++j) merged[j] += weight * (j % 2 ? Element::high((u32)parts[s][j / 2]) : Element::low((u32)parts[s][j / 2]));
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) to[j] = is_there ? Element::pack(merged[2 * j] / total, merged[2 * j + 1] / total) : 0;
        }
      });
    }
  }
  template <int STAGE>
  TS_DEV void load(int at, Given<STAGE>& x) const {
    if (STAGE != PROJECT || layer > 0) return gather<STAGE>(at, x);
#pragma unroll
    for (int k = 0; k < chunk(STAGE) / DEPTH; ++k)
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) {
        const int c = column<STAGE>(at, k);
        x[k][e][0] = x[k][e][1] = x[k][e][2] = x[k][e][3] = 0;
        if (c < WIDTH) lanes::load128(p.row + (sequence(e) * (long long)WIDTH + c) * 2, x[k][e]);
      }
  }

  // ---- norms: of every piece the sum and the squares of what differs from its mean, or, of an RMSNorm, the squares
  TS_DEV float over_team(float v) const {
    v += lanes::across(v, 1);
    return v + lanes::across(v, 2);
  }
  template <int STAGE>
  TS_DEV static int length(int at) {
    const int left = columns(STAGE) - at * chunk(STAGE);
    return left < chunk(STAGE) ? left : chunk(STAGE);
  }
  template <int STAGE>
  TS_DEV void measure(int at, const Given<STAGE>& x) const {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      float sum = 0, squares = 0;
      if (LAYER_NORMS) {
#pragma unroll
        for (int k = 0; k < chunk(STAGE) / DEPTH; ++k)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum += Element::low(x[k][e][j]) + Element::high(x[k][e][j]);
        sum = over_team(sum);
      }
      const float mean = sum / (float)length<STAGE>(at);
#pragma unroll
      for (int k = 0; k < chunk(STAGE) / DEPTH; ++k)
        if (column<STAGE>(at, k) < WIDTH)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float a = Element::low(x[k][e][j]) - mean, b = Element::high(x[k][e][j]) - mean;
            squares += a * a + b * b;
          }
      squares = over_team(squares);
      const int s = e * 8 + lane / 4;
      if (lane % 4 == 0 && s < BATCH) lanes::put_pair(base + MOMENTS + (at * BATCH + s) * 8, sum, squares);
    }
  }
  // Mean and reciprocal deviation of every sequence, for all warps.
  template <int STAGE>
  TS_DEV void settle_norms() const {
    lanes::all_together();
    if (thread < BATCH) {
      float mean = 0, squares = 0;
      if (LAYER_NORMS) {
        for (int at = 0; at < chunks(STAGE); ++at) mean += get_float(base + MOMENTS + (at * BATCH + thread) * 8);
        mean *= 1.0f / WIDTH;
      }
#pragma unroll 4
      for (int at = 0; at < chunks(STAGE); ++at) {
        const Pair part = get_pair(base + MOMENTS + (at * BATCH + thread) * 8);
        const float count = (float)length<STAGE>(at), off = part.a / count - mean;
        squares += part.b + (LAYER_NORMS ? count * off * off : 0.0f);
      }
      lanes::put_pair(base + NORMS + thread * 8, mean, ts::rsqrt_(squares * (1.0f / WIDTH) + p.eps));
    }
    lanes::all_together();
  }
  template <int STAGE>
  TS_DEV void normalise(int at, Given<STAGE>& x) const {
    const StepLayer& l = p.layers[STAGE == HEAD ? 0 : layer];
    const char* const weights = STAGE == HEAD ? p.norm : STAGE == GATE ? l.middle_norm : l.norm;
    const char* const biases = STAGE == HEAD ? p.norm_bias : STAGE == GATE ? l.middle_norm_bias : l.norm_bias;
#pragma unroll
    for (int k = 0; k < chunk(STAGE) / DEPTH; ++k) {
      const int c = column<STAGE>(at, k);
      if (c >= WIDTH) continue;
      u32 w[4], added[4] = {};
      lanes::load128(weights + c * 2, w);
      if (LAYER_NORMS) lanes::load128(biases + c * 2, added);
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) {
        const Pair of = get_pair(base + NORMS + sequence(e) * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float a = (Element::low(x[k][e][j]) - of.a) * of.b, b = (Element::high(x[k][e][j]) - of.a) * of.b;
          x[k][e][j] = Element::pack(a * Element::low(w[j]) + Element::low(added[j]), b * Element::high(w[j]) + Element::high(added[j]));
        }
      }
    }
  }

  // ---- a stage: its tiles one after the other, each by all warps, whose sums are put together in one order
  struct Place {  // of two sums of a thread
    int tile, sequence, row;
  };
  TS_DEV u32 part(int half, int warp, int sequence) const { return base + SCRATCH_AT + ((half * WARPS + warp) * BATCH + sequence) * TILE * 4; }
  TS_DEV void put_parts(int half, const float (&sums)[TALL][4]) const {
#pragma unroll
    for (int n = 0; n < 2 * TALL; ++n) {
      const int s = n * 8 + lane / 4;
      if (s < BATCH) lanes::put_pair(part(half, warp, s) + lane % 4 * 8, sums[n / 2][n % 2 * 2], sums[n / 2][n % 2 * 2 + 1]);
    }
  }
  TS_DEV Pair summed(int half, int sequence, int q) const {
    Pair sum = {0, 0};
#pragma unroll 4
    for (int w = 0; w < WARPS; ++w) sum = sum + get_pair(part(half, w, sequence) + q * 8);
    return sum;
  }
  // `before` says what sums are added to, known before anything is waited for; `store` has the sums, and of the other half. A function of its own: its registers are too.
  template <int STAGE, class Before, class Store>
  TS_APART void products(Before before, Store store) {
    if (first_tile(STAGE) >= tiles(STAGE)) return;
    delay(STAGE);
    constexpr int COUNT = chunks(STAGE);
    constexpr bool KEPT = COUNT <= WARPS;  // each warp has one piece of a row: its values are loaded once
    const int first = ring.first(STAGE), q = thread % 4;
    Given<STAGE> x;
    if constexpr (is_normed(STAGE)) {
      for (int at = first; at < COUNT; at += WARPS) load<STAGE>(at, x), measure<STAGE>(at, x);
      settle_norms<STAGE>();
      if (KEPT && first < COUNT) normalise<STAGE>(first, x);
    }
    for (int tile = first_tile(STAGE); tile < tiles(STAGE); tile += step(STAGE)) {
      const Place place = {tile, thread / 4, tile * TILE + q * 2};
      const bool mine = thread < BATCH * 4;
      const Pair given = mine ? before(place) : Pair{0, 0};
      float sums[TALL][4] = {}, others[TALL][4] = {};
#pragma unroll 1
      for (int at = first; at < COUNT; at += WARPS) {
        if (!KEPT || (!is_normed(STAGE) && tile == first_tile(STAGE))) {
          load<STAGE>(at, x);
          if constexpr (is_normed(STAGE)) normalise<STAGE>(at, x);
        }
        piece<STAGE>(sums, x, length<STAGE>(at));
        if constexpr (halves(STAGE) > 1) piece<STAGE>(others, x, length<STAGE>(at));
      }
      lanes::all_together();
      put_parts(0, sums);
      if constexpr (halves(STAGE) > 1) put_parts(1, others);
      lanes::all_together();
      if (mine) store(place, given + summed(0, place.sequence, q), halves(STAGE) > 1 ? summed(1, place.sequence, q) : Pair{0, 0});
    }
  }
};
