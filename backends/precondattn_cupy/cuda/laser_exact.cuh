// LASER of heads whose values are too far apart for one shift: every e^{s + v} is computed separately.
//
//     o_ic = log Σ_j e^{s_ij + v_jc} − log Σ_j e^{s_ij},    w_ijc = e^{s_ij − λ_i + v_jc − o_ic},
//     dv_jc = Σ_i do_ic w_ijc,    dS_ij = Σ_c do_ic (w_ijc − a_ij),    a_ij = e^{s_ij − λ_i}.
//
// The scores of a tile are stored in shared memory. Then a warp iterates over its 16 rows and some
// channels, with one number of each row in the registers of a lane. Exponents are in units of log 2.
#pragma once

#include "held_products.cuh"
#include "masks.cuh"
#include "tiles.cuh"

#define LOG2_E 1.44269504f

// Channels that are processed at once, one for each lane.
constexpr int CHANNELS = 32;

// Padding of float32 tiles whose rows or columns are read by lanes: no bank conflicts.
template <int COLUMNS>
__host__ __device__ constexpr int wide_step() {
  return COLUMNS + 1;
}

// Some channels of some tokens, in float32.
template <int THREADS, int ROWS, class T>
__device__ __forceinline__ void load_channels(float* tile, const T* __restrict__ head,
                                              long long step, int first, int count, int width,
                                              const unsigned char* valid) {
  // Channels are skipped in parts of CHANNELS, which keeps rows aligned.
  const bool by_16 = width * sizeof(T) % 16 == 0;
  load_tile<THREADS, ROWS, CHANNELS>(tile, wide_step<CHANNELS>(), head, step, first, count, width,
                                     by_16, valid);
}

// Writes the scores of a warp's 16 rows, minus `log_of` of the query, −∞ where masked, to the warp's
// own rows of a tile. OF_KEYS: rows are keys, and columns queries.
template <bool OF_KEYS, int COLUMNS, int KEY_WIDTH, class T>
__device__ __forceinline__ void store_scores(float* to, const T* own, const T* other, int step,
                                             const Mask& mask, float scale, int row, int start,
                                             const int (&run)[2], const int* runs,
                                             const float (&log_of_row)[2],
                                             const float* log_of_column) {
  Product<COLUMNS> p;
  p.clear();
  add_product<false, true, COLUMNS, KEY_WIDTH>(p, own, step, other, step);
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = column_of(j, i), r = row + 8 * (i / 2);
      const bool is_near = OF_KEYS ? mask.is_near(start + column, r) : mask.is_near(r, start + column);
      const float log_of = OF_KEYS ? log_of_column[column] : log_of_row[i / 2];
      to[row_of(i) * wide_step<COLUMNS>() + column] =
          is_near && runs[column] == run[i / 2] ? p.x[j][i] * scale - log_of : -INFINITE;
    }
  __syncwarp();
}
