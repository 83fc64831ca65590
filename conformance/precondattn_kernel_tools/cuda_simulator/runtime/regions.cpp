// Memory of the arrays and of shared variables, each inside a large guard region.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace simulated {

// Larger than any accidental offset from one array to the next.
constexpr size_t ROOM_OF_ARRAY = size_t(64) << 20, ROOM_OF_SHARED = size_t(1) << 20;
constexpr size_t PAGE = 4096;

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static char* map(size_t bytes, int protection) {
  void* found = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) fail(FaultKind::OTHER, "no memory for %zu bytes", bytes);
  return static_cast<char*>(found);
}

static Region& add_region(const char* name, bool is_shared, size_t bytes, size_t granule,
                          size_t shift, size_t guard) {
  Region region{};
  region.name = name;
  region.is_shared = is_shared;
  region.granule = granule;
  const size_t middle = whole_pages(shift + bytes);
  region.first = map(2 * guard + middle, PROT_NONE);
  region.last = region.first + 2 * guard + middle;
  region.begin = region.first + guard + shift;
  region.end = region.begin + bytes;
  if (middle && mprotect(region.first + guard, middle, PROT_READ | PROT_WRITE))
    fail(FaultKind::OTHER, "no memory for %zu bytes", bytes);
  region.shadow_bytes = whole_pages((bytes / granule + 2) * sizeof(Shadow));
  region.shadow = reinterpret_cast<Shadow*>(map(region.shadow_bytes, PROT_READ | PROT_WRITE));
  launch.regions.push_back(region);
  return launch.regions.back();
}

void begin_regions(const Array* arrays, int count) {
  for (int i = 0; i < count; ++i) {
    const Array& array = arrays[i];
    Region& region = add_region(array.name, false, array.bytes, array.granule, array.alignment,
                                ROOM_OF_ARRAY);
    if (array.bytes) memcpy(region.begin, array.memory, array.bytes);
  }
}

void end_regions(bool copies_back, const Array* arrays, int count) {
  for (int i = 0; copies_back && i < count; ++i)
    if (arrays[i].bytes) memcpy(arrays[i].memory, launch.regions[i].begin, arrays[i].bytes);
  for (Region& region : launch.regions) {
    munmap(region.first, region.last - region.first);
    munmap(region.shadow, region.shadow_bytes);
  }
  launch.regions.clear();
}

// Shared memory keeps nothing of the previous block; as floating point it is NaN.
void begin_block_of_regions() {
  for (Region& region : launch.regions)
    if (region.is_shared) memset(region.begin, 0xff, region.end - region.begin);
}

// At an odd multiple of the alignment: code that relies on a larger alignment is misaligned.
static Region& add_shared(const char* name, size_t bytes, size_t alignment) {
  launch.shared_bytes = (launch.shared_bytes + alignment - 1) / alignment * alignment + bytes;
  if (launch.shared_bytes > launch.shared_limit)
    fail(FaultKind::OTHER,
         "the kernel needs %zu bytes of shared memory, and may have %zu: above 48 KiB it is to be "
         "dynamic, and max_dynamic_shared_size_bytes of the function has to be raised",
         launch.shared_bytes, launch.shared_limit);
  const size_t shift = 256 + alignment;
  Region& region = add_region(name, true, bytes, 1, shift, ROOM_OF_SHARED);
  memset(region.begin, 0xff, bytes);
  return region;
}

void* shared_variable(SharedVariable* variable, size_t bytes, size_t alignment, const char* name) {
  if (variable->launch != launch.number) {
    variable->memory = add_shared(name, bytes, alignment).begin;
    variable->launch = launch.number;
  }
  return variable->memory;
}

void* dynamic_shared_memory(size_t alignment) {
  static SharedVariable variable;
  return shared_variable(&variable, launch.dynamic_bytes, std::max<size_t>(alignment, 16),
                         "dynamic shared memory");
}

Region* find_region(const char* address) {
  static size_t last = 0;
  auto holds = [&](const Region& region) {
    return address >= region.first && address < region.last;
  };
  if (last < launch.regions.size() && holds(launch.regions[last])) return &launch.regions[last];
  for (size_t i = 0; i < launch.regions.size(); ++i)
    if (holds(launch.regions[i])) return &launch.regions[last = i];
  return nullptr;
}

// The address range of the module with the kernels, its constants and `__device__` variables.
struct Image {
  const char* base;
  const char* first;
  const char* last;
};

static int look(dl_phdr_info* info, size_t, void* data) {
  Image& image = *static_cast<Image*>(data);
  const char* here = reinterpret_cast<const char*>(&launch);
  const char* base = reinterpret_cast<const char*>(info->dlpi_addr);
  const char *first = nullptr, *last = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    const char* begin = base + part.p_vaddr;
    if (!first || begin < first) first = begin;
    last = std::max(last, begin + part.p_memsz);
  }
  if (here < first || here >= last) return 0;
  image = {base, first, last};
  return 1;
}

static const Image& image() {
  static const Image found = [] {
    Image one{};
    dl_iterate_phdr(look, &one);
    return one;
  }();
  return found;
}

bool is_of_module(const char* address) {
  return address >= image().first && address < image().last;
}

uint32_t code_of(const void* address) {
  return static_cast<uint32_t>(static_cast<const char*>(address) - image().base);
}

}  // namespace simulated
