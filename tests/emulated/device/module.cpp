// The Python module: what tests/emulated/*.py call.
#include "module.h"

#include <torch/csrc/utils/pybind.h>

#include "call.h"
#include "random.h"

using namespace emulated;
namespace py = pybind11;

namespace {

int stream_of(int device, int64_t id) { return id == 0 ? device : int(id); }

// An operation that Python does on the current stream of the tensor's device.
void touch(const at::Tensor& tensor, bool write, const std::string& what) {
  Call call(what, tensor.device());
  call.show(tensor, write, !write);
  call.note();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_hooks();
  register_fallback();

  module.def("device_count", &num_devices);
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int device) {
    TORCH_CHECK(0 <= device && device < num_devices(), "emulated: device ", device, " of ", num_devices());
    current_device = c10::DeviceIndex(device);
  });
  module.def("allocated", &bytes_now);
  module.def("peak", &most_bytes);
  module.def("reset_peak", &reset_most_bytes);
  module.def("default_generator", [](int device) { return default_generator(device); });

  module.def("clock", [](int device, int64_t id) { return clock_of(stream_of(device, id)); });
  module.def("touch", &touch);
  module.def("begin_work", [](int device, int64_t id) { return begin_work(stream_of(device, id)); });
  module.def("end_work", &end_work);
  module.def("delay", &largest_delay, "Milliseconds that asynchronous work is delayed at most; 0: it is done at once");
  module.def("set_delay", &set_largest_delay);
  module.def("as_cpu", [](const at::Tensor& tensor) { return Call("as_cpu").show(tensor, true); },
             "The same memory as a tensor of the CPU: unchecked, and valid while the tensor is");
  module.def("from_cpu", [](const at::Tensor& tensor, int device) {
    return Call("from_cpu", c10::Device(DEVICE_TYPE, device)).take(tensor);
  });

  module.def("report", [](const std::string& message) { report(message); });
  module.def("reports", &reports, "How often each fault was seen, by message with the stacks");
  module.def("clear_reports", &clear_reports);
  module.def("set_raising", &set_raising, "Whether a fault is an error where it is found");
  module.def("syncs", &synchronisations, "How often the host waited, by operation and, if traced, place");
  module.def("clear_syncs", &clear_synchronisations);
  module.def("trace_syncs", &trace_synchronisations);
  module.def("refuse_syncs", &refuse_synchronisations);
}
