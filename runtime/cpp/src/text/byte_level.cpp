// Printable Latin-1 bytes stand for themselves, the others in order for U+0100 and following.
#include "text/byte_level.hpp"

#include <unordered_map>

#include "text/utf8.hpp"

namespace mars {

namespace {

bool is_printable(unsigned byte) { return (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD); }

char32_t character_of(unsigned byte) {
    if (is_printable(byte)) return byte;
    char32_t shifted = 0x100;
    for (unsigned other = 0; other < byte; ++other) shifted += is_printable(other) ? 0 : 1;
    return shifted;
}

} // namespace

const std::array<std::string, 256>& byte_characters() {
    static const std::array<std::string, 256> all = [] {
        std::array<std::string, 256> characters;
        for (unsigned byte = 0; byte < 256; ++byte) utf8::append(characters[byte], character_of(byte));
        return characters;
    }();
    return all;
}

std::optional<std::string> bytes_of_characters(std::string_view token) {
    static const std::unordered_map<char32_t, char> bytes = [] {
        std::unordered_map<char32_t, char> all;
        for (unsigned byte = 0; byte < 256; ++byte) all[character_of(byte)] = static_cast<char>(byte);
        return all;
    }();
    std::string out;
    for (std::size_t at = 0; at < token.size();) {
        const auto byte = bytes.find(utf8::next(token, at));
        if (byte == bytes.end()) return std::nullopt;
        out += byte->second;
    }
    return out;
}

} // namespace mars
