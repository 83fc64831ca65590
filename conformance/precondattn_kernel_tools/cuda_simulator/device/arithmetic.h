// CUDA's functions that C++ does not have. Fast versions are as exact as the others.
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
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
template <class T>
T __ldg(const T* address) {
  return *address;
}

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
#undef SIMULATED_BITS
