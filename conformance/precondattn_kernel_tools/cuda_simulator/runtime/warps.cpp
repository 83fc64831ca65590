// Operations of a warp: all lanes that the mask names and that have not returned.
#include <algorithm>

#include "runtime.h"

namespace simulated {

static const char* const NAMES[] = {
    "__syncwarp", "a shuffle", "a vote", "__match_any_sync", "__reduce_add_sync",
    "__reduce_max_sync"};

static std::string hexadecimal(unsigned mask) {
  char text[16];
  snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

uint64_t exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, Site site) {
  const int lane = launch.current % WARP;
  if (!(mask >> lane & 1))
    fail(FaultKind::SYNCHRONIZATION, "%s takes part in %s, %s, and the mask %s does not name it",
         where(launch.current).c_str(), NAMES[operation], place(site).c_str(),
         hexadecimal(mask).c_str());
  if (operation == SHUFFLE && !(mask >> source & 1))
    fail(FaultKind::SYNCHRONIZATION,
         "%s reads lane %d in a shuffle, %s, and the mask %s does not name that lane",
         where(launch.current).c_str(), source, place(site).c_str(), hexadecimal(mask).c_str());
  Thread& me = launch.all[launch.current];
  me.operation = operation;
  me.mask = mask;
  me.source = source;
  me.value = value;
  wait(State::IN_WARP, site);
  return me.received;
}

// The lanes of a mask that have arrived, or none while one has not.
static std::vector<int> arrived(int first, unsigned mask) {
  std::vector<int> lanes;
  const int end = std::min(first / WARP * WARP + WARP, launch.threads);
  for (int i = first / WARP * WARP; i < end; ++i) {
    const Thread& thread = launch.all[i];
    if (!(mask >> i % WARP & 1) || thread.state == State::DONE) continue;
    if (thread.state != State::IN_WARP || thread.mask != mask) return {};
    lanes.push_back(i);
  }
  return lanes;
}

static void require_same_site(const std::vector<int>& lanes) {
  const Thread& first = launch.all[lanes[0]];
  for (int i : lanes) {
    const Thread& thread = launch.all[i];
    if (thread.operation == first.operation && thread.site.line == first.site.line &&
        std::string(thread.site.file) == first.site.file)
      continue;
    fail(FaultKind::SYNCHRONIZATION,
         "lanes of the mask %s wait at different places: %s in %s, %s, and %s in %s, %s",
         hexadecimal(first.mask).c_str(), where(lanes[0]).c_str(), NAMES[first.operation],
         place(first.site).c_str(), who(i).c_str(), NAMES[thread.operation],
         place(thread.site).c_str());
  }
}

static uint64_t shuffled(int lane, const std::vector<int>& lanes) {
  const Thread& thread = launch.all[lane];
  const int other = lane / WARP * WARP + thread.source;
  if (std::find(lanes.begin(), lanes.end(), other) == lanes.end())
    fail(FaultKind::SYNCHRONIZATION, "%s reads lane %d in a shuffle, %s, which %s",
         where(lane).c_str(), thread.source, place(thread.site).c_str(),
         other < launch.threads ? "has returned" : "the block does not have");
  return launch.all[other].value;
}

static uint64_t result(int lane, const std::vector<int>& lanes) {
  const Thread& thread = launch.all[lane];
  uint64_t found = 0;
  switch (thread.operation) {
    case SYNCHRONIZE: return 0;
    case SHUFFLE: return shuffled(lane, lanes);
    case BALLOT:
      for (int i : lanes) found |= launch.all[i].value << i % WARP;
      return found;
    case MATCH:
      for (int i : lanes) found |= uint64_t(launch.all[i].value == thread.value) << i % WARP;
      return found;
    default:
      found = launch.all[lanes[0]].value;
      for (size_t i = 1; i < lanes.size(); ++i) {
        const uint64_t other = launch.all[lanes[i]].value;
        found = thread.operation == ADD ? found + other
                                        : uint64_t(std::max(int64_t(found), int64_t(other)));
      }
      return found;
  }
}

// Orders the accesses of all lanes. Only this operation does.
static void join_clocks(const std::vector<int>& lanes) {
  uint32_t joint[WARP] = {};
  for (int i : lanes)
    for (int k = 0; k < WARP; ++k) joint[k] = std::max(joint[k], launch.all[i].clock[k]);
  for (int i : lanes) {
    std::copy(joint, joint + WARP, launch.all[i].clock);
    ++launch.all[i].clock[i % WARP];
  }
}

bool release_warps() {
  bool has_moved = false;
  for (int i = 0; i < launch.threads; ++i) {
    if (launch.all[i].state != State::IN_WARP) continue;
    const std::vector<int> lanes = arrived(i, launch.all[i].mask);
    if (lanes.empty()) continue;
    require_same_site(lanes);
    for (int lane : lanes) launch.all[lane].received = result(lane, lanes);
    if (launch.all[i].operation == SYNCHRONIZE) join_clocks(lanes);
    for (int lane : lanes) launch.all[lane].state = State::READY;
    has_moved = true;
  }
  return has_moved;
}

void fail_in_warp() {
  for (int i = 0; i < launch.threads; ++i) {
    const Thread& thread = launch.all[i];
    if (thread.state != State::IN_WARP) continue;
    const int end = std::min(i / WARP * WARP + WARP, launch.threads);
    for (int k = i / WARP * WARP; k < end; ++k) {
      const Thread& other = launch.all[k];
      if (!(thread.mask >> k % WARP & 1) || other.state == State::DONE) continue;
      if (other.state == State::IN_WARP && other.mask == thread.mask) continue;
      const std::string what = other.state == State::AT_BARRIER
                                   ? std::string("__syncthreads")
                                   : NAMES[other.operation] + (" with the mask " +
                                                               hexadecimal(other.mask));
      fail(FaultKind::SYNCHRONIZATION,
           "a deadlock: %s waits in %s, %s, with the mask %s, for %s, which waits in %s, %s",
           where(i).c_str(), NAMES[thread.operation], place(thread.site).c_str(),
           hexadecimal(thread.mask).c_str(), who(k).c_str(), what.c_str(),
           place(other.site).c_str());
    }
  }
  __builtin_unreachable();
}

}  // namespace simulated
