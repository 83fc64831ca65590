// A device of PyTorch without memory and without arithmetic, on which a call takes the host's time.
//
// PyTorch dispatches to it as to a GPU: tensors have shapes, strides and an address, an operator
// allocates its results and returns. The metadata of results are those that the device "meta"
// computes, at the first call with these arguments; later calls look them up. Reading an entry on
// the host, and copying from or to the host's memory, is an error: in a CUDA graph it is one too.
//
// `torch.ops.absent.operators` records what would launch a kernel: one line for each operator that
// is no view and no allocation, with its name and the bytes of its arguments and results.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kType = at::DeviceType::PrivateUse1;
const at::Device kDevice(kType, 0);

std::atomic<int64_t> live = 0, most_live = 0;  // The bytes of the arrays that exist.

void release(void* context) {
  const std::unique_ptr<size_t> size(static_cast<size_t*>(context));
  live -= *size;
}

// Every tensor has the same address, which is divisible by 16 and never read.
struct Nowhere final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    live += size;
    if (live > most_live) most_live = live.load();
    return {reinterpret_cast<void*>(uintptr_t(1) << 40), new size_t(size), &release, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}
} nowhere;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return kType; }
  at::Device exchangeDevice(at::Device) const override { return kDevice; }
  at::Device getDevice() const override { return kDevice; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  at::Stream getStream(at::Device) const noexcept override {
    return at::Stream(at::Stream::DEFAULT, kDevice);
  }
  at::Stream exchangeStream(at::Stream) const noexcept override {
    return at::Stream(at::Stream::DEFAULT, kDevice);
  }
  at::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The engine of autograd asks whether there is a device.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
} hooks;
const bool is_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &nowhere, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &nowhere,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Scalar read_entry(const at::Tensor&) { TORCH_CHECK(false, "reads an entry on the host"); }

bool is_recording = false;
std::ostringstream recorded;

// Bytes of a tensor; an axis along which all entries are the same one counts once.
int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) return 0;
  int64_t count = tensor.element_size();
  for (int64_t i = 0; i < tensor.dim(); ++i) count *= tensor.stride(i) ? tensor.size(i) : 1;
  return count;
}

int64_t bytes_of(const at::IValue& value) {
  if (value.isTensor()) return bytes_of(value.toTensor());
  int64_t total = 0;
  if (value.isList()) {
    for (const at::IValue& each : value.toListRef()) total += bytes_of(each);
  }
  return total;
}

std::string operators(bool record) {
  std::string text = recorded.str();
  recorded.str("");
  is_recording = record;
  return text;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& into, bool) {
  TORCH_CHECK(
      self.device() == into.device(), "copies between the host and the device: ", self.sizes());
  if (is_recording) recorded << "aten::copy " << bytes_of(self) + bytes_of(into) << "\n";
  return into;
}

struct Metadata {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool is_defined;
};

void describe(std::string& key, const void* bytes, size_t count) {
  key.append(static_cast<const char*>(bytes), count);
}

void describe(std::string& key, const at::Tensor& tensor) {
  const char dtype = tensor.defined() ? static_cast<char>(tensor.scalar_type()) : '-';
  key.push_back(dtype);
  if (!tensor.defined()) return;
  const int64_t axes = tensor.dim();
  describe(key, &axes, sizeof axes);
  describe(key, tensor.sizes().data(), axes * sizeof axes);
  describe(key, tensor.strides().data(), axes * sizeof axes);
}

void describe(std::string& key, const at::IValue& value) {
  key.push_back(';');
  if (value.isTensor()) return describe(key, value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) describe(key, each);
    return;
  }
  if (value.isInt()) {
    const int64_t number = value.toInt();
    return describe(key, &number, sizeof number);
  }
  if (value.isDouble()) {
    const double number = value.toDouble();
    return describe(key, &number, sizeof number);
  }
  if (value.isBool()) return key.push_back(value.toBool() ? 't' : 'f');
  if (value.isIntList()) {
    for (const int64_t number : value.toIntVector()) describe(key, &number, sizeof number);
    return;
  }
  if (value.isList()) {
    for (const at::IValue& each : value.toListRef()) describe(key, each);
    return;
  }
  if (value.isNone()) return;
  std::ostringstream text;
  text << value;
  key += text.str();
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) return tensor;
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::IValue on_meta(const at::IValue& value) {
  if (value.isTensor()) return on_meta(value.toTensor());
  if (value.isDevice()) return at::Device(at::kMeta);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(on_meta(each));
    return list;
  }
  if (value.isList() && value.toList().elementType()->isSubtypeOf(*c10::getTypePtr<std::optional<at::Tensor>>())) {
    c10::List<std::optional<at::Tensor>> list;
    for (const at::IValue& each : value.toListRef()) {
      if (each.isNone()) list.push_back(std::nullopt);
      else list.push_back(on_meta(each.toTensor()));
    }
    return list;
  }
  return value;
}

std::unordered_map<std::string, std::vector<Metadata>> known;

// The metadata of the results of an operator on the top `count` values of the stack.
const std::vector<Metadata>& results_of(
    const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t count) {
  std::string key = op.schema().name() + "." + op.schema().overload_name();
  const size_t first = stack.size() - count;
  for (size_t i = first; i < stack.size(); ++i) describe(key, stack[i]);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  torch::jit::Stack meta;
  for (size_t i = first; i < stack.size(); ++i) meta.push_back(on_meta(stack[i]));
  op.callBoxed(meta);
  std::vector<Metadata> results;
  for (const at::IValue& value : meta) {
    TORCH_CHECK(value.isTensor(), op.schema().name(), " does not return a tensor");
    const at::Tensor& each = value.toTensor();
    if (!each.defined()) results.push_back({{}, {}, at::kFloat, false});
    else results.push_back({each.sizes().vec(), each.strides().vec(), each.scalar_type(), true});
  }
  return known.emplace(std::move(key), std::move(results)).first->second;
}

void without_arithmetic(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t count = arguments.size(), first = stack->size() - count;
  std::vector<at::IValue> results;
  bool is_out = false;
  int64_t bytes = 0;
  if (is_recording) {
    for (size_t i = 0; i < count; ++i) bytes += bytes_of((*stack)[first + i]);
  }
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = arguments[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    results.push_back((*stack)[first + i]);
    is_out = is_out || arguments[i].is_out();
  }
  if (results.empty()) {
    for (const Metadata& each : results_of(op, *stack, count)) {
      results.push_back(
          !each.is_defined ? at::Tensor()
                           : at::detail::empty_strided_generic(
                                 each.sizes, each.strides, &nowhere,
                                 c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), each.dtype));
      bytes += bytes_of(results.back());
    }
  } else if (is_out) {  // A result that is given may have to be resized.
    const auto& metadata = results_of(op, *stack, count);
    for (size_t i = 0; i < results.size(); ++i) {
      auto* given = results[i].toTensor().unsafeGetTensorImpl();
      if (given->sizes() == at::IntArrayRef(metadata[i].sizes)) continue;
      given->set_sizes_and_strides(metadata[i].sizes, metadata[i].strides);
      given->unsafe_storage().unsafeGetStorageImpl()->set_nbytes(at::detail::computeStorageNbytes(
          metadata[i].sizes, metadata[i].strides, given->dtype().itemsize()));
    }
  }
  if (is_recording) recorded << op.schema().name() << " " << bytes << "\n";
  results.resize(op.schema().returns().size());
  stack->resize(first);
  for (at::IValue& each : results) stack->push_back(std::move(each));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&without_arithmetic>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", read_entry);
  m.impl("unfold", at::native::unfold);
}

// The most bytes that existed at once since the last call, beyond those that existed then.
int64_t most_bytes() {
  static int64_t before = 0;
  const int64_t most = most_live - before;
  before = most_live = live.load();
  return most;
}

TORCH_LIBRARY(absent, m) {
  m.def("operators(bool record) -> str", &operators);
  m.def("most_bytes() -> int", &most_bytes);
}

}  // namespace
