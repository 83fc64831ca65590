// CUDA's arithmetic functions that C++ does not have. Fast versions are as exact as the others.
#pragma once

namespace simulated {
template <class A, class B>
using Number = typename std::enable_if<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value,
                                       typename std::common_type<A, B>::type>::type;
}

// For two types too; of a NaN and a number, the number.
template <class A, class B>
::simulated::Number<A, B> max(A a, B b) {
  using T = ::simulated::Number<A, B>;
  if constexpr (std::is_floating_point<T>::value) return fmax(T(a), T(b));
  return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
::simulated::Number<A, B> min(A a, B b) {
  using T = ::simulated::Number<A, B>;
  if constexpr (std::is_floating_point<T>::value) return fmin(T(a), T(b));
  return T(b) < T(a) ? T(b) : T(a);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
#define __exp10f(x) exp10f(x)  // The C library reserves the name.
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline float __int2float_rn(int x) { return (float)x; }

#define SIMULATED_BITS(name, From, To)                      \
  inline To name(From x) {                                  \
    static_assert(sizeof(From) == sizeof(To), "");          \
    To bits;                                                \
    __builtin_memcpy(&bits, &x, sizeof bits);               \
    return bits;                                            \
  }
SIMULATED_BITS(__float_as_int, float, int)
SIMULATED_BITS(__float_as_uint, float, unsigned)
SIMULATED_BITS(__int_as_float, int, float)
SIMULATED_BITS(__uint_as_float, unsigned, float)
SIMULATED_BITS(__double_as_longlong, double, long long)
SIMULATED_BITS(__longlong_as_double, long long, double)
#undef SIMULATED_BITS

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}
inline int __mul24(int x, int y) { return x * y; }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return (unsigned)((unsigned long long)x * y >> 32);
}

// Loads and stores with cache hints are plain loads and stores.
#define SIMULATED_LOAD(name)       \
  template <class T>               \
  T name(const T* address) {       \
    return *address;               \
  }
SIMULATED_LOAD(__ldg)
SIMULATED_LOAD(__ldca)
SIMULATED_LOAD(__ldcg)
SIMULATED_LOAD(__ldcs)
#undef SIMULATED_LOAD
#define SIMULATED_STORE(name)         \
  template <class T>                  \
  void name(T* address, T value) {    \
    *address = value;                 \
  }
SIMULATED_STORE(__stcg)
SIMULATED_STORE(__stcs)
SIMULATED_STORE(__stwb)
#undef SIMULATED_STORE
