// The inverse of a unit lower triangular tile in shared memory, in float32.
//
//     N = (I + L)⁻¹,    L strictly lower triangular
//
// A warp has 16 rows. Diagonal tiles of 16 × 16 are solved row by row, and then combined by
// recursive 2 × 2 block inversion,
//
//     [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]].
//
// Doubling the Neumann series instead would lose all digits for nearly equal keys.
#pragma once

#include "products.cuh"

// From inverted blocks of HALF rows, computes those of twice as many rows.
template <int HALF>
__device__ __forceinline__ void join_blocks(float* solved, const float* lower, int step) {
  const int row = 16 * warp(), own = row / HALF * HALF;
  const bool is_lower = row / HALF % 2 == 1;
  float* corner = solved + row * step + own - HALF;
  Product<HALF> found;
  found.clear();
  if (is_lower)
    add_product<false, false, HALF, HALF>(found, lower + row * step + own - HALF, step,
                                          solved + (own - HALF) * step + own - HALF, step);
  if (is_lower) store_product(corner, step, found);
  __syncthreads();
  found.clear();
  if (is_lower)
    add_product<false, false, HALF, HALF>(found, solved + row * step + own, step,
                                          solved + own * step + own - HALF, step);
#pragma unroll
  for (int j = 0; j < HALF / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) found.x[j][i] = -found.x[j][i];
  __syncthreads();
  if (is_lower) store_product(corner, step, found);
  __syncthreads();
}

// Writes N of `lower` to `solved`; entries of `lower` on and above the diagonal are not read. Starts
// and ends with a barrier.
template <int SIZE>
__device__ __forceinline__ void unit_lower_inverse(float* solved, const float* lower, int step) {
  for (int at = threadIdx.x; at < SIZE * SIZE; at += 2 * SIZE) {
    const int row = at / SIZE, column = at % SIZE;
    if (row / 16 != column / 16) solved[row * step + column] = 0.0f;
  }
  __syncthreads();
  const int first = 16 * warp() * (step + 1), column = lane();
  if (column < 16) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) x[i] -= lower[first + i * step + j] * x[j];
      solved[first + i * step + column] = x[i];
    }
  }
  __syncthreads();
  if constexpr (SIZE >= 32) join_blocks<16>(solved, lower, step);
  if constexpr (SIZE >= 64) join_blocks<32>(solved, lower, step);
}
