// Pixels at a tap of a convolution: row r of a tile is output pixel (n, v, u), and takes the input pixel that lies
// `y` and `x` beside (n, stride_y v, stride_x u). Outside of the picture it is zero.
//
// Lanes copy them as they copy rows through an index (gather.cuh), with computed names; or one bulk copy does, in the im2col
// mode, which walks over output pixels by itself.
#pragma once

// What a loader's registers allow: names of pixels take more of them than indices do.
#if LOADER_REGISTERS >= 88
#define TS_UNROLL_TAPS 4
#else
#define TS_UNROLL_TAPS 1
#endif

namespace ts {

// How a kind of stage takes pixels at taps, if it does; kernels specialise it where it does.
constexpr int BY_LANES = 1, IN_BULK = 2;
template <class S>
constexpr int TAPS = 0;

constexpr int TAPPED = -3, TAPPED_IN_BULK = -4;  // a load's map, where its rows are pixels
// Of such a LoadOp: col in bytes (in bulk: elements), queue and features y and x of the tap (in bulk: from the lowest), tensor
// the pointer (in bulk: the map), cols in bytes, padded the window.

template <class S>
TS_DEV bool copied_by_lanes(int map) {
  return map == GATHERED || ((TAPS<S> & BY_LANES) && map == TAPPED);
}

// An output pixel, as what taps are beside: the first pixel of its picture, below zero beyond the last row; and where in that
// picture a tap of (0, 0) reads, y in the upper half.
struct Pixel {
  int picture;
  u32 corner;
};
TS_DEV Pixel output_pixel(const Window& w, int row) {
  const int line = row / w.width, image = line / w.height;
  const int y = (line - image * w.height) * w.stride_y, x = (row - line * w.width) * w.stride_x;
  return {image * (w.in_height * w.in_width), (u32)y << 16 | (u32)x};
}
// Which of the pictures' pixels a tap takes for an output pixel; beyond the last row, and outside of the picture, -1.
TS_DEV int input_pixel(const Window& w, const LoadOp& op, const Pixel& out) {
  const int y = (int)(out.corner >> 16) + op.queue, x = (int)(out.corner & 0xffff) + op.features;
  const bool inside = out.picture >= 0 && (u32)y < (u32)w.in_height && (u32)x < (u32)w.in_width;
  return inside ? out.picture + y * w.in_width + x : -1;
}

// The output pixels of the rows of a tile that a lane names, computed once a tile where there are registers for them.
template <class S>
struct Pixels {
  static constexpr bool AHEAD = (TAPS<S> & BY_LANES) && Names::AHEAD;
  static constexpr int COUNT = AHEAD ? ROWS / WARP : 1;
  int tile = -1, window = -1;
  Pixel rows[COUNT];
  template <class P>
  static TS_DEV Pixel of(const P& p, const Window& w, int row) {
    return row < p.rows ? output_pixel(w, row) : Pixel{-1, 0};
  }
  template <class P>
  TS_DEV void read(const P& p, const Window& w, int number, int at) {
    if (!AHEAD || (tile == at && window == number)) return;
    tile = at;
    window = number;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) rows[k] = of(p, w, at * ROWS + k * WARP + (int)lane_in_warp());
  }
};

template <class S, class P, class R>
TS_DEV void load_tapped(const P& p, const LoadOp& op, int tile, bool follows, Pixels<S>& pixels, int& coming, R& ring) {
  const Window w = p.window(op.padded);
  pixels.read(p, w, op.padded, tile);
  ring.wait_empty();
  copy_rows<S, TS_UNROLL_TAPS>(ring.addr(), p, op, (u32)w.pixel_bytes, [&](int k) {
    const Pixel out = Pixels<S>::AHEAD ? pixels.rows[k] : Pixels<S>::of(p, w, tile * ROWS + k * WARP + (int)lane_in_warp());
    return input_pixel(w, op, out);
  });
  hand_over<S>(follows, coming, ring);
}

// The map's box begins at the lowest tap of output pixel (0, 0) and ends at that of the last; a tap is an offset from there.
template <class P, class R>
TS_DEV void load_tapped_in_bulk(const P& p, const LoadOp& op, int tile, R& ring) {
  if (lane_in_warp() == 0) {
    ring.wait_empty();
    bar_expect(ring.full(), CHUNK_BYTES);
    const Window w = p.window(op.padded);
    const int line = tile * ROWS / w.width, image = line / w.height;
    const int x = (tile * ROWS - line * w.width) * w.stride_x + w.lowest_x, y = (line - image * w.height) * w.stride_y + w.lowest_y;
    tma_load_pixels(ring.addr(), &p.maps[op.tensor], op.col, x, y, image, (u16)op.features, (u16)op.queue, ring.full(), EVICT_NORMAL);
  }
  sync_warp();  // as where rows come in order
  ring.advance();
}

}  // namespace ts
