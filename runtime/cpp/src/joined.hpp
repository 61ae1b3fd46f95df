// No Python file: small functions of texts.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>

namespace mars {

/// The texts of `parts` with `between` between them. `text_of`: a part's text, by a member or a function.
template <typename Parts, typename TextOf>
std::string joined(const Parts& parts, const char* between, const TextOf& text_of) {
    std::string text;
    for (const auto& part : parts) text += (&part == &*std::begin(parts) ? "" : between) + std::string(std::invoke(text_of, part));
    return text;
}

template <typename Strings>
std::string joined(const Strings& parts, const char* between = ", ") {
    return joined(parts, between, [](const std::string& part) { return part; });
}

inline bool begins_with(std::string_view text, std::string_view beginning) { return text.substr(0, beginning.size()) == beginning; }

/// A number as printf writes it, such as "%.2f MB".
inline std::string printed(const char* format, double number) {
    char text[64];
    std::snprintf(text, sizeof text, format, number);
    return text;
}

/// In lower case, as far as it is ASCII.
inline std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
}

} // namespace mars
