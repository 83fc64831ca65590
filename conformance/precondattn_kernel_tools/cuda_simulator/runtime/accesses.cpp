// Checks of every load and store of a kernel.
//
// The compiler instruments kernels as for its thread sanitizer, whose functions are defined here.
#include "runtime.h"

namespace simulated {

// A thread that waits for another thread without a barrier never ends.
constexpr uint64_t PATIENCE = uint64_t(1) << 24;

[[noreturn]] static void fail_outside(const Region& region, const char* address, size_t bytes,
                                      bool is_write, uint32_t code) {
  const long offset = address - region.begin, size = region.end - region.begin;
  const long granule = region.is_shared ? 1 : region.granule;
  // Rounded down, before the array too.
  const long element = offset >= 0 ? offset / granule : -((-offset + granule - 1) / granule);
  const char* unit = granule == 1 ? "byte" : "element";
  fail(FaultKind::OUT_OF_BOUNDS, "%s %s %zu bytes at %s %ld of %s, which has %ld, %s",
       where(launch.current).c_str(), is_write ? "writes" : "reads", bytes, unit, element,
       region.name.c_str(), size / granule, place_of_code(code).c_str());
}

[[noreturn]] static void fail_anywhere(const char* address, size_t bytes, bool is_write,
                                       uint32_t code) {
  for (int i = 0; i < launch.threads; ++i)
    if (address >= launch.all[i].stack && address < launch.all[i].stack + STACK)
      fail(FaultKind::OUT_OF_BOUNDS, "%s %s a local variable of %s, %s",
           where(launch.current).c_str(), is_write ? "writes" : "reads", who(i).c_str(),
           place_of_code(code).c_str());
  fail(FaultKind::OUT_OF_BOUNDS, "%s %s %zu bytes at %p, which is in no array of the call, %s",
       where(launch.current).c_str(), is_write ? "writes" : "reads", bytes, (const void*)address,
       place_of_code(code).c_str());
}

void check(const void* where_to, size_t bytes, bool is_write, Use use,
           const void* caller) {
  if (launch.current < 0) return;  // The module is being loaded.
  const char* address = static_cast<const char*>(where_to);
  const Thread& me = launch.all[launch.current];
  if (address >= me.stack && address + bytes <= me.stack + STACK) return;
  const uint32_t code = code_of(caller);
  if (++launch.accesses > PATIENCE)
    fail(FaultKind::SYNCHRONIZATION,
         "%s does not come to an end, %s: does it wait for another thread or block?",
         where(launch.current).c_str(), place_of_code(code).c_str());
  Region* region = find_region(address);
  if (!region) {
    if (is_of_module(address)) return;
    fail_anywhere(address, bytes, is_write, code);
  }
  if (address < region->begin || address + bytes > region->end)
    fail_outside(*region, address, bytes, is_write, code);
  // A volatile access to global memory is meant to be visible to other blocks. In shared memory,
  // volatile does not replace a barrier of the warp.
  const bool is_atomic = use == ATOMIC || (use == VOLATILE && !region->is_shared);
  if (is_atomic && !region->is_shared) launch.blocks.back().has_read_atomically = true;
  note(*region, address, bytes, is_write, is_atomic, code);
}

void check_range(const void* address, size_t bytes, bool is_write) {
  if (bytes) check(address, bytes, is_write, PLAIN, __builtin_return_address(0));
}

void atomic_read(const void* address, void* value, size_t bytes) {
  check(address, bytes, true, ATOMIC, __builtin_return_address(0));
  __builtin_memcpy(value, address, bytes);
}

void atomic_write(void* address, const void* value, size_t bytes) {
  __builtin_memcpy(address, value, bytes);
}

}  // namespace simulated

#define HOOK(name, bytes, is_write, use)                                       \
  extern "C" __attribute__((visibility("hidden"))) void __tsan_##name(void* address) {     \
    simulated::check(address, bytes, is_write, simulated::use,                 \
                     __builtin_return_address(0));                                         \
  }
#define HOOKS(bytes)                                                       \
  HOOK(read##bytes, bytes, false, PLAIN)                             \
  HOOK(write##bytes, bytes, true, PLAIN)                             \
  HOOK(unaligned_read##bytes, bytes, false, PLAIN)                  \
  HOOK(unaligned_write##bytes, bytes, true, PLAIN)                  \
  HOOK(volatile_read##bytes, bytes, false, VOLATILE)                 \
  HOOK(volatile_write##bytes, bytes, true, VOLATILE)                 \
  HOOK(unaligned_volatile_read##bytes, bytes, false, VOLATILE)      \
  HOOK(unaligned_volatile_write##bytes, bytes, true, VOLATILE)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" {
__attribute__((visibility("hidden"))) void __tsan_init() {}
__attribute__((visibility("hidden"))) void __tsan_read_range(void* address, size_t bytes) {
  simulated::check(address, bytes, false, simulated::PLAIN, __builtin_return_address(0));
}
__attribute__((visibility("hidden"))) void __tsan_write_range(void* address, size_t bytes) {
  simulated::check(address, bytes, true, simulated::PLAIN, __builtin_return_address(0));
}
}
