// Softmax attention and LASER of one new token: many blocks together read every cached key and value
// once, for all query heads of a group.
//
//     λ_p = log Σ e^{S},    o_p = Σ e^{S − λ_p} v,    or, for LASER,   o_p = log Σ e^{S + v}    (read_*)
//     λ = log Σ_p e^{λ_p},    o = Σ_p e^{λ_p − λ} o_p,               o = log Σ_p e^{o_p} − λ    (combine)
//
// A part p is the result of one warp: each of the 4 warps of a block has its own tokens of a tile, for 16
// rows, which are query heads. The new token is a part by itself. Logarithms are in units of log 2.
//
// In a cache the tokens of a channel are contiguous, (b, n, channels, capacity), and likewise in shared
// memory. Invalid slots are 0 there, whatever they hold.
//
// Grids: splits of the cache, tiles of query heads × kv heads, sequences; and query heads, sequences.
#include "running_softmax.cuh"
#include "slots.cuh"
#include "tiles.cuh"

constexpr int DECODING_WARPS = 4;

// The part that both reads share.
template <class T, int COLUMNS, int KEY_WIDTH, int WIDTH>
struct Past {
  static constexpr int TOKENS = DECODING_WARPS * COLUMNS;
  static constexpr int KEY_STEP = KEY_WIDTH + gap<T>(), STEP = TOKENS + gap<T>();
  T *q_tile, *k_tile, *v_tile;
  unsigned char* counts;
  // The rows of this block: the first, their number, and the index of the first row's part.
  int first, rows, kv;
  long long part;

  __device__ __forceinline__ Past(unsigned char* memory, const T* __restrict__ q, int h, int n,
                                  int d) {
    q_tile = reinterpret_cast<T*>(memory);
    k_tile = q_tile + 16 * KEY_STEP;
    v_tile = k_tile + KEY_WIDTH * STEP;
    counts = reinterpret_cast<unsigned char*>(v_tile + WIDTH * STEP);
    const int group = h / n, tiles = (group + 15) / 16;
    kv = blockIdx.y / tiles;
    first = blockIdx.y % tiles * 16;
    rows = min(group - first, 16);
    const long long head = (long long)blockIdx.z * h + kv * group + first;
    load_tile<32 * DECODING_WARPS, 16, KEY_WIDTH>(q_tile, KEY_STEP, q + head * d, d, 0, rows, d,
                                                  d * sizeof(T) % 16 == 0);
    part = head * gridDim.x * DECODING_WARPS + blockIdx.x * DECODING_WARPS + warp();
  }
  __device__ __forceinline__ long long part_of(int row) const {
    return part + (long long)row * gridDim.x * DECODING_WARPS;
  }

  // The scores of this warp's tokens of a tile.
  __device__ __forceinline__ void load(Product<COLUMNS>& p, const T* __restrict__ keys,
                                       const T* __restrict__ values,
                                       const unsigned char* __restrict__ valid, int start, int end,
                                       int capacity, int n, int d, int e, float scale) const {
    const long long head = (long long)blockIdx.z * n + kv;
    __syncthreads();
    if (valid) valid += (long long)blockIdx.z * capacity;
    const bool by_16 = capacity * sizeof(T) % 16 == 0;
    constexpr int THREADS = 32 * DECODING_WARPS;
    for (int i = threadIdx.x; i < TOKENS; i += THREADS)
      counts[i] = start + i < end && (!valid || valid[start + i]);
    load_slots<KEY_WIDTH, TOKENS, THREADS>(k_tile, keys + head * d * capacity, d, capacity, start,
                                           end, by_16, valid);
    load_slots<WIDTH, TOKENS, THREADS>(v_tile, values + head * e * capacity, e, capacity, start, end,
                                       by_16, valid);
    __syncthreads();
    p.clear();
    const int own = warp() * COLUMNS;
    add_product<false, false, COLUMNS, KEY_WIDTH>(p, q_tile, KEY_STEP, k_tile + own, STEP);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p.x[j][i] = counts[own + column_of(j, i)] ? p.x[j][i] * scale : -INFINITE;
  }
};

template <class T, int COLUMNS, int KEY_WIDTH, int WIDTH>
__global__ void __launch_bounds__(32 * DECODING_WARPS, 1)
    read_softmax(const T* __restrict__ q, const T* __restrict__ keys, const T* __restrict__ values,
                 const unsigned char* __restrict__ valid, float* __restrict__ outs,
                 float* __restrict__ logs, float scale, int count, int capacity, int per_split,
                 int h, int n, int d, int e) {
  extern __shared__ __align__(16) unsigned char memory[];
  typedef Past<T, COLUMNS, KEY_WIDTH, WIDTH> Cached;
  const Cached past(memory, q, h, n, d);
  RunningSoftmax running;
  Product<WIDTH> acc;
  acc.clear();
  const int low = blockIdx.x * per_split, end = min(low + per_split, count);
  for (int start = low; start < end; start += Cached::TOKENS) {
    Product<COLUMNS> p;
    past.load(p, keys, values, valid, start, end, capacity, n, d, e, scale);
    running.weigh<T, true>(p, acc, 1.0f);
    add_held_product<true, WIDTH, COLUMNS>(acc, p, past.v_tile + warp() * COLUMNS, Cached::STEP);
  }
  running.close();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row_of(i) >= past.rows) continue;
    const long long part = past.part_of(row_of(i));
    if (lane() % 4 == 0) logs[part] = running.log_total(i / 2, -INFINITE);
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j)
      if (column_of(j, i) < e)
        outs[part * e + column_of(j, i)] = acc.x[j][i] * running.one_by_total(i / 2);
  }
}

template <class T, bool IS_LASER>
__global__ void combine(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                        const unsigned char* __restrict__ q_valid,
                        const unsigned char* __restrict__ k_valid, const float* __restrict__ outs,
                        const float* __restrict__ logs, T* __restrict__ out, float scale, int parts,
                        int h, int n, int d, int e) {
  const int head = blockIdx.x, batch = blockIdx.y;
  const long long row = (long long)batch * h + head, kv = (long long)batch * n + head / (h / n);
  float score = -INFINITE;
  if (!k_valid || k_valid[batch]) {
    score = 0.0f;
    for (int i = lane(); i < d; i += 32) score += wide(q[row * d + i]) * wide(k[kv * d + i]);
    score = sum_of_warp(score) * scale;
  }
  logs += row * parts;
  outs += row * parts * e;
  float largest = score;
  for (int p = lane(); p < parts; p += 32) largest = fmaxf(largest, logs[p]);
  largest = max_of_warp(largest);
  const float base = largest == -INFINITE ? 0.0f : largest;
  float total = 0.0f;
  for (int p = lane(); p < parts; p += 32) total += power_of_2(logs[p] - base);
  const float own = power_of_2(score - base);
  total = sum_of_warp(total) + own;
  // It is NaN where a key is.
  const bool is_some = total != 0.0f && (!q_valid || q_valid[batch]);
  for (int c = threadIdx.x; c < e; c += blockDim.x) {
    float found = 0.0f;
    // Invalid values are not read.
    const float value = own != 0.0f || (IS_LASER && score > -INFINITE) ? wide(v[kv * e + c]) : 0.0f;
    if (is_some && IS_LASER) {
      const float new_one = score + value * 1.44269504f;
      float high = new_one;
      for (int p = 0; p < parts; ++p) high = fmaxf(high, outs[(long long)p * e + c]);
      found = power_of_2(new_one - high);
      for (int p = 0; p < parts; ++p) found += power_of_2(outs[(long long)p * e + c] - high);
      found = (high + log2f(found) - base - log2f(total)) / 1.44269504f;
    } else if (is_some) {
      found = own * value;
      for (int p = 0; p < parts; ++p)
        found += power_of_2(logs[p] - base) * outs[(long long)p * e + c];
      found /= total;
    }
    out[row * e + c] = narrow<T>(found);
  }
}

// A lane has some channels of each row: the logarithms of their sums so far.
template <class T, int COLUMNS, int KEY_WIDTH, int WIDTH>
__global__ void __launch_bounds__(32 * DECODING_WARPS, 1)
    read_laser(const T* __restrict__ q, const T* __restrict__ keys, const T* __restrict__ values,
               const unsigned char* __restrict__ valid, float* __restrict__ outs,
               float* __restrict__ logs, float scale, int count, int capacity, int per_split, int h,
               int n, int d, int e) {
  extern __shared__ __align__(16) unsigned char memory[];
  typedef Past<T, COLUMNS, KEY_WIDTH, WIDTH> Cached;
  constexpr int EACH = (WIDTH + 31) / 32;
  const Cached past(memory, q, h, n, d);
  float* scores = reinterpret_cast<float*>(past.counts + Cached::TOKENS) + warp() * 16 * COLUMNS;
  RunningSoftmax running;
  Product<16> unused;
  unused.clear();
  float found[16][EACH];
#pragma unroll
  for (int r = 0; r < 16; ++r)
#pragma unroll
    for (int x = 0; x < EACH; ++x) found[r][x] = -INFINITE;
  const int low = blockIdx.x * per_split, end = min(low + per_split, count);
  for (int start = low; start < end; start += Cached::TOKENS) {
    Product<COLUMNS> p;
    past.load(p, keys, values, valid, start, end, capacity, n, d, e, scale);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[row_of(i) * COLUMNS + column_of(j, i)] = p.x[j][i];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      if (r >= past.rows) continue;
#pragma unroll
      for (int x = 0; x < EACH; ++x) {
        const int c = min(lane() + 32 * x, WIDTH - 1);
        const T* value = past.v_tile + c * Cached::STEP + warp() * COLUMNS;
        float high = found[r][x];
        for (int j = 0; j < COLUMNS; ++j)
          high = fmaxf(high, scores[r * COLUMNS + j] + wide(value[j]) * 1.44269504f);
        const float base = high == -INFINITE ? 0.0f : high;
        float sum = power_of_2(found[r][x] - base);
        for (int j = 0; j < COLUMNS; ++j)
          sum += power_of_2(scores[r * COLUMNS + j] + wide(value[j]) * 1.44269504f - base);
        found[r][x] = sum != 0.0f ? base + log2f(sum) : -INFINITE;
      }
    }
    running.weigh<T, false>(p, unused, 1.0f);
  }
  running.close();
#pragma unroll
  for (int i = 0; i < 4; i += 2)
    if (row_of(i) < past.rows && lane() % 4 == 0)
      logs[past.part_of(row_of(i))] = running.log_total(i / 2, -INFINITE);
#pragma unroll
  for (int r = 0; r < 16; ++r)
#pragma unroll
    for (int x = 0; x < EACH; ++x)
      if (r < past.rows && lane() + 32 * x < e)
        outs[past.part_of(r) * e + lane() + 32 * x] = found[r][x];
}
