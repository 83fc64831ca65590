// The rows U that the delta rule writes in a chunk, from the state S before it: U = Y − W S.
//
//     Y = M (β ∘ V),    W = M (β ∘ reading ∘ A),    M = (I + diag(β) stril(D ∘ A Kᵀ))⁻¹
//
// with A the keys that are erased: K, unless ERASES. Backward, with X = Mᵀ dU,
//
//     dV = β ∘ X,    dβ = Σ X ∘ (V − L U) − the state's part from chunk_gradient.cu,
//     dL = −stril((β ∘ X) Uᵀ),    L = stril(D ∘ A Kᵀ),
//     dA = (dL ∘ D) K + …,    dK = (dL ∘ D)ᵀ A + …,
//
// and the sum of both where A is K. A block has a chunk of one head, and iterates over blocks of
// channels.
#include "chunk_inverse.cuh"
#include "chunk_tiles.cuh"

// Writes M to `inverse` (m, T, CHUNK), Y to `y` (m, T, step) and W to `w` (m, T, width). Unless ERASES,
// `a` is null.
template <class T, int CHUNK, int BLOCK, bool ERASES = false>
__global__ void delta_prepare(const T* __restrict__ k, const T* __restrict__ a,
                              const T* __restrict__ v, const float* __restrict__ sums,
                              const float* __restrict__ strength, float* __restrict__ inverse,
                              float* __restrict__ y, float* __restrict__ w, int heads, int k_heads,
                              int a_heads, int v_heads, int s, int tokens, int d, int e, int width,
                              int step) {
  static_assert(!ERASES || BLOCK <= CHUNK, "a tile of A has the memory of M");
  constexpr int SQUARE = CHUNK + GAP, STEP = BLOCK + GAP, DEEP = BLOCK + DEEP_GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* lower = free.take<float>(CHUNK * SQUARE);
  float* solved = free.take<float>(CHUNK * SQUARE);
  float* tile = free.take<float>(CHUNK * DEEP);
  float* gates = free.take<float>(2 * CHUNK);
  float* beta = free.take<float>(CHUNK);
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, start = blockIdx.x * CHUNK;
  const int row = 16 * warp();
  const long long at = (long long)blockIdx.y * tokens + start;
  const Rows<const T> keys = tokens_of(k, b, head / (heads / k_heads), k_heads, s, d);
  const Rows<const T> values = tokens_of(v, b, head / (heads / v_heads), v_heads, s, e);
  load_sums<CHUNK>(gates, sums, at);
  for (int i = threadIdx.x; i < CHUNK; i += 2 * CHUNK) beta[i] = strength[at + i];

  Rows<const T> erased = keys;
  if constexpr (ERASES) erased = tokens_of(a, b, head / (heads / a_heads), a_heads, s, d);
  Product<CHUNK> scores;
  scores.clear();
  if constexpr (ERASES) {
    add_pairs<CHUNK, BLOCK>(scores, solved, erased, start, tile, keys, start);
    __syncthreads();
  } else {
    for (int c = 0; c < d; c += BLOCK) {
      __syncthreads();
      load<CHUNK, BLOCK>(tile, keys, start, c);
      __syncthreads();
      add_tiles<T, OF_16_BITS, OF_16_BITS, false, true, CHUNK, BLOCK>(scores, tile + row * STEP, STEP,
                                                                      tile, STEP);
    }
  }
  decay_pairs<true>(scores, gates, 1.0f);
  scale_rows(scores, beta + row);
  store_product(lower + row * SQUARE, SQUARE, scores);
  unit_lower_inverse<CHUNK>(solved, lower, SQUARE);

  // M as a factor is stored where L was.
  for (int i = threadIdx.x; i < CHUNK * CHUNK; i += 2 * CHUNK) {
    const int m = i / CHUNK, n = i % CHUNK;
    const float own = solved[m * SQUARE + n];
    inverse[at * CHUNK + i] = own;
    lower[m * SQUARE + n] = as_factor<T>(own * beta[n]);
  }
  for (int c = 0; c < step; c += BLOCK) {
    __syncthreads();
    load<CHUNK, BLOCK, DEEP_GAP>(tile, values, start, c);
    __syncthreads();
    Product<BLOCK> found;
    found.clear();
    add_tiles<T, FACTOR, OF_16_BITS, false, false, BLOCK, CHUNK>(found, lower + row * SQUARE, SQUARE,
                                                                 tile, DEEP);
    store(scratch_of(y, at, CHUNK, step), row, c, found);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < CHUNK * CHUNK; i += 2 * CHUNK) {
    const int m = i / CHUNK, n = i % CHUNK;
    lower[m * SQUARE + n] = as_factor<T>(solved[m * SQUARE + n] * beta[n] * reading(gates, n));
  }
  for (int c = 0; c < width; c += BLOCK) {
    __syncthreads();
    load<CHUNK, BLOCK, DEEP_GAP>(tile, erased, start, c);
    __syncthreads();
    Product<BLOCK> found;
    found.clear();
    add_tiles<T, FACTOR, OF_16_BITS, false, false, BLOCK, CHUNK>(found, lower + row * SQUARE, SQUARE,
                                                                 tile, DEEP);
    store(scratch_of(w, at, CHUNK, width), row, c, found);
  }
}

// Writes X to `d_right` (m, T, step), the values' gradient to `d_v` (b, s, m, e), and the factor of K
// in dK to `d_keys` (m, T, CHUNK), or if ERASES, dL ∘ D; the chunk's own part of the gradients of β and
// of the gates to `d_strength` and `crossing_keys` (m, T).
template <class T, class OUT, int CHUNK, int BLOCK, bool ERASES = false>
__global__ void delta_gradient(const T* __restrict__ k, const T* __restrict__ a,
                               const T* __restrict__ v,
                               const float* __restrict__ sums, const float* __restrict__ strength,
                               const float* __restrict__ inverse, const float* __restrict__ u,
                               const float* __restrict__ d_u, float* __restrict__ d_right,
                               OUT* __restrict__ d_v, float* __restrict__ d_keys,
                               float* __restrict__ d_strength, float* __restrict__ crossing_keys,
                               int heads, int k_heads, int a_heads, int v_heads, int s, int tokens,
                               int d, int e, int step) {
  constexpr int SQUARE = CHUNK + 1, LEFT = CHUNK + DEEP_GAP, STEP = BLOCK + GAP;
  constexpr int DEEP = BLOCK + DEEP_GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* square = free.take<float>(CHUNK * SQUARE);
  float* solved = free.take<float>(CHUNK * LEFT);
  float* d_written = free.take<float>(CHUNK * DEEP);
  float* right = free.take<float>(CHUNK * STEP);
  float* written = free.take<float>(CHUNK * STEP);
  float* own_v = free.take<float>(CHUNK * STEP);
  float* gates = free.take<float>(2 * CHUNK);
  float* beta = free.take<float>(CHUNK);
  float* row_sums = free.take<float>(CHUNK);
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, start = blockIdx.x * CHUNK;
  const int row = 16 * warp();
  const long long at = (long long)blockIdx.y * tokens + start;
  const Rows<const T> keys = tokens_of(k, b, head / (heads / k_heads), k_heads, s, d);
  const Rows<const T> values = tokens_of(v, b, head / (heads / v_heads), v_heads, s, e);
  load_sums<CHUNK>(gates, sums, at);
  for (int i = threadIdx.x; i < CHUNK; i += 2 * CHUNK) beta[i] = strength[at + i];
  load_factor<T, CHUNK, CHUNK, DEEP_GAP>(solved, scratch_of(inverse, at, CHUNK, CHUNK), 0, 0);

  Product<CHUNK> among;
  among.clear();
  float d_beta = 0.0f;
  for (int c = 0; c < step; c += BLOCK) {
    __syncthreads();
    load_factor<T, CHUNK, BLOCK, DEEP_GAP>(d_written, scratch_of(d_u, at, CHUNK, step), 0, c);
    load_factor<T, CHUNK, BLOCK>(written, scratch_of(u, at, CHUNK, step), 0, c);
    load<CHUNK, BLOCK>(own_v, values, start, c);
    __syncthreads();
    Product<BLOCK> found;
    found.clear();
    add_tiles<T, FACTOR, FACTOR, true, false, BLOCK, CHUNK>(found, solved + row, LEFT, d_written,
                                                            DEEP);
    store(scratch_of(d_right, at, CHUNK, step), row, c, found);
    store_factor<T>(right + row * STEP, STEP, found);
    sum_rows(row_sums + row, found, own_v + row * STEP, STEP);
    scale_rows(found, beta + row);
    store(tokens_of(d_v, b, head, heads, s, e), start + row, c, found);
    __syncthreads();
    if (threadIdx.x < CHUNK) d_beta += row_sums[threadIdx.x];
    add_tiles<T, FACTOR, FACTOR, false, true, CHUNK, BLOCK>(among, right + row * STEP, STEP, written,
                                                            STEP);
  }
  Product<CHUNK> scores;
  scores.clear();
  Rows<const T> erased = keys;
  if constexpr (ERASES) erased = tokens_of(a, b, head / (heads / a_heads), a_heads, s, d);
  add_pairs<CHUNK, BLOCK>(scores, right, erased, start, written, keys, start);

  decay_pairs<true>(among, gates, 1.0f);
  float* own_square = square + row * SQUARE;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; ++j)
      sum += among.x[j][i] * scores.x[j][i] + among.x[j][i + 1] * scores.x[j][i + 1];
    sum = sum_of_four(sum);
    if (lane() % 4 == 0) row_sums[row + row_of(i)] = sum;
  }
  scale_rows(among, beta + row);
#pragma unroll
  for (int j = 0; j < CHUNK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      own_square[row_of(i) * SQUARE + column_of(j, i)] = -among.x[j][i];
  __syncthreads();
  if (threadIdx.x < CHUNK) d_strength[at + threadIdx.x] = d_beta - row_sums[threadIdx.x];
  for (int i = threadIdx.x; i < CHUNK * CHUNK; i += 2 * CHUNK) {
    const int m = i / CHUNK, n = i % CHUNK;
    d_keys[at * CHUNK + i] = square[m * SQUARE + n] + (ERASES ? 0.0f : square[n * SQUARE + m]);
  }
  if (crossing_keys == nullptr) return;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < CHUNK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) own_square[row_of(i) * SQUARE + column_of(j, i)] *= scores.x[j][i];
  const float crossed = crossing<CHUNK>(square);
  if (threadIdx.x < CHUNK) crossing_keys[at + threadIdx.x] = crossed;
}
