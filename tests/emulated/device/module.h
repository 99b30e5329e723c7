// What the module does when it is loaded, and what its parts offer to each other.
#pragma once

namespace emulated {

void register_hooks();
void register_fallback();  // for every operator that has a kernel for the CPU

}  // namespace emulated
