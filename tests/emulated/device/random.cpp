#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include "order.h"

namespace emulated {
namespace {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(DEVICE_TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "emulated: a generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "emulated: a generator has no offset"); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
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
