// Barriers of a block: all threads must reach the same one.
#include "runtime.h"

namespace simulated {

int barrier(int predicate, Site site) {
  Thread& me = launch.all[launch.current];
  me.predicate = predicate != 0;
  wait(State::AT_BARRIER, site);
  return me.result;
}

// Every thread waits here or has returned: no other thread can run.
void release_barrier() {
  int first = -1, returned = -1, count = 0;
  for (int i = 0; i < launch.threads; ++i) {
    const Thread& thread = launch.all[i];
    if (thread.state == State::DONE) {
      returned = i;
      continue;
    }
    count += thread.predicate;
    if (first < 0) first = i;
    const Thread& other = launch.all[first];
    if (thread.site.line != other.site.line || std::string(thread.site.file) != other.site.file)
      fail(FaultKind::SYNCHRONIZATION,
           "a barrier is divergent: %s waits at __syncthreads, %s, and %s at the one of %s",
           where(first).c_str(), place(other.site).c_str(), who(i).c_str(),
           place(thread.site).c_str());
  }
  if (returned >= 0)
    fail(FaultKind::SYNCHRONIZATION, "%s waits at __syncthreads, %s, and %s has returned",
         where(first).c_str(), place(launch.all[first].site).c_str(), who(returned).c_str());
  ++launch.epoch;
  for (int i = 0; i < launch.threads; ++i) {
    Thread& thread = launch.all[i];
    thread.state = State::READY;
    thread.result = count;
  }
}

}  // namespace simulated
