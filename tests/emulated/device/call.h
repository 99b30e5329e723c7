// One operator on the device: its tensors are shown to the CPU's kernel without a copy, and what that returns or changes
// becomes the device's.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory.h"

namespace emulated {

class Call {
 public:
  explicit Call(std::string name, std::optional<c10::Device> device = std::nullopt) : name_(std::move(name)), device_(device) {}

  // Take the device from an argument. Refuse one of another device as CUDA does: but for numbers, tensors of the CPU that
  // are only read, and indices.
  void meet(const at::Tensor& tensor, bool cpu_allowed, bool written);
  // The same memory as a tensor of the CPU.
  at::Tensor show(const at::Tensor& tensor, bool written, bool read = true);
  // What the kernel returned, as a tensor of the device.
  at::Tensor take(const at::Tensor& tensor);
  // Sizes and memory that the kernel changed in its arguments.
  void update();
  // Wait for work of other threads that the current stream is behind.
  void begin() { settle(current_index(device().index())); }
  // Note what was read and written, as one operation on the current stream.
  void note();

  c10::Device device() const { return device_.value_or(c10::Device(DEVICE_TYPE, current_device)); }
  bool has_device() const { return device_.has_value(); }
  void set_device(c10::Device device) { device_ = device; }
  const std::string& name() const { return name_; }

 private:
  struct Shown {
    at::Tensor device, cpu;
    bool read, written;
  };
  c10::Storage adopt(const c10::Storage& cpu);

  std::string name_;
  std::optional<c10::Device> device_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_of_, device_of_;
  std::vector<Shown> shown_;
};

}  // namespace emulated
