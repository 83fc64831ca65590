// A launch: blocks one at a time, the threads of a block in turn, each with its own stack.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "runtime.h"

namespace simulated {

Launch launch;

uint3 thread_index() { return launch.all[launch.current].index; }
uint3 block_index() { return launch.block_at; }
dim3 block_size() { return launch.block; }
dim3 grid_size() { return launch.grid; }
unsigned lane() { return launch.current % WARP; }

void wait(State state, Site site) {
  Thread& me = launch.all[launch.current];
  me.state = state;
  me.site = site;
  // Switch to the scheduler, which returns here with the same `current`.
  if (!_setjmp(me.place)) _longjmp(launch.scheduler, 1);
}

static void run_thread() {
  launch.kernel(launch.arguments);
  launch.all[launch.current].state = State::DONE;
  _longjmp(launch.scheduler, 1);
}

static void resume(int thread) {
  Thread& it = launch.all[thread];
  launch.current = thread;
  launch.accesses = 0;
  if (_setjmp(launch.scheduler)) {
    launch.current = -1;
    return;
  }
  if (it.is_started) _longjmp(it.place, 1);
  it.is_started = true;
  getcontext(&it.start);
  it.start.uc_stack.ss_sp = it.stack;
  it.start.uc_stack.ss_size = STACK;
  it.start.uc_link = nullptr;
  makecontext(&it.start, run_thread, 0);
  setcontext(&it.start);
}

static std::mt19937 random_bits;

enum Order { FORWARD, REVERSE, SHUFFLED };

static void arrange(std::vector<int>& order, int kind) {
  if (kind == SHUFFLED) std::shuffle(order.begin(), order.end(), random_bits);
}

static void run_block(std::vector<int>& order, int kind) {
  launch.block_epoch = ++launch.epoch;
  launch.blocks.push_back(Block{launch.epoch, 0, 0, false, {}});
  begin_block_of_regions();
  for (int i = 0; i < launch.threads; ++i) {
    Thread& thread = launch.all[i];
    thread.state = State::READY;
    thread.is_started = false;
    thread.predicate = 0;
    memset(thread.clock, 0, sizeof thread.clock);
    thread.clock[i % WARP] = 1;
    thread.acquired_epoch = 0;
  }
  for (;;) {
    arrange(order, kind);
    for (int i : order)
      if (launch.all[i].state == State::READY) resume(i);
    if (release_warps()) continue;
    bool is_done = true;
    for (int i = 0; i < launch.threads; ++i) {
      if (launch.all[i].state == State::IN_WARP) fail_in_warp();
      is_done &= launch.all[i].state == State::DONE;
    }
    if (is_done) return;
    release_barrier();
  }
}

static uint3 at(unsigned number, const dim3& size) {
  return uint3{number % size.x, number / size.x % size.y, number / size.x / size.y};
}

// Stacks are kept between launches, each above a protected page.
static void make_threads() {
  constexpr size_t PAGE = 4096;
  while ((int)launch.all.size() < launch.threads) {
    void* found = mmap(nullptr, STACK + PAGE, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char* stack = static_cast<char*>(found) + PAGE;
    if (found == MAP_FAILED || mprotect(stack, STACK, PROT_READ | PROT_WRITE))
      fail(FaultKind::OTHER, "no memory for the stacks of %d threads", launch.threads);
    Thread thread{};
    thread.stack = stack;
    launch.all.push_back(thread);
  }
  for (int i = 0; i < launch.threads; ++i)
    launch.all[i].index = at(i, launch.block);
}

static struct sigaction before;
static pthread_t runner;

// Errors that the compiler's instrumentation does not see, mostly a stack overflow.
static void on_signal(int, siginfo_t* info, void*) {
  if (launch.current < 0 || !pthread_equal(pthread_self(), runner)) {
    sigaction(SIGSEGV, &before, nullptr);  // Not from a kernel: it is raised again for the previous handler.
    return;
  }
  const char* address = static_cast<const char*>(info->si_addr);
  const char* stack = launch.all[launch.current].stack;
  if (address < stack && address >= stack - 4096)
    fail(FaultKind::OTHER, "%s needs more than %zu KiB for its local variables",
         where(launch.current).c_str(), STACK >> 10);
  fail(FaultKind::OUT_OF_BOUNDS, "%s uses memory at %p, which is in no array of the call",
       where(launch.current).c_str(), (const void*)address);
}

static void watch_signals(bool watches) {
  static char stack[64 << 10];
  static stack_t stack_before;
  if (!watches) {
    sigaction(SIGSEGV, &before, nullptr);
    sigaltstack(&stack_before, nullptr);
    return;
  }
  runner = pthread_self();
  stack_t own{};
  own.ss_sp = stack;
  own.ss_size = sizeof stack;
  sigaltstack(&own, &stack_before);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
}

static void run_blocks(int kind, unsigned seed) {
  const dim3& grid = launch.grid;
  std::vector<int> blocks(size_t(grid.x) * grid.y * grid.z), order(launch.threads);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (kind == REVERSE) {
    std::reverse(blocks.begin(), blocks.end());
    std::reverse(order.begin(), order.end());
  }
  random_bits.seed(seed);
  arrange(blocks, kind);
  for (int block : blocks) {
    launch.block_at = at(block, launch.grid);
    run_block(order, kind);
  }
}

}  // namespace simulated

// Called by Python. Returns 0, or 1 and the number of the kind of error, a newline and its text.
extern "C" __attribute__((visibility("default"))) int simulated_launch(
    void (*kernel)(void**), void** arguments, simulated::Array* arrays, int array_count,
    const int* places, const size_t* offsets, int pointer_count, const unsigned* sizes,
    size_t dynamic_bytes, size_t shared_limit, int order, unsigned seed, char* message,
    size_t size) {
  using namespace simulated;
  ++launch.number;
  launch.grid = dim3(sizes[0], sizes[1], sizes[2]);
  launch.block = dim3(sizes[3], sizes[4], sizes[5]);
  launch.threads = sizes[3] * sizes[4] * sizes[5];
  launch.dynamic_bytes = dynamic_bytes;
  launch.shared_limit = shared_limit;
  launch.shared_bytes = 0;
  launch.epoch = 0;
  launch.blocks.clear();
  launch.kernel = kernel;
  launch.arguments = arguments;
  watch_signals(true);
  volatile bool is_right = false;
  if (!_setjmp(launch.end)) {
    make_threads();
    begin_regions(arrays, array_count);
    // Each pointer argument: its index, the array that it points into, and the offset.
    for (int i = 0; i < pointer_count; ++i)
      *static_cast<char**>(arguments[places[2 * i]]) =
          launch.regions[places[2 * i + 1]].begin + offsets[i];
    run_blocks(order, seed);
    is_right = true;
  }
  watch_signals(false);
  end_regions(is_right, arrays, array_count);
  if (is_right) return 0;
  snprintf(message, size, "%d\n%s", (int)launch.fault, launch.message.c_str());
  return 1;
}
