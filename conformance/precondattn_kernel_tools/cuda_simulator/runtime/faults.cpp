// The messages of errors.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace simulated {

void fail(FaultKind kind, const char* format, ...) {
  char text[2048];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  launch.fault = kind;
  launch.message = text;
  launch.current = -1;
  _longjmp(launch.end, 1);
}

std::string place(Site site) {
  const char* slash = strrchr(site.file, '/');
  return "line " + std::to_string(site.line) + " of " + (slash ? slash + 1 : site.file);
}

std::string place_of_code(uint32_t code) {
  char text[32];
  snprintf(text, sizeof text, "<code %x>", code);
  return text;
}

static std::string triple(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

std::string who(int thread) { return "thread " + triple(launch.all[thread].index); }

std::string where(int thread) {
  return who(thread) + " of block " + triple(launch.block_at);
}

void stop(const char* why, Site site) {
  const int thread = launch.current;
  fail(FaultKind::OTHER, "%s: %s, %s", where(thread).c_str(), why, place(site).c_str());
}

}  // namespace simulated

// Handlers of the compiler's checks of undefined behaviour. Their data begin with the position in
// the source.
namespace {

struct Type {
  uint16_t kind, info;
  char name[1];
};
struct Place {
  const char* file;
  uint32_t line, column;
};
struct OutOfBounds {
  Place place;
  const Type* array;
  const Type* index;
};
struct Mismatch {
  Place place;
  const Type* type;
  uint8_t log_alignment, kind;
};

[[noreturn]] void undefined(const void* data, simulated::FaultKind kind, const std::string& what) {
  const Place& at = *static_cast<const Place*>(data);
  const std::string thread = simulated::where(simulated::launch.current);
  const std::string place = simulated::place({at.file, (int)at.line});
  simulated::fail(kind, "%s: %s, %s", thread.c_str(), what.c_str(), place.c_str());
}

[[noreturn]] void overflow(const void* data) {
  undefined(data, simulated::FaultKind::OTHER, "an integer overflows");
}

}  // namespace

extern "C" {
__attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds(OutOfBounds* data,
                                                                        uint64_t index) {
  const int bits = 1 << (data->index->info >> 1);
  const bool is_signed = data->index->info & 1;
  const int64_t value = is_signed ? (int64_t)(index << (64 - bits)) >> (64 - bits) : (int64_t)index;
  undefined(data, simulated::FaultKind::OUT_OF_BOUNDS,
            "index " + std::to_string(value) + " is outside of an array of type " +
                data->array->name);
}
// A vector is loaded and stored by one instruction, at a multiple of its size.
void __ubsan_handle_type_mismatch_v1(Mismatch* data, char* address) {
  std::string what = std::string("a ") + data->type->name + " is used";
  if (const simulated::Region* region = simulated::find_region(address))
    what += " at byte " + std::to_string(address - region->begin) + " of " + region->name;
  undefined(data, simulated::FaultKind::OUT_OF_BOUNDS,
            what + ", whose address is no multiple of " +
                std::to_string(1 << data->log_alignment));
}
void __ubsan_handle_add_overflow(void* data, uint64_t, uint64_t) { overflow(data); }
void __ubsan_handle_sub_overflow(void* data, uint64_t, uint64_t) { overflow(data); }
void __ubsan_handle_mul_overflow(void* data, uint64_t, uint64_t) { overflow(data); }
void __ubsan_handle_negate_overflow(void* data, uint64_t) { overflow(data); }
void __ubsan_handle_divrem_overflow(void* data, uint64_t, uint64_t) {
  undefined(data, simulated::FaultKind::OTHER, "an integer is divided by zero");
}
void __ubsan_handle_shift_out_of_bounds(void* data, uint64_t, uint64_t) {
  undefined(data, simulated::FaultKind::OTHER, "an integer is shifted by too many bits");
}
}
