// No Python file: messages of a session to its user's log callback (Python uses logging).
#pragma once

#include <string_view>

#include <mars/config.hpp>

namespace mars {

/// Pass `text` to `on_log` if it is set. Its exceptions are dropped: a failing log must not fail an answer.
inline void note(const OnLog& on_log, LogLevel level, std::string_view text) noexcept {
    try {
        if (on_log) on_log(level, text);
    } catch (...) {
    }
}

} // namespace mars
