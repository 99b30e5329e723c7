// Who called: Python's frames, cheap enough to keep for each access to memory.
#pragma once
#include <memory>
#include <string>
#include <vector>

namespace emulated {

struct Code;  // a Python function: its file and name
struct Frame {
  const Code* code;
  int line;
};

// An operation and the place that it was called from.
struct Site {
  std::string what;
  std::vector<Frame> frames;  // innermost first; empty where none were wanted, or a thread has no Python
};
using SitePtr = std::shared_ptr<const Site>;

SitePtr here(std::string what);       // with this thread's frames, if EMULATED_STACKS is not 0
SitePtr here_always(std::string what);
std::string text_of(const Site& site);  // its frames, a line each

}  // namespace emulated
