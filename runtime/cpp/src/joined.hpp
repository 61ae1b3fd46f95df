// Lists in messages.
#pragma once

#include <string>

namespace mars {

/// The strings of `parts` with `between` between them.
template <typename Strings>
std::string joined(const Strings& parts, const char* between = ", ") {
    std::string text;
    for (const std::string& part : parts) text += (text.empty() ? "" : between) + part;
    return text;
}

} // namespace mars
