#include "text/unicode.hpp"

#include <algorithm>

#include "text/unicode_tables.hpp"

namespace mars {

namespace {

bool contains(const Table<CodePointRange>& table, char32_t code_point) {
    const auto* after =
        std::upper_bound(table.begin(), table.end(), code_point, [](char32_t c, const CodePointRange& row) { return c < row.low; });
    return after != table.begin() && code_point <= std::prev(after)->high;
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
