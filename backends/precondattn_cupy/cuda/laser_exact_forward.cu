// LASER forward, of heads that are not close: laser_exact.cuh.
//
// A running maximum M of s_ij + v_jc for each query and channel, and m of s_ij for each query:
//
//     M' = max(M, max_j (s + v)),    acc ← acc 2^{M − M'} + Σ_j 2^{s + v − M'},
//     o = M + log acc − λ,    λ = m + log l.
//
// Grid: tiles of queries × parts of 32 channels, heads, sequences. t s e exponentials per head.
#include "laser_exact.cuh"

template <class T, int ROWS, int COLUMNS, int KEY_WIDTH>
__global__ void __launch_bounds__(2 * ROWS, 1)
    laser_exact_forward(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                        const int* __restrict__ is_close, T* __restrict__ out,
                        float* __restrict__ full, float* __restrict__ log_total,
                        const unsigned char* __restrict__ q_valid,
                        const unsigned char* __restrict__ k_valid,
                        const int* __restrict__ q_segment, const int* __restrict__ k_segment,
                        float scale, int t, int s, int h, int n, int d, int e, int lookback,
                        int lookahead) {
  static_assert(COLUMNS <= 32, "a lane has a column");
  constexpr int KEY_STEP = KEY_WIDTH + gap<T>(), STEP = wide_step<COLUMNS>();
  constexpr int WIDE = wide_step<CHANNELS>();
  const int parts = (e + CHANNELS - 1) / CHANNELS, tiles = (t + ROWS - 1) / ROWS;
  const int part = blockIdx.x % parts, head = blockIdx.y, batch = blockIdx.z;
  const int first = (tiles - 1 - blockIdx.x / parts) * ROWS, kv = head / (h / n);
  if (is_close[batch * n + kv]) return;
  const Mask mask(batch, t, s, lookback, lookahead, q_valid, k_valid, q_segment, k_segment);
  const Span span = keys_of(mask, first, ROWS);

  extern __shared__ __align__(16) unsigned char memory[];
  T* q_tile = reinterpret_cast<T*>(memory);
  T* k_tile = q_tile + ROWS * KEY_STEP;
  float* v_tile = reinterpret_cast<float*>(k_tile + COLUMNS * KEY_STEP);
  float* scores = v_tile + COLUMNS * WIDE;
  int* runs = reinterpret_cast<int*>(scores + ROWS * STEP);

  const int channel = part * CHANNELS;
  const long long k_head = (long long)batch * s * n + kv, q_head = (long long)batch * t * h + head;
  const bool by_16 = d * sizeof(T) % 16 == 0;
  load_tile<2 * ROWS, ROWS, KEY_WIDTH>(q_tile, KEY_STEP, q + q_head * d, (long long)h * d, first,
                                       t, d, by_16, mask.q_valid);
  const T* own = q_tile + 16 * warp() * KEY_STEP;
  scores += 16 * warp() * STEP;
  const int row = first + 16 * warp() + row_of(0);
  const int run[2] = {mask.run_of_query(row), mask.run_of_query(row + 8)};
  const float nothing[2] = {0.0f, 0.0f};

  // Of each row; every lane has the same m and l.
  float largest[16], total[16], highest[16], acc[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    largest[r] = highest[r] = -INFINITE;
    total[r] = acc[r] = 0.0f;
  }
  for (int start = span.low / COLUMNS * COLUMNS; start < span.high; start += COLUMNS) {
    __syncthreads();
    load_tile<2 * ROWS, COLUMNS, KEY_WIDTH>(k_tile, KEY_STEP, k + k_head * d, (long long)n * d,
                                            start, s, d, by_16, mask.k_valid);
    load_channels<2 * ROWS, COLUMNS>(v_tile, v + k_head * e + channel, (long long)n * e, start, s,
                                     e - channel, mask.k_valid);
    for (int j = threadIdx.x; j < COLUMNS; j += blockDim.x) runs[j] = mask.run_of_key(start + j);
    __syncthreads();
    store_scores<false, COLUMNS, KEY_WIDTH>(scores, own, k_tile, KEY_STEP, mask, scale, row, start,
                                            run, runs, nothing, nullptr);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float own_score = lane() < COLUMNS ? scores[r * STEP + lane()] : -INFINITE;
      const float m = fmaxf(largest[r], max_of_warp(own_score));
      float high = highest[r];
#pragma unroll 4
      for (int j = 0; j < COLUMNS; ++j)
        high = fmaxf(high, scores[r * STEP + j] + v_tile[j * WIDE + lane()] * LOG2_E);
      const float m_base = m == -INFINITE ? 0.0f : m, base = high == -INFINITE ? 0.0f : high;
      total[r] = total[r] * power_of_2(largest[r] - m_base) +
                 sum_of_warp(power_of_2(own_score - m_base));
      float sum = acc[r] * power_of_2(highest[r] - base);
#pragma unroll 4
      for (int j = 0; j < COLUMNS; ++j)
        sum += power_of_2(scores[r * STEP + j] + v_tile[j * WIDE + lane()] * LOG2_E - base);
      largest[r] = m, highest[r] = high, acc[r] = sum;
    }
  }
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const int token = first + 16 * warp() + r, at = channel + lane();
    if (token >= t) continue;
    const bool is_some = total[r] != 0.0f;  // It is NaN where a key is.
    const float log_of = is_some ? largest[r] + log2f(total[r]) : INFINITE;
    if (part == 0 && lane() == 0) log_total[((long long)batch * h + head) * t + token] = log_of;
    if (at >= e) continue;
    const float o = is_some ? (highest[r] + log2f(acc[r]) - log_of) / LOG2_E : 0.0f;
    const long long to = (q_head + (long long)token * h) * e + at;
    out[to] = narrow<T>(o);
    full[to] = o;
  }
}
