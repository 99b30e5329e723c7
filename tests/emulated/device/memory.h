// The device's memory, which is the host's: who used which bytes on which stream, and pinned memory.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <set>

#include "order.h"

namespace emulated {

struct Access {
  int stream;
  int64_t time;
  uintptr_t begin, end;
  bool write;
  SitePtr site;
};

// The memory of one storage: the context of its DataPtr.
struct Block {
  c10::DataPtr owner;  // of the bytes
  size_t size;
  c10::Device device;
  int stream;                // the current one when it was allocated
  std::vector<Access> accesses;  // those that a later one may conflict with
  std::set<int> recorded;    // streams of record_stream
};
Block* block_of(const c10::Storage& storage);

// Make bytes of the CPU's memory the device's, allocated on its current stream.
c10::DataPtr device_memory(c10::DataPtr owner, size_t size, c10::Device device);
c10::Allocator* allocator();

// Note an access to bytes [begin, end) by the operation of that time on the stream, and report a conflict with an
// earlier one that the stream does not wait for.
void access(Block* block, uintptr_t begin, uintptr_t end, int stream, int64_t time, bool write, const SitePtr& site);
void record_stream(const c10::DataPtr& data, int stream);

int64_t bytes_now(int device);
int64_t most_bytes(int device);
void reset_most_bytes(int device);

at::HostAllocator* pinned_allocator();
bool is_pinned(const void* data);

}  // namespace emulated
