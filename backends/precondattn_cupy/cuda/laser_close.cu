// LASER by flash attention: o_ic = log Σ_j a_ij e^{v_jc}. The kernels before and after it.
//
// A key/value head is *close* if the valid values of every channel differ by at most R. Then, with
// ν_c their maximum, LASER is softmax attention with values W:
//
//     W = e^{v − ν} − u,    o = ν + log(u + A W),    G = do / (u + A W),    D = Σ_c G ∘ A W,
//     dv = e^{v − ν} ∘ dW,    dW = Aᵀ G,    dS = A ∘ (G Wᵀ − D).
//
// Channels whose values are within log 2 of each other have u = 1, all others u = 0: this minimises the
// rounding error of W. A value masked for a query may affect ν and u, and so the rounding of an output,
// and nothing else.
//
// W and G are float32, bfloat16, or, where float16's range is too small, the sum of two bfloat16 arrays.
#include "held_products.cuh"

#define LOG_2 0.69314718f

// The largest and smallest value of each channel over a segment of tokens: (b, n, segments, e).
// Grid: segments, key/value heads, sequences.
template <class T>
__global__ void value_ranges(const T* __restrict__ v, const unsigned char* __restrict__ k_valid,
                             float* __restrict__ largest, float* __restrict__ smallest, int s,
                             int n, int e, int tokens) {
  const int first = blockIdx.x * tokens, last = min(first + tokens, s);
  const long long at = (((long long)blockIdx.z * n + blockIdx.y) * gridDim.x + blockIdx.x) * e;
  const long long batch = (long long)blockIdx.z * s;
  for (int c = threadIdx.x; c < e; c += blockDim.x) {
    float high = -INFINITE, low = INFINITE;
    for (int j = first; j < last; ++j) {
      if (k_valid && !k_valid[batch + j]) continue;
      const float value = wide(v[((batch + j) * n + blockIdx.y) * e + c]);
      high = fmaxf(high, value);
      low = fminf(low, value);
    }
    largest[at + c] = high;
    smallest[at + c] = low;
  }
}

// ν and u (b, n, e), and whether a head is close (b, n). A warp, and so a block, has a head.
__global__ void spread(const float* __restrict__ largest, const float* __restrict__ smallest,
                       float* __restrict__ shift, float* __restrict__ less,
                       int* __restrict__ is_close, int segments, int e, float range) {
  const long long head = blockIdx.x;
  float widest = 0.0f;
  for (int c = threadIdx.x; c < e; c += 32) {
    float high = -INFINITE, low = INFINITE;
    for (int i = 0; i < segments; ++i) {
      high = fmaxf(high, largest[(head * segments + i) * e + c]);
      low = fminf(low, smallest[(head * segments + i) * e + c]);
    }
    // Without valid values there is nothing to shift.
    const float apart = high >= low ? high - low : 0.0f;
    shift[head * e + c] = high >= low ? high : 0.0f;
    less[head * e + c] = apart <= LOG_2 ? 1.0f : 0.0f;
    widest = fmaxf(widest, apart);
  }
  widest = max_of_warp(widest);
  if (threadIdx.x == 0) is_close[head] = widest <= range;
}

// x, and its rounding error.
template <class F, int PARTS>
__device__ __forceinline__ void store_parts(F* __restrict__ to, F* __restrict__ rest, long long at,
                                            float x) {
  to[at] = narrow<F>(x);
  if (PARTS > 1) rest[at] = narrow<F>(x - rounded<F>(x));
}

// The row of a warp: a token (b, tokens, heads) of a close head.
struct Row {
  bool is_there;
  int head;
  // Offsets of its elements, and of those of its key/value head.
  long long at, channels;
  __device__ __forceinline__ Row(const int* is_close, int tokens, int heads, int n, int e) {
    const int token = blockIdx.x * (blockDim.x / 32) + warp();
    const long long kv = (long long)blockIdx.z * n + blockIdx.y / (heads / n);
    head = blockIdx.y;
    at = (((long long)blockIdx.z * tokens + token) * heads + head) * e;
    channels = kv * e;
    is_there = token < tokens && is_close[kv];
  }
};

template <class T, class F, int PARTS>
__global__ void weights(const T* __restrict__ v, const float* __restrict__ shift,
                        const float* __restrict__ less, const int* __restrict__ is_close,
                        F* __restrict__ w, F* __restrict__ w_rest, int s, int n, int e) {
  const Row row(is_close, s, n, n, e);
  if (!row.is_there) return;
  for (int c = lane(); c < e; c += 32) {
    const float apart = wide(v[row.at + c]) - shift[row.channels + c];
    const float x = less[row.channels + c] > 0.0f ? expm1f(apart) : expf(apart);
    store_parts<F, PARTS>(w, w_rest, row.at + c, x);
  }
}

// o, from A W.
template <class T>
__global__ void outputs(const float* __restrict__ mean, const float* __restrict__ log_total,
                        const float* __restrict__ shift, const float* __restrict__ less,
                        const int* __restrict__ is_close, T* __restrict__ out, int t, int h, int n,
                        int e) {
  const Row row(is_close, t, h, n, e);
  if (!row.is_there) return;
  const int token = blockIdx.x * (blockDim.x / 32) + warp();
  const bool is_some = log_total[((long long)blockIdx.z * h + row.head) * t + token] != INFINITE;
  for (int c = lane(); c < e; c += 32) {
    const float x = mean[row.at + c];
    const float log_of = less[row.channels + c] > 0.0f ? log1pf(x) : logf(x);
    out[row.at + c] = narrow<T>(is_some ? shift[row.channels + c] + log_of : 0.0f);
  }
}

// G, and D (b, h, t) computed from the rounded G: then rounding scales a channel's contribution to dS,
// and the sum of every row stays 0. Queries without visible keys are not read.
template <class T, class F, int PARTS>
__global__ void cotangents(const T* __restrict__ d_o, const float* __restrict__ mean,
                           const float* __restrict__ log_total, const float* __restrict__ less,
                           const int* __restrict__ is_close, F* __restrict__ g,
                           F* __restrict__ g_rest, float* __restrict__ d_sum, int t, int h, int n,
                           int e) {
  const Row row(is_close, t, h, n, e);
  if (!row.is_there) return;
  const int token = blockIdx.x * (blockDim.x / 32) + warp();
  const long long at = ((long long)blockIdx.z * h + row.head) * t + token;
  const bool is_some = log_total[at] < INFINITE;
  float total = 0.0f;
  for (int c = lane(); c < e; c += 32) {
    const float of = mean[row.at + c];
    const float x = is_some ? wide(d_o[row.at + c]) / (less[row.channels + c] + of) : 0.0f;
    store_parts<F, PARTS>(g, g_rest, row.at + c, x);
    total += (PARTS > 1 ? x : rounded<F>(x)) * of;
  }
  total = sum_of_warp(total);
  if (lane() == 0) d_sum[at] = total;
}

// dv, from dW, which is 0 at a key that no query attends to, whatever its value.
template <class T>
__global__ void value_gradients(const T* __restrict__ v, const float* __restrict__ shift,
                                const int* __restrict__ is_close, const float* __restrict__ d_w,
                                T* __restrict__ d_v, int s, int n, int e) {
  const Row row(is_close, s, n, n, e);
  if (!row.is_there) return;
  for (int c = lane(); c < e; c += 32) {
    const float found = d_w[row.at + c];
    const float x = expf(wide(v[row.at + c]) - shift[row.channels + c]);
    d_v[row.at + c] = narrow<T>(found == 0.0f ? 0.0f : found * x);
  }
}
