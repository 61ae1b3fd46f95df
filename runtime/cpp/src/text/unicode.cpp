#include "text/unicode.hpp"

#include <algorithm>

#include "text/unicode_tables.hpp"

namespace mars {

namespace {

bool contains(const Table<char32_t>& edges, char32_t code_point) {
    return (std::upper_bound(edges.begin(), edges.end(), code_point) - edges.begin()) % 2 == 1;
}

} // namespace

CharClass class_of(char32_t c) {
    if (c < 0x80) {
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return CharClass::letter;
        if (c >= '0' && c <= '9') return CharClass::number;
        return c == ' ' || (c >= '\t' && c <= '\r') ? CharClass::space : CharClass::other;
    }
    if (contains(letters, c)) return CharClass::letter;
    if (contains(numbers, c)) return CharClass::number;
    return contains(spaces, c) ? CharClass::space : CharClass::other;
}

bool is_digit(char32_t c) { return c < 0x80 ? c >= '0' && c <= '9' : contains(numbers, c) || contains(new_digits, c); }

} // namespace mars
