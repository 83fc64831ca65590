// Softmax attention, forward (flash attention): online softmax over tiles (running_softmax.cuh).
//
//     S = s q kᵀ,    P = 2^{S − m},    l = rowsum(P),    o = P v / l,    λ = m + log₂ l,
//
// with s in units of log 2. A block has ROWS queries of one head, 16 for each warp, and WIDTH channels
// of the values. Shared memory holds its queries and two tiles of keys and values, of which one is
// copied while the other is read; registers hold acc and the tile's scores, which become P. A query
// without visible keys has o = 0 and λ = ∞: its weights are 0.
//
// Grid: tiles of queries × parts of the values' channels, heads, sequences. 2 t s (d + e) FLOPs per
// head, half of them with causality; keys and values are read once for every tile of queries.
//
// A precise kernel multiplies P as the sum of two 16-bit numbers. The gradient takes the mean of do vᵀ
// from o: with weights of 8 or 11 bits there and of 24 in dS, the rows of dS do not sum to 0, and where
// keys are nearly equal, dq has that error.
//
// Values may have another type than queries, and be the sum of two arrays (`v` and `v_rest`), as the
// exponentials of LASER are. `is_chosen` (b, n) then selects their heads; blocks of others return at once.
#include "running_softmax.cuh"
#include "masks.cuh"
#include "tiles.cuh"

template <class T, class F, int PARTS, int ROWS, int COLUMNS, int KEY_WIDTH, int WIDTH>
__global__ void __launch_bounds__(2 * ROWS, 1)
    softmax_forward(const T* __restrict__ q, const T* __restrict__ k, const F* __restrict__ v,
                    const F* __restrict__ v_rest, const int* __restrict__ is_chosen,
                    T* __restrict__ out, float* __restrict__ full, float* __restrict__ log_total,
                    const unsigned char* __restrict__ q_valid,
                    const unsigned char* __restrict__ k_valid, const int* __restrict__ q_segment,
                    const int* __restrict__ k_segment, float scale, int t, int s, int h, int n,
                    int d, int e, int lookback, int lookahead) {
  constexpr int KEY_STEP = KEY_WIDTH + gap<T>(), STEP = WIDTH + gap<F>();
  const int parts = (e + WIDTH - 1) / WIDTH, tiles = (t + ROWS - 1) / ROWS;
  const int part = blockIdx.x % parts, head = blockIdx.y, batch = blockIdx.z;
  // The last tiles first: with causality, they have the most work.
  const int first = (tiles - 1 - blockIdx.x / parts) * ROWS, kv = head / (h / n);
  if (is_chosen && !is_chosen[batch * n + kv]) return;
  const Mask mask(batch, t, s, lookback, lookahead, q_valid, k_valid, q_segment, k_segment);
  const Span span = keys_of(mask, first, ROWS);

  extern __shared__ __align__(16) unsigned char memory[];
  T* q_tile = reinterpret_cast<T*>(memory);
  T* k_tile = q_tile + ROWS * KEY_STEP;
  F* v_tile = reinterpret_cast<F*>(k_tile + 2 * COLUMNS * KEY_STEP);
  int* runs = reinterpret_cast<int*>(v_tile + 2 * PARTS * COLUMNS * STEP);

  const int channel = part * WIDTH;
  const long long k_head = (long long)batch * s * n + kv, q_head = (long long)batch * t * h + head;
  k += k_head * d;
  v += k_head * e + channel;
  if (PARTS > 1) v_rest += k_head * e + channel;
  const bool d_by_16 = d * sizeof(T) % 16 == 0, e_by_16 = e * sizeof(F) % 16 == 0;
  constexpr int THREADS = 2 * ROWS, V_TILE = COLUMNS * STEP;
  Copies copies;
  // Keys, values and runs of the tile from `start` on, to one of two buffers.
  const auto begin = [&](int start, int buffer) {
    F* values = v_tile + buffer * PARTS * V_TILE;
    begin_tile<THREADS, COLUMNS, KEY_WIDTH>(copies, k_tile + buffer * COLUMNS * KEY_STEP, KEY_STEP,
                                            k, (long long)n * d, start, s, d, d_by_16,
                                            mask.k_valid);
    begin_tile<THREADS, COLUMNS, WIDTH>(copies, values, STEP, v, (long long)n * e, start, s,
                                        e - channel, e_by_16, mask.k_valid);
    if (PARTS > 1)
      begin_tile<THREADS, COLUMNS, WIDTH>(copies, values + V_TILE, STEP, v_rest, (long long)n * e,
                                          start, s, e - channel, e_by_16, mask.k_valid);
#pragma unroll 1
    for (int j = threadIdx.x; j < COLUMNS; j += THREADS)
      runs[buffer * COLUMNS + j] = mask.run_of_key(start + j);
  };
  begin_tile<THREADS, ROWS, KEY_WIDTH>(copies, q_tile, KEY_STEP, q + q_head * d, (long long)h * d,
                                       first, t, d, d_by_16, mask.q_valid);
  const int low = span.low / COLUMNS * COLUMNS;
  if (low < span.high) begin(low, 0);
  const T* own = q_tile + 16 * warp() * KEY_STEP;
  const int row = first + 16 * warp() + row_of(0);
  const int q_run[2] = {mask.run_of_query(row), mask.run_of_query(row + 8)};

  RunningSoftmax running;
  Product<WIDTH> acc;
  acc.clear();
  for (int start = low, buffer = 0; start < span.high; start += COLUMNS, buffer ^= 1) {
    copies.wait();
    __syncthreads();
    if (start + COLUMNS < span.high) begin(start + COLUMNS, buffer ^ 1);

    Product<COLUMNS> p;
    p.clear();
    add_product<false, true, COLUMNS, KEY_WIDTH>(
        p, own, KEY_STEP, k_tile + buffer * COLUMNS * KEY_STEP, KEY_STEP);
    if (!mask.sees_all(first, ROWS, start, COLUMNS)) {
      const int* run = runs + buffer * COLUMNS;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = column_of(j, i);
          if (run[column] != q_run[i / 2] || !mask.is_near(row + 8 * (i / 2), start + column))
            p.x[j][i] = -INFINITE;
        }
    }
    running.weigh<F, false>(p, acc, scale);
    const F* values = v_tile + buffer * PARTS * V_TILE;
    if (PARTS > 1) add_held_product<false, WIDTH, COLUMNS>(acc, p, values + V_TILE, STEP);
    add_weighted<WIDTH, COLUMNS, (PARTS > 1)>(acc, p, values, STEP);
  }

  running.close();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = row + 8 * i;
    if (token < t && part == 0 && lane() % 4 == 0)
      log_total[((long long)batch * h + head) * t + token] = running.log_total(i, INFINITE);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = row + 8 * i;
    if (token >= t) continue;
    const float by = running.one_by_total(i);
    const long long to = (q_head + (long long)token * h) * e + channel;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const int column = column_of(j, 0), there = e - channel - column;
      if (there <= 0) continue;
      const float x = acc.x[j][2 * i] * by, y = acc.x[j][2 * i + 1] * by;
      if (out) store_there(out + to + column, there, e % 2 == 0, x, y);
      if (full) store_there(full + to + column, there, e % 2 == 0, x, y);
    }
  }
}
