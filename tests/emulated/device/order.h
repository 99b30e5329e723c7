// The order of what runs on streams: vector clocks, events, the host's waits, and work that other threads do.
//
// A clock says, for each stream, how many of its operations are over once the owner of the clock goes on. A stream has
// one, an event a copy of one, the host one. Waiting is taking the maximum. Two operations are in order if the clock of
// the later one's stream holds the earlier one.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "stack.h"

namespace emulated {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 64;  // streams below this number are the devices' default ones

using Clock = std::vector<int64_t>;
void merge(Clock& into, const Clock& from);
inline int64_t at(const Clock& clock, int stream) { return stream < int(clock.size()) ? clock[stream] : 0; }

struct Event {
  Clock clock;
  int64_t nanoseconds = 0;
  bool asked = false;  // whether it is over, and answered no: the host has to ask again, or wait
};

extern std::recursive_mutex mutex;  // of all state in these files; never taken before Python's lock
extern thread_local c10::DeviceIndex current_device;

int num_devices();
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(const c10::Stream& stream);
c10::Stream new_stream(c10::DeviceIndex device);
int index_of(const c10::Stream& stream);
int current_index(c10::DeviceIndex device);  // of its current stream

Clock clock_of(int stream);  // with what the host has waited for
int64_t launch(int stream);  // begin an operation on the stream, and return its time
void wait_on(int stream, const Clock& clock);
void record(Event& event, int stream, bool timed);

// The host waits until what is in the clock is over. Counted under the site's name, unless there is none.
void host_waits(const Clock& clock, const char* what = nullptr);
void host_waits_for_all(const char* what);
bool host_knows(const Clock& clock);   // has the host waited for all of it?
bool host_finds(const Clock& clock);   // asks without a wait: is no thread still at it?
void when_host_waits(int stream, std::function<void()> then);  // call it once the host has waited for all until now

// Work of a thread on a stream. What is behind it on streams waits for its end.
int64_t begin_work(int stream);
void end_work(int64_t ticket);
void settle(int stream);  // wait for the work that this stream's next operation is behind
void run_later(int stream, std::function<void()> copy);  // in a thread of the stream, after a random delay
double largest_delay();  // milliseconds, from EMULATED_OVERLAP; 0: all work is done at once
void set_largest_delay(double milliseconds);

// Faults, and how often each was seen.
void report(const std::string& message, bool may_raise = true);
std::map<std::string, int64_t> reports();
void clear_reports();
void set_raising(bool raise);

// Waits of the host, by operation, with the place if traced.
std::map<std::string, int64_t> synchronisations();
void clear_synchronisations();
void trace_synchronisations(bool on);
void refuse_synchronisations(bool on);

}  // namespace emulated
