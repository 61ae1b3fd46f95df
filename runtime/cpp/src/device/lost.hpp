// runtime/device/failures.py: CUDA errors after which the process must be restarted: every later call fails too.
#pragma once

#include <string>

namespace mars {

constexpr const char* lost_advice = "; this process cannot use the GPU any more: restart it";

/// Whether an error message of a library contains one of these, by name or number.
bool is_lasting(const std::string& words);

} // namespace mars
