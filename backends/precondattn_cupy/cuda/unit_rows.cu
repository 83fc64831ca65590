// Rows of unit length, and the gradient; a warp has a row.
//
//     y = o / max(‖o‖, ε),    do = dy / max(‖o‖, ε),    or, with the norm differentiated and
//     ‖o‖ > ε,  do = (dy − y (y · dy)) / ‖o‖
//
// A row is scaled to size 1 before it is squared, so that nothing overflows or underflows.
#include "numbers.cuh"
#include "warps.cuh"

// Two factors whose product is max(‖o‖, ε), and whether that is ‖o‖.
template <class S>
struct Divisor {
  S size, root;
  bool is_norm;
};

template <class T>
__device__ __forceinline__ Divisor<Sum<T>> divisor(const T* __restrict__ o, int width, Sum<T> eps) {
  typedef Sum<T> S;
  S size = 0, total = 0;
  for (int i = threadIdx.x % 32; i < width; i += 32) size = max(size, abs(wide(o[i])));
  size = max_of_warp(size);
  const bool some = size > S(0);
  if (!some) size = 1;
  for (int i = threadIdx.x % 32; i < width; i += 32) {
    const S scaled = wide(o[i]) / size;
    total += scaled * scaled;
  }
  const S root = some ? sqrt(sum_of_warp(total)) : S(1);
  const bool is_norm = some && size > eps / root;
  if (is_norm) return {size, root, true};
  return {eps > S(0) ? eps : S(1), S(1), false};
}

template <class T>
__global__ void unit_rows(const T* __restrict__ o, T* __restrict__ y, int rows, int width,
                          Sum<T> eps) {
  const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  o += row * width;
  const Divisor<Sum<T>> by = divisor(o, width, eps);
  for (int i = threadIdx.x % 32; i < width; i += 32)
    y[row * width + i] = narrow<T>(wide(o[i]) / by.size / by.root);
}

template <class T, bool DETACH>
__global__ void unit_rows_vjp(const T* __restrict__ o, const T* __restrict__ d_y,
                              T* __restrict__ d_o, int rows, int width, Sum<T> eps) {
  typedef Sum<T> S;
  const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  o += row * width;
  d_y += row * width;
  const Divisor<S> by = divisor(o, width, eps);
  S along = 0;
  if (!DETACH && by.is_norm) {
    for (int i = threadIdx.x % 32; i < width; i += 32)
      along += wide(o[i]) / by.size / by.root * wide(d_y[i]);
    along = sum_of_warp(along);
  }
  for (int i = threadIdx.x % 32; i < width; i += 32) {
    S found = wide(d_y[i]);
    if (!DETACH) found -= wide(o[i]) / by.size / by.root * along;
    d_o[row * width + i] = narrow<T>(found / by.root / by.size);
  }
}
