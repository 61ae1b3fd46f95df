// What a session says while it works, to whoever asked for it when it was opened. Nothing else in the library speaks.
#pragma once

#include <string_view>

#include <mars/config.hpp>

namespace mars {

/// Tell `on_log`, if there is one; what it throws is dropped, because no answer may depend on a log.
inline void note(const OnLog& on_log, LogLevel level, std::string_view text) noexcept {
    try {
        if (on_log) on_log(level, text);
    } catch (...) { // it is the caller's own
    }
}

} // namespace mars
