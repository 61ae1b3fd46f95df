// The byte-level alphabet of GPT-2: every byte written as one printable character. Knows no tokens.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace mars {

/// The character, in UTF-8, that stands for each byte in `tokenizer.json`.
const std::array<std::string, 256>& byte_characters();

/// The bytes that a token's characters stand for, or nothing when one of them stands for none. `token` is valid UTF-8.
std::optional<std::string> bytes_of_characters(std::string_view token);

} // namespace mars
