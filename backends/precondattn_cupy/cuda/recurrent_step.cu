// One token of a recurrence: every state is read once and written once.
//
//     S' = e^g S,   u = v  (additive),  β (v − S'ᵀ a)  (delta rule),   S = S' + k uᵀ,   o = s Sᵀ q
//
// with a the key that is erased: k, unless ERASES.
//
// A block has 32 value channels of one head, one for each lane, and all queries that read the head; its
// warps split the key channels, and a thread has its elements of the state in registers. Everything is
// in float32, without products of tiles: 7 d e FLOPs for 8 d e bytes are limited by memory.
#include "numbers.cuh"

// The sum of each lane's x over the warps of a block. Has two barriers.
template <int WARPS>
__device__ __forceinline__ float sum_of_block(float (&of_warps)[WARPS][32], float x) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  of_warps[warp][lane] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += of_warps[i][lane];
  __syncthreads();
  return sum;
}

// Writes `last` (m, d, e) from `initial`, and `o` (b, 1, m, r, e). g and β (b, 1, m) may be null, and so
// is `a` unless ERASES.
template <class T, int WIDTH, int WARPS, bool ERASES = false>
__global__ void step_token(const T* __restrict__ q, const T* __restrict__ k,
                           const T* __restrict__ a, const T* __restrict__ v,
                           const float* __restrict__ g, const float* __restrict__ beta,
                           const float* __restrict__ initial, float* __restrict__ last,
                           T* __restrict__ o, int heads, int queries, int q_heads, int k_heads,
                           int a_heads, int v_heads, int d, int e, float scale) {
  constexpr int ROWS = WIDTH / WARPS;
  __shared__ float of_warps[WARPS][32];
  __shared__ float key[WIDTH];
  __shared__ float other[ERASES ? WIDTH : 1];
  const float* erased = ERASES ? other : key;
  const long long m = blockIdx.y;
  const int b = m / heads, head = m % heads, channel = blockIdx.x * 32 + threadIdx.x % 32;
  const int first = threadIdx.x / 32 * ROWS;
  const bool there = channel < e;
  float state[ROWS];
  const float* from = initial + m * d * e + channel;
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
    state[i] = there && first + i < d ? from[(long long)(first + i) * e] : 0.0f;
  k += ((long long)b * k_heads + head / (heads / k_heads)) * d;
  for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) key[i] = i < d ? wide(k[i]) : 0.0f;
  if constexpr (ERASES) {
    a += ((long long)b * a_heads + head / (heads / a_heads)) * d;
    for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) other[i] = i < d ? wide(a[i]) : 0.0f;
  }
  __syncthreads();
  if (g != nullptr) {
    const float kept = expf(g[m]);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) state[i] *= kept;
  }
  const long long at_v = ((long long)b * v_heads + head / (heads / v_heads)) * e + channel;
  float written = there ? wide(v[at_v]) : 0.0f;
  if (beta != nullptr) {
    float held = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) held += state[i] * erased[first + i];
    written = beta[m] * (written - sum_of_block(of_warps, held));
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    state[i] += key[first + i] * written;
    if (there && first + i < d) last[(m * d + first + i) * e + channel] = state[i];
  }
  for (int query = 0; query < queries; ++query) {
    const int at_q = head / (heads / q_heads) * queries + query;
    const T* own = q + ((long long)b * q_heads * queries + at_q) * d;
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      if (first + i < d) found += state[i] * wide(own[first + i]);
    found = scale * sum_of_block(of_warps, found);
    if (there && threadIdx.x < 32) o[(m * queries + query) * e + channel] = narrow<T>(found);
  }
}
