// No Python file: character classes for tokenizers, and normalization form C.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace mars {

/// The classes that split patterns distinguish. A digit outside `number` is one only to the Digits pre-tokenizer.
enum class CharClass : unsigned char { letter, number, space, other };

/// The class of a code point in the split patterns: \p{L}, \p{N}, \s or none of them.
CharClass class_of(char32_t code_point);

/// Whether a code point is a digit for the Digits pre-tokenizer.
bool is_digit(char32_t code_point);

/// `text` (valid UTF-8) in normalization form C; no value if a quick check shows that it already is.
std::optional<std::string> to_nfc(std::string_view text);

} // namespace mars
