// The outputs of all chunks at once, and the part of dU from outputs of the same chunk.
//
//     O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),    A = s (D ∘ Q Kᵀ)ᵀ dO, over the queries of a state.
//
// A block has a chunk and some value channels; scores are recomputed for every block of channels, so
// that they are not stored.
#include "chunk_tiles.cuh"

// Writes the outputs of one query of each token to `o` (b, t, m, r, e); `u` is null for additive states.
template <class T, int CHUNK, int BLOCK>
__global__ void read_chunks(const T* __restrict__ q, const T* __restrict__ k,
                            const T* __restrict__ v, const float* __restrict__ u,
                            const float* __restrict__ sums, const float* __restrict__ states,
                            T* __restrict__ o, int heads, int queries, int q_heads, int k_heads,
                            int v_heads, int s, int t, int tokens, int d, int e, int width,
                            int step, float scale) {
  constexpr int STEP = BLOCK + GAP, DEEP = BLOCK + DEEP_GAP, LEFT = CHUNK + GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* own = free.take<float>(CHUNK * STEP);
  float* keys = free.take<float>(CHUNK * DEEP);
  float* state = free.take<float>(BLOCK * DEEP);
  float* left = free.take<float>(CHUNK * LEFT);
  float* gates = free.take<float>(2 * CHUNK);
  const int blocks = (step + BLOCK - 1) / BLOCK;
  const int chunk = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
  const long long m = blockIdx.y / queries;
  const int query = blockIdx.y % queries, b = m / heads, head = m % heads;
  const int start = chunk * CHUNK, row = 16 * warp(), at_q = head / (heads / q_heads);
  const long long at = m * tokens + start;
  const Rows<const T> own_q = tokens_of(q, b, at_q * queries + query, q_heads * queries, t, d);
  const Rows<const T> own_k = tokens_of(k, b, head / (heads / k_heads), k_heads, s, d);
  const long long at_chunk = m * (tokens / CHUNK) + chunk;
  const Rows<const float> before = scratch_of(states, at_chunk * width, width, step);
  load_sums<CHUNK>(gates, sums, at);
  Product<CHUNK> pairs;
  Product<BLOCK> found;
  pairs.clear();
  found.clear();
  for (int c = 0; c < d; c += BLOCK) {
    __syncthreads();
    load<CHUNK, BLOCK>(own, own_q, start - s + t, c);
    load<CHUNK, BLOCK>(keys, own_k, start, c);
    load_factor<T, BLOCK, BLOCK, DEEP_GAP, 2 * CHUNK>(state, before, c, first);
    __syncthreads();
    add_tiles<T, OF_16_BITS, OF_16_BITS, false, true, CHUNK, BLOCK>(pairs, own + row * STEP, STEP,
                                                                    keys, STEP);
    add_tiles<T, OF_16_BITS, FACTOR, false, false, BLOCK, BLOCK>(found, own + row * STEP, STEP, state,
                                                                 DEEP);
  }
#pragma unroll
  for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) found.x[j][i] *= scale * reading(gates, row + row_of(i));
  decay_pairs<false>(pairs, gates, scale);
  store_factor<T>(left + row * LEFT, LEFT, pairs);
  __syncthreads();
  const Rows<const T> own_v = tokens_of(v, b, head / (heads / v_heads), v_heads, s, e);
  if (u != nullptr)
    load_factor<T, CHUNK, BLOCK, DEEP_GAP>(keys, scratch_of(u, at, CHUNK, step), 0, first);
  else
    load<CHUNK, BLOCK, DEEP_GAP>(keys, own_v, start, first);
  __syncthreads();
  add_tiles<T, FACTOR, FACTOR, false, false, BLOCK, CHUNK>(found, left + row * LEFT, LEFT, keys, DEEP);
  const Rows<T> outputs = tokens_of(o, b, head * queries + query, heads * queries, t, e);
  store(outputs, start - s + t + row, first, found);
}

// Writes A, summed over all queries of a state, to `local` (m, T, step).
template <class T, int CHUNK, int BLOCK>
__global__ void read_back(const T* __restrict__ q, const T* __restrict__ k,
                          const T* __restrict__ d_o, const float* __restrict__ sums,
                          float* __restrict__ local, int heads, int queries, int q_heads,
                          int k_heads, int s, int t, int tokens, int d, int e, int step,
                          float scale) {
  constexpr int DEEP = BLOCK + DEEP_GAP, LEFT = CHUNK + DEEP_GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* own = free.take<float>(CHUNK * DEEP);
  float* keys = free.take<float>(CHUNK * (BLOCK + GAP));
  float* left = free.take<float>(CHUNK * LEFT);
  float* gates = free.take<float>(2 * CHUNK);
  const int blocks = (step + BLOCK - 1) / BLOCK;
  const int chunk = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
  const long long m = blockIdx.y;
  const int b = m / heads, head = m % heads, start = chunk * CHUNK, row = 16 * warp();
  const long long at = m * tokens + start;
  const Rows<const T> own_k = tokens_of(k, b, head / (heads / k_heads), k_heads, s, d);
  load_sums<CHUNK>(gates, sums, at);
  Product<BLOCK> found;
  found.clear();
  for (int query = 0; query < queries; ++query) {
    const int at_q = head / (heads / q_heads) * queries + query;
    const Rows<const T> own_q = tokens_of(q, b, at_q, q_heads * queries, t, d);
    const Rows<const T> outputs = tokens_of(d_o, b, head * queries + query, heads * queries, t, e);
    Product<CHUNK> pairs;
    pairs.clear();
    add_pairs<CHUNK, BLOCK>(pairs, own, own_q, start - s + t, keys, own_k, start);
    decay_pairs<false>(pairs, gates, scale);
    store_factor<T>(left + row * LEFT, LEFT, pairs);
    __syncthreads();
    load<CHUNK, BLOCK, DEEP_GAP>(own, outputs, start - s + t, first);
    __syncthreads();
    add_tiles<T, FACTOR, OF_16_BITS, true, false, BLOCK, CHUNK>(found, left + row, LEFT, own, DEEP);
  }
  store(scratch_of(local, at, CHUNK, step), row, first, found);
}
