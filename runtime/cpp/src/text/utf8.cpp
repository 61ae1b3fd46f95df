// Well-formed byte sequences of the Unicode standard (chapter 3.9).
#include "text/utf8.hpp"

#include <algorithm>
#include <utility>

namespace mars::utf8 {

namespace {

struct Sequence {
    std::size_t length; // bytes that belong together
    bool whole;         // whether they are a character
};

/// The character, or the longest valid beginning of one, at the start of `bytes` (not empty).
Sequence sequence(std::string_view bytes) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    const unsigned lead = byte(0);
    if (lead < 0x80) return {1, true};
    if (lead < 0xC2 || lead > 0xF4) return {1, false};
    const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    // The second byte is restricted for four leads: no overlong forms, no surrogates, nothing above U+10FFFF.
    const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    for (std::size_t i = 1; i < length; ++i) {
        if (i == bytes.size() || byte(i) < (i == 1 ? low : 0x80) || byte(i) > (i == 1 ? high : 0xBF)) return {i, false};
    }
    return {length, true};
}

/// The characters that Python's str.strip() removes.
bool is_python_space(char32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/// Where the text without white space at its ends begins and ends; equal for white space only.
std::pair<std::size_t, std::size_t> inside(std::string_view text) {
    std::size_t from = text.size(), to = 0;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t begin = at;
        if (is_python_space(next(text, at))) continue;
        from = std::min(from, begin);
        to = at;
    }
    return {from, std::max(from, to)};
}

} // namespace

std::string_view stripped(std::string_view text) {
    const auto [from, to] = inside(text);
    return text.substr(from, to - from);
}

std::string_view left_stripped(std::string_view text) { return text.substr(inside(text).first); }

std::string_view right_stripped(std::string_view text) {
    const auto [from, to] = inside(text);
    return text.substr(0, from == to ? 0 : to);
}

void append(std::string& text, char32_t code_point) {
    const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
    if (code_point < 0x80) return put(code_point);
    if (code_point < 0x800) {
        put(0xC0 | code_point >> 6);
    } else {
        if (code_point < 0x10000) {
            put(0xE0 | code_point >> 12);
        } else {
            put(0xF0 | code_point >> 18);
            put(0x80 | (code_point >> 12 & 0x3F));
        }
        put(0x80 | (code_point >> 6 & 0x3F));
    }
    put(0x80 | (code_point & 0x3F));
}

std::size_t valid_prefix(std::string_view text) {
    std::size_t at = 0;
    while (at < text.size()) {
        const Sequence part = sequence(text.substr(at));
        if (!part.whole) break;
        at += part.length;
    }
    return at;
}

std::string lossy(std::string_view bytes) {
    std::string text;
    while (!bytes.empty()) {
        const std::size_t good = valid_prefix(bytes);
        text += bytes.substr(0, good);
        bytes.remove_prefix(good);
        if (bytes.empty()) break;
        append(text, replacement);
        bytes.remove_prefix(sequence(bytes).length);
    }
    return text;
}

} // namespace mars::utf8
