// C = A B by every way that products.cuh has, of one block whose warps have 16 rows each.
#include "emulated_tensors.cuh"

#include "held_products.cuh"

template <bool TENSORS, bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__global__ void product(const T* a, const T* b, float* c, int rows) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int a_step = (A_TRANSPOSED ? rows : DEPTH) + gap<T>();
  const int b_step = (B_TRANSPOSED ? DEPTH : COLUMNS) + gap<T>();
  T* left = reinterpret_cast<T*>(memory);
  T* right = left + (A_TRANSPOSED ? DEPTH : rows) * a_step;
  for (int at = threadIdx.x; at < rows * DEPTH; at += blockDim.x)
    left[A_TRANSPOSED ? at % DEPTH * a_step + at / DEPTH : at / DEPTH * a_step + at % DEPTH] = a[at];
  for (int at = threadIdx.x; at < DEPTH * COLUMNS; at += blockDim.x) {
    const int k = at / COLUMNS, n = at % COLUMNS;
    right[B_TRANSPOSED ? n * b_step + k : k * b_step + n] = b[at];
  }
  __syncthreads();
  const T* own = left + 16 * warp() * (A_TRANSPOSED ? 1 : a_step);
  Product<COLUMNS> found;
  found.clear();
  if constexpr (TENSORS)
    tensor_product<A_TRANSPOSED, B_TRANSPOSED, COLUMNS, DEPTH>(found, own, a_step, right, b_step);
  else
    plain_product<A_TRANSPOSED, B_TRANSPOSED, COLUMNS, DEPTH>(found, own, a_step, right, b_step);
  store_product(c + 16 * warp() * COLUMNS, COLUMNS, found);
}

// The same with A in registers, (rows, DEPTH) of float32.
template <bool TENSORS, bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__global__ void held_product(const float* a, const T* b, float* c) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int b_step = (B_TRANSPOSED ? DEPTH : COLUMNS) + gap<T>();
  T* right = reinterpret_cast<T*>(memory);
  for (int at = threadIdx.x; at < DEPTH * COLUMNS; at += blockDim.x) {
    const int k = at / COLUMNS, n = at % COLUMNS;
    right[B_TRANSPOSED ? n * b_step + k : k * b_step + n] = b[at];
  }
  __syncthreads();
  Product<DEPTH> own;
  for (int j = 0; j < DEPTH / 8; ++j)
    for (int i = 0; i < 4; ++i) own.x[j][i] = a[(16 * warp() + row_of(i)) * DEPTH + column_of(j, i)];
  Product<COLUMNS> found;
  found.clear();
  if constexpr (TENSORS)
    tensor_held_product<B_TRANSPOSED, COLUMNS, DEPTH>(found, own, right, b_step);
  else
    plain_held_product<B_TRANSPOSED, COLUMNS, DEPTH>(found, own, right, b_step);
  store_product(c + 16 * warp() * COLUMNS, COLUMNS, found);
}
