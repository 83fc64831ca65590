// Order between blocks: a fence of one block, an atomic access of another, and a fence of that.
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

static const Block& block_of(const Access& access) { return launch.blocks[block_number(access)]; }

int block_number(const Access& access) {
  const auto behind = std::upper_bound(
      launch.blocks.begin(), launch.blocks.end(), access.epoch,
      [](uint32_t epoch, const Block& block) { return epoch < block.first_epoch; });
  return int(behind - launch.blocks.begin()) - 1;
}

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

bool is_handed_over(const Access& access) { return is_published(access) && has_acquired(); }

}  // namespace simulated
