// Products whose left factor is in a warp's registers, as left there by an earlier product.
//
//     C += A B,    A (16, DEPTH) in registers,  B (DEPTH, COLUMNS) in shared memory,  C (16, COLUMNS)
//
// Tensor cores read a factor with the register layout in which they write a product: A is rounded to
// the type of B, and no data is moved. `keep_rest` replaces A by its rounding error, for a second
// product where one has too few digits.
#pragma once

#include "products.cuh"
#include "warps.cuh"

template <class T>
__device__ __forceinline__ float rounded(float x) {
  return wide(narrow<T>(x));
}

template <class T, int COLUMNS>
__device__ __forceinline__ void keep_rest(Product<COLUMNS>& a) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 main = wide_two(narrow_two<T>(a.x[j][i], a.x[j][i + 1]));
      a.x[j][i] -= main.x;
      a.x[j][i + 1] -= main.y;
    }
}

// An element of A is in one of the four lanes of its row, from which it is fetched.
template <bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__device__ __forceinline__ void plain_held_product(Product<COLUMNS>& c, const Product<DEPTH>& a,
                                                   const T* b, int b_step) {
#pragma unroll
  for (int k = 0; k < DEPTH; ++k) {
    const int from = lane() / 4 * 4 + k % 8 / 2;
    const float upper = __shfl_sync(ALL_LANES, rounded<T>(a.x[k / 8][k % 2]), from);
    const float lower = __shfl_sync(ALL_LANES, rounded<T>(a.x[k / 8][k % 2 + 2]), from);
    add_outer<B_TRANSPOSED>(c, upper, lower, b, b_step, k);
  }
}

#if !defined(PRECONDATTN_SIMULATED) || defined(PRECONDATTN_EMULATED_TENSORS)

// Two numbers in a register, the first in its lower half.
template <class T>
__device__ __forceinline__ unsigned both_narrow(float first, float second) {
  const Two<T> pair = narrow_two<T>(first, second);
  return *reinterpret_cast<const unsigned*>(&pair);
}

template <bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__device__ __forceinline__ void tensor_held_product(Product<COLUMNS>& c, const Product<DEPTH>& a,
                                                    const T* b, int b_step) {
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    const float(&near)[4] = a.x[k / 8];
    const float(&far)[4] = a.x[k / 8 + 1];
    const unsigned left[4] = {both_narrow<T>(near[0], near[1]), both_narrow<T>(near[2], near[3]),
                              both_narrow<T>(far[0], far[1]), both_narrow<T>(far[2], far[3])};
    multiply_by_rows<B_TRANSPOSED>(c, left, b, b_step, k);
  }
}

#endif

template <bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__device__ __forceinline__ void add_held_product(Product<COLUMNS>& c, const Product<DEPTH>& a,
                                                 const T* b, int b_step) {
  static_assert(COLUMNS % 16 == 0 && DEPTH % 16 == 0, "tiles are made of 16 by 16");
#if !defined(PRECONDATTN_SIMULATED) || defined(PRECONDATTN_EMULATED_TENSORS)
  if constexpr (sizeof(T) == 2) {
    tensor_held_product<B_TRANSPOSED, COLUMNS, DEPTH>(c, a, b, b_step);
    return;
  }
#endif
  plain_held_product<B_TRANSPOSED, COLUMNS, DEPTH>(c, a, b, b_step);
}

// C += A B, in a precise kernel with A split into two parts where its numbers have 16 bits; then it
// overwrites A. TWO_PARTS: in any kernel.
template <int COLUMNS, int DEPTH, bool TWO_PARTS = false, class T>
__device__ __forceinline__ void add_weighted(Product<COLUMNS>& c, Product<DEPTH>& a, const T* b,
                                             int b_step) {
  add_held_product<false, COLUMNS, DEPTH>(c, a, b, b_step);
  if ((PRECISE || TWO_PARTS) && sizeof(T) == 2) {
    keep_rest<T>(a);
    add_held_product<false, COLUMNS, DEPTH>(c, a, b, b_step);
  }
}
