// Weights that lie transposed, as backward graphs read them: copied before the main kernel, one launch for all, the same
// stream, every call, so that a replayed graph sees the weights of that moment.
#pragma once

// TurnEntry and TurnParams stand in front of this (turn.py).

constexpr int EDGE = 32;  // of the square that a block turns at once
constexpr int STEP = 8;   // rows of it that 256 threads take at once

template <class E>
__device__ void turn(const TurnEntry& e) {
  __shared__ E square[EDGE][EDGE + 1];
  const int x = threadIdx.x % EDGE, y0 = threadIdx.x / EDGE;
  const int across = (e.columns + EDGE - 1) / EDGE, down = (e.rows + EDGE - 1) / EDGE;
  for (int k = blockIdx.x; k < across * down; k += gridDim.x) {
    const int r0 = k / across * EDGE, c0 = k % across * EDGE;
    E held[EDGE / STEP];
#pragma unroll
    for (int i = 0; i < EDGE / STEP; ++i) {  // all under way at once: latency is what a small matrix takes
      const int c = c0 + y0 + i * STEP;
      held[i] = c < e.columns && r0 + x < e.rows ? ((const E*)e.source)[(long long)c * e.stride + r0 + x] : (E)0;
    }
#pragma unroll
    for (int i = 0; i < EDGE / STEP; ++i) square[y0 + i * STEP][x] = held[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EDGE / STEP; ++i) {
      const int y = y0 + i * STEP;
      if (r0 + y < e.rows && c0 + x < e.columns) ((E*)e.target)[(long long)(r0 + y) * e.columns + c0 + x] = square[x][y];
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(256) tilestream_turn(const __grid_constant__ TurnParams p) {
  const TurnEntry& e = p.entries[blockIdx.y];
  if (e.element_bytes == 2)
    turn<unsigned short>(e);
  else
    turn<unsigned int>(e);
}
