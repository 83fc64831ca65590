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

// Whether 16-bit calls take more products than rounding once needs (kernel_backend/precise.py).
#ifdef PRECONDATTN_PRECISE
constexpr bool PRECISE = true;
#else
constexpr bool PRECISE = false;
#endif

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

// Two neighbouring elements: one conversion and one access for both.
template <class T>
struct TwoOf {
  typedef float2 type;
};
template <>
struct TwoOf<__half> {
  typedef __half2 type;
};
template <>
struct TwoOf<__nv_bfloat16> {
  typedef __nv_bfloat162 type;
};
template <class T>
using Two = typename TwoOf<T>::type;

template <class T>
__device__ __forceinline__ Two<T> narrow_two(float first, float second);
template <>
__device__ __forceinline__ float2 narrow_two<float>(float first, float second) {
  return {first, second};
}
template <>
__device__ __forceinline__ __half2 narrow_two<__half>(float first, float second) {
  return __floats2half2_rn(first, second);
}
template <>
__device__ __forceinline__ __nv_bfloat162 narrow_two<__nv_bfloat16>(float first, float second) {
  return __floats2bfloat162_rn(first, second);
}
__device__ __forceinline__ float2 wide_two(float2 x) { return x; }
__device__ __forceinline__ float2 wide_two(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 wide_two(__nv_bfloat162 x) { return __bfloat1622float2(x); }

// `to` is aligned to two elements.
template <class T>
__device__ __forceinline__ void store_two(T* to, float first, float second) {
  *reinterpret_cast<Two<T>*>(to) = narrow_two<T>(first, second);
}

// The first `there` of two elements, at least one; `aligned` to two.
template <class T>
__device__ __forceinline__ void store_there(T* to, int there, bool aligned, float first,
                                            float second) {
  if (aligned && there > 1) {
    store_two(to, first, second);
  } else {
    to[0] = narrow<T>(first);
    if (there > 1) to[1] = narrow<T>(second);
  }
}
template <class T>
__device__ __forceinline__ float2 load_there(const T* from, int there, bool aligned) {
  if (aligned && there > 1) return wide_two(*reinterpret_cast<const Two<T>*>(from));
  return {wide(from[0]), there > 1 ? wide(from[1]) : 0.0f};
}

// 2^x in one instruction; 0 where that is not a normal number.
__device__ __forceinline__ float power_of_2(float x) {
#ifdef PRECONDATTN_SIMULATED
  const float found = exp2f(x);
  return found < 1.17549435e-38f ? 0.0f : found;
#else
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
#endif
}

// NVRTC has no header that defines INFINITY.
#define INFINITE __int_as_float(0x7f800000)
