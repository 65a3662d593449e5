// Rows of a decode step (step.cuh): products, values of other CTAs, norms.
#pragma once
#include "step_loader.cuh"

struct StepRows : Tiles {
  const StepParams& p;
  const u32 base;
  int thread, warp, lane;
  u32 tag;  // of this layer's values
  int layer;
  Turn turn;   // of the ring
  int buffer;  // of sums

  TS_DEV StepRows(const StepParams& p, u32 base)
      : p(p), base(base), thread(lanes::thread()), warp(lanes::warp()), lane(lanes::lane()), layer(0), buffer(0) {}
  TS_DEV static void together() { lanes::meet(THREADS); }
  // At the beginning of a stage: its addresses are its own.
  TS_DEV void renew() { lanes::renew(warp), lanes::renew(lane), thread = warp * LANES + lane; }

  // ---- products: sixteen rows, of two slots, by eight sequences. Lane 4 g + a has columns 2 a and 2 a + 1 of eight, of
  // sequence g and of row g.
  template <int STAGE>
  using Given = u32[chunk(STAGE) / DEPTH][EIGHTS][4];
  using Sums = float[CHAINS][EIGHTS][4];
  // The warp's part `at` of the next slot, or of the next two.
  template <int STAGE>
  TS_DEV void piece(Sums& sums, const Given<STAGE>& x, int at, bool two) {
    Turn second = turn;
    lanes::await(base + FULL + turn.slot * 8, turn.parity);
    if (two) second.next(), lanes::await(base + FULL + second.slot * 8, second.parity);
    const int matrix = lane / 8, row = lane % 8, column = warp * chunk(STAGE) + matrix / 2 * 8;
    const u32 from = base + (matrix % 2 ? second.slot : turn.slot) * SLOT + (is_turned(STAGE) ? (column + row) * 16 : row * pitch(STAGE) + column * 2);
#pragma unroll
    for (int k = 0; k < chunk(STAGE) / DEPTH; ++k)
      if (is_piece<STAGE>(at) && is_there<STAGE>(at, k))
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 w[4];
          const u32 its = from + (k * DEPTH + h * 16) * (is_turned(STAGE) ? 16 : 2);
          is_turned(STAGE) ? lanes::matrices_turned(w, its) : lanes::matrices(w, its);
#pragma unroll
          for (int e = 0; e < EIGHTS; ++e) lanes::product<Element>(sums[h % CHAINS][e], w, x[k][e][2 * h], x[k][e][2 * h + 1]);
        }
  }
  // Without the fence a copy could take the place of what the last loads have not read yet.
  TS_DEV void free_slots(int count) {
    lanes::fence_copies();
    lanes::together();
    for (int n = 0; n < count; ++n, turn.next())
      if (lane == 0) lanes::arrive(base + FREE + turn.slot * 8);
  }
  // Of eight rows of lanes; rows apart have the same sequences, and each fetches a part of what all multiply.
  static constexpr int SEQUENCES = BATCH > 4 ? 8 : BATCH > 2 ? 4 : BATCH, APART = 8 / SEQUENCES;
  TS_DEV int part_of_lane() const { return APART > 1 ? lane / 4 / SEQUENCES : 0; }
  TS_DEV int sequence(int eight) const {  // whose values this lane multiplies; the last one's instead of none
    const int s = eight * 8 + lane / 4 % SEQUENCES;
    return s < BATCH ? s : BATCH - 1;
  }
  template <int STAGE>
  TS_DEV static bool is_piece(int at) {
    return chunks(STAGE) % WARPS == 0 || at < chunks(STAGE);
  }
  template <int STAGE>
  TS_DEV static bool is_there(int at, int k) {  // 32 columns of a piece: of the last one there may be fewer
    return columns(STAGE) % chunk(STAGE) == 0 || at * chunk(STAGE) + k * DEPTH < columns(STAGE);
  }
  // Two values of 32 of a piece, the j-th of this lane, in a row of memory.
  template <int STAGE>
  TS_DEV u32 two_of(const char* row, int at, int k, int j) const {
    u32 w[1];
    lanes::load_words<4>(row + (at * chunk(STAGE) + k * DEPTH + j * 8 + lane % 4 * 2) * 2, w);
    return w[0];
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
  // When a stage begins, has its first values, has ended.
  TS_DEV void mark(int stage, int what) const {
#if STAMPS
    if (thread == 0) p.stamps[((long long)block * (LAYERS * 6 + 6) + layer * 6 + stage) * 3 + what] = lanes::now_ns();
#endif
  }
  // What this warp multiplies with piece `at`: many words under way at once, those that are missing again and again.
  template <int STAGE>
  TS_DEV void fetch(int at, Given<STAGE>& x) const {
    constexpr int DEEP = chunk(STAGE) / DEPTH, COUNT = over(DEEP, APART), LOADS = UNDER_WAY / EIGHTS, ONCE = LOADS < 1 ? 1 : LOADS < COUNT ? LOADS : COUNT;
    const int start = at * chunk(STAGE), row = columns(STAGE) / 2, part = part_of_lane();
    const u64* const from = words(layer, input(STAGE)) + start / 2 + lane % 4 * 2;
    u64 one[1];  // not all again and again
    waited(one, from, wanted(STAGE));
    u32 own[COUNT][EIGHTS][4];
#pragma unroll
    for (int first = 0; first < COUNT; first += ONCE) {
      u64 v[ONCE][EIGHTS][4];
      // Words of what there is, and whether they have come: those that say otherwise.
      const auto over_words = [&](auto what) {
        each<ONCE, EIGHTS, 2>([&](int b, int e, int j) {
          const int k = (first + b) * APART + part;
          if (first + b < COUNT && k < DEEP && is_there<STAGE>(at, k)) what(v[b][e][2 * j], v[b][e][2 * j + 1], sequence(e) * row + k * (DEPTH / 2) + 8 * j);
        });
      };
      over_words([&](u64& a, u64& b, int) { a = b = missing(tag); });
      for (Patience patience;;) {
        u32 wrong = 0;
        over_words([&](u64& a, u64& b, int i) {
          if (is_wrong(tag, a, b)) lanes::peek_pair(from + i, a, b);
        });
        over_words([&](u64& a, u64& b, int) { wrong |= is_wrong(tag, a, b); });
        if (all_right(wrong)) break;
        if (patience.is_over()) search(wanted(STAGE), words(layer, input(STAGE)), BATCH * row);
      }
      each<ONCE, EIGHTS, 4>([&](int b, int e, int j) {
        const int k = (first + b) * APART + part;
        if (first + b < COUNT) own[first + b][e][j] = k < DEEP && is_there<STAGE>(at, k) ? (u32)v[b][e][j] : 0;
      });
    }
    each<DEEP, EIGHTS, 4>([&](int k, int e, int j) {
      const u32 its = own[k / APART][e][j];
      x[k][e][j] = APART > 1 ? lanes::word_of(its, (k % APART * SEQUENCES + lane / 4 % SEQUENCES) * 4 + lane % 4) : its;
    });
  }
  // What attention has made of a row: its shares are put together. Lanes that have no sequence of their own take shares.
  TS_DEV void merge(int at, Given<OUTPUT>& x) const {
    constexpr int SHARES = over(SPLITS, APART), DEEP = chunk(OUTPUT) / DEPTH;
    constexpr int LOADS = UNDER_WAY / SHARES, ONCE = LOADS < 1 ? 1 : LOADS < DEEP ? LOADS : DEEP;
    const int start = at * chunk(OUTPUT), first_share = part_of_lane();
    const u64* const all = words(layer, ATTENDED);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
      for (int first = 0; first < DEEP; first += ONCE) {
        u64 v[ONCE][SHARES][4], sums[ONCE][SHARES];
        const auto over_shares = [&](auto what) {
          each<ONCE, SHARES, 1>([&](int b, int n, int) {
            const int share = n * APART + first_share, row = share * BATCH + sequence(e), c = start + (first + b) * DEPTH + lane % 4 * 8;
            if (first + b < DEEP && is_there<OUTPUT>(at, first + b) && (SPLITS % APART == 0 || share < SPLITS))
              what(b, v[b][n], sums[b][n], row * (QUERY / 2) + start / 2 + (first + b) * (DEPTH / 2) + lane % 4 * 2, SUMS - ATTENDED + (row * QUERY + c) / 8);
          });
        };
        over_shares([&](int, u64(&of)[4], u64& sum, int, int) { of[0] = of[1] = of[2] = of[3] = sum = missing(tag); });
        for (Patience patience;;) {
          u32 wrong = 0;
          over_shares([&](int, u64(&of)[4], u64& sum, int i, int its) {
            if (is_wrong(tag, of[0], of[1])) lanes::peek_pair(all + i, of[0], of[1]);
            if (is_wrong(tag, of[2], of[3])) lanes::peek_pair(all + i + 8, of[2], of[3]);
            if (is_wrong(tag, sum, sum)) sum = lanes::peek(all + its);
          });
          over_shares([&](int, u64(&of)[4], u64& sum, int, int) {
            wrong |= is_wrong(tag, of[0], of[1]) | is_wrong(tag, of[2], of[3]) | is_wrong(tag, sum, sum);
          });
          if (all_right(wrong)) break;
          if (patience.is_over()) search(wanted(OUTPUT), all, MIDDLE - ATTENDED);
        }
        float most[ONCE], total[ONCE] = {}, merged[ONCE][8] = {};
#pragma unroll
        for (int b = 0; b < ONCE; ++b) most[b] = NOTHING;
        over_shares([&](int b, u64(&)[4], u64& sum, int, int) { most[b] = value_of(sum) > most[b] ? value_of(sum) : most[b]; });
#pragma unroll
        for (int far = 4 * SEQUENCES; far < LANES; far *= 2)
#pragma unroll
          for (int b = 0; b < ONCE; ++b) {
            const float theirs = lanes::across(most[b], far);
            most[b] = theirs > most[b] ? theirs : most[b];
          }
        over_shares([&](int b, u64(&of)[4], u64& sum, int, int) {
          const float weight = value_of(sum) > NOTHING ? ts::ex2(value_of(sum) - most[b]) : 0.0f;
          total[b] += weight;
#pragma unroll
          for (int j = 0; j < 8; ++j) merged[b][j] += weight * (j % 2 ? Element::high((u32)of[j / 2]) : Element::low((u32)of[j / 2]));
        });
#pragma unroll
        for (int far = 4 * SEQUENCES; far < LANES; far *= 2)
#pragma unroll
          for (int b = 0; b < ONCE; ++b) {
            total[b] += lanes::across(total[b], far);
#pragma unroll
            for (int j = 0; j < 8; ++j) merged[b][j] += lanes::across(merged[b][j], far);
          }
        each<ONCE, 4, 1>([&](int b, int j, int) {
          if (first + b >= DEEP) return;
          const float times = ts::rcp(total[b]);
          x[first + b][e][j] = is_there<OUTPUT>(at, first + b) ? Element::pack(merged[b][2 * j] * times, merged[b][2 * j + 1] * times) : 0;
        });
      }
  }
  template <int STAGE>
  TS_DEV void load(int at, Given<STAGE>& x) const {
    if constexpr (STAGE == OUTPUT && SPLITS > 1) return merge(at, x);
    if (!reads_row(STAGE) || layer > 0) return fetch<STAGE>(at, x);
    each<chunk(STAGE) / DEPTH, EIGHTS, 4>([&](int k, int e, int j) {
      x[k][e][j] = is_there<STAGE>(at, k) ? two_of<STAGE>(p.row + sequence(e) * (WIDTH * 2ll), at, k, j) : 0;
    });
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
  TS_DEV u32 moments(int sequence) const {  // the next norm's lie elsewhere: this one's may still be read
    return base + MOMENTS + ((STAGE == GATE) * chunks(PROJECT) * BATCH + sequence) * 8;
  }
  template <int STAGE>
  TS_DEV void measure(int at, const Given<STAGE>& x) const {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      float sum = 0, squares = 0;
      if (LAYER_NORMS) {
        each<chunk(STAGE) / DEPTH, 4, 1>([&](int k, int j, int) { sum += Element::low(x[k][e][j]) + Element::high(x[k][e][j]); });
        sum = over_team(sum);
      }
      const float mean = sum * ts::rcp((float)length<STAGE>(at));
      each<chunk(STAGE) / DEPTH, 4, 1>([&](int k, int j, int) {
        const float a = Element::low(x[k][e][j]) - mean, b = Element::high(x[k][e][j]) - mean;
        if (is_there<STAGE>(at, k)) squares += a * a + b * b;
      });
      squares = over_team(squares);
      const int s = e * 8 + lane / 4;
      if (lane % 4 == 0 && s < BATCH) lanes::put_pair(moments<STAGE>(s) + at * BATCH * 8, sum, squares);
    }
  }
  // Of LayerNorms: mean and reciprocal deviation of a sequence of each eight, by the lanes that have its values.
  template <int STAGE>
  TS_DEV void settle_norms(Pair (&norms)[EIGHTS]) const {
    together();
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      const u32 from = moments<STAGE>(sequence(e));
      float mean = 0, squares = 0;
      for (int at = lane % 4; at < chunks(STAGE); at += 4) mean += get_float(from + at * BATCH * 8);
      mean = over_team(mean) * (1.0f / WIDTH);
      for (int at = lane % 4; at < chunks(STAGE); at += 4) {
        const Pair part = get_pair(from + at * BATCH * 8);
        const float count = (float)length<STAGE>(at), off = part.a * ts::rcp(count) - mean;
        squares += part.b + count * off * off;
      }
      norms[e] = {mean, ts::rsqrt_(over_team(squares) * (1.0f / WIDTH) + p.eps)};
    }
  }
  // Of RMSNorms: the sum of some pieces' squares; neighbours have the others.
  template <int STAGE>
  TS_DEV float squares_of(int sequence) const {
    const u32 from = moments<STAGE>(sequence) + 4;
    float squares = 0;
    for (int at = lane % AT_ONCE; at < chunks(STAGE); at += AT_ONCE) squares += get_float(from + at * BATCH * 8);
    return squares;
  }
  template <int STAGE>
  struct NormWeights {
    u32 weights[chunk(STAGE) / DEPTH][4], biases[LAYER_NORMS ? chunk(STAGE) / DEPTH : 1][4];
  };
  template <int STAGE>
  TS_DEV void load_norm(int at, NormWeights<STAGE>& n) const {
    const StepLayer& l = p.layers[STAGE == HEAD ? 0 : layer];
    const char* const weights = STAGE == HEAD ? p.norm : STAGE == GATE ? l.middle_norm : l.norm;
    const char* const biases = STAGE == HEAD ? p.norm_bias : STAGE == GATE ? l.middle_norm_bias : l.norm_bias;
    each<chunk(STAGE) / DEPTH, 4, 1>([&](int k, int j, int) {
      if (!is_there<STAGE>(at, k)) return;
      n.weights[k][j] = two_of<STAGE>(weights, at, k, j);
      if (LAYER_NORMS) n.biases[LAYER_NORMS ? k : 0][j] = two_of<STAGE>(biases, at, k, j);
    });
  }
  template <int STAGE>
  TS_DEV void normalise(int at, Given<STAGE>& x, const NormWeights<STAGE>& n, const Pair (&norms)[EIGHTS]) const {
    each<chunk(STAGE) / DEPTH, EIGHTS, 4>([&](int k, int e, int j) {
      if (!is_there<STAGE>(at, k)) return;
      const float more = PLUS_ONE ? 1.0f : 0.0f;
      const u32 w = n.weights[k][j], added = LAYER_NORMS ? n.biases[LAYER_NORMS ? k : 0][j] : 0;
      const float a = (Element::low(x[k][e][j]) - norms[e].a) * norms[e].b, b = (Element::high(x[k][e][j]) - norms[e].a) * norms[e].b;
      x[k][e][j] = Element::pack(a * (Element::low(w) + more) + Element::low(added), b * (Element::high(w) + more) + Element::high(added));
    });
  }

  // ---- a stage: its tiles one after the other, each by all warps, whose sums are put together in one order
  struct Place {  // of two sums of a thread
    int tile, sequence, row;
  };
  // The same of this CTA's next tile, `far` tiles on.
  TS_DEV static Place behind(const Place& at, int far) { return {at.tile + far, at.sequence, at.row + far * TILE}; }
  struct Work {  // of a warp at the end of a tile, or of two: what its sums are added to
    Place place;
    bool mine, stores, two;
    Pair given, given_next;
  };
  TS_DEV u32 part(int half, int warp, int sequence) const {
    return base + SUMS_AT + buffer * SUMS_OF_TILE + ((half * WARPS + warp) * BATCH + sequence) * TILE * 4;
  }
  TS_DEV void put_parts(const Sums& sums, bool two) const {
    each<EIGHTS, 2, 2>([&](int e, int half, int i) {
      const int s = e * 8 + lane % 4 * 2 + i, n = half * 2 + i;
      if (s < BATCH && (half == 0 || two)) put_float(part(half, warp, s) + lane / 4 * 4, CHAINS > 1 ? sums[0][e][n] + sums[CHAINS - 1][e][n] : sums[0][e][n]);
    });
  }
  // Neighbours add the sums of some warps each.
  TS_DEV Pair part_sum(int half, int sequence, int row) const {
    constexpr int OF_ONE = (WARPS + AT_ONCE - 1) / AT_ONCE;
    Pair sum = {0, 0};
#pragma unroll
    for (int w = 0; w < OF_ONE; ++w) sum = sum + get_pair(part(half, lane % AT_ONCE * OF_ONE + w, sequence) + row * 4);
    return sum;
  }
  TS_DEV static Pair across_team(Pair v, int far) { return {lanes::across_team<AT_ONCE>(v.a, far), lanes::across_team<AT_ONCE>(v.b, far)}; }
  // `before` says what sums are added to, known before anything is waited for; `store` has the sums, and of the other half.
  template <int STAGE, class Before, class Store>
  TS_DEV void products(Before before, Store store) {
    if (first_tile(STAGE) >= tiles(STAGE)) return;
    renew();
    mark(STAGE, 0);
    delay(STAGE);
    constexpr int COUNT = chunks(STAGE), TILES = at_once(STAGE);
    constexpr bool NORMED = is_normed(STAGE), KEPT = is_kept(STAGE);  // each warp has one piece of a row: its values are loaded once
    constexpr bool EARLY = chunk(STAGE) * EIGHTS <= 128;  // a norm's weights are on their way while values are waited for
    int later = warp;  // whose turn it is to put sums together goes round, so that no warp is always late
    const auto work_of = [&](int tile) {  // what sums are added to is on its way while values are waited for
      const int worker = later * LANES + lane;
      const bool mine = worker < BATCH * 4 * AT_ONCE, stores = mine && lane % AT_ONCE == 0, two = TILES > 1 && tile + apart(STAGE) < tiles(STAGE);
      Work w = {{tile, worker / (4 * AT_ONCE), tile * TILE + worker / AT_ONCE % 4 * 2}, mine, stores, two, {0, 0}, {0, 0}};
      if (stores) w.given = before(w.place);
      if (stores && two) w.given_next = before(behind(w.place, apart(STAGE)));
      return w;
    };
    Work work = work_of(first_tile(STAGE));
    Given<STAGE> x = {};  // not what an earlier stage left, which would take registers all the while
    Pair norms[EIGHTS];
    NormWeights<STAGE> norm = {};
    if constexpr (NORMED && LAYER_NORMS) {
      for (int at = warp; at < COUNT; at += WARPS) load<STAGE>(at, x), measure<STAGE>(at, x);
      mark(STAGE, 1);
      if (KEPT && is_piece<STAGE>(warp)) load_norm<STAGE>(warp, norm);
      settle_norms<STAGE>(norms);
      if (KEPT && is_piece<STAGE>(warp)) normalise<STAGE>(warp, x, norm, norms);
    } else {
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) norms[e] = {0, 1};
      if (KEPT && is_piece<STAGE>(warp)) {
        if constexpr (NORMED && EARLY) load_norm<STAGE>(warp, norm);
        load<STAGE>(warp, x);
        if constexpr (NORMED) measure<STAGE>(warp, x);
        if constexpr (NORMED && !EARLY) load_norm<STAGE>(warp, norm);
        if constexpr (NORMED) normalise<STAGE>(warp, x, norm, norms);
      }
      mark(STAGE, 1);
    }
#pragma unroll 1
    for (;;) {
      const bool paired = halves(STAGE) > 1 || work.two;  // with the other half, or the next tile
      Sums sums = {};
#pragma unroll 1
      for (int segment = 0; segment < segments(STAGE); ++segment) {
        const int at = segment * WARPS + warp;
        if (!KEPT && is_piece<STAGE>(at)) {
          load<STAGE>(at, x);
          if constexpr (NORMED && !LAYER_NORMS)
            if (work.place.tile == first_tile(STAGE)) measure<STAGE>(at, x);
          if constexpr (NORMED) load_norm<STAGE>(at, norm), normalise<STAGE>(at, x, norm, norms);
        }
        piece<STAGE>(sums, x, at, paired);
        if (segment + 1 < segments(STAGE)) free_slots(paired ? 2 : 1);
      }
      if (BUFFERS == 1) together();
      put_parts(sums, paired);
      together();
      if (work.mine) {
        const int s = work.place.sequence, q = work.place.row % TILE;
        Pair sum = part_sum(0, s, q), other = paired ? part_sum(1, s, q) : Pair{0, 0};
        float squares = NORMED && !LAYER_NORMS ? squares_of<STAGE>(s) : 0;
#pragma unroll
        for (int far = 1; far < AT_ONCE; far *= 2) {
          sum = sum + across_team(sum, far), other = other + across_team(other, far);
          squares += lanes::across_team<AT_ONCE>(squares, far);
        }
        if (NORMED && !LAYER_NORMS) {  // an RMSNorm's deviation multiplies sums, so that no product waits for it
          const float by = ts::rsqrt_(squares * (1.0f / WIDTH) + p.eps);
          sum = sum * by, other = other * by;
        }
        if (STAGE == OUTPUT || STAGE == DOWN) sum = sum * p.times, other = other * p.times;
        if (work.stores) store(work.place, work.given + sum, other);
        if (work.stores && work.two) store(behind(work.place, apart(STAGE)), work.given_next + other, Pair{0, 0});
      }
      free_slots(paired ? 2 : 1);  // nobody waits for it
      buffer = BUFFERS - 1 - buffer;
      later = later == 0 ? WARPS - 1 : later - 1;
      const int next = work.place.tile + round(STAGE);
      if (next >= tiles(STAGE)) break;
      work = work_of(next);
    }
    mark(STAGE, 2);
  }
};
