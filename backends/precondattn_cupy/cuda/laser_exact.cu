// LASER of heads whose values are too far apart for one shift: every e^{s + v} is computed separately.
//
//     o_ic = log Σ_j e^{s_ij + v_jc} − log Σ_j e^{s_ij},    w_ijc = e^{s_ij − λ_i + v_jc − o_ic},
//     dv_jc = Σ_i do_ic w_ijc,    dS_ij = Σ_c do_ic (w_ijc − a_ij),    a_ij = e^{s_ij − λ_i}.
//
// A warp has one token, and a block's warps share tiles of 32 tokens of the other side, one for each lane.
// What depends on a channel is computed by lanes that have channels. A pair of tokens takes e exponentials
// and d products, and exponentials take eight times as long: scores need no tensor cores. Exponents are in
// units of log 2.
#include "masks.cuh"
#include "tiles.cuh"
#include "warps.cuh"

#define LOG2_E 1.44269504f

constexpr int WARPS = 8, THREADS = 32 * WARPS, OTHERS = 32;

// A tile in float32, whose rows or columns are read by lanes without bank conflicts.
template <int ROWS, int WIDTH, class T>
__device__ __forceinline__ void load_rows(float* tile, const T* __restrict__ head, long long step,
                                          int first, int count, int width, int channel,
                                          const unsigned char* valid) {
  load_tile<THREADS, ROWS, WIDTH>(tile, WIDTH + 1, head + channel, step, first, count,
                                  width - channel, width * sizeof(T) % 16 == 0, valid);
}

// The product of a warp's row and the row of this lane.
template <int WIDTH>
__device__ __forceinline__ float dot(const float* own, const float* others) {
  float sum = 0.0f;
#pragma unroll 8
  for (int c = 0; c < WIDTH; ++c) sum += own[c] * others[lane() * (WIDTH + 1) + c];
  return sum;
}

// o and λ, by running maxima of s_ij for each query and of s_ij + v_jc for each of its channels.
// Grid: tiles of queries × parts of CHANNELS, heads, sequences.
template <class T, int KEY_WIDTH, int CHANNELS>
__global__ void __launch_bounds__(THREADS, 1)
    laser_exact_forward(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                        const int* __restrict__ is_close, T* __restrict__ out,
                        float* __restrict__ full, float* __restrict__ log_total,
                        const unsigned char* __restrict__ q_valid,
                        const unsigned char* __restrict__ k_valid,
                        const int* __restrict__ q_segment, const int* __restrict__ k_segment,
                        float scale, int t, int s, int h, int n, int d, int e, int lookback,
                        int lookahead) {
  constexpr int EACH = CHANNELS / 32;
  const int parts = (e + CHANNELS - 1) / CHANNELS, tiles = (t + WARPS - 1) / WARPS;
  const int channel = blockIdx.x % parts * CHANNELS, head = blockIdx.y, batch = blockIdx.z;
  const int first = (tiles - 1 - blockIdx.x / parts) * WARPS, kv = head / (h / n);
  if (is_close[batch * n + kv]) return;
  const Mask mask(batch, t, s, lookback, lookahead, q_valid, k_valid, q_segment, k_segment);
  const Span span = keys_of(mask, first, WARPS);
  extern __shared__ __align__(16) unsigned char memory[];
  float* q_rows = reinterpret_cast<float*>(memory);
  float* k_tile = q_rows + WARPS * (KEY_WIDTH + 1);
  float* v_tile = k_tile + OTHERS * (KEY_WIDTH + 1);
  float* scores = v_tile + OTHERS * (CHANNELS + 1) + 32 * warp();
  const long long k_head = (long long)batch * s * n + kv, q_head = (long long)batch * t * h + head;
  load_rows<WARPS, KEY_WIDTH>(q_rows, q + q_head * d, (long long)h * d, first, t, d, 0,
                              mask.q_valid);
  const int query = first + warp(), run = mask.run_of_query(query);
  float largest = -INFINITE, total = 0.0f, highest[EACH], acc[EACH];
#pragma unroll
  for (int x = 0; x < EACH; ++x) highest[x] = -INFINITE, acc[x] = 0.0f;
  for (int start = span.low / OTHERS * OTHERS; start < span.high; start += OTHERS) {
    __syncthreads();
    load_rows<OTHERS, KEY_WIDTH>(k_tile, k + k_head * d, (long long)n * d, start, s, d, 0,
                                 mask.k_valid);
    load_rows<OTHERS, CHANNELS>(v_tile, v + k_head * e, (long long)n * e, start, s, e, channel,
                                mask.k_valid);
    __syncthreads();
    const bool sees = mask.is_near(query, start + lane()) && mask.run_of_key(start + lane()) == run;
    const float product = dot<KEY_WIDTH>(q_rows + warp() * (KEY_WIDTH + 1), k_tile) * scale;
    const float score = sees ? product : -INFINITE;
    const float m = fmaxf(largest, max_of_warp(score)), m_base = m == -INFINITE ? 0.0f : m;
    total = total * power_of_2(largest - m_base) + sum_of_warp(power_of_2(score - m_base));
    largest = m;
    scores[lane()] = score;
    __syncwarp();
#pragma unroll
    for (int x = 0; x < EACH; ++x) {
      const float* values = v_tile + 32 * x + lane();
      float high = highest[x];
      for (int j = 0; j < OTHERS; ++j)
        high = fmaxf(high, scores[j] + values[j * (CHANNELS + 1)] * LOG2_E);
      const float base = high == -INFINITE ? 0.0f : high;
      float sum = acc[x] * power_of_2(highest[x] - base);
      for (int j = 0; j < OTHERS; ++j)
        sum += power_of_2(scores[j] + values[j * (CHANNELS + 1)] * LOG2_E - base);
      highest[x] = high, acc[x] = sum;
    }
  }
  if (query >= t) return;
  const bool is_some = total != 0.0f;  // It is NaN where a key is.
  const float log_of = is_some ? largest + log2f(total) : INFINITE;
  if (channel == 0 && lane() == 0) log_total[((long long)batch * h + head) * t + query] = log_of;
#pragma unroll
  for (int x = 0; x < EACH; ++x) {
    const int at = channel + 32 * x + lane();
    if (at >= e) continue;
    const float o = is_some ? (highest[x] + log2f(acc[x]) - log_of) / LOG2_E : 0.0f;
    const long long to = (q_head + (long long)query * h) * e + at;
    out[to] = narrow<T>(o);
    full[to] = o;
  }
}

// dq, or, OF_KEYS, dk and dv, which loop over the query heads of a group. VALUES are at least e.
// Grid: tiles of queries or keys, their heads, sequences.
template <class T, bool OF_KEYS, int KEY_WIDTH, int VALUES>
__global__ void __launch_bounds__(THREADS, 1) laser_exact_gradient(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
    const int* __restrict__ is_close, const T* __restrict__ d_o, const float* __restrict__ full,
    const float* __restrict__ log_total, T* __restrict__ d_own, T* __restrict__ d_v,
    const unsigned char* __restrict__ q_valid, const unsigned char* __restrict__ k_valid,
    const int* __restrict__ q_segment, const int* __restrict__ k_segment, float log_scale,
    float scale, int t, int s, int h, int n, int d, int e, int lookback, int lookahead) {
  constexpr int KEY_STEP = KEY_WIDTH + 1, STEP = 33, EACH = (KEY_WIDTH + 31) / 32;
  constexpr int QUERIES = OF_KEYS ? OTHERS : WARPS, KEYS = OF_KEYS ? WARPS : OTHERS;
  const int group = h / n, first = blockIdx.x * WARPS, own = first + warp(), batch = blockIdx.z;
  const int kv = OF_KEYS ? blockIdx.y : blockIdx.y / group;
  if (is_close[batch * n + kv]) return;
  const Mask mask(batch, t, s, lookback, lookahead, q_valid, k_valid, q_segment, k_segment);
  const Span span = OF_KEYS ? queries_of(mask, first, WARPS) : keys_of(mask, first, WARPS);
  extern __shared__ __align__(16) unsigned char memory[];
  float* own_rows = reinterpret_cast<float*>(memory);
  float* others = own_rows + WARPS * KEY_STEP;
  float* v_tile = others + OTHERS * KEY_STEP;
  float* o_tile = v_tile + KEYS * STEP;
  float* d_tile = o_tile + QUERIES * STEP;
  const long long k_head = (long long)batch * s * n + kv;
  float acc[EACH] = {}, values[VALUES / 32] = {};
  const int low = OF_KEYS ? kv * group : blockIdx.y, high = OF_KEYS ? low + group : low + 1;
  for (int head = low; head < high; ++head) {
    const long long q_head = (long long)batch * t * h + head;
    for (int start = span.low / OTHERS * OTHERS; start < span.high; start += OTHERS) {
      const int query_first = OF_KEYS ? start : first, key_first = OF_KEYS ? first : start;
      __syncthreads();
      load_rows<QUERIES, KEY_WIDTH>(OF_KEYS ? others : own_rows, q + q_head * d, (long long)h * d,
                                    query_first, t, d, 0, mask.q_valid);
      load_rows<KEYS, KEY_WIDTH>(OF_KEYS ? own_rows : others, k + k_head * d, (long long)n * d,
                                 key_first, s, d, 0, mask.k_valid);
      __syncthreads();
      const int query = OF_KEYS ? start + lane() : own, key = OF_KEYS ? own : start + lane();
      float log_a = -INFINITE;
      if (mask.is_near(query, key) && mask.run_of_query(query) == mask.run_of_key(key))
        log_a = dot<KEY_WIDTH>(own_rows + warp() * KEY_STEP, others) * log_scale -
                log_total[((long long)batch * h + head) * t + query];
      const float a = power_of_2(log_a);
      float d_score = 0.0f;
#pragma unroll
      for (int part = 0; part < VALUES; part += 32) {
        if (part >= e) break;
        __syncthreads();
        load_rows<KEYS, 32>(v_tile, v + k_head * e, (long long)n * e, key_first, s, e, part,
                            mask.k_valid);
        load_rows<QUERIES, 32>(o_tile, full + q_head * e, (long long)h * e, query_first, t, e, part,
                               mask.q_valid);
        load_rows<QUERIES, 32>(d_tile, d_o + q_head * e, (long long)h * e, query_first, t, e, part,
                               mask.q_valid);
        __syncthreads();
        const int of_query = (OF_KEYS ? lane() : warp()) * STEP;
        const int of_key = (OF_KEYS ? warp() : lane()) * STEP;
#pragma unroll 8
        for (int c = 0; c < 32; ++c) {
          const float above = (v_tile[of_key + c] - o_tile[of_query + c]) * LOG2_E;
          d_score += d_tile[of_query + c] * (power_of_2(log_a + above) - a);
        }
        if (OF_KEYS)
#pragma unroll 8
          for (int i = 0; i < OTHERS; ++i) {
            const int at = i * STEP + lane();
            const float above = (v_tile[of_key + lane()] - o_tile[at]) * LOG2_E;
            const float w = power_of_2(__shfl_sync(ALL_LANES, log_a, i) + above);
            values[part / 32] += d_tile[at] * w;
          }
      }
      for (int i = 0; i < OTHERS; ++i) {
        const float weight = __shfl_sync(ALL_LANES, d_score, i);
#pragma unroll
        for (int x = 0; x < EACH; ++x)
          if (lane() + 32 * x < KEY_WIDTH)
            acc[x] += weight * others[i * KEY_STEP + lane() + 32 * x];
      }
    }
  }
  if (own >= (OF_KEYS ? s : t)) return;
  const long long row = OF_KEYS ? k_head + (long long)own * n
                                : ((long long)batch * t + own) * h + blockIdx.y;
#pragma unroll
  for (int x = 0; x < EACH; ++x)
    if (lane() + 32 * x < d) d_own[row * d + lane() + 32 * x] = narrow<T>(acc[x] * scale);
  if (OF_KEYS)
#pragma unroll
    for (int part = 0; part < VALUES; part += 32)
      if (part + lane() < e) d_v[row * e + part + lane()] = narrow<T>(values[part / 32]);
}
