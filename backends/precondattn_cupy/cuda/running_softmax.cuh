// Online softmax over tiles of scores, with a running maximum m, for the 16 rows of a warp.
//
//     P = 2^{s S − m'},    l ← l 2^{m − m'} + rowsum(P),    acc ← acc 2^{m − m'}  (+ P v)
//
// with m ≥ s S, and s > 0, so that the largest element is found before it is multiplied by s.
// l sums the rounded (or two-part) P that is multiplied with v, so that acc / l is a mean. A lane has a
// part of two rows: `close` adds l over the four lanes of a row after the last tile.
#pragma once

#include "held_products.cuh"

struct RunningSoftmax {
  float largest[2], total[2];

  __device__ __forceinline__ RunningSoftmax() {
    largest[0] = largest[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
  }

  // From S, −∞ where masked, to P, rounded to F or unrounded; rescales acc to P. `scale` is s.
  template <class F, bool IS_ROUNDED, int COLUMNS, int WIDTH>
  __device__ __forceinline__ void weigh(Product<COLUMNS>& p, Product<WIDTH>& acc,
                                        float scale) {
    float base[2], shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float found = -INFINITE;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
        found = fmaxf(found, fmaxf(p.x[j][2 * i], p.x[j][2 * i + 1]));
      const float higher = fmaxf(largest[i], max_of_four(found) * scale);
      base[i] = higher == -INFINITE ? 0.0f : higher;
      shrink[i] = power_of_2(largest[i] - base[i]);
      total[i] *= shrink[i];
      largest[i] = higher;
    }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float found = power_of_2(p.x[j][i] * scale - base[i / 2]);
        p.x[j][i] = IS_ROUNDED ? rounded<F>(found) : found;
        total[i / 2] += p.x[j][i];
      }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.x[j][i] *= shrink[i / 2];
  }

  __device__ __forceinline__ void close() {
    total[0] = sum_of_four(total[0]);
    total[1] = sum_of_four(total[1]);
  }

  // λ in units of log 2, and what turns acc into the mean; `nothing` and 0 without visible keys, and
  // NaN where a key is.
  __device__ __forceinline__ float log_total(int i, float nothing) const {
    return total[i] != 0.0f ? largest[i] + log2f(total[i]) : nothing;
  }
  __device__ __forceinline__ float one_by_total(int i) const {
    return total[i] != 0.0f ? 1.0f / total[i] : 0.0f;
  }
};
