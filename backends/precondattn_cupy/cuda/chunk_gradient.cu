// The gradients of queries and keys, all chunks at once.
//
//     dA = s D ∘ dO Uᵀ,    dQ = dA K + s reading ∘ dO Sᵀ,
//     dK = dAᵀ Q (summed over the queries of a state) + writing ∘ U dSᵀ
//          − reading ∘ β ∘ X Sᵀ + (dL ∘ D + its transpose) K.
//
// The second line of dK applies to the delta rule only, with X and dL from chunk_delta.cu; S is the
// state before the chunk, dS the gradient of the state after it. If other keys A are erased than K, that
// line is (dL ∘ D)ᵀ A, and the gradient of A is
//
//     dA = (dL ∘ D) K − reading ∘ β ∘ X Sᵀ.
//
// A block has a chunk and some key channels, and iterates over the value channels. For the gradients of
// the gates and β, it also sums the products of these terms with Q, K or A.
#include "chunk_tiles.cuh"

// Writes dA of one query of each token to `d_scores` (m r, T, CHUNK), and its part of the gates'
// gradient to `crossing_scores` (m r, T), unless that is null.
template <class T, int CHUNK, int BLOCK>
__global__ void d_scores_of(const T* __restrict__ q, const T* __restrict__ k,
                            const T* __restrict__ v, const float* __restrict__ u,
                            const T* __restrict__ d_o, const float* __restrict__ sums,
                            float* __restrict__ d_scores, float* __restrict__ crossing_scores,
                            int heads, int queries, int q_heads, int k_heads, int v_heads, int s,
                            int t, int tokens, int d, int e, int step, float scale) {
  constexpr int SQUARE = CHUNK + 1;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* own = free.take<float>(CHUNK * (BLOCK + GAP));
  float* other = free.take<float>(CHUNK * (BLOCK + GAP));
  float* square = free.take<float>(CHUNK * SQUARE);
  float* gates = free.take<float>(2 * CHUNK);
  const long long m = blockIdx.y / queries;
  const int query = blockIdx.y % queries, b = m / heads, head = m % heads;
  const int start = blockIdx.x * CHUNK, row = 16 * warp(), at_q = head / (heads / q_heads);
  const long long at = m * tokens + start, to = (long long)blockIdx.y * tokens + start;
  const Rows<const T> outputs = tokens_of(d_o, b, head * queries + query, heads * queries, t, e);
  load_sums<CHUNK>(gates, sums, at);
  Product<CHUNK> found;
  found.clear();
  if (u != nullptr) {
    const Rows<const float> written = scratch_of(u, at, CHUNK, step);
    add_pairs<CHUNK, BLOCK>(found, own, outputs, start - s + t, other, written, 0);
  } else {
    const Rows<const T> written = tokens_of(v, b, head / (heads / v_heads), v_heads, s, e);
    add_pairs<CHUNK, BLOCK>(found, own, outputs, start - s + t, other, written, start);
  }
  decay_pairs<false>(found, gates, scale);
  store(scratch_of(d_scores, to, CHUNK, CHUNK), row, 0, found);
  if (crossing_scores == nullptr) return;
  const Rows<const T> own_q = tokens_of(q, b, at_q * queries + query, q_heads * queries, t, d);
  const Rows<const T> own_k = tokens_of(k, b, head / (heads / k_heads), k_heads, s, d);
  Product<CHUNK> scores;
  scores.clear();
  add_pairs<CHUNK, BLOCK>(scores, own, own_q, start - s + t, other, own_k, start);
#pragma unroll
  for (int j = 0; j < CHUNK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      square[(row + row_of(i)) * SQUARE + column_of(j, i)] = found.x[j][i] * scores.x[j][i];
  const float crossed = crossing<CHUNK>(square);
  if (threadIdx.x < CHUNK) crossing_scores[to + threadIdx.x] = crossed;
}

// Writes BLOCK channels of one query of each token to `d_q` (b, t, m, r, d), and the sums of Q with
// the state's part of dQ to `read` (m r, blocks, T), unless that is null.
template <class T, class OUT, int CHUNK, int BLOCK>
__global__ void d_queries(const T* __restrict__ q, const T* __restrict__ k,
                          const T* __restrict__ d_o, const float* __restrict__ sums,
                          const float* __restrict__ d_scores, const float* __restrict__ states,
                          OUT* __restrict__ d_q, float* __restrict__ read, int heads, int queries,
                          int q_heads, int k_heads, int s, int t, int tokens, int d, int e,
                          int width, int step, float scale) {
  constexpr int STEP = BLOCK + GAP, DEEP = BLOCK + DEEP_GAP, LEFT = CHUNK + GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* own = free.take<float>(CHUNK * STEP);
  float* other = free.take<float>(CHUNK * DEEP);
  float* state = free.take<float>(BLOCK * STEP);
  float* left = free.take<float>(CHUNK * LEFT);
  float* gates = free.take<float>(2 * CHUNK);
  const int blocks = (d + BLOCK - 1) / BLOCK;
  const int chunk = blockIdx.x / blocks, block = blockIdx.x % blocks, first = block * BLOCK;
  const long long m = blockIdx.y / queries;
  const int query = blockIdx.y % queries, b = m / heads, head = m % heads;
  const int start = chunk * CHUNK, row = 16 * warp(), at_q = head / (heads / q_heads);
  const long long at = m * tokens + start;
  const Rows<const T> outputs = tokens_of(d_o, b, head * queries + query, heads * queries, t, e);
  const long long at_chunk = m * (tokens / CHUNK) + chunk;
  const Rows<const float> before = scratch_of(states, at_chunk * width, width, step);
  load_sums<CHUNK>(gates, sums, at);
  Product<BLOCK> found;
  found.clear();
  for (int c = 0; c < e; c += BLOCK) {
    __syncthreads();
    load<CHUNK, BLOCK>(own, outputs, start - s + t, c);
    load_factor<T, BLOCK, BLOCK, GAP, 2 * CHUNK>(state, before, first, c);
    __syncthreads();
    add_tiles<T, OF_16_BITS, FACTOR, false, true, BLOCK, BLOCK>(found, own + row * STEP, STEP, state,
                                                                STEP);
  }
#pragma unroll
  for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) found.x[j][i] *= scale * reading(gates, row + row_of(i));
  __syncthreads();
  load<CHUNK, BLOCK>(own, tokens_of(q, b, at_q * queries + query, q_heads * queries, t, d),
                     start - s + t, first);
  load<CHUNK, BLOCK, DEEP_GAP>(other, tokens_of(k, b, head / (heads / k_heads), k_heads, s, d), start,
                               first);
  const long long pairs = (long long)blockIdx.y * tokens + start;
  load_factor<T, CHUNK, CHUNK>(left, scratch_of(d_scores, pairs, CHUNK, CHUNK), 0, 0);
  __syncthreads();
  if (read != nullptr) {
    const long long to = ((long long)blockIdx.y * blocks + block) * tokens + start;
    sum_rows(read + to + row, found, own + row * STEP, STEP);
  }
  add_tiles<T, FACTOR, OF_16_BITS, false, false, BLOCK, CHUNK>(found, left + row * LEFT, LEFT, other,
                                                               DEEP);
  const Rows<OUT> rows = tokens_of(d_q, b, head * queries + query, heads * queries, t, d);
  store(rows, start - s + t + row, first, found);
}

// Writes BLOCK channels of `d_k` (b, s, m, d). With gates, writes the sums of K with the part of dK
// from the state after the chunk to `written` (m, blocks, T), and Σ S ∘ dS to `overlap` (m, chunks,
// blocks); with the delta rule the sums of K with reading ∘ X Sᵀ to `from_keys` (m, blocks, T). Outputs
// that are not needed are null. If ERASES, X is not read, and `from_keys` is left to `d_erased_of`.
template <class T, class OUT, int CHUNK, int BLOCK, bool ERASES = false>
__global__ void d_keys_of(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ a,
                          const T* __restrict__ v,
                          const float* __restrict__ u, const float* __restrict__ sums,
                          const float* __restrict__ strength, const float* __restrict__ d_scores,
                          const float* __restrict__ d_right, const float* __restrict__ d_keys,
                          const float* __restrict__ states, const float* __restrict__ d_states,
                          OUT* __restrict__ d_k, float* __restrict__ written,
                          float* __restrict__ from_keys, float* __restrict__ overlap, int heads,
                          int queries, int q_heads, int k_heads, int a_heads, int v_heads, int s,
                          int t, int tokens, int d, int e, int width, int step) {
  constexpr int STEP = BLOCK + GAP, DEEP = BLOCK + DEEP_GAP, WARPS = CHUNK / 16;
  constexpr int LEFT = CHUNK + GAP, DEEP_LEFT = CHUNK + DEEP_GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* own = free.take<float>(CHUNK * DEEP);
  float* right = free.take<float>(CHUNK * DEEP);
  float* state = free.take<float>(BLOCK * STEP);
  float* d_state = free.take<float>(BLOCK * STEP);
  float* left = free.take<float>(CHUNK * DEEP_LEFT);
  float* gates = free.take<float>(2 * CHUNK);
  float* of_warps = free.take<float>(WARPS);
  const int blocks = (d + BLOCK - 1) / BLOCK;
  const int chunk = blockIdx.x / blocks, block = blockIdx.x % blocks, first = block * BLOCK;
  const long long m = blockIdx.y;
  const int b = m / heads, head = m % heads, start = chunk * CHUNK, row = 16 * warp();
  const long long at = m * tokens + start, at_chunk = m * (tokens / CHUNK) + chunk;
  const long long to_sums = (m * blocks + block) * tokens + start + row;
  const Rows<const float> before = scratch_of(states, at_chunk * width, width, step);
  const Rows<const float> lookback = scratch_of(d_states, at_chunk * width, width, step);
  load_sums<CHUNK>(gates, sums, at);
  Product<BLOCK> found, from_state;
  found.clear();
  from_state.clear();
  float both = 0.0f;
  for (int c = 0; c < e; c += BLOCK) {
    __syncthreads();
    if (u != nullptr)
      load_factor<T, CHUNK, BLOCK>(own, scratch_of(u, at, CHUNK, step), 0, c);
    else
      load<CHUNK, BLOCK>(own, tokens_of(v, b, head / (heads / v_heads), v_heads, s, e), start, c);
    if (!ERASES && d_right != nullptr)
      load_factor<T, CHUNK, BLOCK>(right, scratch_of(d_right, at, CHUNK, step), 0, c);
    load<BLOCK, BLOCK, GAP, 2 * CHUNK>(state, before, first, c);
    load<BLOCK, BLOCK, GAP, 2 * CHUNK>(d_state, lookback, first, c);
    __syncthreads();
    // Not rounded in shared memory, for the sake of `overlap`.
    add_tiles<T, FACTOR, WHOLE, false, true, BLOCK, BLOCK>(found, own + row * STEP, STEP, d_state,
                                                           STEP);
    if (!ERASES && d_right != nullptr)
      add_tiles<T, FACTOR, WHOLE, false, true, BLOCK, BLOCK>(from_state, right + row * STEP, STEP,
                                                             state, STEP);
    if (overlap != nullptr)
      for (int i = threadIdx.x; i < BLOCK * BLOCK; i += 2 * CHUNK) {
        const int place = i / BLOCK * STEP + i % BLOCK;
        both += state[place] * d_state[place];
      }
  }
  __syncthreads();
  float* keys = right;
  load<CHUNK, BLOCK, DEEP_GAP>(keys, tokens_of(k, b, head / (heads / k_heads), k_heads, s, d), start,
                               first);
  if constexpr (ERASES) {
    load_factor<T, CHUNK, CHUNK, DEEP_GAP>(left, scratch_of(d_keys, at, CHUNK, CHUNK), 0, 0);
    load<CHUNK, BLOCK, DEEP_GAP>(own, tokens_of(a, b, head / (heads / a_heads), a_heads, s, d), start,
                                 first);
  } else if (d_keys != nullptr) {
    load_factor<T, CHUNK, CHUNK>(left, scratch_of(d_keys, at, CHUNK, CHUNK), 0, 0);
  }
  both = sum_of_warp(both);
  if (lane() == 0) of_warps[warp()] = both;
  __syncthreads();
  if (overlap != nullptr && threadIdx.x == 0) {
    float sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += of_warps[i];
    overlap[at_chunk * blocks + block] = sum;
  }
#pragma unroll
  for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) found.x[j][i] *= decay(gates, CHUNK - 1, row + row_of(i));
  if (written != nullptr) sum_rows(written + to_sums, found, keys + row * DEEP, DEEP);
  if constexpr (ERASES) {
    add_tiles<T, FACTOR, OF_16_BITS, true, false, BLOCK, CHUNK>(found, left + row, DEEP_LEFT, own,
                                                                DEEP);
  } else if (d_keys != nullptr) {
#pragma unroll
    for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) from_state.x[j][i] *= reading(gates, row + row_of(i));
    sum_rows(from_keys + to_sums, from_state, keys + row * DEEP, DEEP);
#pragma unroll
    for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        found.x[j][i] -= strength[at + row + row_of(i)] * from_state.x[j][i];
    add_tiles<T, FACTOR, OF_16_BITS, false, false, BLOCK, CHUNK>(found, left + row * LEFT, LEFT, keys,
                                                                 DEEP);
  }
  for (int query = 0; query < queries; ++query) {
    const int at_q = head / (heads / q_heads) * queries + query;
    const long long pairs = (m * queries + query) * tokens + start;
    __syncthreads();
    load<CHUNK, BLOCK, DEEP_GAP>(own, tokens_of(q, b, at_q, q_heads * queries, t, d), start - s + t,
                                 first);
    load_factor<T, CHUNK, CHUNK, DEEP_GAP>(left, scratch_of(d_scores, pairs, CHUNK, CHUNK), 0, 0);
    __syncthreads();
    add_tiles<T, FACTOR, OF_16_BITS, true, false, BLOCK, CHUNK>(found, left + row, DEEP_LEFT, own,
                                                                DEEP);
  }
  store(tokens_of(d_k, b, head, heads, s, d), start + row, first, found);
}

// Writes BLOCK channels of dA to `d_a` (b, s, m, d), and the sums of A with reading ∘ X Sᵀ to `from_keys`
// (m, blocks, T). `d_pairs` (m, T, CHUNK) is dL ∘ D.
template <class T, class OUT, int CHUNK, int BLOCK>
__global__ void d_erased_of(const T* __restrict__ k, const T* __restrict__ a,
                            const float* __restrict__ sums, const float* __restrict__ strength,
                            const float* __restrict__ d_right, const float* __restrict__ d_pairs,
                            const float* __restrict__ states, OUT* __restrict__ d_a,
                            float* __restrict__ from_keys, int heads, int k_heads, int a_heads, int s,
                            int tokens, int d, int e, int width, int step) {
  constexpr int STEP = BLOCK + GAP, DEEP = BLOCK + DEEP_GAP, LEFT = CHUNK + GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* right = free.take<float>(CHUNK * STEP);
  float* keys = free.take<float>(CHUNK * DEEP);
  float* state = free.take<float>(BLOCK * STEP);
  float* left = free.take<float>(CHUNK * LEFT);
  float* gates = free.take<float>(2 * CHUNK);
  const int blocks = (d + BLOCK - 1) / BLOCK;
  const int chunk = blockIdx.x / blocks, block = blockIdx.x % blocks, first = block * BLOCK;
  const long long m = blockIdx.y;
  const int b = m / heads, head = m % heads, start = chunk * CHUNK, row = 16 * warp();
  const long long at = m * tokens + start;
  const Rows<const float> before =
      scratch_of(states, (m * (tokens / CHUNK) + chunk) * width, width, step);
  load_sums<CHUNK>(gates, sums, at);
  Product<BLOCK> found;
  found.clear();
  for (int c = 0; c < e; c += BLOCK) {
    __syncthreads();
    load_factor<T, CHUNK, BLOCK>(right, scratch_of(d_right, at, CHUNK, step), 0, c);
    load_factor<T, BLOCK, BLOCK, GAP, 2 * CHUNK>(state, before, first, c);
    __syncthreads();
    add_tiles<T, FACTOR, FACTOR, false, true, BLOCK, BLOCK>(found, right + row * STEP, STEP, state,
                                                            STEP);
  }
  __syncthreads();
  float* erased = right;
  load<CHUNK, BLOCK>(erased, tokens_of(a, b, head / (heads / a_heads), a_heads, s, d), start, first);
  load<CHUNK, BLOCK, DEEP_GAP>(keys, tokens_of(k, b, head / (heads / k_heads), k_heads, s, d), start,
                               first);
  load_factor<T, CHUNK, CHUNK>(left, scratch_of(d_pairs, at, CHUNK, CHUNK), 0, 0);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) found.x[j][i] *= reading(gates, row + row_of(i));
  sum_rows(from_keys + (m * blocks + block) * tokens + start + row, found, erased + row * STEP, STEP);
#pragma unroll
  for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) found.x[j][i] *= -strength[at + row + row_of(i)];
  add_tiles<T, FACTOR, OF_16_BITS, false, false, BLOCK, CHUNK>(found, left + row * LEFT, LEFT, keys,
                                                               DEEP);
  store(tokens_of(d_a, b, head, heads, s, d), start + row, first, found);
}
