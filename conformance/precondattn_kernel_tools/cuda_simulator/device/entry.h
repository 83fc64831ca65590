// Calling a kernel by its pointer: its signature for Python, its arguments from Python.
#pragma once
#include <utility>

namespace simulated {

// One letter and the size: f4 float, f2 half, b2 bfloat16, i4 int, u8 size_t, t1 bool, v0 void,
// x16 anything else.
template <class T>
int describe(char* to, size_t size) {
  using U = typename std::remove_cv<T>::type;
  if constexpr (std::is_void<U>::value) {
    return snprintf(to, size, "v0 ");
  } else {
    const char letter = std::is_same<U, bool>::value                                   ? 't'
                        : std::is_same<U, __nv_bfloat16>::value                        ? 'b'
                        : std::is_floating_point<U>::value || std::is_same<U, __half>::value ? 'f'
                        : std::is_integral<U>::value ? (std::is_signed<U>::value ? 'i' : 'u')
                                                     : 'x';
    return snprintf(to, size, "%c%zu ", letter, sizeof(U));
  }
}

template <class T>
int describe_parameter(char* to, size_t size) {
  if constexpr (std::is_pointer<T>::value) {
    using Target = typename std::remove_pointer<T>::type;
    const int length = snprintf(to, size, std::is_const<Target>::value ? "*c" : "*");
    return length + describe<Target>(to + length, size - length);
  } else {
    return describe<T>(to, size);
  }
}

// "*cf4 *f4 i4": const float*, float*, int.
template <class... Parameters>
void signature(void (*)(Parameters...), char* to, size_t size) {
  size_t length = 0;
  to[0] = 0;
  ((length += describe_parameter<Parameters>(to + length, size - length)), ...);
}

// Not instrumented: the arguments are in memory that does not belong to the kernel.
template <class... Parameters, size_t... I>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Parameters...), void** arguments,
                                                 std::index_sequence<I...>) {
  kernel(*(typename std::remove_reference<Parameters>::type*)arguments[I]...);
}

template <class... Parameters>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Parameters...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Parameters...>{});
}

}  // namespace simulated
