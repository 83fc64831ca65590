// The gradient of LUCID's keys, in one pass over all pairs of tiles.
//
//     dk̂_a = −s Σ_b Φ_ab g_ab k̂_b,    g_ab = dv_a · y_b  (b before a),  dv_b · y_a  (b after a),
//
// and through the norm, dk = (dk̂ − k̂ (k̂ · dk̂) / d) / rms(k). A block owns a tile of keys and iterates
// over all others of the same segments, before and after it. No two blocks add to the same element, so
// the result is deterministic.
//
// g is unbounded, unlike keys. Where keys are 16-bit operands, a row of Φ ∘ g is divided by a power of
// two, and the previous sum is rescaled when that power grows.
#include "lucid_tiles.cuh"
#include "tiles.cuh"
#include "warps.cuh"

// A tile of dk (b, s, n, d), from y and dv (b, s, n, e); the grid is (T / ROWS, m).
template <class T, class OPERAND, int ROWS, int COLUMNS, int KEY_WIDTH, int WIDTH, bool NORMALIZE>
__global__ void __launch_bounds__(2 * ROWS, 1) lucid_key_gradient(
    const OPERAND* __restrict__ keys, const float* __restrict__ reciprocal,
    const int* __restrict__ segments, const unsigned char* __restrict__ valid,
    const T* __restrict__ y, const T* __restrict__ d_v, T* __restrict__ d_k, int s, int heads,
    int tokens, int key_width, int width, float scale, float shift, float score_scale, bool by_16) {
  constexpr int KEY_STEP = step_of<OPERAND, KEY_WIDTH>(), STEP = step_of<T, WIDTH>();
  constexpr int PHI_STEP = step_of<OPERAND, COLUMNS>();
  constexpr bool SCALED = sizeof(OPERAND) == 2;
  extern __shared__ __align__(16) unsigned char memory[];
  OPERAND* own_keys = reinterpret_cast<OPERAND*>(memory);
  OPERAND* other_keys = own_keys + ROWS * KEY_STEP;
  OPERAND* phi = other_keys + COLUMNS * KEY_STEP;
  T* left = reinterpret_cast<T*>(phi + ROWS * PHI_STEP);
  T* right = left + ROWS * STEP;
  const int row = 16 * warp(), own = blockIdx.x * ROWS;
  phi += row * PHI_STEP;
  const long long head = blockIdx.y, b = head / heads, n = head % heads;
  const long long value_step = (long long)heads * width, key_step = (long long)heads * key_width;
  if (segments != nullptr) segments += b * s;
  if (valid != nullptr) valid += b * s;
  y += (b * s * heads + n) * width;
  d_v += (b * s * heads + n) * width;
  keys += head * tokens * KEY_WIDTH;

  Copies copies;
  copy_tile<2 * ROWS, ROWS, KEY_WIDTH>(copies, own_keys, keys + (long long)own * KEY_WIDTH,
                                       KEY_WIDTH);
  Product<KEY_WIDTH> total;
  total.clear();
  float size[2] = {0.0f, 0.0f};
  const Span span = reach(segments, s, tokens, own, ROWS);
  // Tiles that cross the diagonal are visited twice, each time for one side of it.
  for (int side = 0; side < 2; ++side) {
    const bool is_before = side == 0;
    const T *of_own = is_before ? d_v : y, *of_other = is_before ? y : d_v;
    const int begin = (is_before ? span.low : own) / COLUMNS * COLUMNS;
    const int end = min(is_before ? own + ROWS : span.high, s);
    for (int other = begin; other < end; other += COLUMNS) {
      Product<COLUMNS> g;
      g.clear();
      for (int first = 0; first < width; first += WIDTH) {
        const int there = width - first;
        // With a single chunk of channels, the block's own rows stay in shared memory.
        if (other == begin || width > WIDTH)
          begin_tile<2 * ROWS, ROWS, WIDTH>(copies, left, STEP, of_own + first, value_step, own, s, there,
                                            by_16, valid);
        begin_tile<2 * ROWS, COLUMNS, WIDTH>(copies, right, STEP, of_other + first, value_step, other, s,
                                               there, by_16, valid);
        if (first == 0)
          copy_tile<2 * ROWS, COLUMNS, KEY_WIDTH>(copies, other_keys,
                                                  keys + (long long)other * KEY_WIDTH, KEY_WIDTH);
        copies.wait();
        __syncthreads();
        add_product<false, true, COLUMNS, WIDTH>(g, left + row * STEP, STEP, right, STEP);
        if (first + WIDTH < width) __syncthreads();
      }
      Product<COLUMNS> weights;
      weights.clear();
      add_product<false, true, COLUMNS, KEY_WIDTH>(weights, own_keys + row * KEY_STEP, KEY_STEP,
                                                   other_keys, KEY_STEP);
      exponentiate(weights, {segments, s, scale, shift}, own + row, other);
      float largest[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int apart = own + row + row_of(i) - other - column_of(j, i);
          const bool is_there = is_before ? apart > 0 : apart < 0;
          weights.x[j][i] = is_there ? weights.x[j][i] * g.x[j][i] : 0.0f;
          largest[i / 2] = fmaxf(largest[i / 2], fabsf(weights.x[j][i]));
        }
      if constexpr (SCALED) {
        float kept[2], by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float higher = fmaxf(size[i], power_above(max_of_four(largest[i])));
          by[i] = one_by_power(higher);
          kept[i] = size[i] * by[i];
          size[i] = higher;
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) weights.x[j][i] *= by[i / 2];
        if (kept[0] != 1.0f || kept[1] != 1.0f)
#pragma unroll
          for (int j = 0; j < KEY_WIDTH / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) total.x[j][i] *= kept[i / 2];
      }
      store_product(phi, PHI_STEP, weights);
      __syncwarp();
      add_product<false, false, KEY_WIDTH, COLUMNS>(total, phi, PHI_STEP, other_keys, KEY_STEP);
      __syncthreads();
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = own + row + row_of(2 * half);
    const float factor = -score_scale * (SCALED ? size[half] : 1.0f);
    const float one_by_rms = NORMALIZE ? reciprocal[head * tokens + token] : 1.0f;
    const OPERAND* unit = own_keys + (row + row_of(2 * half)) * KEY_STEP;
    float along = 0.0f;
    if constexpr (NORMALIZE) {
#pragma unroll
      for (int j = 0; j < KEY_WIDTH / 8; ++j)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i)
          along += total.x[j][i] * wide(unit[column_of(j, i)]);
      along = sum_of_four(along) / key_width;
    }
    if (token >= s) continue;
    T* to = d_k + (b * s * heads + n) * key_width + token * key_step;
#pragma unroll
    for (int j = 0; j < KEY_WIDTH / 8; ++j)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const int column = column_of(j, i);
        float found = total.x[j][i];
        if constexpr (NORMALIZE) found -= wide(unit[column]) * along;
        if (column < key_width) to[column] = narrow<T>(found * factor * one_by_rms);
      }
  }
}
