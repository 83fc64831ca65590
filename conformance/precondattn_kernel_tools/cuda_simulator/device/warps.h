// Shuffles, votes and reductions of a warp.
#pragma once

namespace simulated {

template <class T>
uint64_t as_bits(T value) {
  static_assert(sizeof(T) <= 8, "a warp exchanges values of at most 64 bits");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  __builtin_memcpy((void*)&value, &bits, sizeof(T));
  return value;
}

template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  return from_bits<T>(exchange(SHUFFLE, mask, as_bits(value), source, site));
}

inline int width_of(int width, Site site) {
  if (width < 1 || width > 32 || (width & (width - 1)))
    stop("the width of a shuffle has to be a power of two, and at most 32", site);
  return width;
}

// Reductions are of 32 bits, as in hardware.
template <class T>
T reduce(WarpOperation operation, unsigned mask, T value, Site site) {
  static_assert(sizeof(T) == 4 && std::is_integral<T>::value,
                "the hardware reduces integers of 32 bits");
  // Signed integers keep their order with the sign bits in the upper half.
  return (T)exchange(operation, mask, (uint64_t)(int64_t)value, 0, site);
}

}  // namespace simulated

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMULATED_CALLER) {
  ::simulated::exchange(::simulated::SYNCHRONIZE, mask, 0, 0, SIMULATED_SITE);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              SIMULATED_CALLER) {
  const int first = ::simulated::lane() & ~(::simulated::width_of(width, SIMULATED_SITE) - 1);
  return ::simulated::shuffle(mask, value, first + (source & (width - 1)), SIMULATED_SITE);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 SIMULATED_CALLER) {
  const int lane = ::simulated::lane();
  const bool inside = (lane & (::simulated::width_of(width, SIMULATED_SITE) - 1)) >= (int)delta;
  return ::simulated::shuffle(mask, value, inside ? lane - (int)delta : lane, SIMULATED_SITE);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   SIMULATED_CALLER) {
  const int lane = ::simulated::lane();
  const bool inside = (lane & (::simulated::width_of(width, SIMULATED_SITE) - 1)) + (int)delta < width;
  return ::simulated::shuffle(mask, value, inside ? lane + (int)delta : lane, SIMULATED_SITE);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  SIMULATED_CALLER) {
  const int lane = ::simulated::lane(), other = (lane ^ lanes) & 31;
  // A lane may read preceding groups, not following ones.
  const bool inside = (other | (::simulated::width_of(width, SIMULATED_SITE) - 1)) <= (lane | (width - 1));
  return ::simulated::shuffle(mask, value, inside ? other : lane, SIMULATED_SITE);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              SIMULATED_CALLER) {
  return (unsigned)::simulated::exchange(::simulated::BALLOT, mask, predicate != 0, 0, SIMULATED_SITE);
}
inline int __any_sync(unsigned mask, int predicate, SIMULATED_CALLER) {
  return ::simulated::exchange(::simulated::BALLOT, mask, predicate != 0, 0, SIMULATED_SITE) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMULATED_CALLER) {
  return ::simulated::exchange(::simulated::BALLOT, mask, predicate == 0, 0, SIMULATED_SITE) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SIMULATED_CALLER) {
  return (unsigned)::simulated::exchange(::simulated::MATCH, mask, ::simulated::as_bits(value), 0,
                                         SIMULATED_SITE);
}

#define SIMULATED_REDUCTION(name, operation)                                        \
  template <class T>                                                                \
  T __reduce_##name##_sync(unsigned mask, T value,                                  \
                           SIMULATED_CALLER) {               \
    return ::simulated::reduce(::simulated::operation, mask, value, SIMULATED_SITE);          \
  }
SIMULATED_REDUCTION(add, ADD)
SIMULATED_REDUCTION(max, MAXIMUM)
#undef SIMULATED_REDUCTION
