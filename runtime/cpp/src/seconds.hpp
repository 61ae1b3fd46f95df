// Seconds given by a caller, as a duration.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include <mars/errors.hpp>

namespace mars {

/// Clamped to 0 ... 1e9 seconds. Throws SessionError for NaN; `name` is the parameter's name in the message.
inline std::chrono::steady_clock::duration span(double seconds, const char* name) {
    if (std::isnan(seconds)) throw SessionError(std::string(name) + " must be a number of seconds, not nan");
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)));
}

} // namespace mars
