// Every operator that has a kernel for the CPU, by that kernel.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

#include "call.h"
#include "module.h"
#include "random.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;

// Indices may be of the CPU.
const std::set<std::string> TAKES_CPU_INDICES{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                                              "aten::_unsafe_index", "aten::_unsafe_index_put"};
// The size of the result, or a value, is known to the host only once it has waited.
const std::set<std::string> WAITS{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                  "aten::unique_consecutive", "aten::bincount", "aten::equal", "aten::repeat_interleave"};
// No memory is touched.
const std::set<std::string> VIEWS{"aten::view", "aten::as_strided", "aten::_reshape_alias", "aten::unfold", "aten::alias",
                                  "aten::detach", "aten::set_", "aten::resize_", "aten::as_strided_", "aten::view_as_real"};

// Call visit(tensor, is an index list) for each tensor of an argument, and put what it returns in its place.
template <typename Visit>
void each_tensor(IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = visit(value.toTensor(), false);
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(visit(tensor, false));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(visit(*tensor, true)) : tensor);
    value = list;
  }
}

// The CPU's generator has the state of the device's, for an operator that takes none as an argument.
class DrawnFrom {
 public:
  explicit DrawnFrom(at::Generator source) : source_(std::move(source)), kept_(usual_.get_state()) {
    usual_.set_state(source_.get_state());
  }
  ~DrawnFrom() {
    source_.set_state(usual_.get_state());
    usual_.set_state(kept_);
  }

 private:
  at::Generator source_, usual_ = at::detail::getDefaultCPUGenerator();
  Tensor kept_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Call call(schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name());
  auto written = [&](size_t i) { return arguments[i].alias_info() && arguments[i].alias_info()->isWrite(); };

  const bool takes_indices = TAKES_CPU_INDICES.count(schema.name());
  bool waits = WAITS.count(schema.name());
  for (size_t i = 0; i < arguments.size(); ++i)
    each_tensor((*stack)[first + i], [&](const Tensor& tensor, bool in_index) {
      call.meet(tensor, takes_indices && in_index, written(i));
      waits |= in_index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);  // a mask's nonzero
      return tensor;
    });
  for (size_t i = 0; i < arguments.size(); ++i)
    if (const auto& value = (*stack)[first + i]; value.isDevice() && !call.has_device() && value.toDevice().has_index())
      call.set_device(value.toDevice());
  call.set_device(call.device());

  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    each_tensor(value, [&](const Tensor& tensor, bool) { return call.show(tensor, written(i), !arguments[i].is_out()); });
    if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() || arguments[i].name() == "generator") {
      has_generator = true;
      value = of_cpu(value.isGenerator() ? value.toGenerator() : default_generator(call.device().index()));
    }
  }
  call.begin();
  if (waits) host_waits(clock_of(current_index(call.device().index())), call.name().c_str());
  {
    std::optional<DrawnFrom> drawn;
    if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) drawn.emplace(of_cpu(default_generator(call.device().index())));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.update();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const Tensor& tensor, bool) { return call.take(tensor); });
  if (!VIEWS.count(schema.name())) call.note();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

// Where the CPU has a kernel of its own, use that and not the composite one of several operators, whose bits may differ.
// Products of groups are one kernel on accelerators, for which the host does not wait.
void register_fallback() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasSchema() &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.name == "aten::_grouped_mm") &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      library.impl((name.overload_name.empty() ? name.name : name.name + "." + name.overload_name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace emulated
