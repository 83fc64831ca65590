// CUDA C++ for g++: the builtins that a kernel uses without an include.
//
// The types, among them float16 and bfloat16, are those of CUDA's own headers, whose code for the
// host rounds as a GPU does. `PRECONDATTN_SIMULATED` is defined, for kernels that use plain C++
// in place of tensor cores or PTX. `__shared__` declarations are rewritten before compilation.
#pragma once
// C++'s headers that end in .h: abs, exp and isnan are global, with an overload for float.
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <type_traits>

#define PRECONDATTN_SIMULATED 1
// CUDA's headers define this for their own compiler; without it they warn or hide functions.
#define __CUDA_ARCH_LIST__ 800
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#undef __host__
#undef __device__
#undef __global__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __host__
#define __device__
#define __constant__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
// `__global__` and `__shared__` are kept here: the preprocessed text is searched for them.

#include "interface.h"

// Indices of a thread, and barriers of its block.

#define threadIdx (::simulated::thread_index())
#define blockIdx (::simulated::block_index())
#define blockDim (::simulated::block_size())
#define gridDim (::simulated::grid_size())
#define warpSize 32

inline void __syncthreads(SIMULATED_CALLER) {
  ::simulated::barrier(0, SIMULATED_SITE);
}
inline int __syncthreads_count(int predicate, SIMULATED_CALLER) {
  return ::simulated::barrier(predicate, SIMULATED_SITE);
}

inline void __threadfence() { ::simulated::fence(); }

[[noreturn]] inline void __trap(SIMULATED_CALLER) {
  ::simulated::stop("__trap() is reached", SIMULATED_SITE);
}
#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : ::simulated::stop("an assertion fails: " #condition, \
                                              ::simulated::Site{__FILE__, __LINE__}))

namespace simulated {
inline void* copy(void* to, const void* from, size_t bytes) {
  check_range(from, bytes, false);
  check_range(to, bytes, true);
  return ::memcpy(to, from, bytes);
}
}  // namespace simulated
#define memcpy(to, from, bytes) ::simulated::copy(to, from, bytes)

#include "warps.h"

// Atomic operations, for the types for which CUDA has them.

namespace simulated {

template <class T, class... Among>
constexpr bool is_one_of = (std::is_same<T, Among>::value || ...);

// Always inlined, so that an error names the line of the kernel.
template <class T, class Change>
__attribute__((always_inline)) inline T update(T* address, Change change) {
  T old;
  atomic_read(address, &old, sizeof(T));
  const T fresh = change(old);
  atomic_write(address, &fresh, sizeof(T));
  return old;
}

template <class T>
using Same = typename std::common_type<T>::type;  // Not deduced: the pointer determines the type.

}  // namespace simulated

#define SIMULATED_ATOMIC(name, expression, ...)                                               \
  template <class T>                                                                          \
  __attribute__((always_inline)) inline T name(T* address, ::simulated::Same<T> value) {      \
    static_assert(::simulated::is_one_of<T, __VA_ARGS__>, "CUDA has no " #name " of this type"); \
    return ::simulated::update(address, [&](T old) -> T { return expression; });              \
  }

SIMULATED_ATOMIC(atomicAdd, old + value, int, unsigned, unsigned long long, float, double, __half,
                 __half2, __nv_bfloat16, __nv_bfloat162)
SIMULATED_ATOMIC(atomicExch, value, int, unsigned, unsigned long long, float)
#undef SIMULATED_ATOMIC

template <class T>
__attribute__((always_inline)) inline T atomicCAS(T* address, ::simulated::Same<T> expected,
                                                  ::simulated::Same<T> value) {
  static_assert(::simulated::is_one_of<T, int, unsigned, unsigned long long, unsigned short>,
                "CUDA has no atomicCAS of this type");
  return ::simulated::update(address, [&](T old) { return old == expected ? value : old; });
}


// CUDA's functions that C++ does not have. Fast versions are as exact as the others.

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

#include "entry.h"
