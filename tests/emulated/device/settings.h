// Settings from the environment.
#pragma once
#include <cstdlib>

namespace emulated {

inline int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoi(value) : otherwise;
}

}  // namespace emulated
