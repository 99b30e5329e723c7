#include "order.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <unordered_map>

#include "settings.h"

namespace emulated {

std::recursive_mutex mutex;
thread_local c10::DeviceIndex current_device = 0;

namespace {

constexpr int MOST_STREAMS = 4096;

thread_local int64_t stream_ids[MOST_DEVICES] = {0};
std::vector<Clock> clocks(MOST_STREAMS);
Clock host;
int num_streams = MOST_DEVICES;

struct Delayed {
  int stream;
  int64_t time;
  std::function<void()> then;
};
std::vector<Delayed> delayed;

struct Work {
  int stream;
  int64_t time;
};
std::map<int64_t, Work> unfinished;  // by ticket
int64_t last_ticket = 0;
std::condition_variable_any work_ended;

std::map<std::string, int64_t> fault_counts, synchronisation_counts;
bool raising = false, tracing = false, refusing = false;
std::atomic<double> delay = setting("EMULATED_OVERLAP", 0);

struct WithoutPython {  // lets other threads run Python while this one waits
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutPython() {
    if (state) PyEval_RestoreThread(state);
  }
};

bool is_held(const Clock& clock) {
  for (const auto& [_, work] : unfinished)
    if (work.time <= at(clock, work.stream)) return true;
  return false;
}

void wait_for_work(const Clock& clock) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!is_held(clock)) return;
  }
  WithoutPython released;
  std::unique_lock<std::recursive_mutex> lock(mutex);
  work_ended.wait(lock, [&] { return !is_held(clock); });
}

// The thread of a stream on which copies run later.
class Lane {
 public:
  explicit Lane(int stream) : random_(setting("EMULATED_SEED", 0) * 1000 + setting("RANK", 0) * 100 + stream) {
    std::thread([this] { run(); }).detach();
  }
  void add(std::function<void()> copy, Clock behind, int64_t ticket) {
    std::lock_guard<std::mutex> lock(mine_);
    queue_.push_back({std::move(copy), std::move(behind), ticket});
    added_.notify_one();
  }

 private:
  struct Item {
    std::function<void()> copy;
    Clock behind;
    int64_t ticket;
  };
  void run() {
    while (true) {
      Item item;
      {
        std::unique_lock<std::mutex> lock(mine_);
        added_.wait(lock, [&] { return !queue_.empty(); });
        item = std::move(queue_.front());
        queue_.pop_front();
      }
      wait_for_work(item.behind);
      std::uniform_real_distribution<double> some(0.0, largest_delay());
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(some(random_)));
      item.copy();
      item.copy = nullptr;  // lets go of its tensors before its end
      end_work(item.ticket);
    }
  }
  std::mutex mine_;
  std::condition_variable added_;
  std::deque<Item> queue_;
  std::mt19937 random_;
};

}  // namespace

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

int num_devices() {
  static const int count = std::min(setting("EMULATED_DEVICES", 8), MOST_DEVICES);
  return count;
}

// ------------------------------------------------------------------------------------------------------- streams
c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE_TYPE, device), stream_ids[device]);
}
void set_current_stream(const c10::Stream& stream) { stream_ids[stream.device_index()] = stream.id(); }
c10::Stream new_stream(c10::DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (num_streams == MOST_STREAMS) num_streams = MOST_DEVICES;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE_TYPE, device), num_streams++);
}
int index_of(const c10::Stream& stream) { return stream.id() == 0 ? stream.device_index() : int(stream.id()); }
int current_index(c10::DeviceIndex device) { return index_of(current_stream(device)); }

Clock clock_of(int stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto clock = clocks[stream];
  merge(clock, host);
  return clock;
}
int64_t launch(int stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& clock = clocks[stream];
  merge(clock, host);
  if (int(clock.size()) <= stream) clock.resize(stream + 1);
  return ++clock[stream];
}
void wait_on(int stream, const Clock& clock) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  merge(clocks[stream], clock);
}
void record(Event& event, int stream, bool timed) {
  if (timed) settle(stream);  // its time is when the stream gets there
  std::lock_guard<std::recursive_mutex> lock(mutex);
  launch(stream);
  event.clock = clocks[stream];
  event.asked = false;
  event.nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
}

// ------------------------------------------------------------------------------------------------------- the host
void host_waits(const Clock& clock, const char* what) {
  if (what) {
    TORCH_CHECK(!refusing, "called a synchronizing operation: ", what);
    std::string text = what;
    if (tracing) text += "\n" + text_of(*here_always(what));
    std::lock_guard<std::recursive_mutex> lock(mutex);
    synchronisation_counts[text]++;
  }
  wait_for_work(clock);
  std::vector<Delayed> over;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    merge(host, clock);
    std::vector<Delayed> left;
    for (auto& one : delayed) (one.time <= at(host, one.stream) ? over : left).push_back(std::move(one));
    delayed.swap(left);
  }
  for (auto& one : over) one.then();
}
void host_waits_for_all(const char* what) {
  Clock all;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (const auto& clock : clocks) merge(all, clock);
  }
  host_waits(all, what);
}
bool host_knows(const Clock& clock) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  for (size_t i = 0; i < clock.size(); ++i)
    if (clock[i] > at(host, int(i))) return false;
  return true;
}
bool host_finds(const Clock& clock) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (is_held(clock)) return false;
  }
  host_waits(clock);
  return true;
}
void when_host_waits(int stream, std::function<void()> then) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  delayed.push_back({stream, at(clocks[stream], stream), std::move(then)});
}

// ------------------------------------------------------------------------------------------ work of other threads
int64_t begin_work(int stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto time = launch(stream);
  unfinished[++last_ticket] = {stream, time};
  return last_ticket;
}
void end_work(int64_t ticket) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  unfinished.erase(ticket);
  work_ended.notify_all();
}
void settle(int stream) {
  Clock behind;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (unfinished.empty()) return;
    behind = clock_of(stream);
  }
  wait_for_work(behind);
}
void run_later(int stream, std::function<void()> copy) {
  static auto* lanes = new std::unordered_map<int, std::unique_ptr<Lane>>();  // threads outlive statics
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto behind = clock_of(stream);
  auto ticket = begin_work(stream);
  auto& lane = (*lanes)[stream];
  if (!lane) lane = std::make_unique<Lane>(stream);
  lane->add(std::move(copy), std::move(behind), ticket);
}
double largest_delay() { return delay; }
void set_largest_delay(double milliseconds) { delay = milliseconds; }

// -------------------------------------------------------------------------------------------- faults, and counting
void report(const std::string& message, bool may_raise) {
  auto text = message + "\n" + text_of(*here_always(""));
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    fault_counts[text]++;
  }
  TORCH_CHECK(!(raising && may_raise), "emulated: ", text);
}
std::map<std::string, int64_t> reports() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return fault_counts;
}
void clear_reports() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  fault_counts.clear();
}
void set_raising(bool raise) { raising = raise; }
std::map<std::string, int64_t> synchronisations() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return synchronisation_counts;
}
void clear_synchronisations() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  synchronisation_counts.clear();
}
void trace_synchronisations(bool on) { tracing = on; }
void refuse_synchronisations(bool on) { refusing = on; }

}  // namespace emulated
