// Two threads access the same element without an order, and one of them writes.
//
// Within a block barriers order accesses, and within a warp __syncwarp does, by vector clocks;
// between blocks fences do. So a race is found in any order in which the threads run.
#include "runtime.h"

namespace simulated {

static bool is_before(const Access& access, bool is_shared) {
  if (access.epoch < launch.block_epoch) {  // Of another block, or none.
    return is_shared || access.epoch == 0 || is_handed_over(access);
  }
  if (access.epoch < launch.epoch || access.thread == launch.current) return true;
  const Thread& me = launch.all[launch.current];
  return access.thread / WARP == launch.current / WARP &&
         me.clock[access.thread % WARP] >= access.clock;
}

[[noreturn]] static void fail_in_race(const Region& region, size_t element, const Access& access,
                                      bool was_write, bool is_write, uint32_t code) {
  const bool is_other_block = access.epoch < launch.block_epoch;
  const std::string other = is_other_block
                                ? "a thread of another block, number " +
                                      std::to_string(block_number(access)) + " to run,"
                                : who(access.thread);
  const char* unit = region.granule == 1 ? "byte" : "element";
  fail(FaultKind::RACE, "%s %s %s %zu of %s, %s, which %s has %s, %s, with no %s between them",
       where(launch.current).c_str(), is_write ? "writes" : "reads", unit, element,
       region.name.c_str(), place_of_code(code).c_str(), other.c_str(),
       was_write ? "written" : "read", place_of_code(access.code).c_str(),
       is_other_block ? "fence" : "barrier");
}

void note(Region& region, const char* address, size_t bytes, bool is_write, bool is_atomic,
          uint32_t code) {
  const size_t first = (address - region.begin) / region.granule;
  const size_t last = (address + bytes - 1 - region.begin) / region.granule;
  const Thread& me = launch.all[launch.current];
  const Access now{launch.epoch, me.clock[launch.current % WARP], code,
                   static_cast<uint16_t>(launch.current), is_atomic};
  for (size_t i = first; i <= last; ++i) {
    Shadow& shadow = region.shadow[i];
    if ((!is_write || is_atomic) && region.is_shared && shadow.write.epoch < launch.block_epoch)
      fail(FaultKind::UNINITIALIZED,
           "%s reads byte %zu of %s, %s, which no thread of the block has written",
           where(launch.current).c_str(), i, region.name.c_str(), place_of_code(code).c_str());
    auto conflicts = [&](const Access& access) {
      return !(is_atomic && access.is_atomic) && !is_before(access, region.is_shared);
    };
    if (conflicts(shadow.write))
      fail_in_race(region, i, shadow.write, true, is_write, code);
    if (is_write) {
      for (const Access* read : {&shadow.read, &shadow.other_read})
        if (conflicts(*read)) fail_in_race(region, i, *read, false, true, code);
      shadow.write = now;
    } else {
      // Two threads are enough: at least one of two readers is not the writer.
      if (shadow.read.thread != now.thread || shadow.read.epoch < launch.block_epoch)
        shadow.other_read = shadow.read;
      shadow.read = now;
    }
  }
}

}  // namespace simulated
