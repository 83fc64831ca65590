// The recurrence with a gate for each key channel or each head, token by token, with the states in
// registers.
//
//     S' = e^g ∘ S,   u = v  (additive),  β (v − S'ᵀ a)  (delta rule),   S ← S' + k uᵀ,   o = s Sᵀ q
//
// with g a number for each row of S, or one for all, and a the key that is erased: k, unless ERASES. Backward, with Λ the
// gradient of S after a token, from the last token to the first,
//
//     Λ += s q doᵀ,    dq = s S do,    du = Λᵀ k,    dk = Λ u,    dv = β du  (additive: du),
//     dβ = du·(v − S'ᵀ a),    da = −S' dv,    Λ' = Λ − a dvᵀ,    dg = Σ Λ' ∘ S'  (along rows),    Λ ← e^g ∘ Λ'.
//
// Gates occur as e^g ≤ 1 alone, so no gate, however strong, overflows or costs others accuracy. The
// forward pass keeps the state before each segment of tokens; the backward pass repeats a segment and
// keeps the states before its tokens, which the thread that wrote them reads again.
//
// A warp has VALUES value channels of a head, and its lanes share the key channels: lane l has l, l + 32,
// …. What sums over key channels is summed by shuffles; what sums over value channels, over a block's
// warps in shared memory and over blocks by the caller. Everything is in float32, without products of
// tiles.
#include "numbers.cuh"
#include "warps.cuh"

constexpr int VALUES = 4, WARPS = 8;

// Rows of one head: those of token i begin at `head` + i `step`.
template <class T>
struct HeadRows {
  const T* head;
  long long step;
  __device__ __forceinline__ const T* operator()(int token) const { return head + token * step; }
};

template <class T>
__device__ __forceinline__ HeadRows<T> rows_of(const T* array, int b, int head, int heads, int count,
                                               int width) {
  return {array + ((long long)b * count * heads + head) * width, (long long)heads * width};
}

// A lane's part of a row, 0 outside it.
template <int KEYS, class T>
__device__ __forceinline__ void load_keys(float (&row)[KEYS], const T* from, int lane, int d) {
#pragma unroll
  for (int i = 0; i < KEYS; ++i) row[i] = lane + 32 * i < d ? wide(from[lane + 32 * i]) : 0.0f;
}

// `there` of a warp's value channels, the same in all lanes.
template <class T>
__device__ __forceinline__ void load_values(float (&row)[VALUES], const T* from, int there) {
#pragma unroll
  for (int j = 0; j < VALUES; ++j) row[j] = j < there ? wide(from[j]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store_values(T* to, const float (&row)[VALUES], int lane, int there) {
#pragma unroll
  for (int j = 0; j < VALUES; ++j)
    if (lane == j && j < there) to[j] = narrow<T>(row[j]);
}

template <int KEYS>
using State = float[KEYS][VALUES];

// From or to a state (d, e), from the warp's first value channel.
template <int KEYS>
__device__ __forceinline__ void load_state(State<KEYS>& state, const float* from, int lane, int there,
                                           int d, int e) {
#pragma unroll
  for (int i = 0; i < KEYS; ++i)
#pragma unroll
    for (int j = 0; j < VALUES; ++j)
      state[i][j] =
          lane + 32 * i < d && j < there ? from[(long long)(lane + 32 * i) * e + j] : 0.0f;
}

template <int KEYS>
__device__ __forceinline__ void store_state(float* to, const State<KEYS>& state, int lane, int there,
                                            int d, int e) {
#pragma unroll
  for (int i = 0; i < KEYS; ++i)
#pragma unroll
    for (int j = 0; j < VALUES; ++j)
      if (lane + 32 * i < d && j < there) to[(long long)(lane + 32 * i) * e + j] = state[i][j];
}

// Sᵀ row.
template <int KEYS>
__device__ __forceinline__ void read_state(float (&found)[VALUES], const State<KEYS>& state,
                                           const float (&row)[KEYS]) {
#pragma unroll
  for (int j = 0; j < VALUES; ++j) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) sum += state[i][j] * row[i];
    found[j] = sum_of_warp(sum);
  }
}

template <int KEYS>
__device__ __forceinline__ void add_outer(State<KEYS>& state, const float (&row)[KEYS],
                                          const float (&values)[VALUES]) {
#pragma unroll
  for (int i = 0; i < KEYS; ++i)
#pragma unroll
    for (int j = 0; j < VALUES; ++j) state[i][j] += row[i] * values[j];
}

template <int KEYS>
__device__ __forceinline__ void scale_state(State<KEYS>& state, const float (&row)[KEYS]) {
#pragma unroll
  for (int i = 0; i < KEYS; ++i)
#pragma unroll
    for (int j = 0; j < VALUES; ++j) state[i][j] *= row[i];
}

// The inputs of a head that change its state; `a` is k, unless ERASES.
template <class T, int KEYS, bool ERASES>
struct Tokens {
  HeadRows<T> k, a, v;
  HeadRows<float> g, beta;
  int lane, there, d, gates;
  bool is_delta;

  float key[KEYS], other[ERASES ? KEYS : 1], kept[KEYS];
  float strength, residual[VALUES], u[VALUES];

  __device__ __forceinline__ const float (&erased() const)[KEYS] {
    if constexpr (ERASES)
      return other;
    else
      return key;
  }

  // Loads a token and turns S into S'; u is what the token writes.
  __device__ __forceinline__ void decay(State<KEYS>& state, int token) {
    load_keys(key, k(token), lane, d);
    if constexpr (ERASES) load_keys(other, a(token), lane, d);
    load_keys(kept, g(token), lane, gates);
#pragma unroll
    for (int i = 0; i < KEYS; ++i) kept[i] = expf(gates == 1 ? *g(token) : kept[i]);
    load_values(residual, v(token), there);
    scale_state(state, kept);
    strength = 1.0f;
    if (is_delta) {
      strength = *beta(token);
      float held[VALUES];
      read_state(held, state, erased());
#pragma unroll
      for (int j = 0; j < VALUES; ++j) residual[j] -= held[j];
    }
#pragma unroll
    for (int j = 0; j < VALUES; ++j) u[j] = strength * residual[j];
  }
};

template <class T, int KEYS, bool ERASES>
__device__ __forceinline__ Tokens<T, KEYS, ERASES> tokens_of_head(
    const T* k, const T* a, const T* v, const float* g, const float* beta, int first, int heads,
    int k_heads, int a_heads, int v_heads, int s, int d, int e, int gates) {
  const int b = blockIdx.y / heads, head = blockIdx.y % heads;
  Tokens<T, KEYS, ERASES> x;
  x.k = rows_of(k, b, head / (heads / k_heads), k_heads, s, d);
  x.a = x.k;
  if constexpr (ERASES) x.a = rows_of(a, b, head / (heads / a_heads), a_heads, s, d);
  // A warp without channels of its own only takes part in sums.
  x.v = rows_of(v, b, head / (heads / v_heads), v_heads, s, e);
  x.v.head += first < e ? first : 0;
  x.g = rows_of(g, b, head, heads, s, gates);
  x.gates = gates;
  x.is_delta = beta != nullptr;
  x.beta = {nullptr, 0};
  if (x.is_delta) x.beta = rows_of(beta, b, head, heads, s, 1);
  x.lane = threadIdx.x % 32;
  x.there = e - first;
  x.d = d;
  return x;
}

// Writes `o` (b, t, m, r, e) and `last` (m, d, e) from `initial`; or if `states` (m, segments, d, e) is
// given, only the state before each segment.
template <class T, int WIDTH, bool ERASES = false>
__global__ void scan_tokens(const T* __restrict__ q, const T* __restrict__ k,
                              const T* __restrict__ a, const T* __restrict__ v,
                              const float* __restrict__ g, const float* __restrict__ beta,
                              const float* __restrict__ initial, float* __restrict__ last,
                              float* __restrict__ states, T* __restrict__ o, int heads, int queries,
                              int q_heads, int k_heads, int a_heads, int v_heads, int s, int t, int d,
                              int e, int gates, int segment, float scale) {
  constexpr int KEYS = WIDTH / 32;
  const int first = (blockIdx.x * WARPS + threadIdx.x / 32) * VALUES;
  const int b = blockIdx.y / heads, head = blockIdx.y % heads;
  if (first >= e) return;
  auto x = tokens_of_head<T, KEYS, ERASES>(k, a, v, g, beta, first, heads, k_heads, a_heads, v_heads,
                                           s, d, e, gates);
  const int lane = x.lane, there = x.there;
  const long long size = (long long)d * e;
  State<KEYS> state;
  load_state<KEYS>(state, initial + blockIdx.y * size + first, lane, there, d, e);
  const int segments = (s + segment - 1) / segment;
  for (int token = 0; token < s; ++token) {
    if (states != nullptr && token % segment == 0) {
      const long long at = (long long)blockIdx.y * segments + token / segment;
      store_state<KEYS>(states + at * size + first, state, lane, there, d, e);
    }
    x.decay(state, token);
    add_outer<KEYS>(state, x.key, x.u);
    if (states != nullptr || token < s - t) continue;
    const long long place = (long long)b * t + token - (s - t);
    for (int query = 0; query < queries; ++query) {
      const int at_q = head / (heads / q_heads) * queries + query;
      float row[KEYS], found[VALUES];
      load_keys(row, q + (place * q_heads * queries + at_q) * d, lane, d);
      read_state<KEYS>(found, state, row);
#pragma unroll
      for (int j = 0; j < VALUES; ++j) found[j] *= scale;
      store_values(o + ((place * heads + head) * queries + query) * e + first, found, lane, there);
    }
  }
  if (states == nullptr)
    store_state<KEYS>(last + blockIdx.y * size + first, state, lane, there, d, e);
}

// The sums of rows over a block's warps, each written to d channels of `to`. Has two barriers.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void sum_over_warps(float (*shared)[WARPS][WIDTH],
                                               const float (&rows)[ROWS][WIDTH / 32],
                                               float* const (&to)[ROWS], int d) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROWS; ++n)
#pragma unroll
    for (int i = 0; i < WIDTH / 32; ++i) shared[n][warp][lane + 32 * i] = rows[n][i];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < ROWS; ++n)
    for (int c = threadIdx.x; c < d; c += 32 * WARPS) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += shared[n][w][c];
      to[n][c] = sum;
    }
  __syncthreads();
}

// Gradients, those of sums over value channels by blocks of these: `d_q` (blocks, b, t, m, r, d), `d_k`,
// `d_a` and `d_g` (blocks, b, s, m, d), `d_beta` (blocks, b, s, m); `d_v` (b, s, m, e) and `d_initial`
// (m, d, e). `memory` has the states of a segment of each warp, (m, blocks, warps, segment, VALUES
// WIDTH). `d_a` is null unless ERASES, and `d_beta` for additive states.
template <class T, int WIDTH, bool ERASES = false>
__global__ void scan_tokens_back(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ a,
    const T* __restrict__ v, const float* __restrict__ g, const float* __restrict__ beta,
    const float* __restrict__ states, const T* __restrict__ d_o, const float* __restrict__ d_last,
    float* memory, float* __restrict__ d_q, float* __restrict__ d_k, float* __restrict__ d_a,
    float* __restrict__ d_v, float* __restrict__ d_g, float* __restrict__ d_beta,
    float* __restrict__ d_initial, int heads, int queries, int q_heads, int k_heads, int a_heads,
    int v_heads, int s, int t, int d, int e, int gates, int segment, float scale) {
  constexpr int KEYS = WIDTH / 32, ROWS = ERASES ? 3 : 2;
  __shared__ float shared[ROWS][WARPS][WIDTH];
  __shared__ float of_beta[WARPS];
  const int warp = threadIdx.x / 32, first = (blockIdx.x * WARPS + warp) * VALUES;
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, batch = gridDim.y / heads;
  auto x = tokens_of_head<T, KEYS, ERASES>(k, a, v, g, beta, first, heads, k_heads, a_heads, v_heads,
                                           s, d, e, gates);
  const int lane = x.lane, there = x.there, segments = (s + segment - 1) / segment;
  const long long size = (long long)d * e;
  float* own = memory + (((long long)blockIdx.y * gridDim.x + blockIdx.x) * WARPS + warp) * segment *
                            (VALUES * WIDTH) + lane;
  State<KEYS> grad, state;
  load_state<KEYS>(grad, d_last + blockIdx.y * size + first, lane, there, d, e);
  for (int n = segments - 1; n >= 0; --n) {
    const int begin = n * segment, end = min(s, begin + segment);
    const long long at_state = (long long)blockIdx.y * segments + n;
    load_state<KEYS>(state, states + at_state * size + first, lane, there, d, e);
    for (int token = begin; token < end; ++token) {
      float* to = own + (long long)(token - begin) * (VALUES * WIDTH);
#pragma unroll
      for (int i = 0; i < KEYS; ++i)
#pragma unroll
        for (int j = 0; j < VALUES; ++j) to[32 * (i * VALUES + j)] = state[i][j];
      if (token + 1 == end) continue;
      x.decay(state, token);
      add_outer<KEYS>(state, x.key, x.u);
    }
    for (int token = end - 1; token >= begin; --token) {
      const float* from = own + (long long)(token - begin) * (VALUES * WIDTH);
#pragma unroll
      for (int i = 0; i < KEYS; ++i)
#pragma unroll
        for (int j = 0; j < VALUES; ++j) state[i][j] = from[32 * (i * VALUES + j)];
      x.decay(state, token);
      if (token >= s - t) {
        const long long place = (long long)b * t + token - (s - t);
        for (int query = 0; query < queries; ++query) {
          const int at_q = head / (heads / q_heads) * queries + query;
          const long long at_o = (place * heads + head) * queries + query;
          float row[KEYS], d_out[VALUES], found[1][KEYS];
          load_keys(row, q + (place * q_heads * queries + at_q) * d, lane, d);
          load_values(d_out, d_o + at_o * e + (there > 0 ? first : 0), there);
#pragma unroll
          for (int j = 0; j < VALUES; ++j) d_out[j] *= scale;
          add_outer<KEYS>(grad, row, d_out);
#pragma unroll
          for (int i = 0; i < KEYS; ++i) {
            found[0][i] = 0.0f;
#pragma unroll
            for (int j = 0; j < VALUES; ++j)
              found[0][i] += (state[i][j] + x.key[i] * x.u[j]) * d_out[j];
          }
          const long long of_block = (long long)blockIdx.x * batch * t * heads * queries;
          float* const to[1] = {d_q + (of_block + at_o) * d};
          sum_over_warps<1, WIDTH>(shared, found, to, d);
        }
      }
      const long long at = ((long long)b * s + token) * heads + head;
      const long long of_block = (long long)blockIdx.x * batch * s * heads + at;
      float d_u[VALUES], d_value[VALUES], d_strength = 0.0f;
      read_state<KEYS>(d_u, grad, x.key);
#pragma unroll
      for (int j = 0; j < VALUES; ++j) {
        d_value[j] = x.strength * d_u[j];
        d_strength += d_u[j] * x.residual[j];
      }
      store_values(d_v + at * e + first, d_value, lane, there);
      float found[ROWS][KEYS];
#pragma unroll
      for (int i = 0; i < KEYS; ++i) {
        float of_key = 0.0f, of_erased = 0.0f, of_gate = 0.0f;
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
          of_key += grad[i][j] * x.u[j];
          if (x.is_delta) {
            of_erased -= state[i][j] * d_value[j];
            grad[i][j] -= x.erased()[i] * d_value[j];
          }
          of_gate += grad[i][j] * state[i][j];
          grad[i][j] *= x.kept[i];
        }
        found[0][i] = of_gate;
        found[1][i] = ERASES ? of_key : of_key + of_erased;
        if constexpr (ERASES) found[ROWS - 1][i] = of_erased;
      }
      if (lane == 0) of_beta[warp] = d_strength;
      float* to[ROWS];
      to[0] = d_g + of_block * d;
      to[1] = d_k + of_block * d;
      if constexpr (ERASES) to[ROWS - 1] = d_a + of_block * d;
      // The next token writes `of_beta` after the second barrier of the sums.
      __syncthreads();
      if (x.is_delta && threadIdx.x == 0) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) sum += of_beta[w];
        d_beta[of_block] = sum;
      }
      sum_over_warps<ROWS, WIDTH>(shared, found, to, d);
    }
  }
  store_state<KEYS>(d_initial + blockIdx.y * size + first, grad, lane, there, d, e);
}
