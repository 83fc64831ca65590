// The state of a launch. One kernel runs at a time; Python holds a lock.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <ucontext.h>
#include <vector>

#include "../device/interface.h"

namespace simulated {

constexpr int WARP = 32;
constexpr size_t STACK = size_t(128) << 10;  // Of a thread.

enum class FaultKind { OTHER, OUT_OF_BOUNDS, RACE, UNINITIALIZED, SYNCHRONIZATION };

enum class State { READY, AT_BARRIER, IN_WARP, DONE };

// A CUDA thread: its stack, and the event for which it waits.
struct Thread {
  State state;
  bool is_started;
  uint3 index;
  char* stack;  // Its lowest byte; the page below it is protected.
  ucontext_t start;
  jmp_buf place;
  Site site;
  // At a barrier.
  int predicate;
  int result;
  // In a warp.
  WarpOperation operation;
  unsigned mask;
  int source;
  uint64_t value;
  uint64_t received;
  // By lane: the clock up to which its accesses are ordered before this thread's.
  uint32_t clock[WARP];
  // Its first fence after an atomic access of the block.
  uint32_t acquired_epoch, acquired_clock;
};

// A thread's last fence: its time, and the accesses that were ordered before it.
struct Fence {
  uint32_t epoch;
  uint32_t clock[WARP];
};

// A block that has run or is running: its accesses that are visible to others.
struct Block {
  uint32_t first_epoch;
  uint32_t last_fence;
  uint32_t first_acquired;
  bool has_read_atomically;
  std::map<int, Fence> fences;  // By thread.
};

// The record of an access to memory.
struct Access {
  uint32_t epoch;  // The launch's, which barriers and blocks advance; 0 is none.
  uint32_t clock;  // The thread's, which __syncwarp and fences advance.
  uint32_t code;   // The offset of the instruction in the module.
  uint16_t thread;
  bool is_atomic;
};

// Of an element: the last write, and the last reads of two threads.
struct Shadow {
  Access write, read, other_read;
};

// Memory that a kernel may access: an array of the call, or a variable in shared memory.
struct Region {
  std::string name;
  bool is_shared;
  char* begin;
  char* end;
  char* first;  // The first byte of the reserved address range around it.
  char* last;
  size_t granule;  // Bytes per shadow entry.
  Shadow* shadow;
  size_t shadow_bytes;
};

// An array of the call, as Python passes it.
struct Array {
  char* memory;
  size_t bytes;
  size_t granule;
  size_t alignment;  // The address modulo 256 that it has on a GPU.
  char name[128];
};

struct Launch {
  unsigned number = 0;
  dim3 grid, block;
  int threads = 0;
  uint3 block_at{};
  int current = -1;  // The running thread; -1 is none.
  uint64_t accesses = 0;  // Of the running thread, since it was resumed.
  jmp_buf scheduler, end;
  std::vector<Thread> all;
  std::vector<Region> regions;
  size_t dynamic_bytes = 0;
  size_t shared_limit = 0;
  size_t shared_bytes = 0;
  uint32_t epoch = 0;
  uint32_t block_epoch = 0;   // The first one of the block.
  std::vector<Block> blocks;  // In the order in which they run.
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
  FaultKind fault = FaultKind::OTHER;
  std::string message;
};
extern Launch launch;

// Ends the launch. In the format, %s is replaced by the results of place() and who().
[[noreturn]] void fail(FaultKind kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string place(Site site);
std::string place_of_code(uint32_t code);  // Python finds the line.
std::string who(int thread);
std::string where(int thread);  // Thread and block.

// threads.cpp
void wait(State state, Site site);  // Until one or all other threads let this one continue.

// warps.cpp
bool release_warps();
[[noreturn]] void fail_in_warp();  // No thread can run, and one waits for its warp.

// barriers.cpp
void release_barrier();

// regions.cpp
void begin_regions(const Array* arrays, int count);
void begin_block_of_regions();
void end_regions(bool copies_back, const Array* arrays, int count);
Region* find_region(const char* address);
bool is_of_module(const char* address);
uint32_t code_of(const void* address);

// races.cpp
void note(Region& region, const char* address, size_t bytes, bool is_write, bool is_atomic,
          uint32_t code);

// accesses.cpp
enum Use { PLAIN, VOLATILE, ATOMIC };
void check(const void* address, size_t bytes, bool is_write, Use use, const void* code);

}  // namespace simulated
