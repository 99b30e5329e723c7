#include "memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <map>

namespace emulated {
namespace {

constexpr size_t MOST_POISONED = size_t(64) << 20;  // bytes: ZeRO's bucket of 2 GB would take seconds
int64_t allocated[MOST_DEVICES] = {0}, peak[MOST_DEVICES] = {0};

const char* verb(bool write) { return write ? "writes" : "reads"; }
const char* past(bool write) { return write ? "wrote" : "read"; }

std::string conflict(const Access& before, const SitePtr& site, int stream, bool write) {
  return "race: " + site->what + " " + verb(write) + " on stream " + std::to_string(stream) + " what " +
         before.site->what + " " + past(before.write) + " on stream " + std::to_string(before.stream) +
         ", which it does not wait for\n  earlier, on stream " + std::to_string(before.stream) + ":\n" +
         text_of(*before.site) + "  now, on stream " + std::to_string(stream) + ":";
}

// The block goes: may another stream still be at it?
void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::string fault;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    allocated[block->device.index()] -= block->size;
    const auto clock = clock_of(block->stream);
    for (const auto& old : block->accesses)
      if (old.stream != block->stream && old.time > at(clock, old.stream) && !block->recorded.count(old.stream))
        fault = "freed: memory of stream " + std::to_string(block->stream) + " is freed while stream " +
                std::to_string(old.stream) + " may be at " + old.site->what +
                " on it: no record_stream, no wait\n  used by:\n" + text_of(*old.site) + "  freed by:";
  }
  if (!fault.empty()) report(fault, false);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto owner = c10::GetCPUAllocator()->allocate(size);
    if (size && size < MOST_POISONED) std::memset(owner.get(), 0xFF, size);  // NaN in every floating-point type
    auto made = device_memory(std::move(owner), size, c10::Device(DEVICE_TYPE, current_device));
    auto* block = static_cast<Block*>(made.get_context());
    auto begin = reinterpret_cast<uintptr_t>(made.get());
    access(block, begin, begin + size, block->stream, launch(block->stream), true, here("the allocation"));
    return made;
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
DeviceAllocator device_allocator;

std::map<uintptr_t, size_t> pinned;  // bytes by their place
void unpin(void* data) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    pinned.erase(reinterpret_cast<uintptr_t>(data));
  }
  std::free(data);
}
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, size + 1) == 0, "emulated: no pinned memory of ", size, " bytes");
    std::lock_guard<std::recursive_mutex> lock(mutex);
    pinned[reinterpret_cast<uintptr_t>(data)] = size + 1;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator the_pinned_allocator;

}  // namespace

REGISTER_ALLOCATOR(DEVICE_TYPE, &device_allocator);

c10::Allocator* allocator() { return &device_allocator; }
at::HostAllocator* pinned_allocator() { return &the_pinned_allocator; }

Block* block_of(const c10::Storage& storage) { return static_cast<Block*>(storage.data_ptr().get_context()); }

c10::DataPtr device_memory(c10::DataPtr owner, size_t size, c10::Device device) {
  auto* data = owner.get();
  auto* block = new Block{std::move(owner), size, device, current_index(device.index()), {}, {}};
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& now = allocated[device.index()];
  now += size;
  peak[device.index()] = std::max(peak[device.index()], now);
  return {data, block, &free_block, device};
}

void access(Block* block, uintptr_t begin, uintptr_t end, int stream, int64_t time, bool write, const SitePtr& site) {
  if (begin >= end) return;
  std::string fault;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    const auto clock = clock_of(stream);
    auto& kept = block->accesses;
    for (const auto& old : kept) {
      bool overlaps = old.begin < end && begin < old.end;
      if (overlaps && (write || old.write) && old.stream != stream && old.time > at(clock, old.stream))
        fault = conflict(old, site, stream, write);
    }
    // Whatever conflicts with an old access conflicts with this one too, if this one covers it and is behind it.
    kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Access& old) {
      bool covered = begin <= old.begin && old.end <= end && old.time <= at(clock, old.stream);
      return covered && (write || (!old.write && old.stream == stream));
    }), kept.end());
    kept.push_back({stream, time, begin, end, write, site});
  }
  if (!fault.empty()) report(fault);
}

void record_stream(const c10::DataPtr& data, int stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (data.get_context()) static_cast<Block*>(data.get_context())->recorded.insert(stream);
}

int64_t bytes_now(int device) { return allocated[device]; }
int64_t most_bytes(int device) { return peak[device]; }
void reset_most_bytes(int device) { peak[device] = allocated[device]; }

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto place = reinterpret_cast<uintptr_t>(data);
  auto after = pinned.upper_bound(place);
  if (after == pinned.begin()) return false;
  --after;
  return place < after->first + after->second;
}

}  // namespace emulated
