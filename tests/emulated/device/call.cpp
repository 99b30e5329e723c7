#include "call.h"

#include <c10/core/CPUAllocator.h>

namespace emulated {

using at::Tensor;
using c10::Storage;
using c10::StorageImpl;

namespace {

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE_TYPE; }

// A tensor over the storage with the layout of another.
Tensor as(const Tensor& tensor, Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

c10::DataPtr keep(const Storage& storage) {  // its memory, for as long as the result lives
  return {const_cast<void*>(storage.data()), new Storage(storage), [](void* kept) { delete static_cast<Storage*>(kept); },
          c10::Device(c10::kCPU)};
}

Storage new_storage(c10::DataPtr data, size_t size, c10::Allocator* allocator) {
  return Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), size, std::move(data), allocator, true));
}

}  // namespace

void Call::meet(const Tensor& tensor, bool cpu_allowed, bool written) {
  if (!is_on_device(tensor)) {
    TORCH_CHECK(tensor.is_meta() || cpu_allowed || (tensor.dim() == 0 && !written),
                "Expected all tensors to be on the same device, but found at least two devices, ", device(), " and ",
                tensor.device(), "! (", name_, ")");
    return;
  }
  TORCH_CHECK(!device_ || *device_ == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              *device_, " and ", tensor.device(), "! (", name_, ")");
  device_ = tensor.device();
}

Tensor Call::show(const Tensor& tensor, bool written, bool read) {
  if (!is_on_device(tensor)) return tensor;
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  auto known = cpu_of_.find(impl);
  if (known == cpu_of_.end()) {
    c10::DataPtr borrowed(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU));
    auto storage = new_storage(std::move(borrowed), tensor.storage().nbytes(), c10::GetCPUAllocator());
    device_of_.emplace(storage.unsafeGetStorageImpl(), tensor.storage());
    known = cpu_of_.emplace(impl, std::move(storage)).first;
  }
  shown_.push_back({tensor, as(tensor, known->second, c10::DispatchKey::CPU), read, written});
  return shown_.back().cpu;
}

Storage Call::adopt(const Storage& cpu) {
  auto known = device_of_.find(cpu.unsafeGetStorageImpl());
  if (known != device_of_.end()) return known->second;
  auto made = new_storage(device_memory(keep(cpu), cpu.nbytes(), device()), cpu.nbytes(), allocator());
  device_of_.emplace(cpu.unsafeGetStorageImpl(), made);
  return made;
}

Tensor Call::take(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  for (const auto& one : shown_)
    if (one.cpu.is_same(tensor)) return one.device;
  bool fresh = !device_of_.count(tensor.storage().unsafeGetStorageImpl());
  auto made = as(tensor, adopt(tensor.storage()), c10::DispatchKey::PrivateUse1);
  if (fresh) shown_.push_back({made, tensor, false, true});
  return made;
}

void Call::update() {
  for (auto& one : shown_) {
    if (!one.written) continue;
    auto* impl = one.device.unsafeGetTensorImpl();
    const auto& cpu = one.cpu.storage();
    auto storage = adopt(cpu);
    if (storage.data() != cpu.data() || storage.nbytes() != cpu.nbytes()) {  // the kernel resized it
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(device_memory(keep(cpu), cpu.nbytes(), device()));
      storage.set_nbytes(cpu.nbytes());
    }
    if (!storage.is_alias_of(one.device.storage())) impl->set_storage_keep_dtype(storage);
    if (impl->sizes() != one.cpu.sizes() || impl->strides() != one.cpu.strides() || impl->storage_offset() != one.cpu.storage_offset()) {
      impl->set_storage_offset(one.cpu.storage_offset());
      impl->set_sizes_and_strides(one.cpu.sizes(), one.cpu.strides());
    }
  }
}

void Call::note() {
  int stream = current_index(device().index());
  auto time = launch(stream);
  auto site = here(name_);
  for (bool writes : {false, true})
    for (const auto& one : shown_) {
      bool concerned = one.written ? writes : one.read && !writes;
      if (!concerned || !one.device.numel() || !one.device.has_storage()) continue;
      auto begin = reinterpret_cast<uintptr_t>(one.device.storage().data()) + one.device.storage_offset() * one.device.itemsize();
      int64_t last = 0;
      for (int64_t i = 0; i < one.device.dim(); ++i) last += (one.device.size(i) - 1) * one.device.stride(i);
      if (auto* block = block_of(one.device.storage()))
        access(block, begin, begin + (last + 1) * one.device.itemsize(), stream, time, writes, site);
    }
}

}  // namespace emulated
