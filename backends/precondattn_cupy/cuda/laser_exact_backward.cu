// LASER backward, of heads that are not close: laser_exact.cuh.
//
// laser_exact_gradient computes dq (tiles of queries × parts of their channels), or, OF_KEYS, dk (tiles
// of keys × parts); a lane has a token of the other side, and iterates over the value channels.
// laser_exact_values computes dv (tiles of keys × parts of 32 channels); a lane has a channel. Both have
// 16 rows in the registers of a lane. Gradients of keys and values loop over the query heads of a group.
#include "laser_exact.cuh"

template <class T, bool OF_KEYS, int ROWS, int COLUMNS, int KEY_WIDTH>
__global__ void __launch_bounds__(2 * ROWS, 1) laser_exact_gradient(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
    const int* __restrict__ is_close, const T* __restrict__ d_o, const float* __restrict__ full,
    const float* __restrict__ log_total, T* __restrict__ d_own,
    const unsigned char* __restrict__ q_valid, const unsigned char* __restrict__ k_valid,
    const int* __restrict__ q_segment, const int* __restrict__ k_segment, float log_scale,
    float scale, int t, int s, int h, int n, int d, int e, int lookback, int lookahead) {
  static_assert(COLUMNS <= 32, "a lane has a column");
  constexpr int KEY_STEP = KEY_WIDTH + gap<T>(), STEP = wide_step<COLUMNS>();
  constexpr int OWN = KEY_WIDTH < 128 ? KEY_WIDTH : 128, WIDE = wide_step<CHANNELS>();
  constexpr int QUERIES = OF_KEYS ? COLUMNS : ROWS, KEYS = OF_KEYS ? ROWS : COLUMNS;
  const int parts = (d + OWN - 1) / OWN, own_heads = OF_KEYS ? n : h, group = h / n;
  const int channel = blockIdx.x % parts * OWN, first = blockIdx.x / parts * ROWS;
  const int batch = blockIdx.z, kv = OF_KEYS ? blockIdx.y : blockIdx.y / group;
  if (is_close[batch * n + kv]) return;
  const Mask mask(batch, t, s, lookback, lookahead, q_valid, k_valid, q_segment, k_segment);
  const Span span = OF_KEYS ? queries_of(mask, first, ROWS) : keys_of(mask, first, ROWS);

  extern __shared__ __align__(16) unsigned char memory[];
  T* own_tile = reinterpret_cast<T*>(memory);
  T* other_tile = own_tile + ROWS * KEY_STEP;
  float* v_tile = reinterpret_cast<float*>(other_tile + COLUMNS * KEY_STEP);
  float* o_tile = v_tile + KEYS * WIDE;
  float* d_tile = o_tile + QUERIES * WIDE;
  float* scores = d_tile + QUERIES * WIDE;
  float* log_of = scores + ROWS * STEP;
  int* runs = reinterpret_cast<int*>(log_of + QUERIES);

  const bool by_16 = d * sizeof(T) % 16 == 0;
  const int row = first + 16 * warp() + row_of(0), column = min(lane(), COLUMNS - 1);
  int run[2];
  for (int i = 0; i < 2; ++i)
    run[i] = OF_KEYS ? mask.run_of_key(row + 8 * i) : mask.run_of_query(row + 8 * i);
  scores += 16 * warp() * STEP;
  const long long k_head = (long long)batch * s * n + kv;
  Product<OWN> acc;
  acc.clear();
  const int low = OF_KEYS ? kv * group : blockIdx.y, high = OF_KEYS ? low + group : low + 1;
  for (int head = low; head < high; ++head) {
    const long long q_head = (long long)batch * t * h + head;
    const T* q_of = q + q_head * d;
    const T* k_of = k + k_head * d;
    for (int start = span.low / COLUMNS * COLUMNS; start < span.high; start += COLUMNS) {
      const int query = OF_KEYS ? start : first, key = OF_KEYS ? first : start;
      __syncthreads();
      load_tile<2 * ROWS, QUERIES, KEY_WIDTH>(OF_KEYS ? other_tile : own_tile, KEY_STEP, q_of,
                                              (long long)h * d, query, t, d, by_16, mask.q_valid);
      load_tile<2 * ROWS, KEYS, KEY_WIDTH>(OF_KEYS ? own_tile : other_tile, KEY_STEP, k_of,
                                           (long long)n * d, key, s, d, by_16, mask.k_valid);
      for (int i = threadIdx.x; i < QUERIES; i += blockDim.x)
        log_of[i] = query + i < t ? log_total[((long long)batch * h + head) * t + query + i]
                                  : INFINITE;
      for (int i = threadIdx.x; i < COLUMNS; i += blockDim.x)
        runs[i] = OF_KEYS ? mask.run_of_query(start + i) : mask.run_of_key(start + i);
      __syncthreads();
      float log_of_row[2] = {0.0f, 0.0f};
      if (!OF_KEYS)
        for (int i = 0; i < 2; ++i) log_of_row[i] = log_of[16 * warp() + row_of(0) + 8 * i];
      store_scores<OF_KEYS, COLUMNS, KEY_WIDTH>(scores, own_tile + 16 * warp() * KEY_STEP,
                                                other_tile, KEY_STEP, mask, log_scale, row, start,
                                                run, runs, log_of_row, log_of);
      float log_a[16], a[16], found[16];
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        log_a[r] = scores[r * STEP + column];
        a[r] = power_of_2(log_a[r]);
        found[r] = 0.0f;
      }
      for (int part = 0; part < e; part += CHANNELS) {
        __syncthreads();
        load_channels<2 * ROWS, KEYS>(v_tile, v + k_head * e + part, (long long)n * e, key, s,
                                      e - part, mask.k_valid);
        load_channels<2 * ROWS, QUERIES>(o_tile, full + q_head * e + part, (long long)h * e, query,
                                         t, e - part, mask.q_valid);
        load_channels<2 * ROWS, QUERIES>(d_tile, d_o + q_head * e + part, (long long)h * e, query,
                                         t, e - part, mask.q_valid);
        __syncthreads();
#pragma unroll 2
        for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
          for (int r = 0; r < 16; ++r) {
            const int own = (16 * warp() + r) * WIDE + c, other = column * WIDE + c;
            const int of_query = OF_KEYS ? other : own, of_key = OF_KEYS ? own : other;
            const float above = (v_tile[of_key] - o_tile[of_query]) * LOG2_E;
            found[r] += d_tile[of_query] * (power_of_2(log_a[r] + above) - a[r]);
          }
        }
      }
      __syncwarp();
      if (lane() < COLUMNS) {
#pragma unroll
        for (int r = 0; r < 16; ++r) scores[r * STEP + lane()] = found[r];
      }
      __syncwarp();
      Product<COLUMNS> d_scores;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          d_scores.x[j][i] = scores[row_of(i) * STEP + column_of(j, i)];
      add_weighted<OWN, COLUMNS>(acc, d_scores, other_tile + channel, KEY_STEP);
    }
  }
#pragma unroll
  for (int j = 0; j < OWN / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = row + 8 * (i / 2), at = channel + column_of(j, i);
      if (token >= (OF_KEYS ? s : t) || at >= d) continue;
      const long long head = OF_KEYS ? k_head : (long long)batch * t * h + blockIdx.y;
      d_own[(head + (long long)token * own_heads) * d + at] = narrow<T>(acc.x[j][i] * scale);
    }
}

template <class T, int ROWS, int COLUMNS, int KEY_WIDTH>
__global__ void __launch_bounds__(2 * ROWS, 1) laser_exact_values(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
    const int* __restrict__ is_close, const T* __restrict__ d_o, const float* __restrict__ full,
    const float* __restrict__ log_total, T* __restrict__ d_v,
    const unsigned char* __restrict__ q_valid, const unsigned char* __restrict__ k_valid,
    const int* __restrict__ q_segment, const int* __restrict__ k_segment, float log_scale, int t,
    int s, int h, int n, int d, int e, int lookback, int lookahead) {
  constexpr int KEY_STEP = KEY_WIDTH + gap<T>(), STEP = wide_step<COLUMNS>();
  constexpr int WIDE = wide_step<CHANNELS>();
  const int parts = (e + CHANNELS - 1) / CHANNELS, group = h / n;
  const int channel = blockIdx.x % parts * CHANNELS, first = blockIdx.x / parts * ROWS;
  const int kv = blockIdx.y, batch = blockIdx.z;
  if (is_close[batch * n + kv]) return;
  const Mask mask(batch, t, s, lookback, lookahead, q_valid, k_valid, q_segment, k_segment);
  const Span span = queries_of(mask, first, ROWS);

  extern __shared__ __align__(16) unsigned char memory[];
  T* k_tile = reinterpret_cast<T*>(memory);
  T* q_tile = k_tile + ROWS * KEY_STEP;
  float* o_tile = reinterpret_cast<float*>(q_tile + COLUMNS * KEY_STEP);
  float* d_tile = o_tile + COLUMNS * WIDE;
  float* scores = d_tile + COLUMNS * WIDE;
  float* log_of = scores + ROWS * STEP;
  int* runs = reinterpret_cast<int*>(log_of + COLUMNS);

  const bool by_16 = d * sizeof(T) % 16 == 0;
  const long long k_head = (long long)batch * s * n + kv;
  load_tile<2 * ROWS, ROWS, KEY_WIDTH>(k_tile, KEY_STEP, k + k_head * d, (long long)n * d, first,
                                       s, d, by_16, mask.k_valid);
  const int row = first + 16 * warp() + row_of(0), at = channel + lane();
  const int run[2] = {mask.run_of_key(row), mask.run_of_key(row + 8)};
  const float nothing[2] = {0.0f, 0.0f};
  scores += 16 * warp() * STEP;
  float value[16], acc[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const int token = first + 16 * warp() + r;
    const bool counts = at < e && mask.run_of_key(token) >= 0;
    value[r] = counts ? wide(v[(k_head + (long long)token * n) * e + at]) : 0.0f;
    acc[r] = 0.0f;
  }
  for (int head = kv * group; head < (kv + 1) * group; ++head) {
    const long long q_head = (long long)batch * t * h + head;
    for (int start = span.low / COLUMNS * COLUMNS; start < span.high; start += COLUMNS) {
      __syncthreads();
      load_tile<2 * ROWS, COLUMNS, KEY_WIDTH>(q_tile, KEY_STEP, q + q_head * d, (long long)h * d,
                                              start, t, d, by_16, mask.q_valid);
      load_channels<2 * ROWS, COLUMNS>(o_tile, full + q_head * e + channel, (long long)h * e,
                                       start, t, e - channel, mask.q_valid);
      load_channels<2 * ROWS, COLUMNS>(d_tile, d_o + q_head * e + channel, (long long)h * e, start,
                                       t, e - channel, mask.q_valid);
      for (int i = threadIdx.x; i < COLUMNS; i += blockDim.x) {
        const int token = start + i;
        log_of[i] = token < t ? log_total[((long long)batch * h + head) * t + token] : INFINITE;
        runs[i] = mask.run_of_query(token);
      }
      __syncthreads();
      store_scores<true, COLUMNS, KEY_WIDTH>(scores, k_tile + 16 * warp() * KEY_STEP, q_tile,
                                             KEY_STEP, mask, log_scale, row, start, run, runs,
                                             nothing, log_of);
#pragma unroll 2
      for (int i = 0; i < COLUMNS; ++i) {
        const float o = o_tile[i * WIDE + lane()], d_of = d_tile[i * WIDE + lane()];
#pragma unroll
        for (int r = 0; r < 16; ++r)
          acc[r] += d_of * power_of_2(scores[r * STEP + i] + (value[r] - o) * LOG2_E);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const int token = first + 16 * warp() + r;
    if (token < s && at < e) d_v[(k_head + (long long)token * n) * e + at] = narrow<T>(acc[r]);
  }
}
