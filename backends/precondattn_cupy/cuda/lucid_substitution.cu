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
// Φ is symmetric, so one kernel, `lucid_update`, serves both. In products of 16 bits, right sides are
// divided by a power of two for each channel and super-block of S tokens, so that the largest is at most
// 2¹² / S: since no entry of N or β is larger than 2, no quotient y is larger than 2¹⁴, which float16
// represents, and right sides that are far smaller keep their digits.
#include "held_products.cuh"
#include "lucid_tiles.cuh"

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
    const int* __restrict__ segments, const unsigned char* __restrict__ valid, const float* __restrict__ right,
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
      size[channel] = power_above(found * (super / 4096.0f));
      if (blockIdx.x == 0) sizes[head * step + first + channel] = size[channel];
    }
    __syncthreads();
  }

  Copies copies;
  Product<WIDTH> total;
  total.clear();
  if (segments != nullptr) segments += b * s;
  const Span span = reach(segments, s, tokens, own, TILE);
  const int low = BACKWARD ? own : max(start, span.low / TILE * TILE);
  const int high = BACKWARD ? min(end, span.high) : own + TILE;
  for (int other = low; other < high; other += TILE) {
    const int at_row = BACKWARD ? other : own, at_column = (BACKWARD ? own : other) - start;
    copy_tile<2 * TILE, TILE, TILE>(copies, block, inverse + (long long)at_row * super + at_column,
                                    super);
    // Several reads before the first one is used.
#pragma unroll 8
    for (int i = 0; i < WIDTH / 8; ++i) {
      const int at = i * 2 * TILE + threadIdx.x;
      const int token = at / (WIDTH / 4), channel = at % (WIDTH / 4) * 4;
      float4 x = four(right + (long long)(other + token) * step + channel);
      if (SCALED) {
        const float4 by = four(size + channel);
        x = {x.x * one_by_power(by.x), x.y * one_by_power(by.y), x.z * one_by_power(by.z),
             x.w * one_by_power(by.w)};
      }
      store_two(sides + token * SIDE_STEP + channel, x.x, x.y);
      store_two(sides + token * SIDE_STEP + channel + 2, x.z, x.w);
    }
    copies.wait();
    __syncthreads();
    add_product<BACKWARD, false, WIDTH, TILE>(total, BACKWARD ? block + row : block + row * BLOCK_STEP,
                                              BLOCK_STEP, sides, SIDE_STEP);
    __syncthreads();
  }

  factor += head * tokens;
  solved += head * tokens * step + first;
  float along[2] = {0.0f, 0.0f};
  const bool aligned = width % 2 == 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int token = own + row + row_of(i);
    const float by = factor[token];
    const long long at = ((b * s + token) * heads + n) * width + first;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const int column = column_of(j, i), there = width - first - column;
      float x = total.x[j][i], y = total.x[j][i + 1];
      store_two(solved + (long long)token * step + column, x * by, y * by);
      if (token >= s || there <= 0) continue;
      if (SCALED) {
        x *= size[column];
        y *= size[column + 1];
      }
      store_there(out + at + column, there, aligned, x * by, y * by);
      if (rho == nullptr) continue;
      if (!BACKWARD) {
        store_there(rho + at + column, there, aligned, x, y);
      } else {
        const float2 other = load_there(rho + at + column, there, aligned);
        along[i / 2] += x * other.x + (there > 1 ? y * other.y : 0.0f);
      }
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
  constexpr int THREADS = 2 * ROWS;
  extern __shared__ __align__(16) unsigned char memory[];
  OPERAND* own_keys = reinterpret_cast<OPERAND*>(memory);
  // Two buffers each.
  OPERAND* other_keys = own_keys + ROWS * KEY_STEP;
  OPERAND* values = other_keys + 2 * COLUMNS * KEY_STEP;
  const long long head = blockIdx.y;
  const int first = blockIdx.z * WIDTH, own = first_row + blockIdx.x * ROWS, row = 16 * warp();
  if (segments != nullptr) segments += head / heads * s;
  const Span span = reach(segments, s, tokens, own, ROWS);
  const int end = min(start + super, tokens);
  // Narrower bounds of the loop would cost registers, of which there are none left.
  if (span.low >= end || span.high <= start) return;
  keys += (head * tokens + start) * KEY_WIDTH;
  solved += (head * tokens + start) * step + first;

  Copies copies;
  // The next tile.
  const auto begin = [&](int buffer) {
    copy_tile<THREADS, COLUMNS, KEY_WIDTH>(copies, other_keys + buffer * COLUMNS * KEY_STEP, keys,
                                           KEY_WIDTH);
    copy_tile<THREADS, COLUMNS, WIDTH>(copies, values + buffer * COLUMNS * STEP, solved, step);
    keys += COLUMNS * KEY_WIDTH;
    solved += (long long)COLUMNS * step;
  };
  copy_tile<THREADS, ROWS, KEY_WIDTH>(copies, own_keys, keys + (long long)(own - start) * KEY_WIDTH,
                                      KEY_WIDTH);
  begin(0);
  Product<WIDTH> total;
  total.clear();
  for (int other = start, buffer = 0; other < end; other += COLUMNS, buffer ^= 1) {
    copies.wait();
    __syncthreads();
    if (other + COLUMNS < end) begin(buffer ^ 1);
    Product<COLUMNS> scores;
    scores.clear();
    add_product<false, true, COLUMNS, KEY_WIDTH>(scores, own_keys + row * KEY_STEP, KEY_STEP,
                                                 other_keys + buffer * COLUMNS * KEY_STEP, KEY_STEP);
    exponentiate(scores, {segments, s, scale, shift}, own + row, other);
    add_held_product<false, WIDTH, COLUMNS>(total, scores, values + buffer * COLUMNS * STEP, STEP);
  }
  right += (head * tokens + own + row) * step + first;
  const float* size = sizes + head * step + first;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int column = column_of(j, i);
      float2 by = {1.0f, 1.0f};
      if (sizeof(OPERAND) == 2) by = *reinterpret_cast<const float2*>(size + column);
      float2* to = reinterpret_cast<float2*>(right + row_of(i) * step + column);
      const float2 before = *to;
      *to = {before.x - total.x[j][i] * by.x, before.y - total.x[j][i + 1] * by.y};
    }
}
