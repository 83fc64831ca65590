// Atomic operations, for the types for which CUDA has them.
#pragma once

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
