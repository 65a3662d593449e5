// Products of one row. Every CTA makes the rows that products read, in shared memory, while its weights are on their way: a
// warp has some columns of a group of products, sums over all of a row, and a lane makes a column's results of its sums.
//
// A job is AT_ONCE columns of one group. Weights of a warp's first job are asked for before the kernel in front has ended.
#pragma once

namespace ts {

// An element, past the L1: the kernel in front may have written it while this one was there already.
template <class T>
struct Io {
  static TS_DEV float param(const void* p, int k) { return T::low(lanes::peek16((const u16*)p + k)); }
  static TS_DEV void put(void* p, int k, float a) {
    const u32 word = T::pack(a, 0.0f);
    lanes::store_words<2>((u16*)p + k, &word);
  }
  static TS_DEV float round(float a) { return T::low(T::pack(a, 0.0f)); }
};
template <>
struct Io<f32> {
  static TS_DEV float param(const void* p, int k) { return lanes::load_shared((const float*)p + k); }
  static TS_DEV void put(void* p, int k, float a) { lanes::store32((float*)p + k, bits_of(a)); }
  static TS_DEV float round(float a) { return a; }
};

// What all threads' values combine to, always in the same order. `scratch`: 4 WARPS bytes, which the next but one may use.
template <int WARPS, class O>
TS_DEV float of_all(float v, u32 scratch, const O& combine) {
#pragma unroll
  for (int far = 16; far > 0; far /= 2) v = combine(v, lanes::across(v, far));
  if (lanes::lane() == 0) lanes::put32(scratch + 4 * lanes::warp(), bits_of(v));
  lanes::all_together();
  v = float_of(lanes::get32(scratch));
#pragma unroll
  for (int w = 1; w < WARPS; ++w) v = combine(v, float_of(lanes::get32(scratch + 4 * w)));
  return v;
}

// Pieces of the weights of a job, 16 bytes a lane and column, from piece `from` of each lane on.
template <class K, class G>
struct Pieces {
  u32 w[G::PRODUCTS][G::AT_ONCE][G::PIECES][4];
  static TS_DEV int at(int from, int q) { return (from + q) * 32 + lanes::lane(); }
  TS_DEV void load(const typename K::Params& p, int c, int from) {
#pragma unroll
    for (int j = 0; j < G::PRODUCTS; ++j)
#pragma unroll
      for (int u = 0; u < G::AT_ONCE; ++u) {
        const int row = G::first_row(j) + (c + u < G::COLUMNS ? c + u : G::COLUMNS - 1);
        const char* const weights = (const char*)p.tensors[G::weight(j)] + row * p.strides[G::weight(j)];
#pragma unroll
        for (int q = 0; q < G::PIECES; ++q)
          if (at(from, q) * 8 < K::DEPTH) lanes::load128_now(weights + 16 * at(from, q), w[j][u][q]);
      }
  }
  TS_DEV void add(u32 smem, int from, float (&sums)[G::AT_ONCE][G::PRODUCTS]) const {
#pragma unroll
    for (int q = 0; q < G::PIECES; ++q) {
      if (at(from, q) * 8 >= K::DEPTH) continue;
#pragma unroll
      for (int j = 0; j < G::PRODUCTS; ++j) {
        u32 x[4];
        lanes::get128(smem + 2 * K::DEPTH * G::operand(j) + 16 * at(from, q), x);
#pragma unroll
        for (int u = 0; u < G::AT_ONCE; ++u)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            sums[u][j] = fma_(K::T::low(w[j][u][q][k]), K::T::low(x[k]), sums[u][j]);
            sums[u][j] = fma_(K::T::high(w[j][u][q][k]), K::T::high(x[k]), sums[u][j]);
          }
      }
    }
  }
};

// Of a CTA's columns of a group, those of one job; with FIRST the rows are made in between.
template <class K, class G, bool FIRST>
TS_DEV void one_row_job(const typename K::Params& p, u32 smem, int job) {
  constexpr int STEPS = (K::DEPTH + 256 * G::PIECES - 1) / (256 * G::PIECES);
  const int own = job * G::AT_ONCE, c = lanes::block() * G::OWN + own, mine = c + lanes::lane();
  const bool has = lanes::lane() < G::AT_ONCE && own + lanes::lane() < G::OWN && mine < G::COLUMNS;
  Pieces<K, G> pieces;
  pieces.load(p, c, 0);
  if constexpr (FIRST) {
    await_kernel_before();
    let_next_kernel_start();  // not earlier: only the kernel in front may still be there, whose reads it does not write
  }
  float x[G::LOADS + 1] = {};
  if (has) G::load(p, mine, x);
  if constexpr (FIRST) {
    K::front(p, smem);
    lanes::all_together();
  }
  float sums[G::AT_ONCE][G::PRODUCTS] = {}, s[G::PRODUCTS] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step > 0) pieces.load(p, c, step * G::PIECES);
    pieces.add(smem, step * G::PIECES, sums);
  }
#pragma unroll
  for (int j = 0; j < G::PRODUCTS; ++j)
#pragma unroll
    for (int u = 0; u < G::AT_ONCE; ++u) {
      float sum = sums[u][j];
#pragma unroll
      for (int far = 16; far > 0; far /= 2) sum += lanes::across(sum, far);
      if (lanes::lane() == u) s[j] = sum;
    }
  if (has) G::behind(p, smem, mine, s, x);
}

template <class K>
TS_DEV void one_row(const typename K::Params& p, u32 smem) {
  K::template take<true>(p, smem, lanes::warp());
  for (int job = lanes::warp() + K::WARPS; job < K::JOBS; job += K::WARPS) K::template take<false>(p, smem, job);
}

}  // namespace ts
