// Results that the lanes of a warp, or of four lanes of it, compute together; every lane gets them.
#pragma once

#define ALL_LANES 0xffffffffu

template <class S>
__device__ __forceinline__ S sum_of_warp(S x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
  return x;
}

template <class S>
__device__ __forceinline__ S max_of_warp(S x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, apart));
  return x;
}

// Over four neighbouring lanes, which share a row of a product (products.cuh).
__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

__device__ __forceinline__ float max_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
