// Operators of the fake device: copies, views, and one fallback for all others.
//
// The fallback queues the kernel of the processor. The shapes of the results come from a call with
// meta tensors. If they depend on values, or if the result is no tensor, the host waits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "backend.h"

namespace at::autocast {  // its header includes all operators
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace fake {
namespace {

using c10::IValue;
using Values = std::vector<IValue>;

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// Kernels of the processor, whatever the calling thread does: autograd, autocast, modes of Python.
// An operation may run in any thread that waits.
struct PlainKernels {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
};

void run_in_current_stream(int device, Work work) {
  enqueue(current_stream(device), [work = std::move(work)] {
    at::internal::lazy_init_num_threads();
    PlainKernels plain;
    work();
  });
}

void wait_for_current_stream(int device) { wait_on_host(end_of(current_stream(device))); }

// The place of a tensor's values in memory. It keeps nothing alive, as on a real device.
struct Region {
  void* start = nullptr;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool is_conj, is_neg;

  explicit Region(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        is_conj(tensor.is_conj()),
        is_neg(tensor.is_neg()) {
    if (tensor.numel() > 0) start = backing(tensor.const_data_ptr());
  }

  at::Tensor tensor() const {
    auto options = at::TensorOptions().dtype(dtype);
    auto made = start ? at::from_blob(start, sizes, strides, options)
                      : at::empty_strided(sizes, strides, options);
    made._set_conj(is_conj);
    made._set_neg(is_neg);
    return made;
  }
};

// --- memory -------------------------------------------------------------------------------------

constexpr auto KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                               std::optional<c10::Layout>, std::optional<c10::Device> device,
                               std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator(), KEYS, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), KEYS,
                                           c10::dtype_or_default(dtype));
}

// New memory for a larger size gets the old content in the order of the stream.
const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  if (tensor.sizes() == size && !format) return tensor;
  auto* resized = tensor.unsafeGetTensorImpl();
  resized->set_sizes_contiguous(size);
  if (format) resized->empty_tensor_restride(*format);
  auto num_bytes = size_t(resized->storage_offset() + resized->numel()) * tensor.element_size();
  if (resized->numel() > 0 && num_bytes > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), num_bytes);
  return tensor;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  use_in_stream(tensor.storage().data(), {index_of(stream.device()), stream.id()});
}

// --- copies -------------------------------------------------------------------------------------

void queue_copy(int device, const Region& source, const Region& target, std::shared_ptr<void> held) {
  run_in_current_stream(device, [=] {
    (void)held;  // pinned memory of the host, until the copy has run
    target.tensor().copy_(source.tensor());
  });
}

void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto source = current_stream(index_of(from.device()));
  auto target = current_stream(index_of(to.device()));
  bool is_one_device = source.device == target.device;
  if (!is_one_device) wait_in_stream(source, record(target));
  queue_copy(source.device, Region(from), Region(to), nullptr);
  if (!is_one_device) wait_in_stream(target, record(source));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (is_ours(from) && is_ours(to)) {
    copy_between_devices(from, to);
  } else if (is_ours(to)) {
    auto device = index_of(to.device());
    if (auto held = hold_pinned(from.const_data_ptr()); held && non_blocking) {
      queue_copy(device, Region(from), Region(to), held);
    } else {  // pageable memory is read before the call returns
      at::Tensor staged;
      {
        PlainKernels plain;
        staged = from.detach().clone();
      }
      Region target(to);
      run_in_current_stream(device, [=] { target.tensor().copy_(staged); });
      if (!non_blocking) wait_for_current_stream(device);
    }
  } else {
    auto device = index_of(from.device());
    auto held = hold_pinned(to.const_data_ptr());
    queue_copy(device, Region(from), Region(to), held);
    if (!held || !non_blocking) wait_for_current_stream(device);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

c10::Scalar local_scalar_dense(const at::Tensor& tensor) {
  wait_for_current_stream(index_of(tensor.device()));
  PlainKernels plain;
  return at::native::_local_scalar_dense_cpu(Region(tensor).tensor());
}

// --- all other operators ------------------------------------------------------------------------

// The same argument with each tensor replaced; `replace` is called in a fixed order.
template <typename Replace>
IValue replaced(const IValue& value, Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& one : value.toTensorVector()) made.push_back(replace(one));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      made.push_back(one ? std::optional(replace(*one)) : std::nullopt);
    return made;
  }
  return value;
}

template <typename Replace>
Values replaced(const Values& values, Replace replace) {
  Values made;
  for (auto& value : values) made.push_back(replaced(value, replace));
  return made;
}

template <typename Visit>
void for_each_tensor(const Values& values, Visit visit) {
  replaced(values, [&](const at::Tensor& one) {
    visit(one);
    return one;
  });
}

void replace_devices(Values& values, c10::Device device) {
  for (auto& value : values)
    if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) value = device;
}

// Arguments or results, apart from the tensors that they were given with.
class Recorded {
 public:
  explicit Recorded(const Values& values)
      : values_(replaced(values, [&](const at::Tensor& one) -> at::Tensor {
          if (is_ours(one)) {
            tensors_.push_back(Region(one));
          } else {
            tensors_.push_back(one.defined() ? one.detach().clone() : one);
          }
          return {};
        })) {
    replace_devices(values_, at::kCPU);
  }

  Values with_tensors() const {
    size_t at = 0;
    return replaced(values_, [&](const at::Tensor&) {
      auto& one = tensors_.at(at++);
      auto* region = std::get_if<Region>(&one);
      return region ? region->tensor() : std::get<at::Tensor>(one);
    });
  }

 private:
  std::vector<std::variant<Region, at::Tensor>> tensors_;
  Values values_;
};

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

c10::Device device_of_call(const Values& args) {
  auto found = torch_device(current_device());
  for (auto& value : args)
    if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE)
      found = torch_device(index_of(value.toDevice()));
  bool is_first = true;
  for_each_tensor(args, [&](const at::Tensor& one) {
    if (is_ours(one) && std::exchange(is_first, false)) found = one.device();
  });
  return found;
}

Values meta_call(const c10::OperatorHandle& op, const Values& args, Values* after = nullptr) {
  auto stack = replaced(args, [](const at::Tensor& one) {
    bool is_number = one.defined() && one.is_cpu() && one.dim() == 0;
    if (!one.defined() || is_number) return one;
    return at::empty_strided(one.sizes(), one.strides(), one.options().device(at::kMeta));
  });
  replace_devices(stack, at::kMeta);
  if (after) *after = stack;  // the same tensors, of which the call may change the shapes
  op.callBoxed(&stack);
  return stack;
}

// The arguments that the operator writes and returns. Resizes those given as `out=`.
Values written_results(const c10::OperatorHandle& op, const Values& args) {
  const auto& schema = op.schema();
  bool has_out = false;
  for (auto& argument : schema.arguments()) has_out |= argument.is_out();
  if (has_out) {
    Values after;
    meta_call(op, args, &after);
    for (size_t at = 0; at < args.size(); ++at) {
      if (!schema.arguments()[at].is_out() || !args[at].isTensor()) continue;
      auto tensor = args[at].toTensor();
      auto wanted = after[at].toTensor();
      if (is_ours(tensor) && tensor.sizes() != wanted.sizes())
        resize(tensor, wanted.sizes(), std::nullopt);
    }
  }
  Values results;
  for (auto& result : schema.returns())
    for (size_t at = 0; at < args.size(); ++at)
      if (is_written(schema.arguments()[at]) &&
          *schema.arguments()[at].alias_info() == *result.alias_info())
        results.push_back(args[at]);
  return results;
}

Values new_results(const c10::OperatorHandle& op, const Values& args, c10::Device device) {
  return replaced(meta_call(op, args), [&](const at::Tensor& one) {
    if (!one.defined()) return one;
    return at::empty_strided(one.sizes(), one.strides(), one.options().device(device));
  });
}

// A scalar `out` in memory of the host that can grow, and its place. Losses use it as scratch.
struct Scalar {
  size_t index;
  Region region;
  at::Tensor made;
};

std::vector<Scalar> scalar_results(const c10::OperatorHandle& op, const Values& args) {
  std::vector<Scalar> found;
  for (size_t at = 0; at < args.size(); ++at) {
    if (!op.schema().arguments()[at].is_out() || !args[at].isTensor()) continue;
    auto tensor = args[at].toTensor();
    if (is_ours(tensor) && tensor.dim() == 0) found.push_back({at, Region(tensor), {}});
  }
  return found;
}

enum class Kind { writes, creates, needs_values };

Kind kind_of(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output))
    return Kind::needs_values;
  bool writes = true, is_tensors = true;
  for (auto& result : op.schema().returns()) {
    auto type = result.type()->str();
    is_tensors &= type == "Tensor" || type == "Tensor[]";
    writes &= is_written(result);
    if (result.alias_info() != nullptr && !is_written(result)) return Kind::needs_values;
  }
  if (writes) return Kind::writes;
  return is_tensors ? Kind::creates : Kind::needs_values;
}

// Such numbers are drawn at the call, so that the generator has the state after them.
bool draws_on_host(const Values& args) {
  for (auto& value : args)
    if (value.isGenerator() && random_state_of(value.toGenerator()) == nullptr) return true;
  return false;
}

void take_random_numbers(const c10::OperatorHandle& op, Values& args, int device,
                         std::vector<std::pair<size_t, Draw>>& draws) {
  for (size_t at = 0; at < args.size(); ++at) {
    bool is_default = args[at].isNone() && op.schema().arguments()[at].name() == "generator";
    if (!is_default && !args[at].isGenerator()) continue;
    auto* state = is_default ? &default_random_state(device) : random_state_of(args[at].toGenerator());
    if (state == nullptr) continue;
    draws.emplace_back(at, draw_from(*state, device));
    args[at] = IValue();
  }
}

void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (take_refusal()) throw std::runtime_error("fake device: out of memory, of an earlier call");
  auto count = op.schema().arguments().size();
  Values args(stack->end() - count, stack->end());
  auto device = device_of_call(args);
  c10::DeviceGuard guard(device);
  auto kind = kind_of(op);
  std::optional<Values> results;
  if (kind != Kind::needs_values && !draws_on_host(args)) {
    PlainKernels plain;
    try {
      results = kind == Kind::writes ? written_results(op, args) : new_results(op, args, device);
    } catch (const std::exception&) {
      // The shapes depend on values, or the call is wrong: the kernel of the processor decides.
    }
  }
  std::vector<std::pair<size_t, Draw>> draws;
  take_random_numbers(op, args, device.index(), draws);
  if (!results) {
    wait_for_current_stream(device.index());
    std::copy(args.begin(), args.end(), stack->end() - count);
    for (auto& [at, draw] : draws)
      stack->at(stack->size() - count + at) = at::make_generator<at::CPUGeneratorImpl>(draw.seed());
    at::native::cpu_fallback(op, stack);
    return;
  }
  PlainKernels plain;
  Recorded inputs(args);
  std::optional<Recorded> outputs;
  if (kind == Kind::creates) outputs.emplace(*results);
  auto scalars = scalar_results(op, args);
  run_in_current_stream(device.index(), [op, inputs, outputs, draws, scalars]() mutable {
    auto running = inputs.with_tensors();
    for (auto& one : scalars) {
      one.made = at::empty_strided({0}, {1}, at::TensorOptions().dtype(one.region.dtype));
      running[one.index] = one.made;
    }
    for (auto& [at, draw] : draws)
      running[at] = at::make_generator<at::CPUGeneratorImpl>(draw.seed());
    op.callBoxed(&running);
    for (auto& one : scalars) one.region.tensor().copy_(one.made);
    if (!outputs) return;
    std::vector<at::Tensor> targets;
    for_each_tensor(outputs->with_tensors(), [&](const at::Tensor& one) { targets.push_back(one); });
    size_t at = 0;
    for_each_tensor(running, [&](const at::Tensor& one) {
      auto& target = targets.at(at++);
      bool is_unused = !one.defined() || one.numel() == 0;  // as the statistics of an evaluation
      if (target.defined() && !is_unused) target.copy_(one);
    });
  });
  torch::jit::drop(*stack, count);
  for (auto& result : *results) stack->push_back(std::move(result));
}

void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  auto dtype = at::autocast::get_autocast_dtype(DEVICE_TYPE);
  auto count = op.schema().arguments().size();
  Values args(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  for (auto& value : replaced(args, [&](const at::Tensor& one) {
         return is_ours(one) && one.scalar_type() == at::kFloat ? one.to(dtype) : one;
       }))
    stack->push_back(value);
  op.callBoxed(stack);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  launch(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  // (grad, input, weight, stride, padding, dilation, transposed, output_padding, groups, mask); the
  // operator of the processor has the size of the bias after the weight.
  auto first = stack->end() - 10;
  auto weight = (first + 2)->toTensor();
  bool is_transposed = (first + 6)->toBool();
  auto size = is_transposed ? weight.size(1) * (first + 8)->toInt() : weight.size(0);
  stack->insert(first + 3, IValue(std::vector<int64_t>{size}));
  launch(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

at::Tensor& set_from_storage(at::Tensor& tensor, c10::Storage source, int64_t offset,
                             c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(source), offset, size, stride);
}

at::Tensor& set_from_whole_storage(at::Tensor& tensor, c10::Storage source) {
  return at::native::set_(tensor, std::move(source));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_.source_Storage", set_from_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_from_storage);
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Compositions of other operators by default, which give other bytes than the processor's kernels.
  for (auto name : {"native_layer_norm", "native_group_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (auto name : {"linear", "matmul", "conv2d"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_call>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

}  // namespace
}  // namespace fake
