// Element types of arrays, and the types in which sums are computed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// float64 is summed in float64; everything else in float32.
template <class T>
struct SumOf {
  typedef float type;
};
template <>
struct SumOf<double> {
  typedef double type;
};
template <class T>
using Sum = typename SumOf<T>::type;

template <class T>
constexpr bool HAS_11_BITS = false;
template <>
constexpr bool HAS_11_BITS<__half> = true;

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest, ties to even; overflow gives infinity.
template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ double narrow<double>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <class T>
__device__ __forceinline__ T narrow(double x) {
  return T(x);
}

// NVRTC has no header that defines INFINITY.
#define INFINITE __int_as_float(0x7f800000)
