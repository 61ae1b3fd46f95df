// No Python file: strict UTF-8: decoding, validation, and replacing invalid bytes by U+FFFD.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mars::utf8 {

constexpr char32_t replacement = 0xFFFD;

/// The code point at `text[at]`; moves `at` after it. `text` is valid UTF-8 and `at` the start of a character.
inline char32_t next(std::string_view text, std::size_t& at) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const char32_t lead = byte(at);
    if (lead < 0x80) return at += 1, lead;
    const char32_t second = byte(at + 1) & 0x3F;
    if (lead < 0xE0) return at += 2, (lead & 0x1F) << 6 | second;
    const char32_t third = byte(at + 2) & 0x3F;
    if (lead < 0xF0) return at += 3, (lead & 0x0F) << 12 | second << 6 | third;
    return at += 4, (lead & 0x07) << 18 | second << 12 | third << 6 | (byte(at - 1) & 0x3F);
}

void append(std::string& text, char32_t code_point);

/// The number of characters of valid UTF-8.
inline std::int64_t length(std::string_view text) {
    return std::count_if(text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U; });
}

/// The number of leading bytes that are whole characters.
std::size_t valid_prefix(std::string_view text);

inline bool is_valid(std::string_view text) { return valid_prefix(text) == text.size(); }

/// `bytes` with each invalid sequence replaced by one U+FFFD; a valid beginning of a character counts as one sequence.
std::string lossy(std::string_view bytes);

/// `text`, valid UTF-8, without white space at its ends, as Python's str.strip() removes it.
std::string_view stripped(std::string_view text);

/// The same at the beginning only, and at the end only.
std::string_view left_stripped(std::string_view text);
std::string_view right_stripped(std::string_view text);

/// Whether `text` ends in U+FFFD, which more bytes may complete.
inline bool ends_broken(std::string_view text) { return text.size() >= 3 && text.substr(text.size() - 3) == "\xEF\xBF\xBD"; }

} // namespace mars::utf8
