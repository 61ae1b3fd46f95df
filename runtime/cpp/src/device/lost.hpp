// CUDA's errors that stay: "the process must be terminated and relaunched", it says of these, and gives them to every later call. Knows names,
// numbers and the words of libraries that pass them on. Twin of runtime/device/lost.py.
#pragma once

#include <string>

namespace mars {

constexpr const char* lost_advice = "; nothing computes on the GPU in this process any more: start it again";

/// Whether a library's error is one of these, by its name or as a number behind CUDA's.
bool is_lasting(const std::string& words);

} // namespace mars
