// Tiles of LUCID's matrix, and the layout of a solve's scratch arrays.
//
//     Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d} ≤ 1,    0 where i and j belong to different segments
//
// Scratch is (m, T, w), with m = b n the heads of all sequences, T the tokens padded to whole tiles, and
// rows padded to 16 bytes. Invalid tokens and padding have k̂ = 0, v = 0 and β = 0, so that the kernels
// need no mask. Tiles without a common segment are not multiplied.
#pragma once

#include "copies.cuh"
#include "masks.cuh"
#include "products.cuh"

// Padding of the rows of a tile in shared memory.
template <class T, int WIDTH>
__host__ __device__ constexpr int step_of() {
  return WIDTH + gap<T>();
}

// Begins to copy rows of scratch, which begin at `from`, to shared memory. Not unrolled: nothing waits
// for a copy, and registers are scarcer than instructions.
template <int THREADS, int ROWS, int WIDTH, class T>
__device__ __forceinline__ void copy_tile(Copies& copies, T* tile, const T* __restrict__ from,
                                          int from_step) {
  constexpr int PART = 16 / sizeof(T), PARTS = WIDTH / PART;
#pragma unroll 1
  for (int start = 0; start < ROWS * PARTS; start += THREADS) {
    const int at = start + threadIdx.x;
    if (ROWS * PARTS % THREADS != 0 && at >= ROWS * PARTS) break;
    const int row = at / PARTS, column = at % PARTS * PART;
    copies.add(tile + row * step_of<T, WIDTH>() + column,
               from + (long long)row * from_step + column, true);
  }
}

// A power of two above x ≥ 0, and its reciprocal. Both are normal numbers; so for enormous x, x is at
// most 8 times the power.
__device__ __forceinline__ float power_above(float x) {
  const int exponent = __float_as_int(x) >> 23;
  return __int_as_float(min(max(exponent + 1, 2), 252) << 23);
}

__device__ __forceinline__ float one_by_power(float power) {
  return __int_as_float((254 << 23) - __float_as_int(power));
}

// The scale of exponents, and the segments of tokens.
struct Metric {
  const int* segments;  // (s), of this sequence, or null
  int s;
  float scale, shift;  // s and s d, times log₂ e
};

// The tokens that share a segment with some of `count` tokens from `first` on: all of T without
// segments. Padding belongs to the segment of the last token, s − 1.
__device__ __forceinline__ Span reach(const int* segments, int s, int tokens, int first, int count) {
  if (segments == nullptr) return {0, tokens};
  const int low = segments[min(first, s - 1)], high = segments[min(first + count, s) - 1];
  const int end = position_of_run(segments, s, high + 1);
  return {position_of_run(segments, s, low), end < s ? end : tokens};
}

// Replaces ⟨k̂_i, k̂_j⟩ by Φ, for a warp's 16 rows, which begin at token `i_first`.
template <int COLUMNS>
__device__ __forceinline__ void exponentiate(Product<COLUMNS>& c, const Metric& metric, int i_first,
                                             int j_first) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      c.x[j][i] = power_of_2(c.x[j][i] * metric.scale - metric.shift);
  if (metric.segments == nullptr) return;
  // Tokens after the last one are padding, in any segment.
  const int last = metric.s - 1;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = metric.segments[min(i_first + row_of(i), last)];
      if (own != metric.segments[min(j_first + column_of(j, i), last)]) c.x[j][i] = 0.0f;
    }
}
