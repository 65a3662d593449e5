// Attention of a decode step (step.cuh): the queries of one head of keys over a share of the cache.
//
// Warps take eight positions in turn. Scores are products of tensor cores: queries are rows, positions are columns. Weights
// go through shared memory to the lanes that sum up values, each its own features, so that no sum goes across lanes.
#pragma once
#include "step_rows.cuh"

struct Attention : StepRows {
  using StepRows::StepRows;

  static constexpr int OF_LANE = FEATURES / LANES;  // features; and parts of 16 bytes of a row that products read
  static constexpr u32 ROW_BYTES = FEATURES * 2, GIVEN = (GROUP + 2) * ROW_BYTES;  // queries, the token's key and value
  static constexpr u32 PART = (FEATURES + 4) * 4, PARTS = GROUP * PART;            // of a warp: values, the greatest score, the sum
  static constexpr u32 WEIGHTS = GROUP * 48;                                       // there before: of eight positions, and what sums keep
  static_assert(GIVEN + WARPS * PARTS == ATTENTION && 2 * WEIGHTS <= PARTS);
  struct Angles {
    float cos[OF_LANE], sin[OF_LANE];
  };
  // The weights of a head's norm, which are on their way while the head is waited for.
  TS_DEV void load_head_norm(float (&w)[OF_LANE], const char* weights) const {
#pragma unroll
    for (int j = 0; j < OF_LANE && HEAD_NORMS; ++j) w[j] = single(weights, lane + j * LANES) + (PLUS_ONE ? 1.0f : 0.0f);
  }
  // Whether element lane + 32 j of a head is rotated in this layer, and the one of the other half, with its sign.
  TS_DEV bool is_rotated(int j) const { return lane + j * LANES < ROTARY && !(NO_ROPE >> layer & 1); }
  TS_DEV float other_half(const float (&v)[OF_LANE], int j) const {
    constexpr int HALF = ROTARY / 2, FAR = HALF / LANES, APART = HALF % LANES;  // 0, 16, or 8 of one half alone
    const bool is_first = lane + j * LANES < HALF, carries = APART && lane >= LANES - APART;
    const auto at = [&](int n) { return v[(n + 2 * OF_LANE) % OF_LANE]; };
    if (APART < LANES / 2) {
      const float its = APART ? lanes::across(v[0], HALF) : j < FAR ? at(j + FAR) : at(j - FAR);
      return is_first ? -its : its;
    }
    const float near = lanes::across(at(j + FAR), APART), far = lanes::across(at(j + FAR + 1), APART);
    const float back = lanes::across(at(j - FAR), APART), further = lanes::across(at(j - FAR - 1), APART);
    return is_first ? -(carries ? far : near) : carries ? back : further;
  }
  // A head of a query or a key: its norm, its rotation; each lane has elements lane, lane + 32, ...
  TS_DEV void turn_head(float (&v)[OF_LANE], const Angles& angles, const float (&w)[OF_LANE]) const {
#if HEAD_NORMS
    float squares = 0;
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) squares += v[j] * v[j];
    const float rstd = ts::rsqrt_(over_lanes(squares) * (1.0f / FEATURES) + p.head_eps);
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] *= rstd * w[j];
#endif
    float t[OF_LANE];
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) {
      const float turned = j * LANES < ROTARY ? v[j] * angles.cos[j] + other_half(v, j) * angles.sin[j] : v[j];
      t[j] = is_rotated(j) ? turned : v[j];
    }
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] = t[j];
  }
  TS_DEV float mask_of(const Share& s, int position) const {
#if MASKED
    return position < s.end ? single(p.mask, s.sequence * p.mask_step + position) : NOTHING;
#else
    return position < s.end ? 0.0f : NOTHING;
#endif
  }
  TS_DEV Pair masks_of(const Share& s, int at) const { return {mask_of(s, at + lane % 4 * 2), mask_of(s, at + lane % 4 * 2 + 1)}; }
  // Shares of the cache of the sequences, of the heads of this CTA's team.
  TS_DEV void attend(long long place_of_token) {
    if (member >= items) return;
    renew();
    mark(ATTEND, 0);
    delay(ATTEND);
    if (place_of_token < 0 || place_of_token >= POSITIONS) lanes::give_up(p.record, NO_POSITION, block, POSITIONS, place_of_token);
#pragma unroll 1
    for (int item = member; item < items; item += members) attend(share_of(base, item), (int)place_of_token);
    mark(ATTEND, 2);
  }
  // Queries, key and value of a head, as they come: each by a warp, into `given`, key and value into the cache too.
  TS_DEV void take(const Share& s, int position, u32 given) const {
    const StepLayer& l = p.layers[layer];
    const u64* const from = words(layer, PROJECTED) + (s.sequence * KEY_HEADS + s.head) * OF_HEAD;
    const int owner = position / s.each;
    const bool owns = (owner < SPLITS ? owner : SPLITS - 1) == s.share;
    const long long mine = (s.row + position) * ROW_BYTES;
    Angles angles;
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) {
      if (!is_rotated(j)) continue;
      const int f = s.sequence * p.turn_step + lane + j * LANES;
      angles.cos[j] = single(p.cos, f), angles.sin[j] = single(p.sin, f);
    }
    together();  // what lay there is read
#pragma unroll 1
    for (int h = warp; h < GROUP + 2; h += WARPS) {
      u64 come[OF_LANE];
      float norm[OF_LANE] = {};
      load_head_norm(norm, h < GROUP ? l.query_norm : l.key_norm);
      waited(come, from + h * FEATURES + lane, wanted(ATTEND));
      float v[OF_LANE];
#pragma unroll
      for (int j = 0; j < OF_LANE; ++j) v[j] = value_of(come[j]);
      if (h <= GROUP) turn_head(v, angles, norm);
      char* const to = h < GROUP || !owns ? nullptr : (h == GROUP ? l.keys : l.values) + mine;
#pragma unroll
      for (int j = 0; j < OF_LANE; ++j) {
        const u32 rounded = Element::pack(v[j], 0);
        lanes::put16(given + h * ROW_BYTES + (lane + j * LANES) * 2, rounded);
        if (to != nullptr) *(u16*)(to + (lane + j * LANES) * 2) = (u16)rounded;
      }
    }
    mark(ATTEND, 1);
    together();
  }
  // Of the row of queries or keys that this lane multiplies, 16 bytes of each 64. Products sum over features, in any order. Odd
  // rows begin with the second 64: so no bank is met twice.
  TS_DEV void load_row(u32 (&v)[OF_LANE][4], u32 row) const {
    const bool odd = lane / 4 % 2;
#pragma unroll
    for (int n = 0; n < OF_LANE; n += 2) {
      u32 first[4], second[4];
      const u32 at = row + n * 64 + lane % 4 * 16;
      lanes::get128(at + (odd ? 64 : 0), first), lanes::get128(at + (odd ? 0 : 64), second);
#pragma unroll
      for (int k = 0; k < 4; ++k) v[n][k] = odd ? second[k] : first[k], v[n + 1][k] = odd ? first[k] : second[k];
    }
  }
  // Of eight positions that this warp has at once. Lane 4 g + a has query g, and of scores positions 2 a and 2 a + 1.
  struct Scores {
    u32 query[OF_LANE][4];
    float most = NOTHING, sum = 0;
    float values[GROUP][OF_LANE] = {};  // of features lane * OF_LANE on
  };
  // Positions from `at` on: rows of keys and values lie from there on, but for the token's.
  TS_DEV void add_eight(Scores& t, const Share& s, int at, u32 keys, u32 values, int position, u32 token, Pair mask, u32 weights) const {
    const auto row_of = [&](int n, u32 from, u32 its) { return at + n < s.end && at + n != position ? from + n * ROW_BYTES : its; };
    u32 key[OF_LANE][4], value[8][OF_LANE / 2];
    load_row(key, row_of(lane / 4, keys, token));
#pragma unroll
    for (int n = 0; n < 8; ++n) lanes::get_words<OF_LANE * 2>(row_of(n, values, token + ROW_BYTES) + lane * (OF_LANE * 2), value[n]);
    float sums[2][4] = {};
    each<OF_LANE, 2, 1>([&](int n, int h, int) {
      const u32 of_query[4] = {t.query[n][2 * h], 0, t.query[n][2 * h + 1], 0};
      lanes::product<Element>(sums[h], of_query, key[n][2 * h], key[n][2 * h + 1]);
    });
    const auto score_of = [&](int i, float added) {
      const bool counts = added > NOTHING;
      return counts ? (sums[0][i] + sums[1][i]) * (p.scale * LOG2_E) + added * LOG2_E : NOTHING;
    };
    const Pair score = {score_of(0, mask.a), score_of(1, mask.b)};
    float now = score.a > score.b ? score.a : score.b;
#pragma unroll
    for (int far = 1; far < 4; far *= 2) {
      const float theirs = lanes::across(now, far);
      now = theirs > now ? theirs : now;
    }
    now = t.most > now ? t.most : now;
    const float before = ts::ex2(t.most - now);
    const Pair weight = {mask.a > NOTHING ? ts::ex2(score.a - now) : 0.0f, mask.b > NOTHING ? ts::ex2(score.b - now) : 0.0f};
    t.most = now, t.sum = t.sum * before + (weight.a + weight.b);
    if (lane / 4 < GROUP) {
      lanes::put_pair(weights + lane * 8, weight.a, weight.b);
      if (lane % 4 == 0) put_float(weights + GROUP * 32 + lane, before);
    }
    lanes::together();
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      u32 w[2][4];
      lanes::get128(weights + g * 32, w[0]), lanes::get128(weights + g * 32 + 16, w[1]);
      const float kept = get_float(weights + GROUP * 32 + g * 4);
#pragma unroll
      for (int j = 0; j < OF_LANE; ++j) t.values[g][j] *= kept;
      each<8, OF_LANE, 1>([&](int n, int j, int) {
        t.values[g][j] += ts::float_of(w[n / 4][n % 4]) * (j % 2 ? Element::high(value[n][j / 2]) : Element::low(value[n][j / 2]));
      });
    }
  }
  TS_DEV void attend(const Share& s, int position) {
    const u32 given = base + ATTENTION_AT, parts = given + GIVEN, own = parts + warp * PARTS;
    int at = s.start + warp * 8, turns = 0;
    Pair mask = masks_of(s, at);  // of the next eight
    take(s, position, given);
    Scores t;
    load_row(t.query, given + (lane / 4 < GROUP ? lane / 4 : GROUP - 1) * ROW_BYTES);
#pragma unroll 1
    for (int first = s.start; first < s.end; first += OF_SLOT) {
      const int last = first + OF_SLOT < s.end ? first + OF_SLOT : s.end;
      lanes::await(base + FULL + turn.slot * 8, turn.parity);
#pragma unroll 1
      for (; at < last; at += WARPS * 8, ++turns) {
        const Pair added = mask;
        mask = masks_of(s, at + WARPS * 8);
        const u32 keys = base + turn.slot * SLOT + (at - first) * ROW_BYTES;
        // In two places in turn: who is ahead writes what nobody reads any more.
        add_eight(t, s, at, keys, keys + OF_SLOT * ROW_BYTES, position, given + GROUP * ROW_BYTES, added, own + turns % 2 * WEIGHTS);
      }
      free_slots(1);
    }
    t.sum = over_team(t.sum);
    lanes::together();
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
#pragma unroll
      for (int j = 0; j < OF_LANE; j += 2) lanes::put_pair(own + g * PART + (lane * OF_LANE + j) * 4, t.values[g][j], t.values[g][j + 1]);
    if (lane % 4 == 0 && lane / 4 < GROUP) lanes::put_pair(own + lane / 4 * PART + FEATURES * 4, t.most, t.sum);
    together();
    for (int i = thread; i < GROUP * FEATURES / 2; i += THREADS) put_together(s, parts, i / (FEATURES / 2), i % (FEATURES / 2) * 2);
  }
  // Two features of a query, of all warps together.
  TS_DEV void put_together(const Share& s, u32 parts, int g, int f) const {
    const u32 its = parts + g * PART;
    float largest = NOTHING, total = 0;
    Pair sum = {0, 0};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float theirs = get_float(its + w * PARTS + FEATURES * 4);
      largest = theirs > largest ? theirs : largest;
    }
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const Pair of = get_pair(its + w * PARTS + FEATURES * 4);
      const float weight = ts::ex2(of.a - largest);
      total += weight * of.b, sum = sum + get_pair(its + w * PARTS + f * 4) * weight;
    }
    const int row = s.share * BATCH + s.sequence, query = s.head * GROUP + g;
    sum = sum * (total > 0 ? 1.0f / total : 0.0f);
    store_word(words(layer, ATTENDED) + row * (QUERY / 2) + spot((query * FEATURES + f) / 2), Element::pack(sum.a, sum.b), tag);
    if (f % 8 == 0 && SPLITS > 1)
      store_word(words(layer, SUMS) + (row * QUERY + query * FEATURES + f) / 8, ts::bits_of(total > 0 ? largest + ts::lg2(total) : NOTHING), tag);
  }
};
