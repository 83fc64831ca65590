// Block substitution with LUCID's matrix, one super-block after the other; Φ is never stored.
//
// Forward, from the first super-block J to the last, with N_J from `lucid_inverse.cu` and R = v,
//
//     ρ_J = N_J R_J,    y_J = β_J ρ_J,    R_I −= Φ_IJ y_J  for all later I;
//
// backward, from the last to the first, with R = dy,
//
//     X_J = N_Jᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J  for all earlier I.
//
// Φ is symmetric, so one kernel, `lucid_update`, serves both. In products of 16 bits, y is divided by a
// power of two above the largest right side of its channel and super-block: since no entry of N is
// larger than 2, no quotient is larger than 4 S, far below float16's maximum.
#include "lucid_tiles.cuh"
#include "warps.cuh"

__device__ __forceinline__ float4 four(const float* x) {
  return *reinterpret_cast<const float4*>(x);
}

// A tile of rows of the super-block that begins at `start`, and some channels; the grid is (tiles of
// the super-block, m, chunks).
//
// Writes y or dv to `out` (b, s, n, e), and the same as an operand, divided by `sizes` (m, step), to
// `solved` (m, T, step). With a β, `rho` (b, s, n, e) is ρ: written forward, read backward, where
// `d_factor` (chunks, m, T) receives the channels' part of dβ = X · ρ.
template <class T, class OPERAND, int TILE, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(2 * TILE, 1) lucid_apply(
    const OPERAND* __restrict__ inverse, const float* __restrict__ factor,
    const unsigned char* __restrict__ valid, const float* __restrict__ right,
    OPERAND* __restrict__ solved, float* __restrict__ sizes, T* __restrict__ rho,
    T* __restrict__ out, float* __restrict__ d_factor, int s, int heads, int tokens, int super,
    int start, int width, int step) {
  constexpr int BLOCK_STEP = step_of<OPERAND, TILE>(), SIDE_STEP = step_of<OPERAND, WIDTH>();
  constexpr bool SCALED = sizeof(OPERAND) == 2;
  extern __shared__ __align__(16) unsigned char memory[];
  float* size = reinterpret_cast<float*>(memory);
  OPERAND* block = reinterpret_cast<OPERAND*>(size + WIDTH);
  OPERAND* sides = block + TILE * BLOCK_STEP;
  const long long head = blockIdx.y, b = head / heads, n = head % heads;
  const int first = blockIdx.z * WIDTH, own = start + blockIdx.x * TILE, row = 16 * warp();
  const int end = min(start + super, tokens);
  right += head * tokens * step + first;
  inverse += head * tokens * super;

  if constexpr (SCALED) {
    // Threads with the same channels store their results next to one another.
    float* largest = reinterpret_cast<float*>(block);
    const int parts = blockDim.x / (WIDTH / 4), part = threadIdx.x / (WIDTH / 4);
    if (part < parts) {
      float found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
      for (int token = start + part; token < end; token += parts) {
        const float4 x = four(right + (long long)token * step + threadIdx.x % (WIDTH / 4) * 4);
        found[0] = fmaxf(found[0], fabsf(x.x));
        found[1] = fmaxf(found[1], fabsf(x.y));
        found[2] = fmaxf(found[2], fabsf(x.z));
        found[3] = fmaxf(found[3], fabsf(x.w));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[threadIdx.x * 4 + i] = found[i];
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < WIDTH; channel += blockDim.x) {
      float found = 0.0f;
      for (int i = 0; i < parts; ++i) found = fmaxf(found, largest[i * WIDTH + channel]);
      size[channel] = power_above(found);
      if (blockIdx.x == 0) sizes[head * step + first + channel] = size[channel];
    }
    __syncthreads();
  }

  Product<WIDTH> total;
  total.clear();
  const int low = BACKWARD ? own : start, high = BACKWARD ? end : own + TILE;
  for (int other = low; other < high; other += TILE) {
    const int at_row = BACKWARD ? other : own, at_column = (BACKWARD ? own : other) - start;
    copy_tile<TILE, TILE>(block, inverse + (long long)at_row * super + at_column, super);
    for (int at = threadIdx.x; at < TILE * WIDTH / 4; at += blockDim.x) {
      const int token = at / (WIDTH / 4), channel = at % (WIDTH / 4) * 4;
      const float4 x = four(right + (long long)(other + token) * step + channel);
      const float found[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = SCALED ? one_by_power(size[channel + i]) : 1.0f;
        sides[token * SIDE_STEP + channel + i] = narrow<OPERAND>(found[i] * by);
      }
    }
    __syncthreads();
    add_product<BACKWARD, false, WIDTH, TILE>(total, BACKWARD ? block + row : block + row * BLOCK_STEP,
                                              BLOCK_STEP, sides, SIDE_STEP);
    __syncthreads();
  }

  factor += head * tokens;
  solved += head * tokens * step + first;
  float along[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = own + row + row_of(i), column = column_of(j, i);
      const float found = total.x[j][i], result = found * factor[token];
      const float unit = SCALED ? size[column] : 1.0f;
      solved[(long long)token * step + column] = narrow<OPERAND>(result);
      if (token < s && first + column < width) {
        const long long at = ((b * s + token) * heads + n) * width + first + column;
        out[at] = narrow<T>(result * unit);
        if (rho != nullptr && !BACKWARD) rho[at] = narrow<T>(found * unit);
        if (rho != nullptr && BACKWARD) along[i / 2] += found * unit * wide(rho[at]);
      }
    }
  if (rho == nullptr || !BACKWARD) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = own + row + row_of(2 * i);
    const bool counts = token < s && (valid == nullptr || valid[b * s + token]);
    const float found = sum_of_four(along[i]);
    if (lane() % 4 == 0)
      d_factor[((long long)blockIdx.z * gridDim.y + head) * tokens + token] = counts ? found : 0.0f;
  }
}

// R_I −= Φ_IJ y_J for the super-block J that begins at `start`, for a tile of rows and channels, the
// first of which begins at `first_row`. The grid is (tiles, m, chunks).
template <class OPERAND, int ROWS, int COLUMNS, int KEY_WIDTH, int WIDTH>
__global__ void __launch_bounds__(2 * ROWS, 2) lucid_update(
    const OPERAND* __restrict__ keys, const int* __restrict__ segments,
    const OPERAND* __restrict__ solved, const float* __restrict__ sizes, float* __restrict__ right,
    int s, int heads, int tokens, int super, int start, int first_row, int step, float scale,
    float shift) {
  constexpr int KEY_STEP = step_of<OPERAND, KEY_WIDTH>(), STEP = step_of<OPERAND, WIDTH>();
  constexpr int PHI_STEP = step_of<OPERAND, COLUMNS>();
  extern __shared__ __align__(16) unsigned char memory[];
  OPERAND* own_keys = reinterpret_cast<OPERAND*>(memory);
  OPERAND* other_keys = own_keys + ROWS * KEY_STEP;
  OPERAND* values = other_keys + COLUMNS * KEY_STEP;
  OPERAND* phi = values + COLUMNS * STEP + 16 * warp() * PHI_STEP;
  const long long head = blockIdx.y;
  const int first = blockIdx.z * WIDTH, own = first_row + blockIdx.x * ROWS, row = 16 * warp();
  if (segments != nullptr) segments += head / heads * s;
  keys += head * tokens * KEY_WIDTH;
  solved += head * tokens * step + first;

  copy_tile<ROWS, KEY_WIDTH>(own_keys, keys + (long long)own * KEY_WIDTH, KEY_WIDTH);
  Product<WIDTH> total;
  total.clear();
  const int end = min(start + super, tokens);
  for (int other = start; other < end; other += COLUMNS) {
    copy_tile<COLUMNS, KEY_WIDTH>(other_keys, keys + (long long)other * KEY_WIDTH, KEY_WIDTH);
    copy_tile<COLUMNS, WIDTH>(values, solved + (long long)other * step, step);
    __syncthreads();
    Product<COLUMNS> scores;
    scores.clear();
    add_product<false, true, COLUMNS, KEY_WIDTH>(scores, own_keys + row * KEY_STEP, KEY_STEP,
                                                 other_keys, KEY_STEP);
    exponentiate(scores, {segments, s, scale, shift}, own + row, other);
    store_product(phi, PHI_STEP, scores);
    __syncwarp();
    add_product<false, false, WIDTH, COLUMNS>(total, phi, PHI_STEP, values, STEP);
    __syncthreads();
  }
  right += (head * tokens + own + row) * step + first;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = column_of(j, i);
      const float size = sizeof(OPERAND) == 2 ? sizes[head * step + first + column] : 1.0f;
      right[row_of(i) * step + column] -= total.x[j][i] * size;
    }
}
