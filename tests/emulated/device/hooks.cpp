// What torch asks of a device: its guard (current device and stream, events) and its hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <utility>

#include "memory.h"
#include "module.h"
#include "random.h"

namespace emulated {
namespace {

using c10::Device;
using c10::DeviceIndex;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Device getDevice() const override { return Device(DEVICE_TYPE, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices(), "emulated: device ", int(device.index()), " of ", num_devices());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  Device with_index(Device device) const { return device.has_index() ? device : getDevice(); }
  c10::Stream getStream(Device device) const override { return current_stream(with_index(device).index()); }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getNewStream(Device device, int) const override { return new_stream(with_index(device).index()); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    set_current_stream(next);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return host_finds(clock_of(index_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(clock_of(index_of(stream)), "Stream.synchronize");
  }
  void synchronizeDevice(DeviceIndex) const override { host_waits_for_all("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, index_of(stream));
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag flag) const override {
    if (!*event) *event = new Event();
    emulated::record(*static_cast<Event*>(*event), index_of(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_on(index_of(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    auto* known = static_cast<Event*>(event);
    if (!known || host_knows(known->clock)) return true;
    bool again = std::exchange(known->asked, true);
    return again && host_finds(known->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock, "Event.synchronize");
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto *begin = static_cast<Event*>(first), *end = static_cast<Event*>(second);
    return (end->nanoseconds - begin->nanoseconds) / 1e6;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(DEVICE_TYPE, device)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(DEVICE_TYPE, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    settle(current_index(current_device));
    auto other = allocator()->allocate(size);
    std::memcpy(other.get(), storage.data(), std::min(size, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(other));
    impl->set_nbytes(size);
  }
};

}  // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  at::setHostAllocator(DEVICE_TYPE, pinned_allocator());
}

}  // namespace emulated
