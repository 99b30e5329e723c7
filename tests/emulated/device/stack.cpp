#include "stack.h"

#include <Python.h>
#include <frameobject.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>

#include "settings.h"

namespace emulated {

struct Code {
  std::string file, name;
  bool skipped;  // a wrapper of torch's between a module's call and its forward
};

namespace {

constexpr size_t MOST_FRAMES = 16;

std::string text(PyObject* string) {
  const char* found = PyUnicode_AsUTF8(string);
  if (!found) PyErr_Clear();
  return found ? found : "?";
}

const Code* code_of(PyCodeObject* code) {  // holds the GIL
  static auto* known = new std::unordered_map<PyCodeObject*, Code*>();
  auto& found = (*known)[code];
  if (!found) {
    Py_INCREF(code);  // for good, so that its address is not used again
    found = new Code{text(code->co_filename), text(code->co_name), false};
    found->skipped = found->file.find("torch/nn/modules/module.py") != std::string::npos ||
                     found->file.find("torch/utils/_contextlib.py") != std::string::npos;
  }
  return found;
}

std::vector<Frame> frames_of_this_thread() {
  std::vector<Frame> frames;
  if (!Py_IsInitialized()) return frames;
  auto gil = PyGILState_Ensure();
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && frames.size() < MOST_FRAMES) {
    auto* code = PyFrame_GetCode(frame);
    if (const Code* found = code_of(code); !found->skipped) frames.push_back({found, PyFrame_GetLineNumber(frame)});
    Py_DECREF(code);
    auto* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  PyErr_Restore(type, value, trace);
  PyGILState_Release(gil);
  return frames;
}

std::string with_backward(std::string what) {
  auto node = torch::autograd::get_current_node();
  return node ? what + " (in " + node->name() + ")" : what;
}

}  // namespace

SitePtr here_always(std::string what) {
  return std::make_shared<Site>(Site{with_backward(std::move(what)), frames_of_this_thread()});
}

SitePtr here(std::string what) {
  static const bool wanted = setting("EMULATED_STACKS", 1);
  return wanted ? here_always(std::move(what)) : std::make_shared<Site>(Site{std::move(what), {}});
}

std::string text_of(const Site& site) {
  std::string lines;
  for (const auto& frame : site.frames)
    lines += "    " + frame.code->file + ":" + std::to_string(frame.line) + " " + frame.code->name + "\n";
  return lines.empty() ? "    (no Python on this thread)\n" : lines;
}

}  // namespace emulated
