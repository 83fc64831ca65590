// The runtime's functions for simulated kernels. Kernels are instrumented, the runtime is not.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

namespace simulated {

// Constant during a call of the kernel: one thread runs on one stack.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();
__attribute__((const)) unsigned lane();

// A position in the source.
struct Site {
  const char* file;
  int line;
};
// The last parameters of a function: the position of its call.
#define SIMULATED_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMULATED_SITE (::simulated::Site{file, line})

// The number of threads of the block whose predicate is not 0.
int barrier(int predicate, Site site);

enum WarpOperation { SYNCHRONIZE, SHUFFLE, BALLOT, MATCH, ADD, MAXIMUM };
// All lanes of the mask exchange 64 bits. A shuffle returns those of the lane `source`, the other
// operations return a reduction over all lanes.
uint64_t exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, Site site);

// A static variable in shared memory. Its memory is allocated when a block first reaches it.
struct SharedVariable {
  void* memory;
  unsigned launch;
};
void* shared_variable(SharedVariable* variable, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared_memory(size_t alignment);

void fence();
// No other thread runs between the read and the write of an atomic operation.
void atomic_read(const void* address, void* value, size_t bytes);
void atomic_write(void* address, const void* value, size_t bytes);
// For accesses that the compiler does not instrument: memcpy.
void check_range(const void* address, size_t bytes, bool is_write);
[[noreturn]] void stop(const char* why, Site site);

}  // namespace simulated
