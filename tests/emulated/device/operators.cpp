// Operators that the fallback cannot do: new memory, copies between devices, numbers for the host, storages, attention.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <torch/library.h>

#include <cstring>

#include "call.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::Device;
using c10::IntArrayRef;
using std::optional;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// ---------------------------------------------------------------------------------------------------- new memory
Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device, optional<bool> pin,
             optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, allocator(), KEYS, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<Device> device, optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), KEYS, c10::dtype_or_default(dtype));
}

// -------------------------------------------------------------------------------------------------------- copies
void hide(const Tensor& host) {  // until the copy to it is over
  if (host.is_contiguous()) std::memset(host.data_ptr(), 0xFF, host.nbytes());
}

// Asynchronous, from or to pinned memory. Either in a thread of the stream; or at once, where the host sees what came
// only after it has waited, and what it sent is compared then.
void copy_behind(Call& call, const Tensor& from, const Tensor& to, const Tensor& source, const Tensor& target) {
  int stream = current_index(call.device().index());
  bool down = to.device().is_cpu();
  if (largest_delay() > 0) {
    if (down) hide(to);
    run_later(stream, [from, to, source, target] {
      at::AutoDispatchBelowADInplaceOrView without_autograd;  // which the copy itself has gone through
      target.copy_(source);
    });
  } else if (down) {
    auto arrived = source.clone();
    hide(to);
    when_host_waits(stream, [to, arrived] {
      at::AutoDispatchBelowADInplaceOrView without_autograd;
      to.copy_(arrived);
    });
  } else {
    target.copy_(source);
    when_host_waits(stream, [from, sent = source.clone()] {
      if (!sent.equal(from)) report("host: pinned memory was changed before its asynchronous copy to the device was over", false);
    });
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool down = to.device().is_cpu(), up = from.device().is_cpu();
  Call call("copy_", down ? from.device() : to.device());
  auto source = call.show(from, false);
  auto target = call.show(to, true, false);
  call.begin();
  int stream = current_index(call.device().index());
  if (!down && !up && from.device() != to.device()) {  // the current streams of both devices wait for each other
    int other = current_index(from.device().index());
    settle(other);
    wait_on(stream, clock_of(other));
    wait_on(other, clock_of(stream));
  }
  call.note();
  if (non_blocking && from.numel() && ((down && is_pinned(to.data_ptr())) || (up && is_pinned(from.data_ptr())))) {
    copy_behind(call, from, to, source, target);
    return to;
  }
  // A copy of pageable memory to the device is taken into a buffer first: the host does not wait for the stream.
  if (down || (up && !non_blocking)) host_waits(clock_of(stream), down ? "copy to the host" : "copy to the device");
  target.copy_(source);
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& self) {
  Call call("item", self.device());
  auto value = call.show(self, false);
  call.begin();
  call.note();
  host_waits(clock_of(current_index(self.device().index())), "item");
  return value.item();
}

// ------------------------------------------------------------------------------------------------------ storages
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() || size.empty()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {count}, {1});
}
Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  auto nothing = at::empty({0}, self.options());
  return set_storage(self, nothing.storage(), 0, {0}, {1});
}
void record_stream_of(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), index_of(stream)); }

// ---------------------------------------------------------------------------- what the CPU has for some types only
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {  // CUDA: of integers, too
  Call call("histc", self.device());
  auto values = call.show(self, false);
  call.begin();
  auto counts = at::histc(values.is_floating_point() ? values : values.to(at::kDouble), bins, least, most);
  auto result = call.take(counts.to(values.scalar_type()));
  call.note();
  return result;
}

optional<Tensor> show(Call& call, const optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? optional<Tensor>(call.show(*tensor, false)) : std::nullopt;
}

// --------------------------------------------------------------------------------------------------- convolution
// torch leaves it to devices of this kind. The CPU chooses its kernel as for tensors of its own.
Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  Call call("convolution", input.device());
  auto x = call.show(input, false), w = call.show(weight, false);
  auto b = show(call, bias);
  call.begin();
  auto result = call.take(at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
  call.note();
  return result;
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride,
                                                        IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  Call call("convolution's backward", input.device());
  auto g = call.show(grad, false), x = call.show(input, false), w = call.show(weight, false);
  const int64_t channels = grad.size(1);
  call.begin();
  auto [dx, dw, db] = at::convolution_backward(g, x, w, IntArrayRef(channels), stride, padding, dilation, transposed, output_padding,
                                               groups, wanted);
  auto first = call.take(dx), second = call.take(dw), third = call.take(db);
  call.note();
  return {first, second, third};
}

// ----------------------------------------------------------------------------------------------------- attention
// torch chooses among a device's kernels for scaled dot-product attention. Here it chooses as for the CPU, so that the
// bits are the same.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask, double dropout,
                         bool causal, optional<double> scale, bool grouped) {
  if (mask && mask->defined() && mask->requires_grad()) return int64_t(at::SDPBackend::math);
  Call call("the choice of attention");
  auto choice = at::_fused_sdp_choice(call.show(query, false), call.show(key, false), call.show(value, false), show(call, mask),
                                      dropout, causal, scale, grouped);
  return choice == int64_t(at::SDPBackend::math) ? choice : int64_t(at::SDPBackend::overrideable);
}
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask, double dropout, bool causal, bool,
    optional<double> scale) {
  Call call("attention", query.device());
  auto q = call.show(query, false), k = call.show(key, false), v = call.show(value, false);
  auto shown_mask = show(call, mask);
  call.begin();
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, shown_mask, scale);
  auto result = call.take(out), kept = call.take(sums);
  call.note();
  auto nothing = [&] { return at::empty({0}, query.options()); };
  return {result, kept, Tensor(), Tensor(), query.size(2), key.size(2), nothing(), nothing(), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, std::array<bool, 4>,
    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const Tensor&, const Tensor&, optional<double> scale) {
  Call call("attention's backward", query.device());
  auto read = [&](const Tensor& tensor) { return call.show(tensor, false); };
  auto g = read(grad), q = read(query), k = read(key), v = read(value), o = read(out), s = read(sums);
  auto shown_mask = show(call, mask);
  call.begin();
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, o, s, dropout, causal, shown_mask, scale);
  auto first = call.take(dq), second = call.take(dk), third = call.take(dv);
  call.note();
  return {first, second, third, Tensor()};
}

// ------------------------------------------------------------------------------------------------------ parameters
// torch asks whether Module.to may keep a Parameter, with its attributes, and change its data: for CUDA it may.
bool can_take_data(const Tensor& tensor, const Tensor& other) {
  return tensor.layout() == at::kStrided && other.layout() == at::kStrided;
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { library.impl("_has_compatible_shallow_copy_type", can_take_data); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", can_take_data);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream_of);
  library.impl("histc", histc);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("_fused_sdp_choice", choose_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}

// ------------------------------------------------------------------------------------------------------ autocast
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_PROMOTE(WIDEST_PRECISION)
}

}  // namespace
}  // namespace emulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::choose_attention)
}
