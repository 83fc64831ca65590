// Softmax attention, backward (flash attention): A is recomputed in tiles from λ.
//
//     A = 2^{S − λ},    D_i = do_i · o_i,    dS = A ∘ (do vᵀ − D),
//     dq = scale dS k,    dk = scale dSᵀ q,    dv = Aᵀ do,    S = scale log₂ e q kᵀ.
//
// Two kernels, and their grids:
//
//     row_products              D                 8 queries of a head × heads × sequences
//     softmax_gradient          dq                tiles of queries × parts of channels, heads, …
//     … OF_KEYS                 dk and dv         tiles of keys × parts of channels, kv heads, …
//
// A block of the last has ROWS tokens, 16 for each warp, with all channels in shared memory, next to
// a tile of the other tokens; scores and their gradients stay in registers. It computes a part of the
// output channels. A block of the key gradient iterates over all query heads that read its keys: no two
// blocks add to the same element, so the result is deterministic.
//
// A precise kernel multiplies dS as the sum of two 16-bit numbers: if keys are nearly equal, dS k
// cancels, and a single 16-bit number leaves few correct digits. v and do may also be sums of two
// arrays, as in softmax_forward.cu.
#include "held_products.cuh"
#include "masks.cuh"
#include "tiles.cuh"

// A warp has a row. Queries without visible keys are not read.
template <class T>
__global__ void row_products(const T* __restrict__ d_o, const float* __restrict__ o,
                             const float* __restrict__ log_total, float* __restrict__ d_sum, int t,
                             int h, int e) {
  const int token = blockIdx.x * (blockDim.x / 32) + warp();
  if (token >= t) return;
  const long long at = ((long long)blockIdx.z * h + blockIdx.y) * t + token;
  const long long row = (((long long)blockIdx.z * t + token) * h + blockIdx.y) * e;
  float found = 0.0f;
  if (log_total[at] < INFINITE)
    for (int i = lane(); i < e; i += 32) found += wide(d_o[row + i]) * o[row + i];
  found = sum_of_warp(found);
  if (lane() == 0) d_sum[at] = found;
}

// Begins to load tokens of an array that is the sum of PARTS arrays, each in a tile of its own.
template <int THREADS, int PARTS, int ROWS, int WIDTH, class F>
__device__ __forceinline__ void begin_parts(Copies& copies, F* tile, const F* __restrict__ x,
                                           const F* __restrict__ rest, long long step, int first,
                                           int count, int width, const unsigned char* valid) {
  const bool by_16 = width * sizeof(F) % 16 == 0;
  begin_tile<THREADS, ROWS, WIDTH>(copies, tile, WIDTH + gap<F>(), x, step, first, count, width,
                                   by_16, valid);
  if (PARTS > 1)
    begin_tile<THREADS, ROWS, WIDTH>(copies, tile + ROWS * (WIDTH + gap<F>()), WIDTH + gap<F>(),
                                     rest, step, first, count, width, by_16, valid);
}

// Begins to load ROWS queries and their do, or keys and their values, of the head that begins at `head`.
template <int THREADS, int PARTS, int ROWS, int KEY_WIDTH, int WIDTH, class T, class F>
__device__ __forceinline__ void begin_side(Copies& copies, T* x_tile, F* v_tile,
                                           const T* __restrict__ x, const F* __restrict__ v,
                                           const F* __restrict__ v_rest, long long head, int heads,
                                           int first, int count, int d, int e,
                                           const unsigned char* valid) {
  begin_tile<THREADS, ROWS, KEY_WIDTH>(copies, x_tile, KEY_WIDTH + gap<T>(), x + head * d,
                                       (long long)heads * d, first, count, d,
                                       d * sizeof(T) % 16 == 0, valid);
  begin_parts<THREADS, PARTS, ROWS, WIDTH>(copies, v_tile, v + head * e,
                                           PARTS > 1 ? v_rest + head * e : v_rest,
                                           (long long)heads * e, first, count, e, valid);
}

// C += A Bᵀ of such tiles, without the product of the two smallest parts.
template <int PARTS, int ROWS, int COLUMNS, int WIDTH, class F>
__device__ __forceinline__ void add_product_of_parts(Product<COLUMNS>& c, const F* a, const F* b) {
  constexpr int STEP = WIDTH + gap<F>();
  a += 16 * warp() * STEP;
  add_product<false, true, COLUMNS, WIDTH>(c, a, STEP, b, STEP);
  if (PARTS > 1) {
    add_product<false, true, COLUMNS, WIDTH>(c, a + ROWS * STEP, STEP, b, STEP);
    add_product<false, true, COLUMNS, WIDTH>(c, a, STEP, b + COLUMNS * STEP, STEP);
  }
}

// dq, or, OF_KEYS, dk and dv: then everything is transposed, keys × queries. dv is written to `d_v`, or,
// unrounded, to `d_v_full`.
template <class T, class F, int PARTS, bool OF_KEYS, int ROWS, int COLUMNS, int KEY_WIDTH, int WIDTH>
__global__ void __launch_bounds__(2 * ROWS, 1) softmax_gradient(
    const T* __restrict__ q, const T* __restrict__ k, const F* __restrict__ v,
    const F* __restrict__ v_rest, const int* __restrict__ is_chosen, const F* __restrict__ d_o,
    const F* __restrict__ d_o_rest, const float* __restrict__ log_total,
    const float* __restrict__ d_sum, T* __restrict__ d_own, T* __restrict__ d_v,
    float* __restrict__ d_v_full, const unsigned char* __restrict__ q_valid,
    const unsigned char* __restrict__ k_valid, const int* __restrict__ q_segment,
    const int* __restrict__ k_segment, float log_scale, float scale, int t, int s, int h, int n,
    int d, int e, int lookback, int lookahead) {
  constexpr int KEY_STEP = KEY_WIDTH + gap<T>(), STEP = WIDTH + gap<F>(), THREADS = 2 * ROWS;
  constexpr int OWN_KEY = KEY_WIDTH < 128 ? KEY_WIDTH : 128, OWN = WIDTH < 128 ? WIDTH : 128;
  const int key_parts = (d + OWN_KEY - 1) / OWN_KEY, value_parts = (e + OWN - 1) / OWN;
  const int parts = OF_KEYS ? max(key_parts, value_parts) : key_parts;
  const int part = blockIdx.x % parts, batch = blockIdx.z, group = h / n;
  // With causality, the first keys and the last queries have the most work.
  const int tile = OF_KEYS ? blockIdx.x / parts : (t + ROWS - 1) / ROWS - 1 - blockIdx.x / parts;
  const int first = tile * ROWS, kv = OF_KEYS ? blockIdx.y : blockIdx.y / group;
  if (is_chosen && !is_chosen[batch * n + kv]) return;
  const Mask mask(batch, t, s, lookback, lookahead, q_valid, k_valid, q_segment, k_segment);
  const Span span = OF_KEYS ? queries_of(mask, first, ROWS) : keys_of(mask, first, ROWS);

  extern __shared__ __align__(16) unsigned char memory[];
  T* own_keys = reinterpret_cast<T*>(memory);
  T* other_keys = own_keys + ROWS * KEY_STEP;
  F* own_values = reinterpret_cast<F*>(other_keys + COLUMNS * KEY_STEP);
  F* other_values = own_values + PARTS * ROWS * STEP;
  int* runs = reinterpret_cast<int*>(other_values + PARTS * COLUMNS * STEP);
  float* log_of = reinterpret_cast<float*>(runs + COLUMNS);
  float* sum_of = log_of + COLUMNS;

  const long long k_head = (long long)batch * s * n + kv;
  Copies copies;
  if (OF_KEYS)
    begin_side<THREADS, PARTS, ROWS, KEY_WIDTH, WIDTH>(copies, own_keys, own_values, k, v, v_rest,
                                                       k_head, n, first, s, d, e, mask.k_valid);
  else
    begin_side<THREADS, PARTS, ROWS, KEY_WIDTH, WIDTH>(
        copies, own_keys, own_values, q, d_o, d_o_rest, (long long)batch * t * h + blockIdx.y, h,
        first, t, d, e, mask.q_valid);
  const int row = first + 16 * warp() + row_of(0);
  int run[2];
  float log_of_row[2], sum_of_row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = row + 8 * i;
    run[i] = OF_KEYS ? mask.run_of_key(token) : mask.run_of_query(token);
    const long long at = ((long long)batch * h + blockIdx.y) * t + token;
    log_of_row[i] = !OF_KEYS && token < t ? log_total[at] : INFINITE;
    sum_of_row[i] = !OF_KEYS && token < t ? d_sum[at] : 0.0f;
  }

  Product<OWN_KEY> key_acc;
  Product<OF_KEYS ? OWN : 16> acc;
  key_acc.clear();
  acc.clear();
  const int low = OF_KEYS ? kv * group : blockIdx.y, high = OF_KEYS ? low + group : low + 1;
  for (int head = low; head < high; ++head) {
    for (int start = span.low / COLUMNS * COLUMNS; start < span.high; start += COLUMNS) {
      __syncthreads();
      if (OF_KEYS)
        begin_side<THREADS, PARTS, COLUMNS, KEY_WIDTH, WIDTH>(
            copies, other_keys, other_values, q, d_o, d_o_rest, (long long)batch * t * h + head, h,
            start, t, d, e, mask.q_valid);
      else
        begin_side<THREADS, PARTS, COLUMNS, KEY_WIDTH, WIDTH>(copies, other_keys, other_values, k, v,
                                                              v_rest, k_head, n, start, s, d, e,
                                                              mask.k_valid);
#pragma unroll 1
      for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
        const int token = start + i;
        runs[i] = OF_KEYS ? mask.run_of_query(token) : mask.run_of_key(token);
        if (!OF_KEYS) continue;
        const long long at = ((long long)batch * h + head) * t + token;
        log_of[i] = token < t ? log_total[at] : INFINITE;
        sum_of[i] = token < t ? d_sum[at] : 0.0f;
      }
      copies.wait();
      __syncthreads();

      Product<COLUMNS> p, d_a;
      p.clear();
      d_a.clear();
      add_product<false, true, COLUMNS, KEY_WIDTH>(p, own_keys + 16 * warp() * KEY_STEP, KEY_STEP,
                                                   other_keys, KEY_STEP);
      add_product_of_parts<PARTS, ROWS, COLUMNS, WIDTH>(d_a, own_values, other_values);
      const bool sees_all = OF_KEYS ? mask.sees_all(start, COLUMNS, first, ROWS)
                                    : mask.sees_all(first, ROWS, start, COLUMNS);
      if (!sees_all)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = column_of(j, i), own = row + 8 * (i / 2), other = start + column;
            const bool is_near = OF_KEYS ? mask.is_near(other, own) : mask.is_near(own, other);
            if (runs[column] != run[i / 2] || !is_near) p.x[j][i] = -INFINITE;
          }
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = column_of(j, i);
          const float log_of_pair = OF_KEYS ? log_of[column] : log_of_row[i / 2];
          const float sum_of_pair = OF_KEYS ? sum_of[column] : sum_of_row[i / 2];
          p.x[j][i] = power_of_2(p.x[j][i] * log_scale - log_of_pair);
          d_a.x[j][i] = p.x[j][i] * (d_a.x[j][i] - sum_of_pair);
        }
      if constexpr (OF_KEYS)
        if (part * OWN < WIDTH) {
          const F* own = other_values + part * OWN;
          add_held_product<false, OWN, COLUMNS>(acc, p, own, STEP);
          if (PARTS > 1) {
            add_held_product<false, OWN, COLUMNS>(acc, p, own + COLUMNS * STEP, STEP);
            keep_rest<F>(p);
            add_held_product<false, OWN, COLUMNS>(acc, p, own, STEP);
          }
        }
      if (part * OWN_KEY < KEY_WIDTH)
        add_weighted<OWN_KEY, COLUMNS>(key_acc, d_a, other_keys + part * OWN_KEY, KEY_STEP);
    }
  }

#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int token = row + 8 * (i / 2);
    if (token >= (OF_KEYS ? s : t)) continue;
    const long long at_token = OF_KEYS ? k_head + (long long)token * n
                                       : ((long long)batch * t + token) * h + blockIdx.y;
#pragma unroll
    for (int j = 0; j < OWN_KEY / 8; ++j) {
      const int at = part * OWN_KEY + column_of(j, i);
      const float x = key_acc.x[j][i] * scale, y = key_acc.x[j][i + 1] * scale;
      if (at < d) store_there(d_own + at_token * d + at, d - at, d % 2 == 0, x, y);
    }
    if constexpr (OF_KEYS)
#pragma unroll
      for (int j = 0; j < OWN / 8; ++j) {
        const int at = part * OWN + column_of(j, i);
        const float x = acc.x[j][i], y = acc.x[j][i + 1];
        if (at >= e) continue;
        if (d_v) store_there(d_v + at_token * e + at, e - at, e % 2 == 0, x, y);
        if (d_v_full) store_there(d_v_full + at_token * e + at, e - at, e % 2 == 0, x, y);
      }
  }
}
