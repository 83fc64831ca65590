// Copies of 16 bytes from memory to shared memory that run while a thread computes (cp.async).
//
//     copies.add(to, from, is_there);    …    copies.wait();    __syncthreads();
//
// After `wait` a thread may read what it has copied itself; after a barrier, what all have. With two
// buffers one barrier serves both ways: nobody reads the other buffer any more.
//
//     wait, barrier, begin to copy the next tile to the other buffer, compute with this one
//
// In the simulator, NaN is there until `wait`, so that a read before it or a write under a reader shows.
#pragma once

#include "numbers.cuh"

struct Copies {
#ifdef PRECONDATTN_SIMULATED
  static constexpr int MOST = 512;
  uint4* targets[MOST];
  const uint4* sources[MOST];
  int count = 0;

  __device__ void add(void* to, const void* from, bool is_there) {
    assert(count < MOST && (unsigned long long)to % 16 == 0);
    assert(!is_there || (unsigned long long)from % 16 == 0);
    targets[count] = (uint4*)to;
    *targets[count] = {~0u, ~0u, ~0u, ~0u};
    sources[count++] = is_there ? (const uint4*)from : nullptr;
  }
  __device__ void wait() {
    for (int i = 0; i < count; ++i)
      *targets[i] = sources[i] ? *sources[i] : uint4{0, 0, 0, 0};
    count = 0;
  }
#else
  // Writes zeros unless `is_there`; then `from` is not read.
  __device__ __forceinline__ void add(void* to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((unsigned)__cvta_generic_to_shared(to)),
                   "l"(__cvta_generic_to_global(from)), "r"(is_there ? 16 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_all;" : : : "memory"); }
#endif
};
