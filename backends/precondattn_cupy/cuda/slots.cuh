// Slots of a cache, (b, n, channels, capacity): the tokens of a channel are contiguous.
#pragma once

#include "products.cuh"

// The slots from `first` to `end` of a head's channels, (WIDTH, TOKENS). Missing and invalid slots are
// 0, whatever memory holds. A thread has the same slots of several channels, and issues several loads
// before it waits for the first.
template <int WIDTH, int TOKENS, int THREADS, class T>
__device__ __forceinline__ void load_slots(T* tile, const T* __restrict__ head, int width,
                                           int capacity, int first, int end, bool by_16,
                                           const unsigned char* __restrict__ valid) {
  constexpr int PART = 16 / sizeof(T), PARTS = TOKENS / PART, STEP = TOKENS + gap<T>();
  constexpr int CHANNELS = THREADS / PARTS, COUNT = WIDTH / CHANNELS;
  constexpr int AT_ONCE = COUNT < 8 ? COUNT : 8;
  static_assert(THREADS % PARTS == 0 && WIDTH % (CHANNELS * AT_ONCE) == 0, "threads have equal parts");
  const int column = threadIdx.x % PARTS * PART, own = threadIdx.x / PARTS;
  unsigned seen = 0;
#pragma unroll
  for (int k = 0; k < PART; ++k) {
    const int slot = first + column + k;
    if (slot < end && (valid == nullptr || valid[slot])) seen |= 1u << k;
  }
  head += first + column;
  tile += column;
  if (!by_16) {
#pragma unroll 1
    for (int at = 0; at < COUNT * PART; ++at) {
      const int channel = own + at / PART * CHANNELS, k = at % PART;
      const bool there = channel < width && (seen >> k & 1u);
      tile[channel * STEP + k] = there ? head[(long long)channel * capacity + k] : narrow<T>(0.0f);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < COUNT; i += AT_ONCE) {
    uint4 parts[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int channel = own + (i + j) * CHANNELS;
      const T* from = head + (long long)channel * capacity;
      parts[j] = make_uint4(0, 0, 0, 0);
      if (channel < width && seen != 0) parts[j] = *reinterpret_cast<const uint4*>(from);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      T* x = reinterpret_cast<T*>(&parts[j]);
#pragma unroll
      for (int k = 0; k < PART; ++k)
        if (!(seen >> k & 1u)) x[k] = narrow<T>(0.0f);
      *reinterpret_cast<uint4*>(tile + (own + (i + j) * CHANNELS) * STEP) = parts[j];
    }
  }
}
