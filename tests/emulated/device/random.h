// Generators of random numbers: each has one of the CPU's, which the kernels draw from.
#pragma once
#include <ATen/core/Generator.h>

namespace emulated {

const at::Generator& default_generator(int device);  // -1: the current device
at::Generator new_generator(int device);
at::Generator of_cpu(const at::Generator& generator);

}  // namespace emulated
