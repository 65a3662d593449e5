// A whole decode step of one sequence as one persistent kernel: every CTA has rows of every product of every layer.
//
// A layer is five stages: QKV product; attention over shares of the cache; output projection with the residual; gate and
// up; down with the residual. A value goes from one to the next as a word of 64 bits, a tag beside it (as in NCCL's LL
// protocol): whoever reads polls the value itself, and no fence, counter or barrier of the grid is needed. A buffer is
// written again two layers later. Ten stages lie between, each of which needs all of the one before, so nobody reads it any
// more. Weights come by bulk copies into a ring of each warp in the order in which the warp will want them, stage after
// stage: they are on their way while it waits for values.
//
// A norm is applied behind its product: every CTA reads the whole row, so the sum of squares costs a few shuffles. Attention
// over a share of the cache leaves its result and the logarithm of its sum; who reads it for the output projection puts the
// shares together.
//
// Compiled for WIDTH, HIDDEN, HEADS, KEY_HEADS, FEATURES (of a head), POSITIONS (of the cache), VOCABULARY, LAYERS, SPLITS
// (of the cache), HEAD_NORMS, MASKED, WARPS (of a CTA), SLOTS (of a warp's ring), TIMEOUT (ns), DELAYS, behind StepParams (step/kernel.py).
#pragma once
#include "lanes.cuh"
#include "math.cuh"

using Element = ts::bf16;

constexpr int LANES = 32, THREADS = WARPS * LANES;
constexpr int QUERY = HEADS * FEATURES, KEYS = KEY_HEADS * FEATURES, QKV = QUERY + 2 * KEYS;
constexpr int GROUP = HEADS / KEY_HEADS, PIECE = 1024, SLOT = PIECE * 2;
enum { PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD };  // stages: five of a layer, and one
enum { NO_POSITION = 16 };                           // in a record: the index is not one of the cache
// Shared memory: rings, two staged rows, barriers, parts of sums.
constexpr u32 RINGS = WARPS * SLOTS * SLOT, BARRIERS = RINGS + 2 * STAGED * 4, PARTS = BARRIERS + WARPS * SLOTS * 8;
// Words of a buffer. There are two, of even and of odd layers.
constexpr int ROW = 0, PROJECTED = ROW + WIDTH, ATTENDED = PROJECTED + QKV, SUMS = ATTENDED + SPLITS * QUERY / 2,
              MIDDLE = SUMS + SPLITS * HEADS + (SPLITS * HEADS & 1), GATED = MIDDLE + WIDTH;
static_assert(GATED + HIDDEN == WORDS && PARTS + 2 * WARPS * 4 == SHARED_BYTES && STAGED % 8 == 0);
static_assert(FEATURES % 64 == 0 && FEATURES <= 256 && GROUP <= 8 && GROUP + 2 <= WARPS && WIDTH % 8 == 0 && HIDDEN % 8 == 0);
constexpr float LOG2_E = 1.44269504f, NOTHING = -3.0e38f;  // below every score

TS_DEV u32 tag_of(u64 v) { return (u32)(v >> 32); }
TS_DEV float value_of(u64 v) { return ts::float_of((u32)v); }
TS_DEV void store_word(u64* p, u32 bits, u32 tag) { lanes::post(p, (u64)tag << 32 | bits); }
TS_DEV void put_float(u32 at, float v) { lanes::put32(at, ts::bits_of(v)); }
TS_DEV float get_float(u32 at) { return ts::float_of(lanes::get32(at)); }
// Where element i of a staged row lies: halves of 8 apart, so that lanes that read 16 bytes each meet no bank twice.
// Elements 2k and 2k + 1 are neighbours.
TS_DEV int placed(int i) { return (i >> 3 << 2 | (i & 3)) + (i >> 2 & 1) * (STAGED / 2); }
TS_DEV float over_lanes(float v) {
#pragma unroll
  for (int far = 16; far; far >>= 1) v += lanes::across(v, far);
  return v;
}
TS_DEV float single(const char* of, int i) { return Element::low(lanes::load16(of + i * 2)); }
TS_DEV void both(const char* of, int i, float& a, float& b) {
  u32 w[1];
  lanes::load_words<4>(of + i * 2, w);
  a = Element::low(w[0]), b = Element::high(w[0]);
}

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

struct Step {
  const StepParams& p;
  const u32 base;
  const int thread, warp, lane, block, grid;
  u32 tag;  // of this layer's values
  int layer, side, limit, position;
  // The weights to come: the next to be asked for; how many pieces have been asked for, and used.
  int ahead_stage, ahead_layer, ahead_row, ahead_start, ahead_half, asked, used;

  TS_DEV Step(const StepParams& p, u32 base)
      : p(p),
        base(base),
        thread(lanes::thread()),
        warp(lanes::warp()),
        lane(lanes::lane()),
        block(lanes::block()),
        grid(lanes::blocks()),
        layer(0),
        side(0),
        ahead_stage(PROJECT),
        ahead_layer(0),
        ahead_row(first_row(PROJECT)),
        ahead_start(0),
        ahead_half(0),
        asked(0),
        used(0) {}

  // ---- rows of a product: spread over CTAs first, from another warp on in each stage
  TS_DEV int first_row(int stage) const { return ((warp + 5 * stage) & (WARPS - 1)) * grid + block; }
  static TS_DEV int rows(int stage) {
    return stage == PROJECT ? QKV : stage == GATE ? HIDDEN : stage == HEAD ? VOCABULARY : WIDTH;
  }
  static TS_DEV int columns(int stage) { return stage == OUTPUT ? QUERY : stage == DOWN ? HIDDEN : WIDTH; }
  TS_DEV const char* weight() const {
    const StepLayer& l = p.layers[ahead_stage == HEAD ? 0 : ahead_layer];
    const char* of = p.head;
    int row = ahead_row;
    if (ahead_stage == PROJECT) {
      of = row < QUERY ? l.query : row < QUERY + KEYS ? l.key : l.value;
      row -= row < QUERY ? 0 : row < QUERY + KEYS ? QUERY : QUERY + KEYS;
    }
    if (ahead_stage == OUTPUT) of = l.output;
    if (ahead_stage == GATE) of = ahead_half ? l.up : l.gate;
    if (ahead_stage == DOWN) of = l.down;
    return of + ((long long)row * columns(ahead_stage) + ahead_start) * 2;
  }
  TS_DEV u32 slot(int n) const { return base + (warp * SLOTS + n % SLOTS) * SLOT; }
  TS_DEV u32 barrier(int n) const { return base + BARRIERS + (warp * SLOTS + n % SLOTS) * 8; }
  // Ask for the next piece that this warp will want, if there is one: of gate and up in turns.
  TS_DEV void ask() {
    while (ahead_row >= rows(ahead_stage)) {
      if (ahead_stage == HEAD) return;
      if (ahead_stage == DOWN) {
        ahead_stage = ++ahead_layer < LAYERS ? PROJECT : HEAD;
      } else {
        ahead_stage += ahead_stage == PROJECT ? 2 : 1;
      }
      ahead_row = first_row(ahead_stage);
    }
    const int left = columns(ahead_stage) - ahead_start;
    if (lane == 0) {
      lanes::ask(slot(asked), weight(), (left < PIECE ? left : PIECE) * 2, barrier(asked));
    }
    ++asked;
    ahead_half = ahead_stage == GATE && !ahead_half;
    if (ahead_half) return;
    ahead_start += PIECE;
    if (left <= PIECE) ahead_start = 0, ahead_row += WARPS * grid;
  }
  // This lane's share of the next piece times the staged row from column `start` on.
  TS_DEV float piece(int start, int count) {
    lanes::await(barrier(used), used / SLOTS & 1);
    const u32 from = slot(used), x = base + RINGS + side * (STAGED * 4) + start * 2;  // 8 columns are 16 bytes of each half
    float sum = 0;
#pragma unroll
    for (int j = 0; j < PIECE / (8 * LANES); ++j) {
      const int c = lane + LANES * j;
      if (c * 8 < count) {
        u32 w[4], a[4], b[4];
        lanes::get128(from + c * 16, w);
        lanes::get128(x + c * 16, a);
        lanes::get128(x + STAGED * 2 + c * 16, b);
        sum += Element::low(w[0]) * ts::float_of(a[0]) + Element::high(w[0]) * ts::float_of(a[1]);
        sum += Element::low(w[1]) * ts::float_of(a[2]) + Element::high(w[1]) * ts::float_of(a[3]);
        sum += Element::low(w[2]) * ts::float_of(b[0]) + Element::high(w[2]) * ts::float_of(b[1]);
        sum += Element::low(w[3]) * ts::float_of(b[2]) + Element::high(w[3]) * ts::float_of(b[3]);
      }
    }
    lanes::together();
    ++used;
    ask();
    return sum;
  }
  // Every row that this warp has of a product, the first of which has `before` already; `store` is called by one lane.
  template <int STAGE, class Before, class Store>
  TS_DEV void products(float first, Before before, Store store) {
    constexpr int COLUMNS = STAGE == OUTPUT ? QUERY : STAGE == DOWN ? HIDDEN : WIDTH;
    float given = first;
    for (int row = first_row(STAGE); row < rows(STAGE); row += WARPS * grid) {
      float sum = 0, other = 0;
#pragma unroll 1
      for (int start = 0; start < COLUMNS; start += PIECE) {
        const int count = COLUMNS - start < PIECE ? COLUMNS - start : PIECE;
        sum += piece(start, count);
        if constexpr (STAGE == GATE) other += piece(start, count);
      }
      sum = over_lanes(sum);
      if constexpr (STAGE == GATE) other = over_lanes(other);
      if (lane == 0) store(row, sum, other, given);
      if (row + WARPS * grid < rows(STAGE)) given = before(row + WARPS * grid);
    }
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
  TS_DEV u32 staged(int which) const { return base + RINGS + which * (STAGED * 4); }
  TS_DEV void put_pair(int i, float a, float b) const { lanes::put_pair(staged(side) + placed(i) * 4, a, b); }
  // Tagged words of a row, two at once and all of a thread's under way together, to `take(i, first, second)`.
  template <int COUNT, class Take>
  TS_DEV void gather(const u64* from, int stage, Take take) const {
    constexpr int PASSES = (COUNT + 2 * THREADS - 1) / (2 * THREADS), BATCH = PASSES < 8 ? PASSES : 8;
    const Wanted w = wanted(stage);
    for (int first = thread * 2; first < COUNT; first += BATCH * THREADS * 2) {
      u64 v[BATCH][2];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int i = first + b * THREADS * 2;
        if (i < COUNT) lanes::peek_pair(from + i, v[b]);
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int i = first + b * THREADS * 2;
        if (i < COUNT) take(i, value_of(settled(v[b][0], from + i, w, i)), value_of(settled(v[b][1], from + i + 1, w, i + 1)));
      }
    }
  }
  // A row of the residual stream times a norm's weights, staged; returns the reciprocal of its root mean square.
  TS_DEV float normed(int part, const char* weights, int stage) {
    side ^= 1;
    delay(stage);
    float squares = 0;
    const auto take = [&](int i, float a, float b) {
      float g, h;
      both(weights, i, g, h);
      put_pair(i, a * g, b * h);
      squares += a * a + b * b;
    };
    if (block < rows(stage)) {
      if (layer == 0 && part == ROW) {
        for (int i = thread * 2; i < WIDTH; i += THREADS * 2) {
          float a, b;
          both(p.row, i, a, b);
          take(i, a, b);
        }
      } else {
        gather<WIDTH>(words(layer, part), stage, take);
      }
    }
    squares = over_lanes(squares);
    const u32 parts = base + PARTS + side * (WARPS * 4);
    if (lane == 0) put_float(parts + warp * 4, squares);
    lanes::all_together();
    squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w += 4) {
      u32 v[4];
      lanes::get128(parts + w * 4, v);
      squares += (ts::float_of(v[0]) + ts::float_of(v[1])) + (ts::float_of(v[2]) + ts::float_of(v[3]));
    }
    return ts::rsqrt_(squares * (1.0f / WIDTH) + p.eps);
  }
  // An element of the row that a product is added to. It is known since a stage before, so that nobody waits for it.
  TS_DEV float residual(int part, int row, int stage) const {
    if (row >= WIDTH) return 0;
    if (layer == 0 && part == ROW) return single(p.row, row);
    const u64* at = words(layer, part) + row;
    return value_of(settled(lanes::peek(at), at, wanted(stage), row));
  }

  // ---- attention of the queries of one head of keys over a share of the cache
  static constexpr int OF_POSITION = FEATURES / 8, AT_ONCE = LANES / OF_POSITION;  // lanes of a position; positions of a warp
  static constexpr int EACH = GROUP > 3 ? 1 : 2, BATCH = EACH * WARPS * AT_ONCE;                   // loads under way of a lane; positions of a CTA
  struct Cached {
    u32 keys[EACH][4], values[EACH][4];
    float masks[EACH];
  };
  TS_DEV int place(int start, int e) const { return start + (e * WARPS + warp) * AT_ONCE + lane / OF_POSITION; }
  TS_DEV void load_cached(Cached& c, int head, int start, int end) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int s = place(start, e);
      c.masks[e] = NOTHING;
      if (s >= end) continue;
      const long long at = (((long long)head * POSITIONS + s) * FEATURES + lane % OF_POSITION * 8) * 2;
      if (s != position) {
        lanes::load128(p.layers[layer].keys + at, c.keys[e]);
        lanes::load128(p.layers[layer].values + at, c.values[e]);
      }
#if MASKED
      c.masks[e] = single(p.mask, s);
#else
      c.masks[e] = 0;
#endif
    }
  }
  // A head of a query or a key: its norm, its rotation; each lane has elements lane, lane + 32, ...
  TS_DEV void turned(u32 at, const char* weights, bool is_key, char* to) const {
    constexpr int OF_LANE = FEATURES / LANES;
    float v[OF_LANE], t[OF_LANE];
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] = get_float(at + (lane + j * LANES) * 4);
#if HEAD_NORMS
    float squares = 0;
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) squares += v[j] * v[j];
    const float rstd = ts::rsqrt_(over_lanes(squares) * (1.0f / FEATURES) + p.head_eps);
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] *= rstd * single(weights, lane + j * LANES);
#endif
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) {
      const float other = j < OF_LANE / 2 ? -v[(j + OF_LANE / 2) % OF_LANE] : v[j - OF_LANE / 2];
      t[j] = v[j] * single(p.cos, lane + j * LANES) + other * single(p.sin, lane + j * LANES);
    }
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) {
      const u32 rounded = Element::pack(t[j], 0);
      put_float(at + (lane + j * LANES) * 4, is_key ? Element::low(rounded) : t[j] * (p.scale * LOG2_E));
      if (to != nullptr) *(u16*)(to + (lane + j * LANES) * 2) = (u16)rounded;
    }
  }
  TS_DEV int item() const {  // a head and a share; -1: none of this CTA
    const int spread = grid / (KEY_HEADS * SPLITS), item = block / spread;
    return block % spread == 0 && item < KEY_HEADS * SPLITS ? item : -1;
  }
  TS_DEV void attend(int item, long long place_of_token) {
    if (item < 0) return;
    delay(ATTEND);
    if (place_of_token < 0 || place_of_token >= POSITIONS) lanes::give_up(p.record, NO_POSITION, block, POSITIONS, place_of_token);
    position = (int)place_of_token;
    const int head = item / SPLITS, share = item % SPLITS, each = (limit + SPLITS - 1) / SPLITS;
    const int start = share * each, end = start + each < limit ? start + each : limit;
    const StepLayer& l = p.layers[layer];
    Cached c;
    load_cached(c, head, start, end);
    // Queries, key, value of this head, as they come: in the staged row that the products do not read now.
    const u32 given = staged(side ^ 1), merged = staged(side);
    const u64* from = words(layer, PROJECTED);
    const Wanted w = wanted(ATTEND);
    for (int i = thread; i < (GROUP + 2) * FEATURES; i += THREADS) {
      const int which = i / FEATURES, f = i % FEATURES;
      const int at = which < GROUP ? head * GROUP * FEATURES + i : QUERY + (which - GROUP) * KEYS + head * FEATURES + f;
      put_float(given + i * 4, value_of(settled(lanes::peek(from + at), from + at, w, at)));
    }
    lanes::all_together();
    const int owner = position / each;
    const bool owns = (owner < SPLITS ? owner : SPLITS - 1) == share;
    const long long mine = ((long long)head * POSITIONS + position) * FEATURES * 2;
    if (warp < GROUP) turned(given + warp * FEATURES * 4, l.query_norm, false, nullptr);
    if (warp == GROUP) turned(given + GROUP * FEATURES * 4, l.key_norm, true, owns ? l.keys + mine : nullptr);
    if (warp == GROUP + 1)
      for (int f = lane; f < FEATURES; f += LANES) {
        const u32 at = given + ((GROUP + 1) * FEATURES + f) * 4, rounded = Element::pack(get_float(at), 0);
        put_float(at, Element::low(rounded));
        if (owns) *(u16*)(l.values + mine + f * 2) = (u16)rounded;
      }
    lanes::all_together();
    float most[GROUP], sum[GROUP], values[GROUP][8];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      most[g] = NOTHING, sum[g] = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) values[g][k] = 0;
    }
    const u32 feature = lane % OF_POSITION * 32;
#pragma unroll 1
    for (int first = start; first < end; first += BATCH) {
      float keys[EACH][8], cached[EACH][8], masks[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const bool is_new = place(first, e) == position;
        masks[e] = c.masks[e] > NOTHING ? c.masks[e] * LOG2_E : NOTHING;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const u32 at = given + GROUP * FEATURES * 4 + feature + k * 4;
          keys[e][k] = k % 2 ? Element::high(c.keys[e][k / 2]) : Element::low(c.keys[e][k / 2]);
          cached[e][k] = k % 2 ? Element::high(c.values[e][k / 2]) : Element::low(c.values[e][k / 2]);
          if (is_new) keys[e][k] = get_float(at), cached[e][k] = get_float(at + FEATURES * 4);
        }
      }
      load_cached(c, head, first + BATCH, end);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        u32 q[2][4];
        lanes::get128(given + g * FEATURES * 4 + feature, q[0]);
        lanes::get128(given + g * FEATURES * 4 + feature + 16, q[1]);
        float scores[EACH], now = most[g];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          scores[e] = 0;
#pragma unroll
          for (int k = 0; k < 8; ++k) scores[e] += keys[e][k] * ts::float_of(q[k / 4][k % 4]);
        }
#pragma unroll
        for (int far = 1; far < OF_POSITION; far *= 2)
#pragma unroll
          for (int e = 0; e < EACH; ++e) scores[e] += lanes::across(scores[e], far);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          scores[e] = masks[e] > NOTHING ? scores[e] + masks[e] : NOTHING;
          now = scores[e] > now ? scores[e] : now;
        }
        const float before = ts::ex2(most[g] - now);
        most[g] = now, sum[g] *= before;
#pragma unroll
        for (int k = 0; k < 8; ++k) values[g][k] *= before;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
          if (scores[e] > NOTHING) {
            const float weight = ts::ex2(scores[e] - now);
            sum[g] += weight;
#pragma unroll
            for (int k = 0; k < 8; ++k) values[g][k] += weight * cached[e][k];
          }
      }
    }
    // Positions of a warp together, then warps.
    constexpr int PART = FEATURES + 2;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int far = OF_POSITION; far < LANES; far *= 2) {
        const float theirs = lanes::across(most[g], far), now = theirs > most[g] ? theirs : most[g];
        const float mine = ts::ex2(most[g] - now), other = ts::ex2(theirs - now);
        most[g] = now;
        sum[g] = sum[g] * mine + lanes::across(sum[g], far) * other;
#pragma unroll
        for (int k = 0; k < 8; ++k) values[g][k] = values[g][k] * mine + lanes::across(values[g][k], far) * other;
      }
      const u32 to = merged + (warp * GROUP + g) * PART * 4;
      if (lane < OF_POSITION) {
#pragma unroll
        for (int k = 0; k < 8; k += 2) lanes::put_pair(to + feature + k * 4, values[g][k], values[g][k + 1]);
      }
      if (lane == 0) lanes::put_pair(to + FEATURES * 4, most[g], sum[g]);
    }
    lanes::all_together();
    for (int i = thread; i < GROUP * FEATURES / 2; i += THREADS) {
      const int g = i / (FEATURES / 2), f = i % (FEATURES / 2) * 2, query = head * GROUP + g;
      float largest = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float theirs = get_float(merged + ((w * GROUP + g) * PART + FEATURES) * 4);
        largest = theirs > largest ? theirs : largest;
      }
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const u32 at = merged + (w * GROUP + g) * PART * 4;
            const float theirs = get_float(at + FEATURES * 4), of = get_float(at + FEATURES * 4 + 4);
        const float a = get_float(at + f * 4), b = get_float(at + f * 4 + 4);
        const float weight = ts::ex2(theirs - largest);
        total += weight * of, low += weight * a, high += weight * b;
      }
      const float times = total > 0 ? 1.0f / total : 0.0f;
      store_word(words(layer, ATTENDED) + share * (QUERY / 2) + query * (FEATURES / 2) + f / 2, Element::pack(low * times, high * times), tag);
      if (f == 0) store_word(words(layer, SUMS) + share * HEADS + query, ts::bits_of(total > 0 ? largest + ts::lg2(total) : NOTHING), tag);
    }
  }
  // The shares of attention together, staged.
  TS_DEV void attended() {
    side ^= 1;
    delay(OUTPUT);
    const u64 *of = words(layer, ATTENDED), *sums = words(layer, SUMS);
    const Wanted w = wanted(OUTPUT);
    if (block < WIDTH)
      for (int i = thread; i < QUERY / 2; i += THREADS) {
        const int head = i / (FEATURES / 2);
        u64 parts[SPLITS], each[SPLITS];
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          parts[s] = lanes::peek(of + s * (QUERY / 2) + i);
          each[s] = lanes::peek(sums + s * HEADS + head);
        }
        float most = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          parts[s] = settled(parts[s], of + s * (QUERY / 2) + i, w, s * (QUERY / 2) + i);
          each[s] = settled(each[s], sums + s * HEADS + head, w, s * HEADS + head);
          most = value_of(each[s]) > most ? value_of(each[s]) : most;
        }
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          const float weight = value_of(each[s]) > NOTHING ? ts::ex2(value_of(each[s]) - most) : 0.0f;
          total += weight, low += weight * Element::low((u32)parts[s]), high += weight * Element::high((u32)parts[s]);
        }
        put_pair(2 * i, low / total, high / total);
      }
    lanes::all_together();
  }

  // ---- the whole
  TS_DEV void begin() {
    if (thread < WARPS * SLOTS) lanes::begin_bar(base + BARRIERS + thread * 8);
    tag = p.epochs[block];
    limit = POSITIONS;
#if MASKED
    int last = 0;  // of the positions that count; the rest of the cache is not read
    for (int s = thread; s < POSITIONS; s += THREADS)
      if (single(p.mask, s) > NOTHING) last = s + 1;
    limit = last;
#pragma unroll
    for (int far = 16; far; far >>= 1) {
      last = (int)lanes::across((float)limit, far);
      limit = last > limit ? last : limit;
    }
    if (lane == 0) lanes::put32(base + PARTS + warp * 4, limit);
    lanes::all_together();
    for (int w = 0; w < WARPS; ++w) {
      last = (int)lanes::get32(base + PARTS + w * 4);
      limit = last > limit ? last : limit;
    }
    limit = limit > 1 ? limit : 1;
#endif
    lanes::all_together();
    for (int n = 0; n < SLOTS; ++n) ask();
  }
  TS_DEV void run() {
    const auto none = [](int) { return 0.0f; };
    for (; layer < LAYERS; ++layer) {
      ++tag;
      const StepLayer& l = p.layers[layer];
      const int item = this->item();
      const long long position = item < 0 ? 0 : *l.length;
      float rstd = normed(ROW, l.norm, PROJECT);
      u64* to = words(layer, PROJECTED);
      products<PROJECT>(0, none, [&](int row, float sum, float, float) { store_word(to + row, ts::bits_of(sum * rstd), tag); });
      attend(item, position);
      const auto given = [&](int row) { return residual(ROW, row, OUTPUT); };
      float first = given(first_row(OUTPUT));
      attended();
      to = words(layer, MIDDLE);
      products<OUTPUT>(first, given, [&](int row, float sum, float, float x) { store_word(to + row, ts::bits_of(x + sum), tag); });
      rstd = normed(MIDDLE, l.middle_norm, GATE);
      to = words(layer, GATED);
      products<GATE>(0, none, [&](int row, float sum, float other, float) {
        store_word(to + row, ts::bits_of(ts::silu(sum * rstd) * (other * rstd)), tag);
      });
      const auto middle = [&](int row) { return residual(MIDDLE, row, DOWN); };
      first = middle(first_row(DOWN));
      side ^= 1;
      delay(DOWN);
      if (block < WIDTH) gather<HIDDEN>(words(layer, GATED), DOWN, [&](int i, float a, float b) { put_pair(i, a, b); });
      lanes::all_together();
      to = words(layer + 1, ROW);
      products<DOWN>(first, middle, [&](int row, float sum, float, float x) { store_word(to + row, ts::bits_of(x + sum), tag + 1); });
    }
    ++tag;
    const float rstd = normed(ROW, p.norm, HEAD);
    products<HEAD>(0, none, [&](int row, float sum, float, float) {
      *(u16*)(p.out + row * 2ll) = (u16)Element::pack(sum * rstd, 0);
    });
    if (thread == 0) p.epochs[block] = tag;
    // Whoever read a length has done its part of what this CTA was waiting for.
    if (p.counted && block == 0)
      for (int n = thread; n < LAYERS; n += THREADS) ++*p.layers[n].length;
  }
};

TS_LANES_KERNEL(THREADS, 1) tilestream_step(const TS_PARAM StepParams p) {
  TS_LANES_SHARED(base);
  Step step(p, base);
  step.begin();
  step.run();
}
