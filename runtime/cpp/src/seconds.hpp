// Seconds of a caller as a span of the clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include <mars/errors.hpp>

namespace mars {

/// From 0 to about 30 years. Throws SessionError, which calls the value `name`, for what is not a number.
inline std::chrono::steady_clock::duration span(double seconds, const char* name) {
    if (std::isnan(seconds)) throw SessionError(std::string(name) + " must be a number of seconds, not nan");
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)));
}

} // namespace mars
