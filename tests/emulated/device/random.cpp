#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "order.h"

namespace emulated {
namespace {

at::Tensor as_tensor(c10::TensorImpl* state) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(state));
}

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(DEVICE_TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "emulated: a generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "emulated: a generator has no offset"); }
  // A state of the CPU's generator with a byte more: neither takes the other's.
  void set_state(const c10::TensorImpl& state) override {
    auto whole = as_tensor(const_cast<c10::TensorImpl*>(&state)), own = as_tensor(cpu.unsafeGetGeneratorImpl()->get_state().get());
    TORCH_CHECK(whole.numel() == own.numel() + 1, "RNG state is of another kind of device: ", whole.numel(), " bytes, not ", own.numel() + 1);
    cpu.unsafeGetGeneratorImpl()->set_state(*whole.narrow(0, 0, own.numel()).clone().unsafeGetTensorImpl());
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto own = as_tensor(cpu.unsafeGetGeneratorImpl()->get_state().get());
    return at::cat({own, at::zeros({1}, own.options())}).getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), cpu.clone()); }

  at::Generator cpu;
};

int known(int device) { return device < 0 ? current_device : device; }

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < num_devices(); ++i) made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all.at(known(device));
}
at::Generator new_generator(int device) { return at::make_generator<DeviceGenerator>(known(device)); }
at::Generator of_cpu(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == DEVICE_TYPE, "Expected a generator of the device, but found one of ", generator.device());
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace emulated
