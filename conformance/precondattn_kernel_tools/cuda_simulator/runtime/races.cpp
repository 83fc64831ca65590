// Two threads access the same element without an order, and one of them writes.
//
// Within a block barriers order accesses, and within a warp __syncwarp does, by vector clocks;
// between blocks fences do: one of the first block, an atomic access of the second, and a fence of
// that. So a race is found in any order in which the threads run.
#include <algorithm>

#include "runtime.h"

namespace simulated {

void fence() {
  Thread& me = launch.all[launch.current];
  const int lane = launch.current % WARP;
  Block& block = launch.blocks.back();
  block.last_fence = launch.epoch;
  block.fences[launch.current] = {launch.epoch, {}};
  std::copy(me.clock, me.clock + WARP, block.fences[launch.current].clock);
  if (block.has_read_atomically && !me.acquired_epoch) {
    me.acquired_epoch = launch.epoch;
    me.acquired_clock = me.clock[lane];
    if (!block.first_acquired) block.first_acquired = launch.epoch;
  }
  ++me.clock[lane];  // Accesses after the fence have a later time.
}

// In the order in which the blocks run.
static int block_number(const Access& access) {
  const auto behind = std::upper_bound(
      launch.blocks.begin(), launch.blocks.end(), access.epoch,
      [](uint32_t epoch, const Block& block) { return epoch < block.first_epoch; });
  return int(behind - launch.blocks.begin()) - 1;
}

static const Block& block_of(const Access& access) { return launch.blocks[block_number(access)]; }

// A fence of a thread to which the access is ordered: its own, or one that a barrier orders before.
static bool is_published(const Access& access) {
  const Block& block = block_of(access);
  if (block.last_fence > access.epoch) return true;
  const int first = access.thread / WARP * WARP;
  for (auto it = block.fences.lower_bound(first);
       it != block.fences.end() && it->first < first + WARP; ++it)
    if (it->second.epoch == access.epoch &&
        it->second.clock[access.thread % WARP] >= access.clock)
      return true;
  return false;
}

// A fence of this thread, or of one that a barrier orders before its current access.
static bool has_acquired() {
  const Block& block = launch.blocks.back();
  if (block.first_acquired && block.first_acquired < launch.epoch) return true;
  const Thread& me = launch.all[launch.current];
  const int first = launch.current / WARP * WARP;
  for (int i = first; i < std::min(first + WARP, launch.threads); ++i) {
    const Thread& other = launch.all[i];
    if (other.acquired_epoch && me.clock[i % WARP] >= other.acquired_clock) return true;
  }
  return false;
}

static bool is_handed_over(const Access& access) { return is_published(access) && has_acquired(); }

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
