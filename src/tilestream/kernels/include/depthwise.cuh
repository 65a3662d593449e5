// Depthwise convolution of pictures whose channels lie last, with a bias, a scale and a shift of each channel and an
// activation behind it, and sums of what it wrote.
//
// A lane has two channels of a tile of ROWS x COLUMNS output pixels, with all their sums in registers. It goes over the
// window's rows: under each of them lie ROWS rows of input pixels, of which one is new and the next is on its way. Pixels
// are loaded 4 bytes a lane, and neighbouring lanes have neighbouring channels; tiles below one another go to
// neighbouring lanes, so that what they both read comes from the L1. Weights are fp32 in shared memory, two taps of two
// channels a load. Where windows are large multiplications are what takes the time: there is no sum over channels, so
// tensor cores would multiply zeros. Windows that are unrolled whole are two to three times the code and took as long.
//
// Compiled for DTYPE, CHANNELS, HEIGHT, WIDTH, KERNEL_Y, KERNEL_X, STRIDE, PAD_Y, PAD_X, OUT_HEIGHT, OUT_WIDTH; ROWS (1
// at other strides than 1), COLUMNS of a tile; PAIRS of channels that a CTA has, TILES that it has at once, WARPS,
// RESIDENT CTAs of an SM; SCALED, POOLED, ACTIVATION; behind DepthwiseParams (depthwise.py).
#pragma once
#include "channels.cuh"

constexpr int PARTS = CHANNELS / 2 / PAIRS, TAPS = KERNEL_Y * KERNEL_X, HALF = (KERNEL_X + 1) / 2;
constexpr int DOWN = (OUT_HEIGHT + ROWS - 1) / ROWS, ACROSS = (OUT_WIDTH + COLUMNS - 1) / COLUMNS;
constexpr int IN_COLUMNS = (COLUMNS - 1) * STRIDE + KERNEL_X, PIXEL = CHANNELS * 2;
// Weights are loaded in 16 bytes where each CTA's begin there, and all that a lane has of them at once.
constexpr int AT_ONCE = PAIRS % 4 ? 2 : 8, ASKED = (2 * PAIRS * TAPS / AT_ONCE + 32 * WARPS - 1) / (32 * WARPS);
static_assert(CHANNELS % (2 * PAIRS) == 0 && PAIRS * TILES <= 32 * WARPS && IN_COLUMNS <= 32);
static_assert(ROWS == 1 || STRIDE == 1);
// Whether column c of every tile's input lies in the picture.
TS_DEV constexpr bool always(int c) {
  return c >= PAD_X && (ACROSS - 1) * COLUMNS * STRIDE - PAD_X + c < WIDTH;
}

// A row of input pixels, of two channels, as it comes; `inside`: a bit for each column that is in the picture, others are
// zero. No row of all zeros is read.
TS_DEV void load(const char* from, bool there, u32 inside, u32 (&words)[IN_COLUMNS]) {
#pragma unroll
  for (int c = 0; c < IN_COLUMNS; ++c) {
    words[c] = 0;
    if (there && (always(c) || (inside >> c & 1))) lanes::load_words<4>(from + c * PIXEL, &words[c]);
  }
}

struct Row {
  float in[IN_COLUMNS][2];
  TS_DEV void take(const u32 (&words)[IN_COLUMNS]) {
#pragma unroll
    for (int c = 0; c < IN_COLUMNS; ++c) in[c][0] = Element::low(words[c]), in[c][1] = Element::high(words[c]);
  }
};

TS_LANES_KERNEL(32 * WARPS, RESIDENT) tilestream_depthwise(const TS_PARAM DepthwiseParams p) {
  TS_LANES_SHARED(base);
  const int pair = lanes::thread() % PAIRS, slot = lanes::thread() / PAIRS;
  const int first = lanes::block() % PARTS * PAIRS * 2, channel = first + 2 * pair;
  u32 words[ASKED][AT_ONCE / 2];
#pragma unroll
  for (int n = 0; n < ASKED; ++n) {
    const int item = (n * 32 * WARPS + lanes::thread()) * AT_ONCE;
    if (item < 2 * PAIRS * TAPS) lanes::load_words<2 * AT_ONCE>(p.weight + ((long long)first * TAPS + item) * 2, words[n]);
  }
#pragma unroll
  for (int n = 0; n < ASKED; ++n)
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int item = (n * 32 * WARPS + lanes::thread()) * AT_ONCE + k, c = item / TAPS, tap = item % TAPS;
      const int ky = tap / KERNEL_X, kx = tap % KERNEL_X;
      const float weight = k % 2 ? Element::high(words[n][k / 2]) : Element::low(words[n][k / 2]);
      const u32 at = base + 16 * ((ky * HALF + kx / 2) * PAIRS + c / 2) + 8 * (kx % 2) + 4 * (c % 2);
      if (item < 2 * PAIRS * TAPS) lanes::put32(at, ts::bits_of(weight));
    }
  u32 given = 0;
  float scale[2] = {1, 1}, shift[2] = {0, 0};
  if (slot < TILES) {
    if (p.bias) lanes::load_words<4>(p.bias + channel * 2, &given);
    if constexpr (SCALED) two_floats(p.scale + channel, scale), two_floats(p.shift + channel, shift);
  }
  const float bias[2] = {Element::low(given), Element::high(given)};
  lanes::all_together();
  const int tiles = p.images * DOWN * ACROSS, step = lanes::blocks() / PARTS * TILES;
  for (int tile = lanes::block() / PARTS * TILES + slot; slot < TILES && tile < tiles; tile += step) {
    const int image = tile / (DOWN * ACROSS), y = tile % DOWN * ROWS, x = tile / DOWN % ACROSS * COLUMNS;
    const int from_y = y * STRIDE - PAD_Y, from_x = x * STRIDE - PAD_X;
    u32 inside = 0;
#pragma unroll
    for (int c = 0; c < IN_COLUMNS; ++c) inside |= (u32)((u32)(from_x + c) < WIDTH) << c;
    const char* from = p.x + (((long long)image * HEIGHT + from_y) * WIDTH + from_x) * PIXEL + channel * 2;
    float sums[ROWS][COLUMNS][2];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) sums[r][c][0] = bias[0], sums[r][c][1] = bias[1];
    Row rows[ROWS];  // the window's row ky of output row o is rows[(ky + o) % ROWS]
    u32 next[IN_COLUMNS];
    int in_y = from_y;
#pragma unroll
    for (int r = 0; r < ROWS; ++r, ++in_y, from += WIDTH * PIXEL) {
      load(from, (u32)in_y < HEIGHT, inside, next);
      if (r < ROWS - 1) rows[r].take(next);
    }
    u32 weights = base + 16 * pair;
#pragma unroll(KERNEL_Y <= 3 ? KERNEL_Y : 1)
    for (int above = 0; above < KERNEL_Y; above += ROWS) {
#pragma unroll
      for (int k = 0; k < ROWS; ++k) {
        if (KERNEL_Y % ROWS && above + k >= KERNEL_Y) break;
        rows[(k + ROWS - 1) % ROWS].take(next);
        load(from, (u32)in_y < HEIGHT && above + k + 1 < KERNEL_Y, inside, next);
        ++in_y, from += WIDTH * PIXEL;
#pragma unroll
        for (int half = 0; half < HALF; ++half, weights += 16 * PAIRS) {
          u32 words[4];
          lanes::get128(weights, words);
#pragma unroll
          for (int kx = 0; kx < 2 && 2 * half + kx < KERNEL_X; ++kx)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
              for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                  sums[r][c][e] = ts::fma_(rows[(k + r) % ROWS].in[c * STRIDE + 2 * half + kx][e],
                                           ts::float_of(words[2 * kx + e]), sums[r][c][e]);
        }
      }
    }
    char* const to = p.out + (((long long)image * OUT_HEIGHT + y) * OUT_WIDTH + x) * PIXEL + channel * 2;
    float total[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if ((OUT_HEIGHT % ROWS && y + r >= OUT_HEIGHT) || (OUT_WIDTH % COLUMNS && x + c >= OUT_WIDTH)) continue;
        float v[2] = {sums[r][c][0], sums[r][c][1]};
        if constexpr (SCALED) v[0] = ts::fma_(v[0], scale[0], shift[0]), v[1] = ts::fma_(v[1], scale[1], shift[1]);
        activate(v);
        lanes::store32(to + (r * OUT_WIDTH + c) * PIXEL, Element::pack(v[0], v[1]));
        if constexpr (POOLED) total[0] += v[0], total[1] += v[1];
      }
    if constexpr (POOLED) {
      const u32 words[2] = {ts::bits_of(total[0]), ts::bits_of(total[1])};
      lanes::store_words<8>(p.pooled + (long long)tile * CHANNELS + channel, words);
    }
  }
}
