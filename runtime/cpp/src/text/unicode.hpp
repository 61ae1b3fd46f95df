// What a code point is to a tokenizer, and normalisation form C. Knows the tables, no text layout.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace mars {

/// What the split patterns tell apart. A digit outside `number` is one only to the Digits pre-tokenizer.
enum class CharClass : unsigned char { letter, number, space, other };

/// The class of a code point in the split patterns: \p{L}, \p{N}, \s or none of them.
CharClass class_of(char32_t code_point);

/// Whether the Digits pre-tokenizer takes a code point for a digit.
bool is_digit(char32_t code_point);

/// `text` (valid UTF-8) in normalisation form C, or nothing where it is that already for a cheap reason.
std::optional<std::string> to_nfc(std::string_view text);

} // namespace mars
