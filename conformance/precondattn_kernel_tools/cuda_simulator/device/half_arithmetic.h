// Functions of float16 and bfloat16 that CUDA's headers define for a GPU only: computed in float or
// double, and rounded once.
#pragma once

#define SIMULATED_HALF(name, expression)                                             \
  inline __half name(__half x) {                                                     \
    const float value = __half2float(x);                                             \
    return __float2half_rn(expression);                                              \
  }                                                                                  \
  inline __nv_bfloat16 name(__nv_bfloat16 x) {                                       \
    const float value = __bfloat162float(x);                                         \
    return __float2bfloat16_rn(expression);                                          \
  }                                                                                  \
  inline __half2 SIMULATED_PAIR(name)(__half2 x) {                                   \
    return __half2(name(x.x), name(x.y));                                            \
  }                                                                                  \
  inline __nv_bfloat162 SIMULATED_PAIR(name)(__nv_bfloat162 x) {                     \
    return __nv_bfloat162(name(x.x), name(x.y));                                     \
  }
#define SIMULATED_PAIR(name) SIMULATED_PAIR_OF_##name
#define SIMULATED_PAIR_OF_hexp h2exp
#define SIMULATED_PAIR_OF_hexp2 h2exp2
#define SIMULATED_PAIR_OF_hlog h2log
#define SIMULATED_PAIR_OF_hlog2 h2log2
#define SIMULATED_PAIR_OF_hsqrt h2sqrt
#define SIMULATED_PAIR_OF_hrsqrt h2rsqrt
#define SIMULATED_PAIR_OF_hrcp h2rcp
SIMULATED_HALF(hexp, expf(value))
SIMULATED_HALF(hexp2, exp2f(value))
SIMULATED_HALF(hlog, logf(value))
SIMULATED_HALF(hlog2, log2f(value))
SIMULATED_HALF(hsqrt, sqrtf(value))
SIMULATED_HALF(hrsqrt, rsqrtf(value))
SIMULATED_HALF(hrcp, 1.0f / value)
#undef SIMULATED_HALF

// In double the product is exact.
inline __half __hfma(__half x, __half y, __half z) {
  return __double2half(fma((double)__half2float(x), __half2float(y), __half2float(z)));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
  return __double2bfloat16(
      fma((double)__bfloat162float(x), __bfloat162float(y), __bfloat162float(z)));
}
inline __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
  return __half2(__hfma(x.x, y.x, z.x), __hfma(x.y, y.y, z.y));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 x, __nv_bfloat162 y, __nv_bfloat162 z) {
  return __nv_bfloat162(__hfma(x.x, y.x, z.x), __hfma(x.y, y.y, z.y));
}
