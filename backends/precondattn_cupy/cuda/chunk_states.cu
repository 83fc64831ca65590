// The states between chunks, and their gradients: the sequential part.
//
//     U = Y − W S,                    S ← total S + Kᵀ (writing ∘ U),
//     dU = A + writing ∘ (K dS),      dS ← total dS + s Qᵀ (reading ∘ dO) − Wᵀ dU,
//
// with Y and W from chunk_delta.cu; for additive states, U = V and W = 0. A is the part of U's gradient
// from the chunk's own outputs (chunk_reads.cu). A block has some value channels of one head, and
// iterates over the chunks with its part of the state, in float32, in the registers of its warps.
#include "chunk_tiles.cuh"

// WIDTH × BLOCK elements of a state: warp w has the row blocks of 16 rows w, w + WARPS …
template <int CHUNK, int WIDTH, int BLOCK>
struct State {
  static constexpr int WARPS = CHUNK / 16, ROW_BLOCKS = (WIDTH / 16 + WARPS - 1) / WARPS;
  Product<BLOCK> row_blocks[ROW_BLOCKS];

  static __device__ __forceinline__ int row(int n) { return 16 * (warp() + n * WARPS); }

  __device__ __forceinline__ void read(const float* from, int d, int e, int first) {
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n)
#pragma unroll
      for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = row(n) + row_of(i), channel = first + column_of(j, i);
          const bool there = key < d && channel < e;
          row_blocks[n].x[j][i] = there ? from[(long long)key * e + channel] : 0.0f;
        }
  }
  template <class T>
  __device__ __forceinline__ void write(const Rows<T>& to, int first) const {
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n) store(to, row(n), first, row_blocks[n]);
  }
  // As a factor of a call of dtype T.
  template <class T>
  __device__ __forceinline__ void share(float* tile) const {
    constexpr int DEEP = BLOCK + DEEP_GAP;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n)
      if (row(n) < WIDTH) store_factor<T>(tile + row(n) * DEEP, DEEP, row_blocks[n]);
  }
  __device__ __forceinline__ void scale_by(float by) {
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n)
#pragma unroll
      for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) row_blocks[n].x[j][i] *= by;
  }
  // += Aᵀ B, for a chunk's rows A (CHUNK, WIDTH) and B (CHUNK, BLOCK), both with DEEP_GAP.
  template <class T, Numbers OF_A>
  __device__ __forceinline__ void add(const float* a, const float* b) {
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n)
      if (row(n) < WIDTH)
        add_tiles<T, OF_A, FACTOR, true, false, BLOCK, CHUNK>(
            row_blocks[n], a + row(n), WIDTH + DEEP_GAP, b, BLOCK + DEEP_GAP);
  }
};

// From the state `initial`, writes the state before every chunk to `states` (m, chunks, WIDTH, step)
// and the one after the last to `last` (m, d, e). With the delta rule, writes U to `u` (m, T, step).
template <class T, int CHUNK, int WIDTH, int BLOCK>
__global__ void carry_states(const T* __restrict__ k, const T* __restrict__ v,
                             const float* __restrict__ y, const float* __restrict__ w,
                             float* __restrict__ u, const float* __restrict__ sums,
                             const float* __restrict__ initial, float* __restrict__ states,
                             float* __restrict__ last, int heads, int k_heads, int v_heads, int s,
                             int tokens, int d, int e, int step) {
  constexpr int WIDE = WIDTH + GAP, STEP = BLOCK + DEEP_GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* keys = free.take<float>(CHUNK * (WIDTH + DEEP_GAP));
  float* factors = free.take<float>(CHUNK * WIDE);
  float* shared = free.take<float>(WIDTH * STEP);
  float* written = free.take<float>(CHUNK * STEP);
  float* gates = free.take<float>(2 * CHUNK);
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, first = blockIdx.x * BLOCK;
  const int row = 16 * warp(), count = tokens / CHUNK;
  const long long m = blockIdx.y;
  const Rows<const T> own_k = tokens_of(k, b, head / (heads / k_heads), k_heads, s, d);
  const Rows<const T> own_v = tokens_of(v, b, head / (heads / v_heads), v_heads, s, e);
  State<CHUNK, WIDTH, BLOCK> state;
  state.read(initial + m * d * e, d, e, first);
  for (int index = 0; index < count; ++index) {
    const int start = index * CHUNK;
    const long long at = m * tokens + start;
    state.write(scratch_of(states, (m * count + index) * WIDTH, WIDTH, step), first);
    __syncthreads();
    load_sums<CHUNK>(gates, sums, at);
    load<CHUNK, WIDTH, DEEP_GAP>(keys, own_k, start, 0);
    if (w != nullptr) {
      load_factor<T, CHUNK, WIDTH>(factors, scratch_of(w, at, CHUNK, WIDTH), 0, 0);
      load<CHUNK, BLOCK, DEEP_GAP>(written, scratch_of(y, at, CHUNK, step), 0, first);
      state.template share<T>(shared);
    } else {
      load<CHUNK, BLOCK, DEEP_GAP>(written, own_v, start, first);
    }
    __syncthreads();
    Product<BLOCK> found;
    found.clear();
    if (w != nullptr)
      add_tiles<T, FACTOR, FACTOR, false, false, BLOCK, WIDTH>(found, factors + row * WIDE, WIDE,
                                                               shared, STEP);
    const float* own = written + row * STEP;
#pragma unroll
    for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        found.x[j][i] = own[row_of(i) * STEP + column_of(j, i)] - found.x[j][i];
    if (w != nullptr) store(scratch_of(u, at, CHUNK, step), row, first, found);
#pragma unroll
    for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) found.x[j][i] *= decay(gates, CHUNK - 1, row + row_of(i));
    store_factor<T>(written + row * STEP, STEP, found);
    __syncthreads();
    state.scale_by(reading(gates, CHUNK - 1));
    state.template add<T, OF_16_BITS>(keys, written);
  }
  state.write(Rows<float>{last + m * d * e, e, d, e, false}, first);
}

// From `d_last` (m, d, e), writes the gradient of the state after every chunk to `d_states` (m, chunks,
// WIDTH, step), that of the first state to `d_initial` (m, d, e), and that of U to `d_u` (m, T, step).
// `local` (m, T, step) is A.
template <class T, int CHUNK, int WIDTH, int BLOCK>
__global__ void carry_gradients(const T* __restrict__ q, const T* __restrict__ k,
                                const float* __restrict__ w, const T* __restrict__ d_o,
                                const float* __restrict__ local, const float* __restrict__ sums,
                                const float* __restrict__ d_last, float* __restrict__ d_states,
                                float* __restrict__ d_u, float* __restrict__ d_initial, int heads,
                                int queries, int q_heads, int k_heads, int s, int t, int tokens,
                                int d, int e, int step, float scale) {
  constexpr int WIDE = WIDTH + GAP, DEEP_WIDE = WIDTH + DEEP_GAP, STEP = BLOCK + DEEP_GAP;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory free{memory};
  float* keys = free.take<float>(CHUNK * DEEP_WIDE);
  float* factors = free.take<float>(CHUNK * DEEP_WIDE);
  float* shared = free.take<float>(WIDTH * STEP);
  float* d_written = free.take<float>(CHUNK * STEP);
  float* cotangent = free.take<float>(CHUNK * STEP);
  float* gates = free.take<float>(2 * CHUNK);
  float* factor = free.take<float>(CHUNK);
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, first = blockIdx.x * BLOCK;
  const int row = 16 * warp(), count = tokens / CHUNK;
  const long long m = blockIdx.y;
  const Rows<const T> own_k = tokens_of(k, b, head / (heads / k_heads), k_heads, s, d);
  State<CHUNK, WIDTH, BLOCK> state;
  state.read(d_last + m * d * e, d, e, first);
  for (int index = count - 1; index >= 0; --index) {
    const int start = index * CHUNK;
    const long long at = m * tokens + start;
    state.write(scratch_of(d_states, (m * count + index) * WIDTH, WIDTH, step), first);
    __syncthreads();
    load_sums<CHUNK>(gates, sums, at);
    load<CHUNK, WIDTH>(keys, own_k, start, 0);
    load<CHUNK, BLOCK, DEEP_GAP>(d_written, scratch_of(local, at, CHUNK, step), 0, first);
    if (w != nullptr)
      load_factor<T, CHUNK, WIDTH, DEEP_GAP>(factors, scratch_of(w, at, CHUNK, WIDTH), 0, 0);
    state.template share<T>(shared);
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK; i += 2 * CHUNK) factor[i] = scale * reading(gates, i);
    Product<BLOCK> found;
    found.clear();
    add_tiles<T, OF_16_BITS, FACTOR, false, false, BLOCK, WIDTH>(found, keys + row * WIDE, WIDE,
                                                                 shared, STEP);
    float* own = d_written + row * STEP;
#pragma unroll
    for (int j = 0; j < BLOCK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* local_one = own + row_of(i) * STEP + column_of(j, i);
        found.x[j][i] *= decay(gates, CHUNK - 1, row + row_of(i));
        found.x[j][i] += *local_one;
        *local_one = as_factor<T>(-found.x[j][i]);
      }
    store(scratch_of(d_u, at, CHUNK, step), row, first, found);
    state.scale_by(reading(gates, CHUNK - 1));
    for (int query = 0; query < queries; ++query) {
      const int at_q = head / (heads / q_heads) * queries + query;
      const Rows<const T> own_q = tokens_of(q, b, at_q, q_heads * queries, t, d);
      const Rows<const T> outputs =
          tokens_of(d_o, b, head * queries + query, heads * queries, t, e);
      __syncthreads();
      load<CHUNK, WIDTH, DEEP_GAP>(keys, own_q, start - s + t, 0);
      load<CHUNK, BLOCK, DEEP_GAP>(cotangent, outputs, start - s + t, first);
      scale_factor<T, CHUNK, BLOCK, DEEP_GAP>(cotangent, factor);
      __syncthreads();
      state.template add<T, OF_16_BITS>(keys, cotangent);
    }
    if (w != nullptr) state.template add<T, FACTOR>(factors, d_written);
  }
  state.write(Rows<float>{d_initial + m * d * e, e, d, e, false}, first);
}
