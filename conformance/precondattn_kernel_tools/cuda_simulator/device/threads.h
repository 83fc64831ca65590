// Indices of a thread, and barriers of its block.
#pragma once

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
