// A step of LUCID by one token: many blocks together read every cached key and y once.
//
//     [S; Φ] = [s q; s k̂] Kᵀ,    [a; r] = [e^{S − m}; Φ] Y              (`lucid_read`, by splits)
//     y = β (v − r),    o = (a + e^{S_new − m} y) / (Σ e^{S − m} + e^{S_new − m})   (`lucid_finish`)
//
// The rows of a tile are the query heads of a key/value head and the new key. A query's row has a
// running maximum; the key's row needs none, since Φ ≤ 1. Queries and keys are multiplied unnormalised,
// and weights as the sum of two 16-bit numbers: a step is limited by memory, not by products.
//
// Buffers are (b, n, d, c): the tokens of a channel are contiguous. Products use this layout directly.
#include "slots.cuh"
#include "warps.cuh"

// The number of filled slots of a sequence: the common number, or `counts` (b).
__device__ __forceinline__ int filled(const int* counts, long long b, int count, int capacity) {
  return counts == nullptr ? count : min(counts[b], capacity);
}

// One split of one key/value head, unless it has no filled slots; the grid is (splits, m). Writes a and
// r to `totals` (m, splits, g + 1, WIDTH), and m and Σ e^{S − m} to `maxima` and `sums` (m, splits,
// g + 1). q (b, g n, d), k (b, n, d), keys (b, n, d, c), solved (b, n, e, c), rms (b, n, c) or null,
// `valid` (b, c) or null.
template <class T, int ROWS, int TOKENS, int KEY_WIDTH, int WIDTH>
__global__ void __launch_bounds__(2 * ROWS, 1) lucid_read(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ keys,
    const T* __restrict__ solved, const float* __restrict__ rms,
    const unsigned char* __restrict__ valid, const int* __restrict__ counts,
    float* __restrict__ totals, float* __restrict__ maxima, float* __restrict__ sums, int count,
    int capacity, int per_split, int heads, int group, int key_width, int width, float eps,
    float scale, float key_scale, float shift, bool by_16) {
  constexpr int ROW_STEP = KEY_WIDTH + gap<T>(), STEP = TOKENS + gap<T>(), THREADS = 2 * ROWS;
  constexpr bool IS_HALF = sizeof(T) == 2;
  extern __shared__ __align__(16) unsigned char memory[];
  T* rows = reinterpret_cast<T*>(memory);
  T* key_tile = rows + ROWS * ROW_STEP;
  T* value_tile = key_tile + KEY_WIDTH * STEP;
  T* weights = value_tile + WIDTH * STEP + 16 * warp() * STEP;
  T* rest = weights + ROWS * STEP;
  // 1 / rms of a slot, or −1 if it is invalid.
  float* one_by_rms = reinterpret_cast<float*>(value_tile + (WIDTH + (IS_HALF ? 2 : 1) * ROWS) * STEP);
  const long long head = blockIdx.y, b = head / heads;
  const int start = blockIdx.x * per_split;
  const int end = min(start + per_split, filled(counts, b, count, capacity));
  if (start >= end) return;
  q += head * group * key_width;
  k += head * key_width;
  keys += head * key_width * capacity;
  solved += head * width * capacity;
  if (rms != nullptr) rms += head * capacity;
  if (valid != nullptr) valid += b * capacity;

  for (int at = threadIdx.x; at < ROWS * KEY_WIDTH; at += THREADS) {
    const int row = at / KEY_WIDTH, channel = at % KEY_WIDTH;
    const T* from = row < group ? q + (long long)row * key_width : k;
    const bool there = row <= group && channel < key_width;
    rows[row * ROW_STEP + channel] = there ? from[channel] : narrow<T>(0.0f);
  }
  __syncthreads();
  float own = 1.0f;
  if (rms != nullptr) {
    float square = 0.0f;
    for (int i = lane(); i < KEY_WIDTH; i += 32) {
      const float x = wide(rows[group * ROW_STEP + i]);
      square += x * x;
    }
    square = sum_of_warp(square) / key_width + eps;
    own = square > 0.0f ? 1.0f / sqrtf(square) : 1.0f;
  }

  Product<WIDTH> total;
  total.clear();
  float largest[2], sum[2] = {0.0f, 0.0f};
  bool is_key[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    is_key[i] = 16 * warp() + row_of(2 * i) == group;
    largest[i] = is_key[i] ? 0.0f : -INFINITE;
  }
  for (int low = start; low < end; low += TOKENS) {
    load_slots<KEY_WIDTH, TOKENS, THREADS>(key_tile, keys, key_width, capacity, low, end, by_16,
                                           valid);
    load_slots<WIDTH, TOKENS, THREADS>(value_tile, solved, width, capacity, low, end, by_16, valid);
    for (int i = threadIdx.x; i < TOKENS; i += THREADS) {
      const bool seen = low + i < end && (valid == nullptr || valid[low + i]);
      float found = seen && rms != nullptr ? rms[low + i] : 1.0f;
      if (!(found > 0.0f)) found = 1.0f;
      one_by_rms[i] = seen ? 1.0f / found : -1.0f;
    }
    __syncthreads();

    Product<TOKENS> scores;
    scores.clear();
    add_product<false, false, TOKENS, KEY_WIDTH>(scores, rows + 16 * warp() * ROW_STEP, ROW_STEP,
                                                 key_tile, STEP);
    float highest[2] = {-INFINITE, -INFINITE};
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float other = one_by_rms[column_of(j, i)];
        float log = scores.x[j][i] * scale;
        if (is_key[i / 2]) log = scores.x[j][i] * own * other * key_scale - shift;
        if (other < 0.0f) log = -INFINITE;
        scores.x[j][i] = log;
        highest[i / 2] = fmaxf(highest[i / 2], log);
      }
    float kept[2], base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float higher = fmaxf(largest[i], max_of_four(highest[i]));
      base[i] = is_key[i] || higher == -INFINITE ? 0.0f : higher;
      kept[i] = is_key[i] ? 1.0f : power_of_2(largest[i] - base[i]);
      if (!is_key[i]) largest[i] = higher;
      sum[i] *= kept[i];
    }
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = power_of_2(scores.x[j][i] - base[i / 2]);
        sum[i / 2] += weight;
        const int at = row_of(i) * STEP + column_of(j, i);
        weights[at] = narrow<T>(weight);
        if constexpr (IS_HALF) rest[at] = narrow<T>(weight - wide(weights[at]));
      }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) total.x[j][i] *= kept[i / 2];
    __syncwarp();
    add_product<false, true, WIDTH, TOKENS>(total, weights, STEP, value_tile, STEP);
    if constexpr (IS_HALF)
      add_product<false, true, WIDTH, TOKENS>(total, rest, STEP, value_tile, STEP);
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float all = sum_of_four(sum[i]);
    const int row = 16 * warp() + row_of(2 * i);
    if (row > group) continue;
    const long long part = (head * gridDim.x + blockIdx.x) * (group + 1) + row;
    if (lane() % 4 == 0) {
      maxima[part] = largest[i];
      sums[part] = all;
    }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        totals[part * WIDTH + column_of(j, side)] = total.x[j][2 * i + side];
  }
}

// Writes `out` (b, g n, e), `solved` (b, n, e) and `own_rms` (b, n), from the splits of a head; the grid
// is (g, m), and warps split the channels only. v (b, n, e), β (b, n) or null; validity of the new
// tokens as queries and as keys, (b) or null.
template <class T>
__global__ void lucid_finish(const T* __restrict__ q, const T* __restrict__ k,
                             const T* __restrict__ v, const T* __restrict__ beta,
                             const unsigned char* __restrict__ is_query,
                             const unsigned char* __restrict__ is_key,
                             const int* __restrict__ counts, const float* __restrict__ totals,
                             const float* __restrict__ maxima, const float* __restrict__ sums,
                             T* __restrict__ out, T* __restrict__ solved,
                             float* __restrict__ own_rms, int count, int capacity, int per_split,
                             int splits, int heads, int key_width, int width, int step, float eps,
                             float scale) {
  const int group = gridDim.x, row = blockIdx.x, lane = threadIdx.x % 32;
  const long long head = blockIdx.y, b = head / heads;
  const bool asks = is_query == nullptr || is_query[b], answers = is_key == nullptr || is_key[b];
  q += (head * group + row) * key_width;
  k += head * key_width;
  v += head * width;
  const long long first = head * splits * (group + 1);
  const int used = (filled(counts, b, count, capacity) + per_split - 1) / per_split;

  float own = 0.0f, square = 0.0f;
  for (int i = lane; i < key_width; i += 32) {
    const float x = answers ? wide(k[i]) : 0.0f;
    own += (asks ? wide(q[i]) : 0.0f) * x;
    square += x * x;
  }
  own = answers ? sum_of_warp(own) * scale : -INFINITE;
  square = sum_of_warp(square) / key_width + eps;
  if (own_rms != nullptr && row == 0 && threadIdx.x == 0)
    own_rms[head] = square > 0.0f ? sqrtf(square) : 1.0f;

  float largest = own;
  for (int split = 0; split < used; ++split)
    largest = fmaxf(largest, maxima[first + split * (group + 1) + row]);
  const float base = largest == -INFINITE ? 0.0f : largest;
  const float added = power_of_2(own - base), factor = beta == nullptr ? 1.0f : wide(beta[head]);
  for (int channel = threadIdx.x; channel < width; channel += blockDim.x) {
    float read = 0.0f, attended = 0.0f, weight = added;
    for (int split = 0; split < used; ++split) {
      const long long part = first + split * (group + 1);
      const float kept = power_of_2(maxima[part + row] - base);
      read += totals[(part + group) * step + channel];
      attended += totals[(part + row) * step + channel] * kept;
      weight += sums[part + row] * kept;
    }
    const float y = answers ? factor * (wide(v[channel]) - read) : 0.0f;
    const float o = weight != 0.0f ? (attended + added * y) / weight : 0.0f;  // A NaN is kept.
    out[(head * group + row) * width + channel] = narrow<T>(asks ? o : 0.0f);
    if (row == 0) solved[head * width + channel] = narrow<T>(y);
  }
}
