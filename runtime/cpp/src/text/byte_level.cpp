// Printable Latin-1 bytes stand for themselves, the others in order for U+0100 and following.
#include "text/byte_level.hpp"

#include "text/utf8.hpp"

namespace mars {

namespace {

constexpr bool is_printable(unsigned byte) { return (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD); }

constexpr char32_t character_of(unsigned byte) {
    if (is_printable(byte)) return byte;
    char32_t shifted = 0x100;
    for (unsigned other = 0; other < byte; ++other) shifted += is_printable(other) ? 0 : 1;
    return shifted;
}

constexpr char32_t num_characters = character_of(0xAD) + 1; // 0xAD is the last byte that is moved

struct Bytes {
    int of[num_characters];
};

constexpr Bytes inverse() {
    Bytes bytes{};
    for (int& byte : bytes.of) byte = -1;
    for (unsigned byte = 0; byte < 256; ++byte) bytes.of[character_of(byte)] = static_cast<int>(byte);
    return bytes;
}

} // namespace

const std::array<std::string, 256>& byte_characters() {
    static const std::array<std::string, 256> all = [] {
        std::array<std::string, 256> made;
        for (unsigned byte = 0; byte < 256; ++byte) utf8::append(made[byte], character_of(byte));
        return made;
    }();
    return all;
}

std::optional<std::string> bytes_of_characters(std::string_view token) {
    static constexpr Bytes bytes = inverse();
    std::string out;
    for (std::size_t at = 0; at < token.size();) {
        const char32_t c = utf8::next(token, at);
        if (c >= num_characters || bytes.of[c] < 0) return std::nullopt;
        out += static_cast<char>(bytes.of[c]);
    }
    return out;
}

} // namespace mars
